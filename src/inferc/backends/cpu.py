"""The backend of the cpu target: the step in C++, compiled once for each instruction set."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from pathlib import Path

from inferc.arena import MemoryPlan
from inferc.backends.backend import Output, Written
from inferc.backends.lower import LowerConfig
from inferc.backends.partition import RankProgram
from inferc.backends.pipelines import paged_pipeline
from inferc.codegen.cpp import build as cpp_build
from inferc.codegen.cpp.emit import emit
from inferc.codegen.cpp.table import KERNELS
from inferc.codegen.cpp.unit import CppUnit
from inferc.ir.program import Program
from inferc.passes.fuse.linear_silu_mul import fuse_linear_silu_mul
from inferc.passes.lower.plan_memory import memory_plan
from inferc.passes.pipeline import Pass
from inferc.runtime.runners.cpu.abi import detect_isa
from inferc.targets import Target


class CpuBackend:
    """A backend that writes a library for each instruction set, and the C++ that it was compiled from."""

    code = "cpp"
    kernels = KERNELS

    def __init__(self, target: Target) -> None:
        self._isas = cpp_build.target_isas()
        self._libraries: dict[str, dict[str, str]] = {}  # by source text: ranks whose step is equal share libraries
        self._ahead: list[Future[dict[str, Path]]] = []  # the builds that `begin` began

    def check_machine(self) -> None:
        cpp_build.check_machine()

    def pipeline(self, config: LowerConfig) -> tuple[Pass, ...]:
        return paged_pipeline(config, gated=(fuse_linear_silu_mul,))

    def try_write(self, program: Program, config: LowerConfig) -> None:
        _emit(program, memory_plan(program), config)

    def begin(self, ranks: Sequence[RankProgram], output: Output) -> None:
        """Compile the steps of all ranks in the background, which fills the cache that `write` reads."""
        units = [_emit(each.program, memory_plan(each.program), output.config) for each in ranks]
        distinct = {unit.source: unit for unit in units}.values()
        thread = ThreadPoolExecutor(1)
        self._ahead = [thread.submit(cpp_build.build_program, unit, self._built_for(output)) for unit in distinct]
        thread.shutdown(wait=False)

    def _built_for(self, output: Output) -> tuple[str, ...]:
        return detect_isa()[:1] if output.for_here else self._isas

    def write(self, rank: RankProgram, output: Output) -> Written:
        wait(self._ahead)
        plan = memory_plan(rank.program)
        unit = _emit(rank.program, plan, output.config)
        libraries = self._write_libraries(unit, rank.label, output)
        return Written(plan, unit.arena, unit.part, libraries)

    def _write_libraries(self, unit: CppUnit, label: str, output: Output) -> dict[str, str]:
        """Compile the step for each instruction set; return the library files by ISA, best first."""
        if unit.source in self._libraries:
            return self._libraries[unit.source]
        output.report("compile kernels", len(self._libraries), output.num_ranks)
        folder = f"kernels/{label}" if self._libraries else "kernels"
        libraries = {}
        for isa, built in cpp_build.build_program(unit, self._built_for(output)).items():
            libraries[isa] = f"{folder}/cpu-{isa}.so"
            output.writer.add(libraries[isa], built.read_bytes())
        output.writer.add(f"{folder}/cpp/unit.cpp", unit.whole.encode())
        if not self._libraries:
            for header in unit.headers:
                output.writer.add(f"kernels/cpp/{header}", (cpp_build.KERNELS_FOLDER / header).read_bytes())
            for header, text in unit.own_headers.items():
                output.writer.add(f"kernels/cpp/{header}", text.encode())
        self._libraries[unit.source] = libraries
        return libraries


def _emit(program: Program, plan: MemoryPlan, config: LowerConfig) -> CppUnit:
    return emit(program, plan.values, plan.arena.pools, config.kernels, config.own_headers)
