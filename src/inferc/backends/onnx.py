"""The backends of the onnx targets: the step over a dense KV cache as one ONNX model.

The model is for onnxruntime on a CPU, for onnxruntime on a GPU, or for any runtime of the standard.
"""

from __future__ import annotations

from typing import ClassVar

from inferc.backends.backend import Output, Written
from inferc.backends.lower import LowerConfig
from inferc.backends.partition import RankProgram
from inferc.backends.pipelines import dense_pipeline
from inferc.codegen.kernel import Kernel
from inferc.codegen.onnx.table import CUDA_KERNELS, KERNELS, STANDARD_KERNELS
from inferc.ir.program import Program
from inferc.manifest import ONNX_MODEL
from inferc.passes.fuse.dense_attention import fuse_dense_attention
from inferc.passes.pipeline import Pass
from inferc.passes.quantize.round_to_nearest import Reader
from inferc.passes.quantize.schemes import SCHEMES
from inferc.targets import Target
from inferc.version import __version__


class OnnxBackend:
    """A backend that writes the model as one ONNX file, which names the weights' files beside it."""

    code = "onnx"
    kernels: ClassVar[tuple[Kernel, ...]] = KERNELS
    fused: ClassVar[tuple[Pass, ...]] = (fuse_dense_attention,)

    def __init__(self, target: Target) -> None: ...

    def check_machine(self) -> None: ...

    def pipeline(self, config: LowerConfig) -> tuple[Pass, ...]:
        return dense_pipeline(config, *self.fused, rows_of=self.rounded_rows(config))

    def rounded_rows(self, config: LowerConfig) -> tuple[Reader, ...]:
        """Return the products that get rounded rows.

        Products in four bits round their rows themselves, each block by a scale of its own.
        """
        in_groups = config.quantize is not None and SCHEMES[config.quantize].group
        return ("head",) if in_groups else ("linear", "head")

    def try_write(self, program: Program, config: LowerConfig) -> None: ...

    def write(self, rank: RankProgram, output: Output) -> Written:
        from inferc.codegen.onnx.emit import emit

        weights = {weight.name: weight for weight in output.writer.weights}
        model = emit(rank.program, weights, f"inferc {__version__}", output.config.kernels)
        output.writer.add(ONNX_MODEL, model)
        return Written()


class StandardOnnxBackend(OnnxBackend):
    """A backend that writes a model of the ONNX standard's ops alone."""

    kernels = STANDARD_KERNELS
    fused = ()


class CudaOnnxBackend(OnnxBackend):
    """A backend that writes a model for onnxruntime on an NVIDIA GPU.

    It rounds no rows, as onnxruntime has no kernels there for products of integer rows.
    """

    kernels = CUDA_KERNELS

    def rounded_rows(self, config: LowerConfig) -> tuple[Reader, ...]:
        return ()
