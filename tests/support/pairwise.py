"""Choose cases of a test so that any two values of two parameters meet in one of them (all pairs, not all products)."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from itertools import combinations

Case = Mapping[str, Hashable]  # the value of each parameter, or what stands for it


def choose(cases: Sequence[Case]) -> list[int]:
    """Return the positions of some cases, in order, that hold every pair of values that any case holds.

    Greedy: the next case is the one with most pairs that none before had. Parameters that always change together, as
    the names of one `parametrize` do, count as one. Of a single parameter all cases are chosen.
    """
    names = _independent(cases)
    if len(names) < 2:
        return list(range(len(cases)))
    pairs = [{(a, case[a], b, case[b]) for a, b in combinations(names, 2)} for case in cases]
    left = set().union(*pairs)
    chosen = []
    while left:
        best = max(range(len(cases)), key=lambda index: (len(pairs[index] & left), -index))
        chosen.append(best)
        left -= pairs[best]
    return sorted(chosen)


def _independent(cases: Sequence[Case]) -> list[str]:
    """Return one name for each set of parameters that change together."""
    found: dict[tuple[int, ...], str] = {}
    for name in cases[0]:
        numbers: dict[Hashable, int] = {}
        found.setdefault(tuple(numbers.setdefault(case[name], len(numbers)) for case in cases), name)
    return list(found.values())
