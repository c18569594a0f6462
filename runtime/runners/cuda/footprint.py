"""The estimate of an artifact's GPU memory before any is allocated, and the settings to change if it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

from inferc.arena import align_rows, round_up
from inferc.config import EngineConfig
from inferc.errors import ConfigError
from inferc.kv_groups import CacheGroup, CacheLimits, pools_bytes, pools_for_all, shared_part
from inferc.manifest import FAST, INVARIANT, RECORDS, SHARED
from inferc.manifest_types import Scratch
from inferc.runtime.runners.api import RunnerRequest
from inferc.runtime.runners.compiled import CompiledForCuda
from inferc.runtime.runners.cuda.capacity import Capacity, buckets, most_of_all, most_rows, sample_rows
from inferc.runtime.runners.cuda.cublaslt import WORKSPACE_BYTES
from inferc.runtime.runners.cuda.head_rows import most_given, most_own, row_bytes
from inferc.runtime.runners.cuda.input_layout import InputLayout
from inferc.runtime.runners.cuda.output_layout import output_layout
from inferc.runtime.runners.cuda.weights import placed_bytes
from inferc.system.json_text import parse_json

PAGE = 2 << 20  # bytes; the driver allocates memory in pieces of this size
RESERVE_BYTES = 256 << 20  # for the kernels' code and stacks, and for the driver itself
# The estimated bytes of a graph per launch in it. A step whose graph finds no memory runs without a graph.
GRAPH_LAUNCH_BYTES = 16 << 10
MIN_LEN = 16  # tokens of context that a setting must at least serve to be suggested


@dataclass(frozen=True)
class Footprint:
    """The bytes of everything except the KV cache, for one way to serve an artifact."""

    weights: int
    arena: int
    scratch: int
    inputs: int  # the inputs and the results
    workspace: int  # cuBLASLt's workspace
    graphs: int

    @property
    def fixed(self) -> int:
        parts = (self.weights, self.arena, self.scratch, self.inputs, self.workspace, self.graphs)
        return sum(round_up(each, PAGE) for each in parts) + RESERVE_BYTES


def scratch_bytes(size: Scratch, most: Capacity, max_num_seqs: int) -> int:
    """Return the bytes of a buffer that program.json's "scratch" describes."""
    rows = sample_rows(max_num_seqs)
    return size.const + size.per_token * most.tokens + size.per_seq * most.seqs + size.per_row * rows


def graphs_bytes(artifact: CompiledForCuda, max_num_seqs: int, deterministic: bool) -> int:
    """Return the bytes of the graphs of all buckets, with and without shared prefixes, whole and in two parts."""
    order = INVARIANT if deterministic else FAST
    stored = artifact.program.launches
    launches = [*stored.begin, *stored.step, *stored.head, *stored.sample]
    # The number of launches in an engine is unknown; one kernel per op is an upper estimate.
    num_always, num_shared = (
        sum(each.num_ops for each in launches if each.is_for(order) and each.only == only) for only in ("", SHARED)
    )
    num_launches = 2 * num_always + num_shared if num_shared else num_always
    return 2 * GRAPH_LAUNCH_BYTES * len(buckets(max_num_seqs)) * num_launches


def buffers(artifact: CompiledForCuda, deterministic: bool) -> dict[str, Scratch]:
    """Return the scratch buffers that the launches of one order of addition need."""
    order = INVARIANT if deterministic else FAST
    return {name: size for name, size in artifact.program.scratch.items() if size.is_for(order)}


def counts_bytes(artifact: CompiledForCuda, max_num_seqs: int) -> int:
    """Return the bytes of the penalty counts of all slots: one int32 per token of the vocabulary."""
    return 4 * align_rows(artifact.num_logits) * max_num_seqs


def footprint(
    artifact: CompiledForCuda, max_num_tokens: int, max_num_seqs: int, deterministic: bool = False
) -> Footprint:
    """Return the footprint of an artifact served with these limits."""
    capacity = most_of_all(max_num_tokens, max_num_seqs)
    arena = artifact.program.memory_plan.arena
    blocks = [-(-artifact.max_model_len // artifact.block_size)] * len(artifact.kv_groups)
    of_head = row_bytes(artifact.program)
    layout = InputLayout(capacity, sample_rows(max_num_seqs), blocks, has_rows=of_head is not None)
    sizes = buffers(artifact, deterministic).values()
    own_rows = 0 if of_head is None else most_own(max_num_tokens) * of_head[1]
    return Footprint(
        weights=placed_bytes(artifact.weights),
        arena=arena.num_bytes(most_rows(capacity, max_num_seqs)),
        scratch=sum(scratch_bytes(size, capacity, max_num_seqs) for size in sizes)
        + counts_bytes(artifact, max_num_seqs)
        + own_rows,
        inputs=layout.num_bytes + output_layout(capacity.rows)["end"],
        workspace=workspace_bytes(artifact, deterministic),
        graphs=graphs_bytes(artifact, max_num_seqs, deterministic),
    )


def workspace_bytes(artifact: CompiledForCuda, deterministic: bool) -> int:
    """Return the bytes of cuBLASLt's workspace: 0 unless a chip's records use it; the invariant order never does."""
    records = (data for name, data in artifact.contents.items() if name.endswith(f"/{RECORDS}"))
    return WORKSPACE_BYTES if not deterministic and any(map(_name_library, records)) else 0


@lru_cache
def _name_library(records: bytes) -> bool:
    return any(record.get("library") for record in parse_json(records))


def kv_available(
    artifact: CompiledForCuda,
    config: EngineConfig,
    groups: tuple[CacheGroup, ...],
    free_bytes: int,
    gpu: str,
    beside: RunnerRequest | None = None,
) -> int:
    """Return the bytes that the KV cache may take. beside: of the runner for which memory is to be left.

    Raises ConfigError, suggesting settings that fit, if the rest leaves too few.
    """
    seqs, tokens = config.max_num_seqs, config.token_budget("cuda")
    held = footprint(artifact, tokens, seqs, config.deterministic)
    own, others = groups, tuple[CacheGroup, ...]()
    if beside is not None:
        theirs = beside.config
        free_bytes -= footprint(
            beside.artifact, theirs.token_budget("cuda"), theirs.max_num_seqs, theirs.deterministic
        ).fixed
        rows, of_blocks = _given_rows(beside, artifact.block_size, tokens, seqs)
        others = (*beside.groups, *of_blocks)
        free_bytes, gpu = max(0, free_bytes - rows), f"{gpu} beside the draft model"
        groups = (*groups, *others)
    left = free_bytes - held.fixed
    least = _kv_bytes(artifact, groups, tokens, 1, MIN_LEN)
    wanted = least
    if config.kv_memory_bytes != "auto":
        wanted = config.kv_memory_bytes * _bytes_per_token(groups) // _bytes_per_token(own)
    if left >= wanted:
        limits = CacheLimits(artifact.block_size, artifact.max_model_len, seqs, tokens)
        return left if beside is None else shared_part(own, others, limits, left)
    parts = (
        f"weights {_gb(held.weights)}, activations {_gb(held.arena)}, scratch {_gb(held.scratch + held.workspace)},"
        f" graphs {_gb(held.graphs)}"
    )
    missing = held.fixed + wanted - free_bytes
    settings = [f"{setting} fits" for setting in _that_fit(artifact, config, groups, free_bytes, wanted)][:3]
    hint = "; ".join(settings) or "no setting makes it fit: quantize the weights, or use a GPU with more memory"
    raise ConfigError(
        f"out of device memory: {gpu} has {_gb(free_bytes)} free, {missing} bytes less than are needed"
        f" ({parts}, KV cache {_gb(wanted)}, reserve {_gb(RESERVE_BYTES)}); {hint}"
    )


def _given_rows(
    beside: RunnerRequest, block_size: int, max_num_tokens: int, max_num_seqs: int
) -> tuple[int, tuple[CacheGroup, ...]]:
    """Return the bytes of the rows that a model keeps for the head beside it: a constant, and those of each KV block.

    The last row of each block is kept as long as the block, so it counts as a KV group of its own.
    """
    sizes = row_bytes(beside.artifact.program)
    if sizes is None:
        return 0, ()
    rows = most_given(max_num_tokens, max_num_seqs, block_size)
    return round_up(rows * sizes[0], PAGE), (CacheGroup(-(-sizes[0] // block_size)),)


def _that_fit(
    artifact: CompiledForCuda, config: EngineConfig, groups: tuple[CacheGroup, ...], free: int, wanted: int
) -> Iterator[str]:
    """Yield settings, each of which alone makes the artifact fit."""
    seqs, tokens = config.max_num_seqs, config.token_budget("cuda")

    def left(num_tokens: int, num_seqs: int) -> int:
        held = footprint(artifact, num_tokens, num_seqs, config.deterministic)
        return free - held.fixed

    least = _kv_bytes(artifact, groups, tokens, 1, MIN_LEN)
    if config.kv_memory_bytes != "auto" and left(tokens, seqs) >= least:
        yield f"--kv-memory {left(tokens, seqs) >> 20}MiB"
    fewer = _largest(tokens, lambda count: left(count, min(seqs, count)) >= wanted)
    if fewer:
        also = f" --max-num-seqs {fewer}" if fewer < seqs else ""
        yield f"--max-num-batched-tokens {fewer}{also}"
    fewer = _largest(seqs, lambda count: left(tokens, count) >= wanted)
    if fewer:
        yield f"--max-num-seqs {fewer}"
    share = _largest(seqs, lambda count: left(max(count, tokens * count // seqs), count) >= wanted)
    if share:
        yield f"--max-num-batched-tokens {max(share, tokens * share // seqs)} --max-num-seqs {share}"


def _largest(most: int, fits: Callable[[int], bool]) -> int:
    """Return the largest count up to `most` that fits; 0 if none does."""
    low, high = 0, most
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    return low


def _kv_bytes(artifact: CompiledForCuda, groups: tuple[CacheGroup, ...], tokens: int, seqs: int, length: int) -> int:
    """Return the bytes of pools that hold `seqs` sequences of `length`, and block 0."""
    limits = CacheLimits(artifact.block_size, length, seqs, tokens)
    return pools_bytes(groups, limits, pools_for_all(groups, limits))


def _bytes_per_token(groups: tuple[CacheGroup, ...]) -> int:
    return sum(group.bytes_per_token for group in groups)


def _gb(num_bytes: int) -> str:
    return f"{num_bytes / 1e9:.2f} GB"
