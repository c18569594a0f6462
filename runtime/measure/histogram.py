"""The histogram that a server counts its measurements in, and that a reader of its metrics page gets back."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Sequence


class Histogram:
    """A histogram: counts of values per bucket, whose upper bounds are inclusive, and the sum of the values."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(self.bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += count
        self.sum += value * count

    @property
    def count(self) -> int:
        return sum(self.counts)

    def quantile(self, share: float) -> float:
        """Estimate the quantile `share` (0 to 1) by linear interpolation within its bucket; nan without values."""
        wanted, seen = share * self.count, 0
        for index, count in enumerate(self.counts):
            if count and seen + count >= wanted:
                low = self.bounds[index - 1] if index else 0.0
                high = self.bounds[min(index, len(self.bounds) - 1)]
                return low + (high - low) * (wanted - seen) / count
            seen += count
        return math.nan
