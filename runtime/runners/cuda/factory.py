"""The factory of the CUDA runner, and of the same runner with TensorRT engines between its launches."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass

from inferc.config import EngineConfig, ResolvedEngineConfig
from inferc.runtime.adapters.store import stored_bytes
from inferc.runtime.artifact.load import Artifact
from inferc.runtime.offload.disk import open_disk
from inferc.runtime.runners.api import Capability, OpenedRunner, RunnerRequest
from inferc.runtime.runners.cuda.driver import Driver
from inferc.runtime.runners.cuda.engines import Engines, open_engines
from inferc.runtime.runners.cuda.footprint import kv_available
from inferc.runtime.runners.cuda.head_rows import MakeKeeper, keeper_for_head, keeper_for_model, most_given, most_own
from inferc.runtime.runners.cuda.runner import CudaRunner
from inferc.runtime.runners.cuda.weights import placer

OF_LAUNCHES: frozenset[Capability] = frozenset(
    ["grammars", "kv_disk", "kv_evict", "kv_events", "partial_blocks", "prefix_cache", "threads"]
)


@dataclass(frozen=True)
class CudaRunnerFactory:
    """The factory of the CUDA runner for one target.

    can: the capabilities of its runner; open_engines: opens the engines that compute between the launches. They are
    opened first, since the memory they take of the device is not recorded in the artifact.
    """

    can: frozenset[Capability]
    open_engines: Callable[[Artifact, EngineConfig, Driver], Engines] | None = None

    def capabilities(self, artifact: Artifact) -> frozenset[Capability]:
        return self.can

    def open(self, request: RunnerRequest) -> OpenedRunner:
        artifact, config, groups = request.artifact, request.config, request.groups
        with ExitStack() as opened:
            driver = Driver()
            with ExitStack() as before:  # resources that the runner owns once it is made
                before.callback(driver.close)
                engines = None
                if self.open_engines is not None:
                    request.weights_checked()  # first, because TensorRT checks the plans it is given less closely
                    engines = self.open_engines(artifact, config, driver)
                    before.callback(engines.close)
                # Another model of GPU may compute other bits.
                computed_by = f"{driver.arch}{' deterministic' * config.deterministic}"
                disk = open_disk(artifact, config, groups, lambda: computed_by)
                if disk is not None:
                    opened.callback(disk.close)
                free = driver.memory_info()[0] - stored_bytes(config.adapters)
                available = kv_available(artifact, config, groups, free, driver.name, request.beside)
                resolved = config.resolve(
                    artifact.max_model_len, artifact.block_size, groups, available, request.target
                )
                offloaded = () if disk is None else disk.map_files()
                runner = CudaRunner(
                    artifact,
                    resolved,
                    driver,
                    placer(artifact),
                    owns_driver=True,
                    offloaded=offloaded,
                    engines=engines,
                    make_keeper=_keeper(request, resolved),
                )
                before.pop_all()
            opened.callback(runner.close)
            if disk is not None:
                disk.attach_device(runner.num_blocks, runner.read_block)
            opened.pop_all()
        return OpenedRunner(runner, resolved, runner.arch, disk, () if disk is None else disk.num_blocks)


def _keeper(request: RunnerRequest, config: ResolvedEngineConfig) -> MakeKeeper | None:
    """Return what makes the keeper of a runner beside a head, or of the head's own; None for any other."""
    artifact, beside = request.artifact, request.beside
    if (store := request.row_store) is not None:
        return lambda memory, writer, kernels: keeper_for_head(artifact, store, kernels, memory, writer)
    if beside is None or beside.artifact.model.head is None:
        return None
    head = beside.artifact
    given = most_given(config.max_num_batched_tokens, config.max_num_seqs, artifact.block_size)
    num_rows = given + max(config.num_blocks), most_own(beside.config.token_budget("cuda"))
    return lambda memory, writer, _: keeper_for_model(artifact, head, num_rows, memory, writer)


CUDA = CudaRunnerFactory(OF_LAUNCHES | {"adapters", "drafts", "heads", "record"})
TENSORRT_PAGED = CudaRunnerFactory(OF_LAUNCHES, open_engines)
