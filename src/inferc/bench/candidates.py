"""Configurations of a server that `inferc bench tune` compares, and the search for the rate that each bears."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

STEP = 1.1  # between two rates of the ladder that all candidates are compared on; who is better by less is no better
MOST_STRIDE = 8  # rungs, about twice the rate
KEEPS_UP = 0.5  # of the rate: where answers come slower, until the last one, requests pile up and only seem to be good
SEQS = (8, 16, 32, 64, 128)
BUDGETS = (128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class Candidate:
    """What is tuned, by the names of `inferc serve`'s options. threads: None is a thread for each core."""

    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str = "fcfs"
    tbt_ms: float | None = None
    prefix_cache: bool = True
    threads: int | None = None

    def changes(self, default: Candidate) -> dict[str, Any]:
        """What is otherwise than by default."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value != getattr(default, name)}

    def said(self, default: Candidate) -> str:
        found = [f"{name.replace('_', '-')} {_shown(value)}" for name, value in self.changes(default).items()]
        return ", ".join(found) or "default"

    def flags(self) -> dict[str, Any]:
        """Of `inferc serve`; None where there is nothing to say."""
        return {f"--{field.name.replace('_', '-')}": getattr(self, field.name) for field in fields(self)}

    def distance(self, default: Candidate) -> float:
        """How far from the default: near ones come first where time is short, and of equals the nearest is taken."""
        steps = abs(math.log2(self.max_num_seqs / default.max_num_seqs))
        steps += abs(math.log2(self.max_num_batched_tokens / default.max_num_batched_tokens))
        return steps + len(self.changes(default))


def _shown(value: Any) -> str:
    return ("off", "on")[value] if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def grid(default: Candidate, tbt_ms: float | None) -> list[Candidate]:
    """Sequences, token budgets, and steps bounded by the objective or not; the nearest to the default first."""
    seqs = sorted({*SEQS, default.max_num_seqs})
    budgets = sorted({*BUDGETS, default.max_num_batched_tokens})
    bounds = (None,) if tbt_ms is None else (None, tbt_ms)
    found = [Candidate(*each[:2], tbt_ms=each[2]) for each in product(seqs, budgets, bounds) if each[1] >= each[0]]
    return sorted(found, key=lambda each: each.distance(default))


def variants(of: Candidate, policies: Sequence[str], threads: Sequence[int]) -> list[Candidate]:
    """One candidate with each other policy and number of threads, and without the prefix cache."""

    def changed(**change: Any) -> Candidate:
        return Candidate(**{**{field.name: getattr(of, field.name) for field in fields(of)}, **change})

    found = [changed(policy=each) for each in policies if each != of.policy]
    found += [changed(threads=each) for each in threads if each != of.threads]
    return [*found, changed(prefix_cache=not of.prefix_cache)]


@dataclass(frozen=True)
class Outcome:
    """What came of a load. rate: at which requests were sent; answered and good: a second, from the first request to the last answer."""

    rate: float
    answered: float
    good: float
    share: float  # of the requests that were good

    def is_borne(self, share: float) -> bool:
        return self.share >= share and self.answered >= KEEPS_UP * self.rate


def borne(outcomes: Mapping[int, Outcome], share: float) -> dict[int, bool]:
    return {rung: each.is_borne(share) for rung, each in outcomes.items()}


def next_rung(known: Mapping[int, bool], first: int) -> int | None:
    """The rung of a ladder to look at next for the highest that is good; None if that is known.

    From `first` on up or down, by 1, 2, 4, …, at most by MOST_STRIDE, until the last good one and the first
    bad one surround it.
    """
    good = [rung for rung, is_good in known.items() if is_good]
    bad = [rung for rung, is_good in known.items() if not is_good]
    if not known:
        return first
    stride = min(MOST_STRIDE, 1 << (len(known) - 1))
    if not bad:
        return max(good) + stride
    below = [rung for rung in good if rung < min(bad)]
    if not below:
        return min(bad) - stride
    low, high = max(below), min(bad)
    return None if high == low + 1 else (low + high) // 2


def highest_good(known: Mapping[int, bool]) -> int | None:
    """The highest good rung below every bad one."""
    bad = [rung for rung, is_good in known.items() if not is_good]
    below = [rung for rung, is_good in known.items() if is_good and (not bad or rung < min(bad))]
    return max(below, default=None)


def best_rung(outcomes: Mapping[int, Outcome], share: float) -> int | None:
    """Of the highest that is borne and those below it, the one with the most good requests a second."""
    highest = highest_good(borne(outcomes, share))
    if highest is None:
        return None
    return max((rung for rung in outcomes if rung <= highest), key=lambda rung: outcomes[rung].good)
