"""The configuration of a scheduler: its sizes and choices."""

from __future__ import annotations

from dataclasses import dataclass

from inferc.errors import ConfigError
from inferc.kv_groups import CacheGroup, CacheLimits
from inferc.runtime.scheduler.policies import parse_policy


@dataclass(frozen=True)
class SchedulerConfig:
    """The configuration of a scheduler, with sizes in tokens, sequences and blocks.

    num_blocks: for each of `groups`, including the reserved block 0.
    policy: see policies.py.
    tbt_ms: no step with decodes shall take longer.
    overcommit: admit every sequence that has room now, and preempt the last one when blocks are missing.
    kv_events: collect what the prefix cache stores and evicts.
    partial_blocks: copy the common first tokens of a block; the runner must support it.
    num_offloaded: the blocks of each group's offload tier; empty if there is none.
    offload_in_place: steps read offloaded blocks directly; otherwise they are copied to the arena first.
    keep_logprobs: keep the log probability of every sampled token in `Sequence.logprobs`.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: tuple[int, ...]
    block_size: int
    groups: tuple[CacheGroup, ...]
    chunked_prefill: bool = True
    prefix_cache: bool = False
    policy: str = "fcfs"
    tbt_ms: float | None = None
    overcommit: bool = False
    kv_events: bool = False
    num_offloaded: tuple[int, ...] = ()
    offload_in_place: bool = True
    partial_blocks: bool = False
    keep_logprobs: bool = False

    def __post_init__(self) -> None:
        parse_policy(self.policy)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is less than max_num_seqs {self.max_num_seqs};"
                " raise it, so that every sequence can decode in every step"
            )
        if not self.chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"without chunked prefill max_num_batched_tokens {self.max_num_batched_tokens} must be at least"
                f" max_model_len {self.max_model_len}; raise it, or turn chunked prefill on"
            )
        assert self.prefix_cache or not self.num_offloaded, "what lies in the offload tier is found by the prefix cache"
        if min(self.num_blocks) < 2:
            raise ConfigError(f"the KV cache has {min(self.num_blocks)} blocks; it needs 2 or more, raise --kv-memory")

    @property
    def limits(self) -> CacheLimits:
        return CacheLimits(self.block_size, self.max_model_len, self.max_num_seqs, self.max_num_batched_tokens)
