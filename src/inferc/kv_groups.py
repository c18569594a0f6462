"""The sizes of the paged KV cache: which blocks of each KV group a sequence holds, and how groups share memory.

This is the one place that turns bytes into blocks, and attention windows into tokens that may be forgotten: config,
runners and scheduler agree because they ask here. The runtime imports this module, so it imports neither torch nor
numpy.
"""

from __future__ import annotations

import importlib
import re
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from inferc.errors import ConfigError, UnsupportedError
from inferc.manifest_types import KvGroup

NEVER = 2**62  # a position later than that of any token
STRIDE = 8  # the number of blocks that a group with eviction returns to the pool at once
SCALE_BYTES = 4  # the bytes of the scale of an int8 row, a float32


def row_size(head_dim: int, dtype: str) -> int:
    """Return the number of elements stored per token by one head of K or of V, or by a latent.

    In int8 the scale of the row is counted too.
    """
    return head_dim + SCALE_BYTES if dtype == "int8" else head_dim


def num_parts(kind: str) -> int:
    """Return the number of tensors that a layer of a group stores per token: two for K and V, one for a latent."""
    return 1 if kind == "latent" else 2


@dataclass(frozen=True)
class CacheLimits:
    """The limits of what is served at once, in tokens and sequences."""

    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)


@dataclass(frozen=True)
class CacheGroup:
    """A KV group whose queries see all tokens before them, as in full attention; other kinds are subclasses.

    It has the facts that the group's block pool needs. Positions and windows are in tokens. A group that `frees_blocks`
    frees blocks while a sequence runs, as soon as no later query sees them.
    """

    bytes_per_token: int
    frees_blocks: ClassVar[bool] = False
    blocks: ClassVar[str] = "inferc.runtime.kv_cache.group:FullGroup"
    """The module:name of the class that keeps the group's blocks."""

    def find_blocks(self) -> Any:
        """Import and return the class that keeps the group's blocks, a subclass of FullGroup."""
        module, _, name = self.blocks.partition(":")
        return getattr(importlib.import_module(module), name)

    def first_key(self, position: int) -> int:
        """Return the first token that the query at `position` sees, sinks aside.

        The query sees all tokens from there to itself.
        """
        return 0

    def unseen_from(self, token: int) -> int:
        """Return the first position whose query no longer sees `token`; sinks count as the first token after them."""
        return NEVER

    def held_blocks(self, limits: CacheLimits, num_tokens: int, num_new: int) -> int:
        """Return the most blocks that a sequence of up to `num_tokens` holds at once.

        num_new: the most tokens that a step computes of it.
        """
        return limits.blocks_for(num_tokens)

    def most_blocks(self, limits: CacheLimits) -> int:
        """Return the most blocks that one sequence ever holds."""
        return self.held_blocks(limits, limits.max_model_len, limits.max_num_batched_tokens)

    def evicted(self, sinks: int, window: int, block_size: int, chooses: bool) -> CacheGroup:
        """Return the group as it is when `Eviction` makes its sequences forget tokens.

        Raises ConfigError or UnsupportedError where the group's layers need more tokens.
        """
        counted = block_size if chooses else 0
        return EvictedCacheGroup(self.bytes_per_token, window, sinks, STRIDE * block_size, counted)


@dataclass(frozen=True)
class WindowCacheGroup(CacheGroup):
    """A KV group whose queries see the last `window` keys, themselves included."""

    window: int
    frees_blocks: ClassVar[bool] = True
    blocks: ClassVar[str] = "inferc.runtime.kv_cache.window:WindowGroup"

    def first_key(self, position: int) -> int:
        return max(0, position - self.window + 1)

    def unseen_from(self, token: int) -> int:
        return token + self.window

    def held_blocks(self, limits: CacheLimits, num_tokens: int, num_new: int) -> int:
        # The span holds the keys before the first new token and the new tokens. It may begin at a block's last token.
        span = self.window - 1 + num_new
        return min(limits.blocks_for(num_tokens), (span + limits.block_size - 2) // limits.block_size + 1)

    def evicted(self, sinks: int, window: int, block_size: int, chooses: bool) -> CacheGroup:
        if self.window > window:
            raise ConfigError(
                f"kv_evict keeps a window of {window} tokens, and the model has layers that attend over {self.window};"
                " give a longer window"
            )
        return self


@dataclass(frozen=True)
class ChunkCacheGroup(WindowCacheGroup):
    """A KV group whose queries see the keys of their own chunk of `window` tokens."""

    def first_key(self, position: int) -> int:
        return position // self.window * self.window

    def unseen_from(self, token: int) -> int:
        return (token // self.window + 1) * self.window

    def evicted(self, sinks: int, window: int, block_size: int, chooses: bool) -> CacheGroup:
        raise UnsupportedError(
            "kv_evict: the model has layers that attend in chunks, whose keys cannot move; leave it out"
        )


@dataclass(frozen=True)
class EvictedCacheGroup(CacheGroup):
    """A KV group whose sequences forget all but their sinks and their last `window` tokens, see `Eviction`.

    window, sinks and stride are multiples of a block. Which tokens are kept changes only where the sequence's length is
    a multiple of `stride`. counted: the number of queries at the end of a stride by whose attention the sinks are
    chosen; 0 means that the sinks are the first tokens.
    """

    window: int
    sinks: int
    stride: int
    counted: int = 0
    frees_blocks: ClassVar[bool] = True
    blocks: ClassVar[str] = "inferc.runtime.kv_cache.evicted:EvictedGroup"

    def first_key(self, position: int) -> int:
        first = position // self.stride * self.stride - self.window
        return first if first > self.sinks else 0

    def unseen_from(self, token: int) -> int:
        return ((max(token, self.sinks) + self.window) // self.stride + 1) * self.stride

    def held_blocks(self, limits: CacheLimits, num_tokens: int, num_new: int) -> int:
        return min(limits.blocks_for(num_tokens), limits.blocks_for(self.sinks + self.window + self.stride))

    @property
    def first_choice(self) -> int:
        """The first position whose query does not see all tokens before it."""
        return ((self.sinks + self.window) // self.stride + 1) * self.stride

    @property
    def first_counted(self) -> int:
        """The first token whose attention is counted, and which is therefore computed even if it is cached."""
        return max(0, self.first_choice - self.stride - self.counted) if self.counted else NEVER

    def most_new(self, position: int) -> int:
        """Return how many tokens from `position` on see the same earlier keys.

        Where attention is counted, the number also ends at the end of a stride whose last queries are counted.
        """
        first = self.first_choice - (self.stride if self.counted else 0)
        return max(first, (position // self.stride + 1) * self.stride) - position

    def evicted(self, sinks: int, window: int, block_size: int, chooses: bool) -> CacheGroup:
        raise AssertionError("a group is evicted once")


@dataclass(frozen=True)
class Eviction:
    """The rule by which a sequence forgets tokens while it runs: it keeps `sinks` tokens and its last `window` tokens.

    Both are rounded up to blocks. The sinks are its first tokens or, if it `chooses`, the blocks that get most
    attention (runtime/kv_cache/heavy_hitters.py). Tokens are forgotten where the sequence's length is a multiple of a
    stride, so that a query's keys depend on its position alone and on no schedule; it sees up to a stride more than the
    window. Layers with an attention window of their own must have one that is no longer. Keys keep the positions that
    they were rotated for; ALiBi's bias is by places among the tokens that are kept. Sources: Xiao et al. 2024,
    arXiv:2309.17453 (attention sinks); Zhang et al. 2023, arXiv:2306.14048 (heavy hitters, with as many chosen tokens
    as latest ones).
    """

    sinks: int
    window: int
    chooses: bool = False

    @staticmethod
    def parse(text: str) -> Eviction:
        """Parse `sinks:4+window:1024` or `heavy-hitters:2048`; raise ConfigError for anything else.

        Half of the heavy hitters' tokens are the latest tokens, the window.
        """
        match = re.fullmatch(r"sinks:(\d{1,9})\+window:(\d{1,9})|heavy-hitters:(\d{1,9})", text)
        if match is None or not int(match[2] or match[3]):
            raise ConfigError(
                f"kv_evict is {text!r}, expected sinks:N+window:M or heavy-hitters:N in tokens,"
                " as in sinks:4+window:1024"
            )
        if match[3]:
            window = (int(match[3]) + 1) // 2
            return Eviction(int(match[3]) - window, window, chooses=True)
        return Eviction(int(match[1]), int(match[2]))

    def apply(self, groups: Sequence[CacheGroup], block_size: int) -> tuple[CacheGroup, ...]:
        """Return the groups of a cache that evicts; raise ConfigError for a group whose layers need more tokens.

        Raises UnsupportedError for layers that attend in chunks.
        """
        sinks, window = (-(-count // block_size) * block_size for count in (self.sinks, self.window))
        return tuple(group.evicted(sinks, window, block_size, self.chooses) for group in groups)


KINDS: dict[str, Callable[[int, int], CacheGroup]] = {
    "full": lambda bytes_per_token, _: CacheGroup(bytes_per_token),
    "latent": lambda bytes_per_token, _: CacheGroup(bytes_per_token),
    "window": WindowCacheGroup,
    "chunk": ChunkCacheGroup,
}
"""The constructors of groups, called with (bytes per token, window), by the `kind` of a manifest's entry."""


def cache_groups(entries: Sequence[KvGroup]) -> tuple[CacheGroup, ...]:
    """Return the groups of an artifact, from its manifest's `kv_groups`."""
    return tuple(KINDS[entry.kind](entry.bytes_per_token, entry.window) for entry in entries)


def pools_bytes(groups: Sequence[CacheGroup], limits: CacheLimits, num_blocks: Sequence[int]) -> int:
    """Return the memory of the groups' pools, of which each has its number of `num_blocks`."""
    sizes = zip(groups, num_blocks, strict=True)
    return sum(limits.block_size * group.bytes_per_token * count for group, count in sizes)


def pools_for_all(groups: Sequence[CacheGroup], limits: CacheLimits) -> tuple[int, ...]:
    """Return the blocks per group with which `max_num_seqs` sequences of full length run at once.

    Block 0, which is for padding, is included.
    """
    return tuple(1 + limits.max_num_seqs * group.most_blocks(limits) for group in groups)


def share_out(groups: Sequence[CacheGroup], limits: CacheLimits, memory_bytes: int) -> tuple[int, ...]:
    """Return the blocks of each group's pool, block 0 included, that fit in `memory_bytes`.

    All groups get the same number, the largest that fits. But groups that give blocks back get no more than
    `max_num_seqs` sequences can ever need; the memory that they leave goes to the others, whose size bounds how long
    and how many sequences may be. Raises ConfigError for less than two blocks.
    """
    caps = [
        most if group.frees_blocks else NEVER for group, most in zip(groups, pools_for_all(groups, limits), strict=True)
    ]

    def pools(count: int) -> tuple[int, ...]:
        return tuple(min(count, cap) for cap in caps)

    def cost(count: int) -> int:
        return pools_bytes(groups, limits, pools(count))

    block_bytes = cost(1)
    if memory_bytes < 2 * block_bytes:
        full_length = 1 + max(group.most_blocks(limits) for group in groups)
        raise ConfigError(
            f"kv_memory_bytes {memory_bytes} holds less than two blocks of {block_bytes} bytes;"
            f" give at least {2 * block_bytes}, or {cost(full_length)} for one sequence of full length"
        )
    # Where every group has a cap, memory beyond the caps is not used.
    most = min(memory_bytes // min(limits.block_size * group.bytes_per_token for group in groups), max(caps))
    return pools(bisect_right(range(most + 1), memory_bytes, key=cost) - 1)


def shared_part(
    groups: Sequence[CacheGroup], others: Sequence[CacheGroup], limits: CacheLimits, memory_bytes: int
) -> int:
    """Return the bytes that the pools of `groups` get of memory in which `others` have pools of as many blocks.

    Raises ConfigError for less than two blocks.
    """
    num_blocks = share_out((*groups, *others), limits, memory_bytes)
    return pools_bytes(groups, limits, num_blocks[: len(groups)])
