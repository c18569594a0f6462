"""The backend of the tensorrt target: the step over a dense KV cache as one TensorRT plan, for one chip."""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING

from inferc.backends.backend import Output, Written
from inferc.backends.lower import LowerConfig
from inferc.backends.partition import RankProgram
from inferc.backends.pipelines import dense_pipeline
from inferc.codegen.tensorrt.table import KERNELS
from inferc.errors import InfercError
from inferc.ir.program import Program
from inferc.manifest import TENSORRT_LAYERS, TENSORRT_PLAN, json_bytes
from inferc.passes.pipeline import Pass
from inferc.targets import Target

if TYPE_CHECKING:
    from inferc.codegen.tensorrt.adapter import Library

log = logging.getLogger(__name__)


class TensorRTBackend:
    """A backend that writes one plan of the whole step.

    The plan contains the weights, so their own files are dropped.
    """

    code = "tensorrt"
    kernels = KERNELS

    def __init__(self, target: Target) -> None:
        self._target = target

    def check_machine(self) -> None:
        library_for(self._target)

    def pipeline(self, config: LowerConfig) -> tuple[Pass, ...]:
        return dense_pipeline(config, rows_of=("linear", "head"))

    def try_write(self, program: Program, config: LowerConfig) -> None: ...

    def write(self, rank: RankProgram, output: Output) -> Written:
        from inferc.codegen.tensorrt.emit import emit

        (arch,) = self._target.archs
        output.report("build the plan", 0, 1)
        start = time.perf_counter()
        weights = {weight.name: weight for weight in output.writer.weights}
        library = library_for(self._target)
        plan = emit(rank.program, weights, output.folder, library, arch, output.config.kernels)
        data = memoryview(plan.data).cast("B")
        log.info("the plan was built in %.1f s, %d bytes", time.perf_counter() - start, len(data))
        output.writer.drop_weights()
        output.writer.add_mapped(TENSORRT_PLAN, data)
        output.writer.add(TENSORRT_LAYERS, json_bytes(plan.layers))
        return Written(tensorrt=plan.facts)


def library_for(target: Target) -> Library:
    """Return the TensorRT package that builds plans for the target's chip.

    TensorRT itself builds only for the chip of this machine's GPU. Raises ConfigError where no package is installed,
    UnsupportedError where none builds for the chip.
    """
    from inferc.codegen.tensorrt.adapter import to_build

    (arch,) = target.archs
    return to_build(arch, _arch_here(), target.spec.name)


def _arch_here() -> str | None:
    """Return the chip of this machine's GPU; None without one."""
    from inferc.runtime.runners.cuda.driver import Driver

    try:
        driver = Driver()
    except InfercError:
        return None
    driver.close()
    return driver.arch
