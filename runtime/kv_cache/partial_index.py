"""An index of blocks by their first tokens, for a sequence that no full block continues.

A block that is full, or that its sequence left behind when it ended, is listed under the hash of the blocks before it,
in the order of its tokens: the block that shares the most tokens with a sequence is a neighbour of the place where that
sequence would stand.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable

import numpy as np

from inferc.runtime.step.plan import I32

LEAST = 4  # the fewest shared tokens that are worth a copy
FIRST_PURGE = 1024


class PartialIndex:
    """A table of blocks by the hash before them: the tokens of each, as big-endian u32, and its own hash."""

    def __init__(self) -> None:
        self._children: dict[bytes, list[tuple[bytes, bytes]]] = {}
        self._step_of: dict[bytes, int] = {}  # the step that computes the last of the block's tokens
        self._limit = FIRST_PURGE

    def __len__(self) -> int:
        return len(self._step_of)

    def add(self, parent: bytes, token_ids: I32, name: bytes, step: int, is_there: Callable[[bytes], bool]) -> None:
        """Add a block to the index, with its tokens and the step that computes the last of them.

        is_there: returns whether the block of a hash still exists.
        """
        if name in self._step_of:
            self._step_of[name] = max(self._step_of[name], step)  # it may have been evicted, and is computed again
            return
        if len(self._step_of) >= self._limit:
            self._purge(is_there)
        insort(self._children.setdefault(parent, []), (token_ids.astype(">u4").tobytes(), name))
        self._step_of[name] = step

    def find(
        self, parent: bytes, token_ids: I32, step: int, is_there: Callable[[bytes], bool]
    ) -> tuple[bytes, int] | None:
        """Return the block computed before `step` that shares the most first tokens, and how many it shares."""
        children = self._children.get(parent)
        if not children or len(token_ids) < LEAST:
            return None
        key, best, most = token_ids.astype(">u4").tobytes(), None, LEAST - 1
        begin = bisect_left(children, (key, b""))
        gone = []
        for places in (range(begin - 1, -1, -1), range(begin, len(children))):
            for place in places:
                ids, name = children[place]
                if _shared(ids, key) <= most:
                    break  # blocks further on share no more
                if not is_there(name):
                    gone.append(place)
                elif self._step_of[name] < step:
                    best, most = name, _shared(ids, key)
                    break
        for place in sorted(gone, reverse=True):
            del self._step_of[children.pop(place)[1]]
        if not children:
            del self._children[parent]
        return None if best is None else (best, most)

    def _purge(self, is_there: Callable[[bytes], bool]) -> None:
        """Remove the blocks that no longer exist; the next purge is when the index is twice as large."""
        kept = {parent: [each for each in row if is_there(each[1])] for parent, row in self._children.items()}
        self._children = {parent: row for parent, row in kept.items() if row}
        self._step_of = {name: self._step_of[name] for row in self._children.values() for _, name in row}
        self._limit = max(FIRST_PURGE, 2 * len(self._step_of))


def _shared(one: bytes, other: bytes) -> int:
    """Return how many tokens both begin with."""
    count = min(len(one), len(other)) // 4
    same = np.frombuffer(one, ">u4", count) == np.frombuffer(other, ">u4", count)
    return count if same.all() else int(same.argmin())
