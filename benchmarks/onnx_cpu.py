"""Compare ONNX artifacts on the CPU with onnxruntime-genai and with the cpu target, in turn in one run.

    python benchmarks/onnx_cpu.py [--shape qwen3-0.6b] [--turns 3] [--formats float32 int4] [--out FILE]

One model with random weights is run by inferc's engine with onnxruntime (`--target onnx`, and `onnx:standard` without
onnxruntime's own ops), by inferc's compiled C++ (`--target cpu`), and by onnxruntime-genai with its own builder and
loop (`make peers` makes its environment). Every engine runs in its own process, one after the other; medians count, as
ratios to onnxruntime-genai. The memory's read bandwidth is measured before and after each. int4 means groups of 32,
with activations rounded by the kernels; the embedding of onnxruntime-genai stays float.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cpu import SHAPES, cache_files, fresh, prepared, run
from measured import ROOT, save
from peers.environments import peers
from rich.progress import track

from inferc.cost.machine import measure_read
from inferc.system.resources import available_cores

# The cases as (requests, input_len, output_len), by the name of the worker's number that counts.
CASES = {"decode": (1, 128, 32), "prefill": (1, 512, 2), "output": (8, 64, 32)}
GENAI = "onnxruntime-genai"
GENAI_FORMATS = {"float32": "fp32", "int4": "int4"}


@dataclass
class Entry:
    """An engine in one format with its measurements: tokens per second of each case, turn by turn."""

    name: str
    format: str
    model: Path
    runs: list[dict[str, float]] = field(default_factory=list)
    read_gb_s: list[float] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        return {case: statistics.median(run[case] for run in self.runs) for case in CASES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", choices=SHAPES, default=SHAPES[0])
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--formats", nargs="+", choices=tuple(GENAI_FORMATS), default=list(GENAI_FORMATS))
    parser.add_argument(
        "--targets", nargs="+", default=["onnx", "onnx:standard", "cpu"], help="targets of inferc's artifacts"
    )
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--work", type=Path, default=ROOT / "out" / "bench", help="folder where models are kept")
    parser.add_argument("--out", type=Path, default=ROOT / "benchmarks" / "results" / "onnx-cpu.json")
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    entries = [each for format in options.formats for each in entries_of(format, options)]
    for turn in range(options.turns):
        for entry in track(entries, description=f"turn {turn + 1} of {options.turns}"):
            cache_files(entry.model)
            before = measure_read(options.threads)
            entry.runs.append(run_cases(entry, options.threads))
            entry.read_gb_s += [before / 1e9, measure_read(options.threads) / 1e9]
    rows = [
        {"engine": each.name, "format": each.format, "runs": each.runs, "read_gb_s": each.read_gb_s} for each in entries
    ]
    print_table(entries)
    save({"shape": options.shape, "cases": CASES, "threads": options.threads, "rows": rows}, options.out)


def entries_of(format: str, options: argparse.Namespace) -> list[Entry]:
    """Make the models of all engines in one format, and return the engines."""
    peer = peers()["onnxruntime"]
    genai = prepared(options.shape, "onnxruntime", GENAI_FORMATS[format], peer, options.work)
    ours = [
        Entry(f"inferc {target}", format, compiled(options.work, options.shape, target, format))
        for target in options.targets
    ]
    return [Entry(GENAI, format, genai), *ours]


def compiled(work: Path, shape: str, target: str, format: str) -> Path:
    """Return an artifact, and compile it if it does not exist."""
    out = work / f"{shape}-{target.replace(':', '-')}-{format}"
    if not out.exists():
        partial = fresh(out.with_name(out.name + ".partial"))
        how = ["--dtype", "float32"] if format == "float32" or target != "cpu" else ["--dtype", "bfloat16"]
        how += [] if format == "float32" else ["--quantize", format]
        command = [sys.executable, "-m", "inferc", "compile", str(work / shape), "-o", str(partial)]
        run([*command, "--target", target, "--certify", "none", "--max-model-len", "4096", *how])
        partial.rename(out)
    return out


def run_cases(entry: Entry, threads: int) -> dict[str, float]:
    peer = peers()["onnxruntime"]
    python, engine = (peer.python, "onnxruntime") if entry.name == GENAI else (Path(sys.executable), "inferc")
    command = [str(python), "-m", "peers.worker", engine, str(entry.model), "--format", entry.format]
    out = run([*command, "--threads", str(threads), "--cases", json.dumps(CASES)])
    found: dict[str, Any] = json.loads(out.splitlines()[-1])
    return {case: float(found["cases"][case][case]) for case in CASES}


def print_table(entries: list[Entry]) -> None:
    first = {entry.format: entry.medians() for entry in entries if entry.name == GENAI}
    print("| tokens/s (ratio to onnxruntime-genai) | " + " | ".join(CASES) + " |\n|---|" + "---|" * len(CASES))
    for entry in entries:
        found = entry.medians()
        cells = [f"{found[case]:.1f} ({found[case] / first[entry.format][case]:.2f})" for case in CASES]
        print(f"| {entry.name}, {entry.format} | " + " | ".join(cells) + " |")
    reads = [each for entry in entries for each in entry.read_gb_s]
    print(f"memory read: {min(reads):.1f} to {max(reads):.1f} GB/s")


if __name__ == "__main__":
    main()
