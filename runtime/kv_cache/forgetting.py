"""The tokens that queries of running sequences no longer see: none, or those that evicted groups have dropped."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inferc.runtime.kv_cache.evicted import EvictedGroup
from inferc.runtime.kv_cache.group import FullGroup
from inferc.runtime.kv_cache.heavy_hitters import first_counted
from inferc.runtime.step.plan import I32, I64, ScoredQueries

ALL_AT_ONCE = 1 << 62


class NoForgetting:
    """A cache in which every query sees all that the attention of its layer asks for."""

    moves_blocks = False
    """True if `block_tables` differ from the groups' own tables."""

    def __init__(self, groups: Sequence[FullGroup]) -> None:
        self._groups = groups
        self._none: I64 = np.zeros(len(groups[0].table), np.int64)  # one a slot, made once: every step asks for it

    def most_new(self, position: int) -> int:
        """Return how many tokens from `position` on see the same earlier keys."""
        return ALL_AT_ONCE

    def changes_at(self, positions: I64) -> NDArray[np.bool_] | bool:
        """Return whether the queries at some positions see fewer keys than those before them may have seen."""
        return False

    def num_forgotten_at(self, position: int) -> int:
        """Return how many tokens the query at a position does not see, between the sinks and the window."""
        return 0

    def num_forgotten(self, slots: I64) -> I64:
        """Return how many tokens the next queries of some slots do not see, between the sinks and the window."""
        return self._none[: len(slots)]

    def block_tables(self, slots: I64, forgotten: I64, max_blocks: int) -> tuple[I32, ...]:
        """Return the block tables of some slots, each with its first `max_blocks` entries."""
        return tuple(group.table[:, :max_blocks][slots] for group in self._groups)

    def scored_queries(
        self, slots: I64, start: I64, end: I64, query_start_loc: I32, max_blocks: int
    ) -> ScoredQueries | None:
        """Return the queries of a step whose attention is counted, to choose the blocks to keep, or None."""
        return None

    def add_scores(self, scored: ScoredQueries) -> None:
        """Add the scores that a step has counted."""


def forgetting_of(groups: Sequence[FullGroup]) -> NoForgetting:
    """Return what the queries of a cache with these groups forget."""
    return Forgetting(groups) if any(isinstance(group, EvictedGroup) for group in groups) else NoForgetting(groups)


class Forgetting(NoForgetting):
    """The eviction of tokens from running sequences: which tokens their queries no longer see, and which blocks remain.

    They are the same in all evicted groups, because the specs of these groups differ only in bytes.
    """

    moves_blocks = True

    def __init__(self, groups: Sequence[FullGroup]) -> None:
        super().__init__(groups)
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
