"""Where the threads that play the ranks of a group meet to exchange values."""

from __future__ import annotations

import threading
from typing import Any


class Meeting:
    """A place for each rank's value. A rank that fails calls `abort`, and those who wait raise BrokenBarrierError."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._values: list[Any] = [None] * size
        self._barrier = threading.Barrier(size)

    def exchange(self, rank: int, value: Any) -> list[Any]:
        """Every rank's `value`, by rank. All ranks call it, in the same order."""
        self._values[rank] = value
        self._barrier.wait()
        found = list(self._values)
        self._barrier.wait()  # nobody posts the next value before all have read these
        return found

    def abort(self) -> None:
        self._barrier.abort()

    def reset(self) -> None:
        """Meet again after a failure. Nobody waits."""
        if self._barrier.broken:
            self._barrier.reset()
