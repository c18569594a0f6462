"""Sample steps of the cases under Triton's interpreter, and print what is wrong as JSON: {case: [fault]}.

Of those that are named, or of all, with what else sampling launches.

A process of its own: TRITON_INTERPRET=1 must be set before Triton is imported.
"""

import json
import sys

import quick_interpreter
from sampled_step import faults, run_step
from sampling_cases import STEPS, late_ids_faults, score_faults
from torch import Tensor

from inferc.codegen.triton.aot.launch import evaluate_grid
from inferc.codegen.triton.aot.source import Source


def launch(source: Source, counts: dict[str, int], tensors: dict[str, Tensor]) -> None:
    grid = evaluate_grid(source.grid, {**source.constants, **counts})
    source.function[grid](*(tensors[name] for name in source.signature), **source.constants)


if __name__ == "__main__":
    quick_interpreter.use()
    names = sys.argv[1:] or list(STEPS)
    found = {name: faults(STEPS[name], run_step(STEPS[name], launch)) for name in names}
    json.dump({**found, "late ids": late_ids_faults(launch), "scores": score_faults(launch)}, sys.stdout)
