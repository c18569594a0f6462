"""The backend of the tensorrt-paged target: TensorRT plans for the segments between our kernels.

Our kernels keep the KV cache in blocks.
"""

from __future__ import annotations

import dataclasses
import logging
import time

from inferc.backends.backend import Output, Written
from inferc.backends.cuda import try_step, write_step
from inferc.backends.lower import LowerConfig
from inferc.backends.partition import RankProgram
from inferc.backends.pipelines import model_passes, quantization_elsewhere
from inferc.backends.tensorrt import library_for
from inferc.codegen.segments import segments_of
from inferc.codegen.tensorrt import table as tensorrt
from inferc.codegen.triton import table as triton
from inferc.ir.program import Program
from inferc.manifest import TENSORRT_LAYERS, json_bytes, segment_plan
from inferc.manifest_types import PlanRow, Tensorrt
from inferc.passes.attention.pad_heads import PadHeads
from inferc.passes.attention.page_kv_cache import PageKVCache
from inferc.passes.fuse.pointwise import FusePointwise
from inferc.passes.fuse.rope_kv_write import fuse_norm_rope_kv_write, fuse_rope_kv_write
from inferc.passes.lower.choose_kernels import ChooseKernels
from inferc.passes.lower.partition_segments import PartitionSegments
from inferc.passes.lower.plan_memory import PlanMemory
from inferc.passes.lower.select_rows import SelectRows
from inferc.passes.lower.split_head import SplitHead
from inferc.passes.pipeline import Pass
from inferc.passes.quantize.kv_cache import QuantizeKVCache
from inferc.targets import Target

log = logging.getLogger(__name__)


class PagedTensorRTBackend:
    """A backend that writes kernels as the cuda target does, and TensorRT plans for the segments between them.

    Segments that are equal but for their weights share a plan.
    """

    code = "triton"
    kernels = (*triton.KERNELS, *tensorrt.KERNELS)

    def __init__(self, target: Target) -> None:
        self._target = target

    def check_machine(self) -> None:
        library_for(self._target)

    def pipeline(self, config: LowerConfig) -> tuple[Pass, ...]:
        """Return the passes of the plain model, plus the fusions that the kernels between the segments implement.

        TensorRT fuses all other ops by itself.
        """
        return (
            *model_passes(PadHeads()),
            PageKVCache(config.block_size),
            *((QuantizeKVCache(),) if config.kv_dtype == "int8" else ()),
            fuse_rope_kv_write,
            fuse_norm_rope_kv_write,
            FusePointwise(),
            SelectRows(),
            SplitHead(),
            *quantization_elsewhere(config.quantize, ("linear",)),  # our LM head kernel reads float rows
            PartitionSegments(),  # after all passes that make or move a node
            ChooseKernels(config.target, triton.KERNELS, in_segments=tensorrt.KERNELS),
            PlanMemory(),
        )

    def try_write(self, program: Program, config: LowerConfig) -> None:
        try_step(program, config)

    def write(self, rank: RankProgram, output: Output) -> Written:
        """Write the kernels and the plans.

        There is no PTX, since chips to come cannot run the plans. The plans use the weights in the artifact's own
        files.
        """
        step = write_step(rank.program, self._target, output, with_ptx=False)
        return dataclasses.replace(step, tensorrt=self._write_plans(rank.program, output))

    def _write_plans(self, program: Program, output: Output) -> Tensorrt:
        from inferc.codegen.tensorrt.segments import PROFILES, first_of_each, plans

        (arch,) = self._target.archs
        library = library_for(self._target)
        total, rows, layers = len(first_of_each(segments_of(program))), [], {}
        output.report("build plans", 0, total)
        start = time.perf_counter()
        for each in plans(program, library, arch, output.config.kernels):
            data = memoryview(each.data).cast("B")
            log.info("plan %s was built in %.1f s, %d bytes", each.name, time.perf_counter() - start, len(data))
            output.writer.add_mapped(segment_plan(each.name), data)
            layers[each.name] = each.layers
            rows.append(PlanRow(each.name, each.calls))
            output.report("build plans", len(rows), total)
            start = time.perf_counter()
        output.writer.add(TENSORRT_LAYERS, json_bytes(layers))
        return Tensorrt(library.package, library.version, arch, [each.stored for each in PROFILES], rows)
