"""The blocks of a KV group with token eviction: running sequences keep only sinks and recent tokens (`Eviction`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from inferc.kv_groups import CacheLimits, EvictedCacheGroup
from inferc.runtime.kv_cache.block_pool import BlockPool
from inferc.runtime.kv_cache.block_store import BlockStore
from inferc.runtime.kv_cache.group import SlotArrays
from inferc.runtime.kv_cache.heavy_hitters import HeavyHitterScores
from inferc.runtime.kv_cache.window import WindowGroup
from inferc.runtime.step.plan import I32


class EvictedGroup(WindowGroup):
    """A KV group in which a slot keeps sinks besides its window: its first blocks, or those with the highest scores.

    sinks [num_slots, sink blocks] i32: the blocks before `begin` that a slot keeps.
    scores: the attention that blocks get, if that decides which are kept; otherwise None.
    """

    spec: EvictedCacheGroup

    def __init__(
        self, spec: EvictedCacheGroup, pool: BlockPool, store: BlockStore, limits: CacheLimits, slots: SlotArrays
    ) -> None:
        super().__init__(spec, pool, store, limits, slots)
        num_slots, max_blocks = self.table.shape
        self.sinks: I32 = np.zeros((num_slots, spec.sinks // self.block_size), np.int32)
        self.scores = HeavyHitterScores(spec, num_slots, max_blocks, self.block_size) if spec.counted else None

    @property
    def first_counted(self) -> int:
        return self.spec.first_counted

    def _missing_sink(self, hashes: Sequence[bytes], first: int) -> int | None:
        sinks = self.sinks.shape[1] if first else 0
        return next((block for block in range(sinks) if not self.has(hashes[block])), None)

    def attach_cached(self, slot: int, hashes: Sequence[bytes], priority: int) -> None:
        begin = self.first_block(len(hashes))
        count = self.sinks.shape[1] if begin else 0
        held = self._hold([*hashes[:count], *hashes[begin:]], priority)
        self.sinks[slot, :count] = held[:count]
        self._attach(slot, begin, held[count:], len(hashes))

    def _attached(self, hashes: Sequence[bytes]) -> list[bytes]:
        begin = self.first_block(len(hashes))
        return [*hashes[: self.sinks.shape[1] if begin else 0], *hashes[begin:]]

    def _free(self, slot: int, position: int, begin: int, end: int) -> int:
        if self.scores is not None:
            self._choose(self.scores, slot, position, begin, end)
            return end - (begin or self.sinks.shape[1])
        if not begin and self.spec.sinks:
            begin = self._keep_first(slot)
        return super()._free(slot, position, begin, end)

    def _keep_first(self, slot: int) -> int:
        """Keep a slot's first blocks, all of which it has, beyond its window, and return how many."""
        table, sinks = self.table[slot], self.sinks[slot]
        count = len(sinks)
        sinks[:] = table[:count]
        table[:count] = 0
        self.num_offloaded[slot] -= np.count_nonzero(sinks >= self.pool.num_blocks)
        return count

    def _choose(self, scores: HeavyHitterScores, slot: int, position: int, begin: int, end: int) -> None:
        """Keep the best among the sinks of a slot and its blocks [begin, end), and give up the others."""
        table, sinks = self.table[slot], self.sinks[slot]
        own = slice(0, len(sinks) if begin else 0)
        candidates = np.concatenate((scores.kept[slot, own], np.arange(begin, end)))
        blocks = np.concatenate((sinks[own], table[begin:end]))
        is_kept = scores.choose(slot, position, candidates)
        self.num_offloaded[slot] -= np.count_nonzero(table[begin:end] >= self.pool.num_blocks)
        sinks[:] = blocks[is_kept]
        table[begin:end] = 0
        self._give_up(blocks[~is_kept].tolist())

    def release(self, slot: int) -> None:
        super().release(slot)
        if (sinks := self.sinks[slot]).any():
            self._give_up(sinks.tolist())
            sinks[:] = 0
        if self.scores is not None:
            self.scores.reset(slot)

    def _held_besides(self) -> I32:
        held: I32 = self.sinks[self.sinks > 0]
        return held
