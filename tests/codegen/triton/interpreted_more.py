"""Run the Triton kernels of what a dense Llama does without under the interpreter, over their cases.

Prints {kernel: {case: [[error, tolerance]]}} as JSON. In a process of its own: see interpreted.py.
"""

import json
import sys

from more_cases import KERNELS
from triton_cases import Case

SPARE = 3  # tokens, rows and sequences that the grid has room for and the step has not


def run(case: Case) -> list[tuple[float, float]]:
    constants = {**case.source.constants, **({"WIDE_DOT": 1} if "WIDE_DOT" in case.source.constants else {})}
    case.source.function[case.grid(SPARE)](*case.arguments(case.tensors), **constants)
    return case.errors(case.tensors, truncated=True)


if __name__ == "__main__":
    json.dump({kernel: {case.name: run(case) for case in made()} for kernel, made in KERNELS.items()}, sys.stdout)
