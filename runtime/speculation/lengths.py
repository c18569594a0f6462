"""The choice of how many tokens to draft for each sequence of a step: as many as make tokens come fastest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inferc.config import MOST_BRANCHES
from inferc.runtime.speculation.drafter import Offer
from inferc.runtime.step.plan import F64, I64

MOST_KINDS = 16
STRENGTH = 2.0  # drafted tokens for which what is assumed of a kind counts
OF_KIND = 4.0  # drafted tokens for which what is known of the kind counts for a sequence
FORGETTING = 0.99  # the weight of an outcome relative to the one after it
RELENTING = 0.997  # what is left of a sequence's bad record with each step in which it drafts nothing
MOST_RANKS = MOST_BRANCHES  # tokens that are tried for one place
SECOND = 0.3  # the share of misses that a second choice is assumed to be right at, and half of it a third, and so on
MARGIN = 1.02  # how much faster tokens must come with drafts than without


class Acceptance:
    """The share of drafted tokens that the model chose, by kind of draft, and by sequence."""

    def __init__(self, num_slots: int) -> None:
        self._tried: F64 = np.zeros(MOST_KINDS)
        self._chosen: F64 = np.zeros(MOST_KINDS)
        self._tried_of: F64 = np.zeros(num_slots)
        self._chosen_of: F64 = np.zeros(num_slots)
        self._tried_beside: F64 = np.zeros((MOST_KINDS, MOST_RANKS))  # where the first choice was wrong
        self._chosen_beside: F64 = np.zeros((MOST_KINDS, MOST_RANKS))

    def begin(self, slot: int) -> None:
        """Forget the sequence that had a slot before."""
        self._tried_of[slot] = self._chosen_of[slot] = 0.0

    def rate(self, slot: int, offer: Offer) -> float:
        """Return the probability that a drafted token is chosen if those before it were."""
        kind = offer.kind
        of_kind = (STRENGTH * offer.expected + self._chosen[kind]) / (STRENGTH + self._tried[kind])
        return float((OF_KIND * of_kind + self._chosen_of[slot]) / (OF_KIND + self._tried_of[slot]))

    def learn(self, slot: int, kind: int, num_drafted: int, num_chosen: int) -> None:
        """Note that a sequence chose the first `num_chosen` of its drafted tokens; those behind tell nothing."""
        tried = min(num_drafted, num_chosen + 1)
        for all_tried, all_chosen, at in (
            (self._tried, self._chosen, kind),
            (self._tried_of, self._chosen_of, slot),
        ):
            keep = FORGETTING**tried
            all_tried[at] = all_tried[at] * keep + tried
            all_chosen[at] = all_chosen[at] * keep + num_chosen

    def beside(self, offer: Offer) -> list[float]:
        """Return the probability that a second choice is right where the first was wrong, a third, and so on."""
        found = []
        for rank in range(1, min(offer.num_others, MOST_RANKS - 1) + 1):
            chosen, tried = self._chosen_beside[offer.kind, rank], self._tried_beside[offer.kind, rank]
            found.append(float((STRENGTH * SECOND * 0.5 ** (rank - 1) + chosen) / (STRENGTH + tried)))
        return found

    def learn_beside(self, kind: int, ranks: Sequence[int], chosen: int | None) -> None:
        """Note which of the choices tried at a place was right where the first was wrong; chosen: its rank, or None."""
        for rank in ranks:
            self._tried_beside[kind, rank] = self._tried_beside[kind, rank] * FORGETTING + 1.0
            self._chosen_beside[kind, rank] = self._chosen_beside[kind, rank] * FORGETTING + (rank == chosen)

    def relent(self, slot: int) -> None:
        """Trust a sequence a little more, so that it is tried again some time."""
        self._tried_of[slot] *= RELENTING
        self._chosen_of[slot] *= RELENTING


def can_pay(rate: float, num_tokens: int, times: F64, waiting: float, depth_cost: float) -> bool:
    """Return whether a token more for some of a step's sequences pays, as `choose_counts` would choose.

    rate: the probability that each is chosen; the other arguments are those of `choose_counts`.
    """
    most = min(num_tokens, len(times) - 1 - num_tokens)
    if most <= 0:
        return False
    costs = times[num_tokens + 1 : num_tokens + 1 + most] + waiting + depth_cost
    speeds = (num_tokens + rate * np.arange(1, most + 1)) / costs
    return bool(speeds.max() * times[num_tokens] >= MARGIN * num_tokens)


@dataclass(frozen=True)
class Wanted:
    """The drafts that a sequence is to get: so many tokens, of which the chain goes `depth` tokens on."""

    count: int = 0
    depth: int = 0


def choose_counts(
    most: Sequence[int],
    rates: Sequence[float],
    num_tokens: int,
    times: F64,
    waiting: float,
    depth_cost: float,
    beside: Sequence[Sequence[float]] = (),
) -> list[Wanted]:
    """Return how many tokens to draft for each sequence so that a step's tokens per second are the most.

    most, rates: by sequence, how many can be drafted, and the probability that each is chosen after those before it.
    num_tokens: the tokens of the step without drafts, one of each decoding sequence.
    times: of steps by number of tokens. waiting: what a step with drafts takes longer, since it begins when the one
    before it has landed; depth_cost: what each token more of the longest draft takes; both in units of `times`.
    beside: by sequence, the probabilities that a second choice for a place is right where the first is wrong, and
    others; none of them if it gets a chain.

    With probability p of each token, the i-th of a draft is worth p^i tokens (Leviathan et al. 2023, arXiv:2211.17192),
    and another choice for its place that is right at a share s of the misses p^(i-1) (1-p) s. The tokens of all drafts
    are taken in the order of their worth, as long as the step still gains.
    """
    worths: list[tuple[float, int, int]] = []
    for index, (count, rate) in enumerate(zip(most, rates, strict=True)):
        own = [(rate**depth, index, -depth) for depth in range(1, count + 1)]
        for share in beside[index] if beside else ():
            own += [(rate ** (depth - 1) * (1.0 - rate) * share, index, -depth) for depth in range(1, count + 1)]
        worths += sorted(own, reverse=True)[:count]
    worths.sort(reverse=True)
    worths = worths[: len(times) - 1 - num_tokens]
    nothing = [Wanted()] * len(most)
    if not worths:
        return nothing
    gains = np.cumsum([worth for worth, _, _ in worths])
    order = [index for _, index, _ in worths]
    depths: I64 = np.array([-depth for _, _, depth in worths])
    cost = times[num_tokens + 1 : num_tokens + 1 + len(order)] + waiting + depth_cost * np.maximum.accumulate(depths)
    speeds = (num_tokens + gains) / cost
    best = int(speeds.argmax())
    if speeds[best] * times[num_tokens] < MARGIN * num_tokens:
        return nothing
    counts, longest = [0] * len(most), [0] * len(most)
    for index, depth in zip(order[: best + 1], depths.tolist(), strict=False):
        counts[index] += 1
        longest[index] = max(longest[index], depth)
    return [Wanted(*each) for each in zip(counts, longest, strict=True)]
