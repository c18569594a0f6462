"""The blocks of a KV group with token eviction: running sequences keep only sinks and recent tokens (`Eviction`)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inferc.kv_groups import CacheLimits, EvictedCacheGroup
from inferc.runtime.kv_cache.block_pool import BlockPool
from inferc.runtime.kv_cache.block_store import BlockStore
from inferc.runtime.kv_cache.group import FullGroup, SlotArrays
from inferc.runtime.kv_cache.heavy_hitters import HeavyHitterScores, first_counted
from inferc.runtime.kv_cache.window import WindowGroup
from inferc.runtime.step.plan import I32, I64, ScoredQueries


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


class Forgetting:
    """The eviction of tokens from running sequences: which tokens their queries no longer see, and which blocks remain.

    They are the same in all evicted groups, because the specs of these groups differ only in bytes.
    """

    def __init__(self, groups: Sequence[FullGroup]) -> None:
        self._groups = groups
        self._scores = [each.scores if isinstance(each, EvictedGroup) else None for each in groups]
        first = next(each for each in groups if isinstance(each, EvictedGroup))
        self.spec, self._begins, self.block_size = first.spec, first.begins, first.block_size
        self._num_sinks = first.spec.sinks // first.block_size
        # Whether attention scores decide, which steps then have to count.
        self.chooses = first.spec.counted > 0

    def most_new(self, position: int) -> int:
        """Return how many tokens from `position` on see the same earlier keys."""
        return self.spec.most_new(position)

    def changes_at(self, positions: I64) -> NDArray[np.bool_]:
        """Return whether the queries at some positions see fewer keys than those before them may have seen."""
        do: NDArray[np.bool_] = positions % self.spec.stride == 0
        return do

    def num_forgotten_at(self, position: int) -> int:
        """Return how many tokens the query at a position does not see, between the sinks and the window."""
        return max(0, self.spec.first_key(position) - self.spec.sinks)

    def num_forgotten(self, slots: I64) -> I64:
        """Return how many tokens the next queries of some slots do not see, between the sinks and the window."""
        begins = self._begins[slots]
        return np.where(begins > 0, (begins - self._num_sinks) * self.block_size, 0)

    def block_tables(self, slots: I64, forgotten: I64, max_blocks: int) -> tuple[I32, ...]:
        """Return the block tables of some slots without forgotten blocks: first the sinks, then what is seen.

        Layers with a window see none of the moved blocks, because these lie before every window.
        """
        columns = np.arange(max_blocks)
        is_sink = (columns < self._num_sinks) & (forgotten > 0)[:, None]
        last = self._groups[0].table.shape[1] - 1
        moved = np.minimum(columns + forgotten[:, None] // self.block_size, last)
        tables = []
        for group in self._groups:
            rows = np.where(is_sink, 0, group.table[slots[:, None], moved]).astype(np.int32)
            if isinstance(group, EvictedGroup) and group.spec.sinks:
                count = min(max_blocks, self._num_sinks)
                sinks = group.sinks[slots, :count]
                rows[:, :count] = np.where(is_sink[:, :count], sinks, rows[:, :count])
            tables.append(rows)
        return tuple(tables)

    def scored_queries(
        self, slots: I64, start: I64, end: I64, query_start_loc: I32, max_blocks: int
    ) -> ScoredQueries | None:
        """Return the queries of a step whose attention is counted, to choose the blocks to keep, or None."""
        if not self.chooses:
            return None
        wanted = first_counted(self.spec, start)
        first = np.clip(wanted, start, end)
        seqs = np.flatnonzero(first < end)
        if not len(seqs):
            return None
        of = slots[seqs]
        forgotten = self.num_forgotten(of) // self.block_size
        return ScoredQueries(
            (query_start_loc[:-1] + (first - start)).astype(np.int32),
            tuple(None if each is None else np.zeros((len(slots), max_blocks), np.int64) for each in self._scores),
            seqs,
            of,
            wanted[seqs] // self.spec.stride % 2,
            tuple(None if each is None else each.columns(of, forgotten, max_blocks) for each in self._scores),
        )

    def add_scores(self, scored: ScoredQueries) -> None:
        """Add the scores that a step has counted.

        They are used two strides later at the earliest, when the step has long landed.
        """
        for scores, found, columns in zip(self._scores, scored.scores, scored.columns, strict=True):
            if scores is not None and found is not None and columns is not None:
                scores.add(scored.slots, scored.turns, columns, found[scored.seqs])
