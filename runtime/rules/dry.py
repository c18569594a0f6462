"""DRY: a token that would go on with a repetition becomes less likely, the less so the longer the repetition is.

Source: P. E. Weidmann, "DRY: a modern repetition penalty", text-generation-webui pull request 5677.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from inferc.runtime.rules.repeats import places_behind
from inferc.runtime.step.plan import F32, I32

LONGEST = 50  # tokens of a repetition that count
MOST = 1e30  # the largest penalty, which float32 has


@dataclass(frozen=True)
class Penalties:
    """The losses of some tokens' logits: ascending ids, and values below 0 to add."""

    token_ids: I32
    values: F32


NONE = Penalties(np.zeros(0, np.int32), np.zeros(0, np.float32))


class Dry:
    """The penalties of a request.

    A token that came before behind the last n tokens, as the longest such n, loses `multiplier * base ** (n -
    allowed_length)` if n is at least `allowed_length`. No repetition reaches over a breaker, or goes on with one.

    last_n: how many of the last tokens are looked at, or -1 for all. The numbers are taken as float32.
    """

    def __init__(self, multiplier: float, base: float, allowed_length: int, last_n: int, breakers: frozenset[int]):
        self._multiplier, self._base = float(np.float32(multiplier)), float(np.float32(base))
        self._allowed_length, self._last_n, self._breakers = allowed_length, last_n, breakers
        self._breaker_ids: I32 = np.array(sorted(breakers), np.int32)

    def penalties(self, token_ids: I32) -> Penalties:
        """Return what the tokens of a sequence, its prompt included, cost the next one."""
        if self._last_n >= 0:
            token_ids = token_ids[max(0, len(token_ids) - self._last_n) :]
        reach, count = self._reach(token_ids), max(1, self._allowed_length)
        if reach < count:
            return NONE
        places = places_behind(token_ids, count)
        places = places[~np.isin(token_ids[places], self._breaker_ids)]
        if not len(places):
            return NONE
        lengths, longer = np.full(len(places), count), np.arange(len(places))
        for back in range(count + 1, reach + 1):
            longer = longer[places[longer] >= back]
            longer = longer[token_ids[places[longer] - back] == token_ids[-back]]
            if not len(longer):
                break
            lengths[longer] = back
        ids, index = np.unique(token_ids[places], return_inverse=True)
        longest = np.zeros(len(ids), np.int64)
        np.maximum.at(longest, index, lengths)
        values = -np.minimum(MOST, self._multiplier * self._base ** (longest - self._allowed_length))
        return Penalties(ids, values.astype(np.float32))

    def _reach(self, token_ids: I32) -> int:
        """Return how many of the last tokens are behind the last breaker, at most LONGEST."""
        last = token_ids[: -LONGEST - 1 : -1].tolist()
        return next((count for count, token in enumerate(last) if token in self._breakers), len(last))
