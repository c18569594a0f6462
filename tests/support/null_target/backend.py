"""The null target's side of a compile: the pipeline for a paged cache, a kernel for every op, and no code."""

from inferc.backends.backend import Output, Written
from inferc.backends.lower import LowerConfig
from inferc.backends.partition import RankProgram
from inferc.backends.pipelines import paged_pipeline
from inferc.codegen import reference
from inferc.codegen.kernel import Fits, Kernel
from inferc.ir.program import Program
from inferc.passes.pipeline import Pass
from inferc.targets import Target


class NullBackend:
    code = "null"
    kernels = tuple(Kernel("null", each.op, f"null.{each.op}", Fits()) for each in reference.KERNELS)

    def __init__(self, target: Target) -> None: ...

    def check_machine(self) -> None: ...

    def pipeline(self, config: LowerConfig) -> tuple[Pass, ...]:
        return paged_pipeline(config)

    def try_write(self, program: Program, config: LowerConfig) -> None: ...

    def write(self, rank: RankProgram, output: Output) -> Written:
        return Written()
