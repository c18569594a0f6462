"""Choose cases of a test so that any two values of two parameters meet in one of them (all pairs, not all products)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

Case = Mapping[str, object]  # the value of each parameter


def choose(named: Sequence[Case]) -> list[int]:
    """Return the positions of some cases, in order, that hold every pair of values that any case holds.

    Greedy: the next case is the one with most pairs that none before had. Parameters that always change together, as
    the names of one `parametrize` do, count as one. Of a single parameter all cases are chosen.
    """
    cases = _numbered(named)
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


def _numbered(cases: Sequence[Case]) -> list[dict[str, int]]:
    """Return the cases with a number for each value of a parameter; objects other than plain values go by identity."""
    numbers: dict[str, dict[object, int]] = {name: {} for name in cases[0]}

    def number(name: str, value: object) -> int:
        key = (type(value), value) if isinstance(value, str | int | float | bytes | None) else id(value)
        return numbers[name].setdefault(key, len(numbers[name]))

    return [{name: number(name, value) for name, value in case.items()} for case in cases]


def _independent(cases: Sequence[Mapping[str, int]]) -> list[str]:
    """Return one name for each set of parameters that change together."""
    found: dict[tuple[int, ...], str] = {}
    for name in cases[0]:
        found.setdefault(tuple(case[name] for case in cases), name)
    return list(found.values())
