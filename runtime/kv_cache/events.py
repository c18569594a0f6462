"""What the prefix cache came to hold and what it lost, for those outside who want to send requests where their tokens are.

A block counts as held while every KV group that gives nothing back has it, in memory or on a disk; where all groups give
blocks back, while all of them have it. It is told as soon as it can be found, that is when a step that fills it is scheduled.

With this the cache and the scheduler only append to lists; who is told, and how, is not known here (see serve/kv_events/log.py).
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from inferc.runtime.kv_cache.block_store import OffloadedBlocks
from inferc.runtime.kv_cache.manager import KVCacheManager

ARENA = "GPU"  # what routers call the memory that a step computes in, be it a CPU's
HASH_BYTES = 32


@dataclass(frozen=True)
class Stored:
    """Blocks that follow one another, and can be found from now on.

    names: hashes of all tokens up to each block's end. parent: that of the block before the first; None: there is none.
    token_ids: `block_size` ids of each block, as little-endian int32; empty where the tier that has them does not know.
    """

    names: list[bytes]
    parent: bytes | None
    token_ids: bytes
    block_size: int
    salt: str = ""  # of the request: only those with the same find them
    medium: str = ARENA


@dataclass(frozen=True)
class Removed:
    """Blocks that can not be found any more."""

    names: list[bytes]
    medium: str = ARENA


@dataclass(frozen=True)
class Cleared:
    """Nothing can be found any more, in any medium."""


CacheEvent: TypeAlias = Stored | Removed | Cleared


@dataclass(frozen=True)
class KvBatch:
    """What one step changed, in order. time: seconds since the epoch."""

    time: float
    events: list[CacheEvent]

    @property
    def num_bytes(self) -> int:
        """Of hashes and ids, about."""
        names = sum(len(event.names) for event in self.events if not isinstance(event, Cleared))
        return HASH_BYTES * names + sum(len(event.token_ids) for event in self.events if isinstance(event, Stored))


class CacheEvents:
    """Collects what happens to one cache. Begins with `Cleared`, for those who know of an engine before this one."""

    def __init__(self, cache: KVCacheManager) -> None:
        keeping = [group for group in cache.groups if not group.spec.gives_back] or cache.groups
        self._tiers = [
            [group.pool, *([group.store.pool] if isinstance(group.store, OffloadedBlocks) else [])] for group in keeping
        ]
        self._block_size = cache.block_size
        self._events: list[CacheEvent] = [Cleared()]
        self._held: set[bytes] = set()  # as was told
        for tiers in self._tiers:
            for pool in tiers:
                pool.on_evict = self.evict

    def take(self) -> list[CacheEvent]:
        """What happened since the last call."""
        events, self._events = self._events, []
        return events

    def add(self, event: CacheEvent) -> None:
        """Tell of what happened to blocks in whatever medium."""
        last = self._events[-1] if self._events else None
        if isinstance(event, Removed) and isinstance(last, Removed) and last.medium == event.medium:
            last.names.extend(event.names)
        else:
            self._events.append(event)

    def publish(self, hashes: Sequence[bytes], first: int, token_ids: bytes, salt: str) -> None:
        """Blocks of a sequence from its block `first` on were published; token_ids: theirs, as in `Stored`."""
        step, run = 4 * self._block_size, first  # [run, block) are new
        end = first + len(token_ids) // step
        for block in range(first, end + 1):
            if block < end and self._is_new(hashes[block]):
                continue
            if run < block:
                names = list(hashes[run:block])
                ids = token_ids[(run - first) * step : (block - first) * step]
                self._held.update(names)
                self.add(Stored(names, hashes[run - 1] if run else None, ids, self._block_size, salt))
            run = block + 1

    def _is_new(self, name: bytes) -> bool:
        return name not in self._held and self._is_found(name)

    def _is_found(self, name: bytes) -> bool:
        return all(any(name in pool.block_of for pool in tiers) for tiers in self._tiers)

    def evict(self, name: bytes) -> None:
        """A group's block can not be found any more in one tier."""
        if name in self._held and not self._is_found(name):
            self._held.remove(name)
            self.add(Removed([name]))


def batch_now(events: list[CacheEvent]) -> KvBatch:
    return KvBatch(time.time(), events)
