"""The factory of the CPU runner: it opens one runner, or a group of runners for an artifact of several ranks."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace

from inferc.config import EngineConfig
from inferc.kv_groups import CacheLimits, pools_bytes
from inferc.runtime.artifact.load import Artifact
from inferc.runtime.offload.disk import open_disk
from inferc.runtime.runners.api import Capability, OpenedRunner, RunnerRequest
from inferc.runtime.runners.cpu.abi import choose_isa
from inferc.runtime.runners.cpu.rank_group import RankGroup
from inferc.runtime.runners.cpu.runner import CpuRunner
from inferc.runtime.runners.hidden_rows import has_hidden_rows

IN_RANKS: frozenset[Capability] = frozenset(
    ["kv_evict", "kv_events", "offload_in_place", "partial_blocks", "prefix_cache", "record", "threads"]
)
ALONE: frozenset[Capability] = IN_RANKS | {
    "adapters",
    "drafts",
    "draft_trees",
    "grammars",
    "heads",
    "kv_disk",
    "kv_evict_heavy_hitters",
    "logits_processors",
    "observe",
    "taps",
}


class CpuRunnerFactory:
    """The factory of the `cpu` target's runner."""

    def capabilities(self, artifact: Artifact) -> frozenset[Capability]:
        if len(artifact.ranks) > 1:
            return IN_RANKS
        return ALONE | {"vectors"} if has_hidden_rows(artifact.program) else ALONE

    def open(self, request: RunnerRequest) -> OpenedRunner:
        artifact, groups = request.artifact, request.groups
        resolved = _config_of(request).resolve(artifact.max_model_len, artifact.block_size, groups)
        if len(artifact.ranks) > 1:
            group = RankGroup(artifact, resolved)
            return OpenedRunner(group, resolved, group.isa)
        with ExitStack() as opened:
            disk = open_disk(artifact, request.config, groups, lambda: choose_isa(request.config.isa, artifact.isas))
            if disk is None:
                runner = CpuRunner(artifact, resolved)
            else:
                opened.callback(disk.close)
                runner = CpuRunner(artifact, resolved, files=list(zip(disk.files, disk.num_blocks, strict=True)))
                opened.callback(runner.close)
                blocks = [runner.blocks(group) for group in range(len(groups))]
                disk.attach(blocks, [len(of.layers) for of in artifact.kv_groups])
            opened.pop_all()
        # With a KV cache of a given size, idle time is used to back its memory before it is needed.
        # With "auto", no more memory is taken than is needed.
        idle_work = None if request.config.kv_memory_bytes == "auto" else runner.back_cache
        num_offloaded = () if disk is None else disk.num_blocks
        return OpenedRunner(runner, resolved, runner.isa, disk, num_offloaded, idle_work=idle_work)


def _config_of(request: RunnerRequest) -> EngineConfig:
    """Return the config of a request, whose KV memory leaves room for that of the runner beside it."""
    config, artifact = request.config, request.artifact
    if request.beside is None or config.kv_memory_bytes != "auto":
        return config
    both = (*request.groups, *request.beside.groups)
    found = config.resolve(artifact.max_model_len, artifact.block_size, both)
    limits = CacheLimits(
        artifact.block_size, artifact.max_model_len, config.max_num_seqs, config.token_budget(request.target)
    )
    own = pools_bytes(request.groups, limits, found.num_blocks[: len(request.groups)])
    return replace(config, kv_memory_bytes=own)


CPU = CpuRunnerFactory()
