"""Run the Triton kernels under the interpreter, and print what came of it as JSON.

`kernels`: {kernel: {case: [[error, tolerance]]}}; `benchmark`: the same of what the benchmark launches, by its rows;
`depends`: the steps of which a sequence's bits depend on the others in it, or on how its prompt is cut, where they must
not, and the products of which a row's do.

A process of its own: TRITON_INTERPRET=1 must be set before Triton is imported.
"""

import argparse
import json
import sys
import warnings
from pathlib import Path
from typing import Any

import quick_interpreter
import torch
from all_cases import KERNELS
from attention_cases import depend_on_chunks, depend_on_their_step
from gemm_cases import depend_on_their_step as products_that_do
from torch import Tensor
from triton_cases import Case

sys.path.insert(0, str(Path(__file__).parents[3] / "benchmarks"))
from gpu_kernels import Bench, benches, tiny

DEPENDENCES = (depend_on_their_step, depend_on_chunks, products_that_do)
SPARE = 3  # tokens, rows and sequences that the grid has room for and the step has not


def launched(case: Case) -> dict[str, Tensor]:
    constants = {**case.source.all_constants, **({"WIDE_DOT": 1} if "WIDE_DOT" in case.source.constants else {})}
    case.source.function[case.grid(SPARE)](*case.arguments(case.tensors), **constants)
    return case.tensors


def run(case: Case) -> list[tuple[float, float]]:
    return case.errors(launched(case), truncated=True)


def measured() -> dict[str, list[tuple[float, float]]]:
    """Assert that the launches of the benchmark, at small shapes, compute the same as PyTorch."""
    torch.manual_seed(0)
    return {f"{bench.kernel} {bench.shape}": compared(bench) for bench in benches(tiny())}


def compared(bench: Bench) -> list[tuple[float, float]]:
    for each in bench.before:
        compared(each)
    expected = {bench.out: bench.reference()}
    # Truncated here where a GPU rounds.
    return run(Case(bench.shape, bench.source, bench.all_tensors(), expected, bench.counts, roundings=4))


if __name__ == "__main__":
    quick_interpreter.use()
    warnings.simplefilter("ignore")  # of numpy, in the interpreter
    parser = argparse.ArgumentParser()
    parser.add_argument("part", choices=("kernels", "benchmark", "depends"))
    part = parser.parse_args().part
    found: Any
    if part == "kernels":
        found = {kernel: {case.name: run(case) for case in made()} for kernel, made in KERNELS.items()}
    elif part == "benchmark":
        found = measured()
    else:
        found = [name for find in DEPENDENCES for name in find(launched)]
    json.dump(found, sys.stdout)
