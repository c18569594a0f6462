"""A meeting point where the threads that play the ranks of a group exchange values."""

from __future__ import annotations

import threading
from typing import Any


class Rendezvous:
    """A place where each rank of a group leaves a value for the others.

    A rank that fails calls `abort`, and the ranks that wait raise BrokenBarrierError.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Leave `value` and return every rank's value, by rank; all ranks call this in the same order."""
        self._values[rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()  # no rank leaves its next value before all ranks have read these
        return found

    def abort(self) -> None:
        self._barrier.abort()

    def reset(self) -> None:
        """Make the meeting point usable again after a failure; no rank may be waiting."""
        if self._barrier.broken:
            self._barrier.reset()
