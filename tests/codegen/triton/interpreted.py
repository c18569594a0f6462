"""Run every Triton kernel under the interpreter over its cases, and what the benchmark launches.

Prints {kernel or "benchmark": {case: [[error, tolerance]]}} as JSON.

A process of its own: TRITON_INTERPRET=1 must be set before Triton is imported.
"""

import json
import sys
from pathlib import Path

import torch
from triton_cases import KERNELS, Case

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from gpu_kernels import Shape, benches

TINY = Shape(32, 48, 4, 2, 16, (1, 17), ((1, 64), (3, 96)), device="cpu")
SPARE = 3  # tokens, rows and sequences that the grid has room for and the step has not


def run(case: Case) -> list[tuple[float, float]]:
    constants = {**case.source.constants, **({"WIDE_DOT": 1} if "WIDE_DOT" in case.source.constants else {})}
    case.source.function[case.grid(SPARE)](*case.arguments(case.tensors), **constants)
    return case.errors(case.tensors, truncated=True)


def measured() -> dict[str, list[tuple[float, float]]]:
    """What the benchmark launches on a GPU, at small shapes: the same as PyTorch's own."""
    torch.manual_seed(0)
    found = {}
    for bench in benches(TINY):
        expected = {bench.out: bench.reference()}
        tensors = bench.all_tensors("cpu")
        case = Case(bench.shape, bench.source, tensors, expected, bench.counts, roundings=2)
        found[f"{bench.kernel} {bench.shape}"] = run(case)  # truncated here where a GPU rounds
    return found


if __name__ == "__main__":
    cases = {kernel: {case.name: run(case) for case in made()} for kernel, made in KERNELS.items()}
    json.dump({**cases, "benchmark": measured()}, sys.stdout)
