"""The factories of the runners over a dense KV cache: onnxruntime on a CPU or a GPU, and TensorRT."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass

from inferc.config import EngineConfig, ResolvedEngineConfig
from inferc.kv_groups import CacheGroup
from inferc.runtime.artifact.load import Artifact
from inferc.runtime.runners.api import Capability, OpenedRunner, RunnerRequest
from inferc.runtime.runners.cuda.driver import Driver
from inferc.runtime.runners.dense.onnxruntime import open_onnx, open_onnx_cuda
from inferc.runtime.runners.dense.runner import DenseRunner
from inferc.runtime.runners.dense.tensorrt import open_tensorrt

OpenOnGpu = Callable[[Artifact, EngineConfig, Sequence[CacheGroup], Driver], tuple[DenseRunner, ResolvedEngineConfig]]


def _opened(runner: DenseRunner, config: ResolvedEngineConfig) -> OpenedRunner:
    return OpenedRunner(runner, config, share_free_slots=runner.share_free_slots)


class OnnxRunnerFactory:
    """The factory of the runner of the onnx targets on a CPU."""

    def capabilities(self, artifact: Artifact) -> frozenset[Capability]:
        return frozenset(("grammars", "logits_processors"))

    def open(self, request: RunnerRequest) -> OpenedRunner:
        artifact = request.artifact
        resolved = request.config.resolve(
            artifact.max_model_len, artifact.block_size, request.groups, target=request.target
        )
        return _opened(open_onnx(artifact, resolved), resolved)


@dataclass(frozen=True)
class GpuRunnerFactory:
    """The factory for targets with K and V in a GPU's memory; `open_on` opens the runner with the GPU's driver."""

    open_on: OpenOnGpu
    waits_for_weights: bool = False

    def capabilities(self, artifact: Artifact) -> frozenset[Capability]:
        return frozenset(("grammars", "logits_processors"))

    def open(self, request: RunnerRequest) -> OpenedRunner:
        if self.waits_for_weights:
            request.weights_checked()
        with ExitStack() as opened:
            driver = Driver()
            opened.callback(driver.close)  # from here on the runner owns the driver
            runner, resolved = self.open_on(request.artifact, request.config, request.groups, driver)
            opened.pop_all()
        return _opened(runner, resolved)


ONNX = OnnxRunnerFactory()
ONNX_CUDA = GpuRunnerFactory(open_onnx_cuda)
TENSORRT = GpuRunnerFactory(open_tensorrt, waits_for_weights=True)  # TensorRT checks a plan less closely
