"""The walk of a compile, a step or a request through the files of the package.

    python tools/walk.py compile | generate | http     (--tree ../inferc-before: another checkout)

It runs the thing and notes each function of the package when it is called for the first time; the files of these
functions, in that order, are the way of a reader who follows the calls. Printed are the stays (how often the reader
enters a file), the files, the returns (stays in a file where the reader was before), and the way itself.

- compile: tiny-draft to an artifact for the cpu target, without a certificate.
- generate: one prompt through inferc.LLM, from the call to the answer, with the steps of the engine.
- http: one request to /v1/completions, in the process that serves; the engine is in another one.

What runs once, as modules are imported or at the first request, is not counted: all is done twice. Functions of one
file that call each other count as one stay.
"""

from __future__ import annotations

import argparse
import json
import os
import runpy
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).parent.parent
MODEL = ROOT / "examples" / "models" / "tiny-draft"
STAGES = ("frontend", "passes", "codegen", "runtime", "serve")


class Walk:
    """The files of the functions that were called since `restart`, each function once, in the order of first calls."""

    def __init__(self, tree: Path) -> None:
        self._tree = tree
        self._names: dict[str, str | None] = {}
        self._seen: set[object] = set()
        self.files: list[str] = []

    def restart(self) -> None:
        self._seen.clear()
        self.files.clear()

    def start(self) -> None:
        threading.setprofile(self._note)
        sys.setprofile(self._note)

    def stop(self) -> None:
        threading.setprofile(None)
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code not in self._seen and not code.co_name.startswith("<"):
            self._seen.add(code)
            if (name := self._name(code.co_filename)) is not None:
                self.files.append(name)

    def _name(self, path: str) -> str | None:
        """Return the path of a file within the package, or None for a file of another package."""
        if path not in self._names:
            real = Path(os.path.realpath(path))
            inside = real.relative_to(self._tree).as_posix() if real.is_relative_to(self._tree) else ""
            name = inside.removeprefix("src/inferc/")
            is_ours = inside.startswith("src/inferc/") or inside.partition("/")[0] in STAGES
            self._names[path] = name if is_ours else None
        return self._names[path]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("compile", "generate", "http"))
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout that runs (default: this one)")
    parser.add_argument("--inside", metavar="FILE", help=argparse.SUPPRESS)  # in the process that is watched
    parser.add_argument("--artifact", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.inside is not None:
        _inside(args.what, args.tree, Path(args.inside), Path(args.artifact))
        return 0
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder)
        env = {**os.environ, "PYTHONPATH": str(args.tree.resolve() / "src"), "INFERC_ISAS": "avx2"}
        command = [
            sys.executable,
            __file__,
            args.what,
            "--tree",
            str(args.tree.resolve()),
            "--artifact",
            folder + "/out",
        ]
        if args.what != "compile":
            made = [sys.executable, "-m", "inferc", "compile", str(MODEL), "-o", folder + "/out", "--certify", "none"]
            subprocess.run(made, env=env, check=True, capture_output=True)
        subprocess.run([*command, "--inside", str(out / "files.json")], env=env, check=True, stdout=sys.stderr)
        files = json.loads((out / "files.json").read_text())
    way = [name for name, _ in groupby(files)]
    print(f"{len(way)} stays in {len(set(way))} files, {len(way) - len(set(way))} returns\n")
    print("\n".join(_lines(way)))
    return 0


def _lines(way: list[str]) -> Iterator[str]:
    """Yield the way, with an arrow before a file where the reader was before."""
    seen: set[str] = set()
    for name in way:
        yield f"{'<- ' if name in seen else '   '}{name}"
        seen.add(name)


def _inside(what: str, tree: Path, out: Path, artifact: Path) -> None:
    """Run one thing under watch, and write the files of its functions."""
    walk = Walk(tree)
    walk.start()
    if what == "compile":
        _compile(walk, artifact)
    elif what == "generate":
        _generate(walk, artifact)
    else:
        _serve(walk, artifact)
    walk.stop()
    out.write_text(json.dumps(walk.files))


def _compile(walk: Walk, artifact: Path) -> None:
    import inferc

    for name in ("first", "second"):
        walk.restart()
        inferc.compile(str(MODEL), str(artifact / name), inferc.CompileConfig(certify="none"))


def _generate(walk: Walk, artifact: Path) -> None:
    import inferc

    with inferc.LLM(str(artifact)) as llm:
        for _ in range(2):
            walk.restart()
            llm.generate([[1, 2, 3]], inferc.SamplingParams(max_tokens=2))
        walk.stop()


def _serve(walk: Walk, artifact: Path) -> None:
    """Serve in this process, send two requests from a thread, and end at the answer of the second."""
    port, other = _free_ports()

    def ask() -> None:
        url = f"http://127.0.0.1:{port}"
        body = json.dumps({"prompt": [1, 2, 3], "max_tokens": 2}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"content-type": "application/json"})
        while True:
            try:
                urllib.request.urlopen(f"{url}/ready").close()
                break
            except OSError:
                continue
        for _ in range(2):
            walk.restart()
            urllib.request.urlopen(request).read()
        walk.stop()
        os.kill(os.getpid(), 15)

    threading.Thread(target=ask, daemon=True).start()
    sys.argv = ["inferc", "serve", str(artifact), "--http-port", str(port), "--grpc-port", str(other)]
    try:
        runpy.run_module("inferc", run_name="__main__")
    except SystemExit:
        return


def _free_ports() -> tuple[int, int]:
    with socket.create_server(("127.0.0.1", 0)) as one, socket.create_server(("127.0.0.1", 0)) as other:
        return one.getsockname()[1], other.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
