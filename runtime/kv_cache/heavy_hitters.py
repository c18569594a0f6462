"""Attention scores of the blocks of sequences, and the choice of the blocks that a sequence keeps (heavy hitters).

The queries at the end of each stride are counted: the sum of the probabilities that each block gets, over all layers
and heads. A block's score is half of its previous score plus what the stride added. A choice leaves out the last
stride, whose last step may still be in flight, so it depends on the sequence alone and not on the schedule. See
`Eviction`.

Source: Zhang et al. 2023, arXiv:2306.14048 (heavy hitters); Li et al. 2024, arXiv:2404.14469 (few queries suffice).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from inferc.kv_groups import EvictedCacheGroup
from inferc.runtime.step.plan import I64


def first_counted(group: EvictedCacheGroup, start: I64) -> I64:
    """Return the first position that is counted in steps that begin at `start`.

    Each of these steps ends before the next stride does.
    """
    ends = (start // group.stride + 1) * group.stride
    first: I64 = np.maximum(ends, group.first_choice - group.stride) - group.counted
    return first


class HeavyHitterScores:
    """The scores of the blocks of running sequences in one KV group, by slot, and which blocks were kept."""

    def __init__(self, group: EvictedCacheGroup, num_slots: int, max_blocks: int, block_size: int) -> None:
        self._group, self._num_kept = group, group.sinks // block_size
        self._new: I64 = np.zeros((2, num_slots, max_blocks), np.int64)  # sums of the even and of the odd strides
        self._scores: I64 = np.zeros((num_slots, max_blocks), np.int64)
        self.kept: I64 = np.zeros((num_slots, self._num_kept), np.int64)
        self._is_used: NDArray[np.bool_] = np.zeros(num_slots, np.bool_)

    def columns(self, slots: I64, forgotten: I64, count: int) -> I64:
        """Return [slots, count]: the block of its sequence in each of the first columns, without `forgotten` blocks."""
        columns: I64 = np.arange(count) + forgotten[:, None]
        kept = min(count, self._num_kept)
        columns[:, :kept] = np.where(forgotten[:, None] > 0, self.kept[slots, :kept], columns[:, :kept])
        return columns.clip(max=self._scores.shape[1] - 1)  # behind the last block there is nothing to count

    def add(self, slots: I64, turns: I64, columns: I64, scores: I64) -> None:
        """Add the scores that a step has counted for the blocks in `columns` [n, …]."""
        np.add.at(self._new, (turns[:, None], slots[:, None], columns), scores)
        self._is_used[slots] = True

    def choose(self, slot: int, position: int, candidates: I64) -> NDArray[np.bool_]:
        """Return which of `candidates` the queries from `position` on still see: those with the highest scores.

        `position` is the begin of a stride.
        """
        assert position % self._group.stride == 0, "choices are made where a stride begins"
        # The sums of the stride before the last one, which has the same parity as the stride that begins at `position`.
        before = self._new[position // self._group.stride % 2, slot]
        scores = self._scores[slot]
        scores //= 2
        scores += before
        before[:] = 0
        best = np.lexsort((-candidates, -scores[candidates]))[: self._num_kept]  # the latest of equal ones
        is_kept = np.zeros(len(candidates), np.bool_)
        is_kept[best] = True
        self.kept[slot] = candidates[is_kept]
        return is_kept

    def reset(self, slot: int) -> None:
        """Clear the scores of a slot, for another sequence."""
        if self._is_used[slot]:
            self._new[:, slot] = self._scores[slot] = 0
            self._is_used[slot] = False
