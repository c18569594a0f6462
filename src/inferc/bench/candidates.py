"""The server configurations that `inferc bench tune` compares, and the search for the highest rate each can sustain."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import product
from typing import Any

# Candidates are compared on a ladder of request rates. STEP is the ratio of two neighbouring rungs; a candidate that is
# better by less than this ratio does not count as better.
STEP = 1.1
MOST_STRIDE = 8  # largest stride of the search, in rungs; 8 rungs are about a factor of two in rate
# A candidate keeps up with a rate if answers complete at this share of the rate or more. Below it requests pile up, and
# they only seem good because the load ends early.
KEEPS_UP = 0.5
SEQS = (8, 16, 32, 64, 128)
BUDGETS = (128, 256, 512, 1024, 2048)


@dataclass(frozen=True)
class Candidate:
    """A server configuration to compare; its fields carry the names of the options of `inferc serve`.

    threads: number of threads; None means one thread per core.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    policy: str = "fcfs"
    tbt_ms: float | None = None
    prefix_cache: bool = True
    threads: int | None = None

    def changes(self, default: Candidate) -> dict[str, Any]:
        """Return the options that differ from the default configuration, by field name."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if value != getattr(default, name)}

    def said(self, default: Candidate) -> str:
        found = [f"{name.replace('_', '-')} {_shown(value)}" for name, value in self.changes(default).items()]
        return ", ".join(found) or "default"

    def flags(self) -> dict[str, Any]:
        """Return the options for `inferc serve`, by flag; None stands for an option that is not passed."""
        return {f"--{field.name.replace('_', '-')}": getattr(self, field.name) for field in fields(self)}

    def distance(self, default: Candidate) -> float:
        """Return how far the candidate is from the default configuration.

        Near candidates are simulated first because time may run out, and of equally good candidates the nearest one is
        taken.
        """
        steps = abs(math.log2(self.max_num_seqs / default.max_num_seqs))
        steps += abs(math.log2(self.max_num_batched_tokens / default.max_num_batched_tokens))
        return steps + len(self.changes(default))


def _shown(value: Any) -> str:
    return ("off", "on")[value] if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def grid(default: Candidate, tbt_ms: float | None) -> list[Candidate]:
    """Return candidates for all pairs of sequence count and token budget, the nearest to the default first.

    If there is a TBT objective, each pair is tried with and without a limit of the step time by that objective.
    """
    seqs = sorted({*SEQS, default.max_num_seqs})
    budgets = sorted({*BUDGETS, default.max_num_batched_tokens})
    bounds = (None,) if tbt_ms is None else (None, tbt_ms)
    found = [Candidate(*each[:2], tbt_ms=each[2]) for each in product(seqs, budgets, bounds) if each[1] >= each[0]]
    return sorted(found, key=lambda each: each.distance(default))


def variants(of: Candidate, policies: Sequence[str], threads: Sequence[int]) -> list[Candidate]:
    """Return copies of a candidate that each change one option: policy, number of threads, or prefix cache."""

    def changed(**change: Any) -> Candidate:
        return Candidate(**{**{field.name: getattr(of, field.name) for field in fields(of)}, **change})

    found = [changed(policy=each) for each in policies if each != of.policy]
    found += [changed(threads=each) for each in threads if each != of.threads]
    return [*found, changed(prefix_cache=not of.prefix_cache)]


@dataclass(frozen=True)
class Outcome:
    """The result of one load on a candidate, simulated or measured.

    rate: requests sent per second.
    answered, good: answered and good requests per second, from the first request to the last answer.
    """

    rate: float
    answered: float
    good: float
    share: float  # share of the requests that were good

    def is_borne(self, share: float) -> bool:
        return self.share >= share and self.answered >= KEEPS_UP * self.rate


def borne(outcomes: Mapping[int, Outcome], share: float) -> dict[int, bool]:
    return {rung: each.is_borne(share) for rung, each in outcomes.items()}


def next_rung(known: Mapping[int, bool], first: int) -> int | None:
    """Return the rung to try next in the search for the highest good rung; None if that one is already known.

    The search starts at `first` and moves up or down by 1, 2, 4, … rungs (at most MOST_STRIDE) until a good and a bad
    rung enclose the answer; then it bisects.
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
    """Return the highest good rung that lies below every bad one; None if there is none."""
    bad = [rung for rung, is_good in known.items() if not is_good]
    below = [rung for rung, is_good in known.items() if is_good and (not bad or rung < min(bad))]
    return max(below, default=None)


def best_rung(outcomes: Mapping[int, Outcome], share: float) -> int | None:
    """Return the rung with the most good requests per second, up to the highest rung that the candidate sustains."""
    highest = highest_good(borne(outcomes, share))
    if highest is None:
        return None
    return max((rung for rung in outcomes if rung <= highest), key=lambda rung: outcomes[rung].good)
