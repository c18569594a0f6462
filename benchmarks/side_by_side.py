"""Compare artifacts in one process, in turn, to measure the gain of a change to kernels or passes.

    python benchmarks/side_by_side.py OUT OUT… [--requests 1] [--input-len 128] [--output-len 64] [--turns 7] [--out
    FILE]

An artifact contains its kernels: two artifacts of one model, compiled with two checkouts, compare these checkouts with
the runtime of this one. Prompts are random and decoding is greedy. Every artifact runs once per turn, the first turn
warms up, and medians count, as ratios to the first artifact. The read bandwidth of memory is measured after every turn:
if it varies, other work ran on the machine.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import Any

from measured import save
from peers.engines.inferc_engine import load
from peers.worker import run_once

from inferc.cost.machine import measure_read
from inferc.system.resources import available_cores

UNITS = ("decode", "prefill", "output")  # rates in tokens per second, by the names of run_once


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("artifacts", nargs="+", type=Path, metavar="OUT", help="folders that `inferc compile` wrote")
    parser.add_argument("--requests", type=int, default=1, help="number of concurrent requests")
    parser.add_argument("--input-len", type=int, default=128)
    parser.add_argument("--output-len", type=int, default=64)
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--threads", type=int, default=available_cores())
    parser.add_argument("--out", type=Path, help="a JSON file for all numbers")
    options = parser.parse_args()
    if options.turns < 1 or options.output_len < 2:
        parser.error("expected at least one turn and two new tokens")
    case = (options.requests, options.input_len, options.output_len)
    result = compare(options.artifacts, case, options.turns, options.threads)
    print_table(result)
    if options.out is not None:
        save(result, options.out)


def compare(artifacts: list[Path], case: tuple[int, int, int], turns: int, threads: int) -> dict[str, Any]:
    """Run all artifacts in turn and return all runs of each, in the order in which they were measured.

    case: requests, input_len, output_len.
    """
    engines = [load(path, "", threads, case[0], sum(case[1:])) for path in artifacts]
    runs: list[list[dict[str, float]]] = [[] for _ in engines]
    reads: list[float] = []
    for turn in range(turns + 1):
        for engine, own in zip(engines, runs, strict=True):
            found = run_once(engine, turn, *case)
            own.extend([found] if turn else [])
        reads.extend([measure_read(threads) / 1e9] if turn else [])
    rows = [{"artifact": path.name, "runs": own} for path, own in zip(artifacts, runs, strict=True)]
    return {
        "case": dict(zip(("requests", "input_len", "output_len"), case, strict=True)),
        "rows": rows,
        "read_gb_s": reads,
    }


def print_table(result: dict[str, Any]) -> None:
    medians = [{unit: statistics.median(run[unit] for run in row["runs"]) for unit in UNITS} for row in result["rows"]]
    print(f"{'tokens/s':32}" + "".join(f"{unit:>18}" for unit in UNITS))
    for row, own in zip(result["rows"], medians, strict=True):
        cells = (f"{own[unit]:9.1f} ({own[unit] / medians[0][unit]:.3f})" for unit in UNITS)
        print(f"{row['artifact'][-32:]:32}" + "".join(f"{cell:>18}" for cell in cells))
    print("memory read, GB/s: " + ", ".join(f"{read:.1f}" for read in result["read_gb_s"]))


if __name__ == "__main__":
    main()
