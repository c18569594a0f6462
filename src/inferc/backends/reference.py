"""The backend of the reference target: the lowered program itself, which the ops' references run.

Nothing is compiled.
"""

from __future__ import annotations

from inferc.backends.backend import Output, Written
from inferc.backends.lower import LowerConfig
from inferc.backends.partition import RankProgram
from inferc.backends.pipelines import paged_pipeline
from inferc.codegen.reference import KERNELS
from inferc.ir.program import Program
from inferc.passes.lower.plan_memory import memory_plan
from inferc.passes.pipeline import Pass
from inferc.targets import Target


class ReferenceBackend:
    """A backend that writes no code."""

    code = "reference"
    kernels = KERNELS

    def __init__(self, target: Target) -> None: ...

    def check_machine(self) -> None: ...

    def pipeline(self, config: LowerConfig) -> tuple[Pass, ...]:
        return paged_pipeline(config)

    def try_write(self, program: Program, config: LowerConfig) -> None: ...

    def write(self, rank: RankProgram, output: Output) -> Written:
        plan = memory_plan(rank.program)
        return Written(plan, plan.formula)
