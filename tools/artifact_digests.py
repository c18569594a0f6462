"""The digests of what a compile decides, to show that a change of the sources changed no artifact.

    python tools/artifact_digests.py -o before.json --tree ../inferc-before
    python tools/artifact_digests.py -o after.json
    python tools/artifact_digests.py --compare before.json after.json

Digested are the weights, the program, the graph after every pass, the costs, the certificate, the C++ without its
comments, and the machine code for GPUs. Left out is what differs though nothing was decided otherwise: compiled
libraries (g++ writes the lines of checks into them), Triton sources (cubins are compared) and engine.json (it holds
digests of all these). Digests are of one set of versions (torch, triton), which the file names, and certificates of
one kind of processor too: torch adds in another order on another one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from importlib.metadata import version
from pathlib import Path

from inferc.cost.machine import cpuinfo
from inferc.runtime.runners.cpu.abi import detect_isa

ROOT = Path(__file__).parent.parent
MODELS = ("tiny-draft", "tiny-llama", "tiny-moe")
OPTIONS = {
    "bfloat16": (),
    "int8": ("--quantize", "int8"),
    "int4": ("--quantize", "int4"),
    "cuda:sm_90": ("--target", "cuda:sm_90"),
}
VERSIONS = ("torch", "transformers", "triton")
CPP = re.compile(r'//[^\n]*|/\*.*?\*/|("(?:\\.|[^"\\\n])*")', re.DOTALL)  # comments, and strings, which are kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("-o", "--out", type=Path, help="the file to write")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout that compiles (default: this one)")
    parser.add_argument("--models", nargs="+", default=MODELS, help="folders of examples/models")
    parser.add_argument("--compare", nargs=2, type=Path, metavar=("BEFORE", "AFTER"), help="compare two such files")
    args = parser.parse_args()
    if args.compare:
        before, after = (json.loads(path.read_text()) for path in args.compare)
        found = differences(before, after)
        left_out = "" if has_same_processor(before, after) else ", certificates left out: made on other processors"
        print("\n".join(found) or f"equal: {len(before['artifacts'])} artifacts{left_out}")
        return 1 if found else 0
    if args.out is None:
        parser.error("give -o FILE, or --compare BEFORE AFTER")
    args.out.write_text(json.dumps(digests(args.models, args.tree.resolve()), indent=1) + "\n")
    return 0


def digests(models: Iterable[str], tree: Path = ROOT, options: Iterable[str] = OPTIONS) -> dict[str, dict[str, object]]:
    """Compile models with a checkout, and return the digests by artifact and kind of file."""
    found: dict[str, object] = {}
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            for option in options:
                name = f"{model} {option}"
                print(f"compile {name}", file=sys.stderr, flush=True)
                out = Path(folder) / name.replace(" ", "-")
                _compile(ROOT / "examples" / "models" / model, out, OPTIONS[option], tree)
                found[name] = digests_of(out)
    return {"versions": versions(), "processor": processor(), "artifacts": found}


def processor() -> dict[str, object]:
    """Return what the sums in a certificate depend on: who made the processor, and its best instruction set."""
    vendor = re.search(r"^vendor_id\s*: (\S+)", cpuinfo(), re.MULTILINE)
    return {"vendor": vendor[1] if vendor else platform.machine(), "isa": detect_isa()[0]}


def has_same_processor(before: Mapping[str, object], after: Mapping[str, object]) -> bool:
    return before["processor"] == after["processor"]


def versions() -> dict[str, object]:
    return {name: version(name) for name in VERSIONS}


def _compile(model: Path, out: Path, options: tuple[str, ...], tree: Path) -> None:
    env = {**os.environ, "PYTHONPATH": str(tree / "src"), "INFERC_ISAS": "avx2"}
    command = [sys.executable, "-m", "inferc", "compile", str(model), "-o", str(out), *options]
    done = subprocess.run(command, check=False, env=env, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr}")


def digests_of(artifact: Path) -> dict[str, str]:
    """Return the digest of each kind of file of an artifact."""
    kinds: dict[str, list[tuple[str, bytes]]] = {}
    for path in sorted(each for each in artifact.rglob("*") if each.is_file()):
        name, data = path.relative_to(artifact).as_posix(), path.read_bytes()
        if path.suffix in (".h", ".cpp"):
            data = code_of(data.decode()).encode()
        if (kind := _kind(name)) is not None:
            kinds.setdefault(kind, []).append((name, data))
    return {kind: _digest(files) for kind, files in sorted(kinds.items())}


def _kind(name: str) -> str | None:
    folder, _, file = name.rpartition("/")
    if file.endswith((".so", ".py")) or name in ("engine.json", "signature.json"):
        return None
    if file.endswith(".safetensors"):
        return "weights"
    if file.endswith((".h", ".cpp")):
        return "C++"
    return folder or file


def _digest(files: list[tuple[str, bytes]]) -> str:
    whole = hashlib.sha256()
    for name, data in files:
        whole.update(f"{name} {len(data)}\n".encode() + data)
    return whole.hexdigest()


def code_of(source: str) -> str:
    """Return C++ without comments and without the spaces and line ends that mean nothing."""
    bare = CPP.sub(lambda match: match[1] or " ", source)
    return " ".join(bare.split())


def differences(before: dict[str, dict[str, object]], after: dict[str, dict[str, object]]) -> list[str]:
    """Return one line for each difference between two results of `digests`."""
    if before["versions"] != after["versions"]:
        return [f"not comparable: made with {before['versions']} and with {after['versions']}"]
    found = []
    for name in sorted({*before["artifacts"], *after["artifacts"]}):
        one, other = (each["artifacts"].get(name) for each in (before, after))
        if not isinstance(one, dict) or not isinstance(other, dict):
            found.append(f"{name}: only {'after' if one is None else 'before'}")
            continue
        kinds = {*one, *other} - (set() if has_same_processor(before, after) else {"certificate.json"})
        differ = [kind for kind in sorted(kinds) if one.get(kind) != other.get(kind)]
        found += [f"{name}: {kind} differs" for kind in differ]
    return found


if __name__ == "__main__":
    sys.exit(main())
