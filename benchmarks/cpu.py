"""Compare inferc on the CPU with its peers, in turn in one run; `make bench` runs this file.

    python benchmarks/cpu.py [--shape qwen3-0.6b ...] [--turns 3] [--engines inferc vllm ...] [--cases decode ...]

Every engine gets the same random model and runs in its own process (peers/worker.py), one after the other, for --turns
turns; medians count. The memory's read bandwidth is measured before and after each engine: a decode step of one request
cannot be faster than the bytes it reads divided by that bandwidth. Models are read once before, so that they are in the
page cache when they are loaded. The results go to benchmarks/results/cpu-SHAPE.json, .md and .png, with the targets of
targets.toml. An unmet target is reported; a peer that runs far below its known speed fails the run.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from dataclasses import astuple
from pathlib import Path
from typing import Any

from cpu_report import draw, show, write_markdown
from cpu_result import CASES, CRIPPLED, OURS, WIDTHS, Entry, summary
from measured import ROOT, save
from peers.environments import HERE, Peer, peers
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from inferc.cost.machine import measure_read
from inferc.system.resources import available_cores

SHAPES = ("qwen3-0.6b", "llama-3.2-1b")


def prepared(shape: str, engine: str, format: str, peer: Peer | None, work: Path, max_model_len: int = 4096) -> Path:
    """Return the model in the engine's own format; it is made once, under a temporary name, and then renamed."""
    source = work / shape
    if not source.exists():
        partial = fresh(source.with_name(source.name + ".partial"))
        run([sys.executable, str(ROOT / "benchmarks/make_model.py"), shape, str(partial)])
        partial.rename(source)
    if engine in ("transformers", "vllm"):
        return source
    out = work / f"{shape}-{engine}-{format}"
    if out.exists():
        return out
    partial = fresh(out.with_name(out.name + ".partial"))
    if peer is None:
        scheme, _, kv = format.partition("-")
        quantize = [*([] if scheme == "bfloat16" else ["--quantize", scheme]), *(["--kv-dtype", "int8"] if kv else [])]
        inferc = [
            sys.executable,
            "-m",
            "inferc",
            "compile",
            str(source),
            "-o",
            str(partial),
            "--max-model-len",
            str(max_model_len),
        ]
        run([*inferc, "--dtype", "bfloat16", "--certify", "none", *quantize])
    else:
        run([str(peer.python), str(HERE / "convert.py"), engine, str(source), format, str(partial)])
    partial.rename(out)
    return out


def fresh(partial: Path) -> Path:
    """Delete what an interrupted run left at the path, and return the path."""
    if partial.is_dir():
        shutil.rmtree(partial)
    partial.unlink(missing_ok=True)
    return partial


def run(command: Sequence[str], env: dict[str, str] | None = None) -> str:
    """Run a command and return its standard output. Raises RuntimeError with the last line of standard error."""
    done = subprocess.run(
        command, capture_output=True, text=True, cwd=HERE.parent, env={**os.environ, **(env or {})}, check=False
    )
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if line.strip()] or [f"status {done.returncode}"]
        raise RuntimeError(lines[-1][:300])
    return done.stdout


def cache_files(model: Path) -> None:
    """Read a model once, so that loading finds it in the page cache, which drops files not read for a while."""
    for file in [model] if model.is_file() else filter(Path.is_file, model.rglob("*")):
        with file.open("rb", buffering=0) as stream:
            while stream.read(1 << 24):
                pass


def run_once(entry: Entry, cases: Iterable[str], threads: int) -> dict[str, Any]:
    python = entry.peer.python if entry.peer else Path(sys.executable)
    env = {key: value.format(threads=threads) for key, value in entry.peer.env.items()} if entry.peer else {}
    command = [str(python), "-m", "peers.worker", entry.engine, str(entry.model), "--format", entry.format]
    wanted = json.dumps({name: [*astuple(CASES[name])[:3], CASES[name].neighbour] for name in cases})
    out = run([*command, "--threads", str(threads), "--cases", wanted], env)
    result: dict[str, Any] = json.loads(out.splitlines()[-1])
    return result


def compare(shape: str, options: argparse.Namespace, console: Console) -> dict[str, Any]:
    """Measure all engines of a shape and return the summary; the files are rewritten after each turn.

    An interrupted run therefore leaves the results of the turns before.
    """
    known = peers()
    entries: list[Entry] = []
    for engine in options.engines:
        peer = None if engine == "inferc" else known[engine]
        for format in OURS if peer is None else peer.formats:
            if options.formats and WIDTHS[format] not in options.formats:
                continue
            console.print(f"{shape}: {engine} {format}", style="dim")
            entry = Entry(engine, format, peer, Path())
            try:
                entry.model = prepared(shape, engine, format, peer, options.work)
            except RuntimeError as error:
                entry.error = str(error)
            entries.append(entry)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(shape, total=options.turns * len(entries))
        for turn in range(options.turns):
            for entry in entries:
                progress.update(task, description=f"{shape}, turn {turn + 1}: {entry.name}")
                if not entry.error:
                    cache_files(entry.model)
                    before = measure_read(options.threads)
                    try:
                        entry.turns.append(run_once(entry, options.cases, options.threads))
                        entry.reads += [before, measure_read(options.threads)]
                    except RuntimeError as error:
                        entry.error = str(error)
                progress.advance(task)
            result = summary(entries, shape, options.cases)
            save(result, options.out / f"cpu-{shape}.json")
            write_markdown(result, options.cases, options.out / f"cpu-{shape}.md")
            draw(result, options.cases, options.out / f"cpu-{shape}.png")
    return result


def main() -> int:
    known = peers()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--shape", dest="shapes", nargs="+", default=SHAPES, help="model shapes of benchmarks/make_model.py"
    )
    parser.add_argument("--engines", nargs="+", choices=("inferc", *known), default=("inferc", *known))
    parser.add_argument(
        "--formats", nargs="+", type=int, choices=(16, 8, 4), help="only weights of these widths in bits"
    )
    parser.add_argument("--cases", nargs="+", choices=CASES, default=tuple(CASES))
    parser.add_argument("--turns", type=int, default=3, choices=range(1, 100), metavar="N")
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--work", type=Path, default=ROOT / "out/bench", help="folder where models are kept")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks/results", help="folder for the results")
    options = parser.parse_args()
    options.work, options.out = options.work.resolve(), options.out.resolve()
    console = Console(stderr=True)
    missing = [name for name in options.engines if name != "inferc" and not known[name].is_made()]
    if missing:
        parser.error(f"not installed: {', '.join(missing)}; run `make peers`, or name others in --engines")
    options.out.mkdir(parents=True, exist_ok=True)
    failed = False
    for shape in options.shapes:
        result = compare(shape, options, console)
        show(result, options.cases, Console(width=max(Console().width, 130)))
        for row in result["rows"]:
            if "error" in row or "crippled" in row:
                failed = True
                what = row.get("error") or f"below {CRIPPLED} of its row in peers/expected.toml: {row['crippled']}"
                console.print(f"{row['engine']} {row['format']}: {what}", style="red")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
