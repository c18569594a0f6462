"""Events that say which blocks the prefix cache has stored and removed.

They are for routers that send requests to where their tokens are cached. A block counts as stored while every KV group
that gives no blocks back has it, in memory or on a disk; if all groups give blocks back, while all of them have it. It
is reported as soon as it can be found, which is when the step that fills it is scheduled.

The cache and the scheduler only append to lists here; serve/kv_events/log.py decides who is told, and how.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from inferc.runtime.kv_cache.block_store import OffloadedBlocks
from inferc.runtime.kv_cache.manager import KVCacheManager

ARENA = "GPU"  # the name that routers use for the memory in which steps compute, even on a CPU
HASH_BYTES = 32


@dataclass(frozen=True)
class Stored:
    """An event for blocks that follow one another and can be found from now on.

    names: for each block the hash of all tokens up to its end.
    parent: the hash of the block before the first, or None.
    token_ids: `block_size` ids of each block, as little-endian int32; empty if the tier that has the blocks does not
    know.
    """

    names: list[bytes]
    parent: bytes | None
    token_ids: bytes
    block_size: int
    salt: str = ""  # the salt of the request: only requests with the same salt find the blocks
    medium: str = ARENA
    adapter: str = ""  # the name of the request's LoRA adapter: only requests with the same one find the blocks


@dataclass(frozen=True)
class Removed:
    """An event for blocks that cannot be found any more."""

    names: list[bytes]
    medium: str = ARENA


@dataclass(frozen=True)
class Cleared:
    """An event that says that nothing can be found any more, in any medium."""


CacheEvent: TypeAlias = Stored | Removed | Cleared


@dataclass(frozen=True)
class KvBatch:
    """The changes of one step, in order; `time` is in seconds since the epoch."""

    time: float
    events: list[CacheEvent]

    @property
    def num_bytes(self) -> int:
        """The approximate size of the hashes and token ids, in bytes."""
        names = sum(len(event.names) for event in self.events if not isinstance(event, Cleared))
        return HASH_BYTES * names + sum(len(event.token_ids) for event in self.events if isinstance(event, Stored))


class CacheEvents:
    """A collector of the events of one cache.

    The first event is `Cleared`, for those who know of an engine that ran before this one.
    """

    def __init__(self, cache: KVCacheManager) -> None:
        keeping = [group for group in cache.groups if not group.spec.frees_blocks] or cache.groups
        self._pools = [
            [group.pool, *([group.store.pool] if isinstance(group.store, OffloadedBlocks) else [])] for group in keeping
        ]
        self._block_size = cache.block_size
        self._events: list[CacheEvent] = [Cleared()]
        self._held: set[bytes] = set()  # the hashes that were reported as stored
        for pools in self._pools:
            for pool in pools:
                pool.on_evict = self.evict

    def take(self) -> list[CacheEvent]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def add(self, event: CacheEvent) -> None:
        """Add an event of blocks in any medium."""
        last = self._events[-1] if self._events else None
        if isinstance(event, Removed) and isinstance(last, Removed) and last.medium == event.medium:
            last.names.extend(event.names)
        else:
            self._events.append(event)

    def publish(self, hashes: Sequence[bytes], first: int, token_ids: bytes, salt: str, adapter: str = "") -> None:
        """Report that the blocks of a sequence from its block `first` on were cached.

        token_ids: the ids of these blocks, as in `Stored`.
        """
        step, run = 4 * self._block_size, first  # the blocks [run, block) are new
        end = first + len(token_ids) // step
        for block in range(first, end + 1):
            if block < end and self._is_new(hashes[block]):
                continue
            if run < block:
                names = list(hashes[run:block])
                ids = token_ids[(run - first) * step : (block - first) * step]
                self._held.update(names)
                parent = hashes[run - 1] if run else None
                self.add(Stored(names, parent, ids, self._block_size, salt, adapter=adapter))
            run = block + 1

    def _is_new(self, name: bytes) -> bool:
        return name not in self._held and self._is_found(name)

    def _is_found(self, name: bytes) -> bool:
        return all(any(name in pool.block_of for pool in pools) for pools in self._pools)

    def evict(self, name: bytes) -> None:
        """Report that a group's block was evicted from one tier, if it cannot be found in any other."""
        if name in self._held and not self._is_found(name):
            self._held.remove(name)
            self.add(Removed([name]))


def batch_now(events: list[CacheEvent]) -> KvBatch:
    return KvBatch(time.time(), events)
