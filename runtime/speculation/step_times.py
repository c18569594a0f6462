"""The times of steps by how many tokens they compute, learned while serving.

A decode step reads all weights once, whatever the number of its tokens; so the first tokens more cost little, until
the arithmetic takes longer than the memory. Where that is depends on the machine, the model and the batch. The times
that were seen are kept relative to one another: a machine that gets slower as a whole, as contexts grow or other
processes run, makes all of them longer alike.
"""

from __future__ import annotations

import numpy as np

from inferc.runtime.step.plan import F64

MOST_TOKENS = 512  # longer steps are not told apart
PER_TOKEN = 0.03  # what a token more is assumed to add to a step of one, before it was tried
LEARNING = 0.1  # the weight of the newest time of a size
DRIFTING = 0.5  # the weight of the newest step in how slow the machine is now
FORGOTTEN = 2000  # steps after which a size counts as not tried


class StepTimes:
    """The times of decode steps by their number of tokens, in units of what the machine does now."""

    def __init__(self) -> None:
        self._times: F64 = np.zeros(MOST_TOKENS + 1)
        self._seen: F64 = np.full(MOST_TOKENS + 1, -np.inf)  # the number of the step at which it was last tried
        self._drift, self._count = 1.0, 0
        self._assumed: F64 = 1.0 + PER_TOKEN * np.arange(MOST_TOKENS + 1, dtype=np.float64)
        self._table: F64 | None = None

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step of decoding sequences alone."""
        if not 0 < num_tokens <= MOST_TOKENS or seconds <= 0.0:
            return
        self._count += 1
        if self._count == 1:
            self._drift = seconds
        elif self._is_known(num_tokens):  # a size that was not tried yet says nothing of the machine
            surprise = seconds / (float(self.times[num_tokens]) * self._drift)
            self._drift *= min(max(surprise, 0.5), 2.0) ** DRIFTING
        time, was = seconds / self._drift, self._times[num_tokens]
        self._times[num_tokens] = was + LEARNING * (time - was) if self._is_known(num_tokens) else time
        self._seen[num_tokens] = self._count
        self._table = None

    def _is_known(self, num_tokens: int) -> bool:
        return bool(self._seen[num_tokens] > self._count - FORGOTTEN)

    @property
    def times(self) -> F64:
        """The time of a step of each number of tokens, relative to one another: index 0 is not used."""
        if self._table is None:
            known = np.flatnonzero(self._seen > self._count - FORGOTTEN)
            if not len(known):
                return self._assumed
            # Between sizes that were tried, and beyond them, times grow as is assumed of a first token.
            ratio = np.interp(np.arange(MOST_TOKENS + 1), known, self._times[known] / self._assumed[known])
            self._table = self._assumed * ratio
        return self._table

    @property
    def seconds_per_unit(self) -> float:
        """The seconds that a unit of `times` takes now."""
        return self._drift
