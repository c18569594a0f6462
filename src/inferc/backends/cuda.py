"""The backend of the cuda target: the step as launches of Triton kernels, compiled ahead of time for each chip."""

from __future__ import annotations

import importlib.util
from typing import TYPE_CHECKING

import msgspec

from inferc.arena import SAMPLE_ROWS, MemoryPlan
from inferc.backends.backend import Output, Written
from inferc.backends.lower import LowerConfig
from inferc.backends.partition import RankProgram
from inferc.backends.pipelines import paged_pipeline
from inferc.codegen.artifact_writer import ArtifactWriter
from inferc.codegen.triton.table import KERNELS
from inferc.ir.program import Program
from inferc.manifest_types import Program as ProgramJson
from inferc.passes.fuse.linear_silu_mul import fuse_linear_silu_mul, fuse_linear_silu_mul_int8
from inferc.passes.lower.plan_memory import memory_plan
from inferc.passes.pipeline import Pass
from inferc.system.progress import Progress
from inferc.targets import Target

if TYPE_CHECKING:
    from inferc.codegen.triton.emit import CudaStep


class CudaBackend:
    """A backend that writes cubins and launch records for each named chip, and PTX for chips to come."""

    code = "triton"
    kernels = KERNELS

    def __init__(self, target: Target) -> None:
        self._target = target

    def check_machine(self) -> None: ...

    def pipeline(self, config: LowerConfig) -> tuple[Pass, ...]:
        of_int8 = (fuse_linear_silu_mul_int8,) if config.quantize == "int8" else ()
        # The fused kernel of the q, k and v projection cannot write an int8 cache.
        return paged_pipeline(config, gated=(fuse_linear_silu_mul, *of_int8), fuses_qkv=config.kv_dtype != "int8")

    def try_write(self, program: Program, config: LowerConfig) -> None:
        try_step(program, config)

    def write(self, rank: RankProgram, output: Output) -> Written:
        return write_step(rank.program, self._target, output, with_ptx=True)

    def add(self, program: Program, compiled: ProgramJson, writer: ArtifactWriter, report: Progress) -> Written | None:
        from inferc.codegen.triton.code import write_code
        from inferc.codegen.triton.emit import emit

        plan = memory_plan(program)
        step = emit(program, plan.values)
        made, there = msgspec.to_builtins(step.part), msgspec.to_builtins(compiled)
        if any(there[name] != value for name, value in made.items()):
            return None

        def of_kernels(done: int, total: int) -> None:
            report("compile kernels", done, total)

        cubins, rows = write_code(step, self._target.archs, writer.add, of_kernels, with_ptx=False)
        return Written(plan, part=step.part, cubins=cubins, kernels=rows)


def try_step(program: Program, config: LowerConfig) -> None:
    """Raise what emitting a step would refuse, where Triton is installed; without it a model can still be explained."""
    if importlib.util.find_spec("triton") is not None:
        emit_step(program, memory_plan(program), config)


def emit_step(program: Program, plan: MemoryPlan, config: LowerConfig) -> CudaStep:
    """Return the launches of a lowered program, and the kernels that they name."""
    from inferc.codegen.triton.emit import emit  # imports Triton, which only GPU targets need

    return emit(program, plan.values, config.kernels)


def write_step(program: Program, target: Target, output: Output, *, with_ptx: bool) -> Written:
    """Compile a step's kernels for each chip of the target; write them and their sources."""
    from inferc.codegen.triton.code import write_code, write_sources

    plan = memory_plan(program)
    step = emit_step(program, plan, output.config)
    of_row = sum(each.per_row for each in step.scratch.values())
    arena = msgspec.structs.replace(plan.formula, const=plan.formula.const + SAMPLE_ROWS * of_row)

    def report(done: int, total: int) -> None:
        output.report("compile kernels", done, total)

    cubins, rows = write_code(step, target.archs, output.writer.add, report, with_ptx=with_ptx)
    write_sources(step, output.writer.add)
    return Written(plan, arena, step.part, cubins=cubins, kernels=rows)
