"""Automata of regular terms: terms without And and Not, and those of texts of some length."""

from __future__ import annotations

from functools import lru_cache
from itertools import pairwise

from inferc.runtime.grammar.schema.regex import (
    ANY,
    EMPTY,
    LAST,
    NEVER,
    Alt,
    And,
    Chars,
    Not,
    Ranges,
    Repeat,
    Seq,
    Term,
    admits_empty,
    after,
    alt,
    chars,
    conj,
    merged,
    repeat,
    seq,
)

MOST_STATES = 200
MOST_PARTS = 4_000
MOST_LEAVES = 16_000  # of a way written out: terms share their parts, so few of them may be long
LOOPS = 4  # to keep within a length, loops are bounded to no fewer rounds than this


class TooLargeError(Exception):
    """A term whose automaton or plain form has more parts than it is worth."""


# ------------------------------------------------------------------------------------------------- automata


@lru_cache(maxsize=1024)
def is_never(term: Term) -> bool:
    """Return whether the term admits no text at all. Raises TooLargeError."""
    return 0 not in _alive(*_automaton(term)) if _is_compound(term) else term == NEVER


def _is_compound(term: Term) -> bool:
    match term:
        case And() | Not():
            return True
        case Seq(parts) | Alt(parts):
            return any(map(_is_compound, parts))
        case Repeat(part, _, _):
            return _is_compound(part)
        case _:
            return False


@lru_cache(maxsize=1024)
def plain(term: Term) -> Term:
    """Return the same language without And and Not. Raises TooLargeError."""
    if not _is_compound(term):
        return term
    edges, ends = _automaton(term)
    live = _alive(edges, ends)
    if 0 not in live:
        return NEVER
    return _read_back({state: {to: by for to, by in edges[state].items() if to in live} for state in live}, ends)


def _automaton(term: Term) -> tuple[list[dict[int, Ranges]], set[int]]:
    classes = alphabet(term)
    states, todo = {term: 0}, [term]
    edges: list[dict[int, Ranges]] = []
    while len(edges) < len(todo):
        here: dict[int, Ranges] = {}
        for ranges in classes:
            there = after(todo[len(edges)], ranges[0][0])
            if there == NEVER:
                continue
            if there not in states:
                states[there] = len(states)
                todo.append(there)
            here[states[there]] = merged((*here.get(states[there], ()), *ranges))
        edges.append(here)
        if len(states) > MOST_STATES or len(states) * len(classes) > 20 * MOST_STATES:
            raise TooLargeError
    return edges, {index for each, index in states.items() if admits_empty(each)}


def _alive(edges: list[dict[int, Ranges]], ends: set[int]) -> set[int]:
    back: dict[int, list[int]] = {}
    for state, here in enumerate(edges):
        for to in here:
            back.setdefault(to, []).append(state)
    live, todo = set(ends), list(ends)
    while todo:
        for state in back.get(todo.pop(), ()):
            if state not in live:
                live.add(state)
                todo.append(state)
    return live


def _read_back(edges: dict[int, dict[int, Ranges]], ends: set[int]) -> Term:
    """Return the term of an automaton: states leave one by one, those with the fewest ways through them first."""
    last = -1
    out: dict[int, dict[int, Term]] = {
        state: {to: chars(by) for to, by in here.items()} | ({last: EMPTY} if state in ends else {})
        for state, here in edges.items()
    }
    out[last] = {}
    into: dict[int, set[int]] = {state: set() for state in out}
    for state, here in out.items():
        for to in here:
            into[to].add(state)
    leaves = {state: {to: 1 for to in here} for state, here in out.items()}
    sizes = 0
    for _ in range(len(edges) - 1):
        state = min((each for each in edges if each in out and each), key=lambda each: len(into[each]) * len(out[each]))
        here, counts = out.pop(state), leaves.pop(state)
        loop = repeat(here.pop(state, NEVER), 0, None)
        around = counts.pop(state, 0)
        for before in into.pop(state) - {state}:
            way, count = out[before].pop(state), leaves[before].pop(state)
            for to, by in here.items():
                leaves[before][to] = leaves[before].get(to, 0) + count + around + counts[to]
                sizes += 1
                if sizes > MOST_PARTS or leaves[before][to] > MOST_LEAVES:
                    raise TooLargeError
                joined = seq((way, loop, by))
                out[before][to] = alt((out[before].get(to, NEVER), joined))
                into[to].add(before)
        for to in here:
            into[to].discard(state)
    return seq((repeat(out[0].pop(0, NEVER), 0, None), out[0].get(last, NEVER)))


def _bounds(term: Term, found: set[int]) -> set[int]:
    match term:
        case Chars(ranges):
            for low, high in ranges:
                found |= {low, high + 1}
        case Seq(parts) | Alt(parts):
            for part in parts:
                _bounds(part, found)
        case Repeat(part, _, _) | Not(part):
            _bounds(part, found)
        case And(several):
            for part in several:
                _bounds(part, found)
    return found


def alphabet(term: Term) -> list[Ranges]:
    """Return classes of characters that the term does not tell apart."""
    cuts = sorted(_bounds(term, {0, 0xD800, 0xE000, LAST + 1}))
    leaves = set(_leaves(term))
    classes: dict[tuple[bool, ...], list[tuple[int, int]]] = {}
    for low, high in pairwise(cuts):
        if not 0xD800 <= low <= 0xDFFF:
            key = tuple(any(first <= low <= last for first, last in leaf) for leaf in leaves)
            classes.setdefault(key, []).append((low, high - 1))
    return [merged(each) for each in classes.values()]


def _leaves(term: Term) -> list[Ranges]:
    match term:
        case Chars(ranges):
            return [ranges]
        case Repeat(part, _, _) | Not(part):
            return _leaves(part)
        case Seq(parts) | Alt(parts):
            return [leaf for part in parts for leaf in _leaves(part)]
        case And(several):
            return [leaf for part in several for leaf in _leaves(part)]


# ---------------------------------------------------------------------------------------------------- lengths


def lengths(term: Term) -> tuple[int, int | None]:
    """Return the least and the greatest number of characters of a plain term's texts; None is no bound."""
    match term:
        case Chars():
            return 1, 1
        case Seq(parts):
            pairs = [lengths(part) for part in parts]
            return sum(low for low, _ in pairs), _total([high for _, high in pairs])
        case Alt(parts):
            pairs = [lengths(part) for part in parts] or [(0, 0)]
            highs = [high for _, high in pairs]
            return min(low for low, _ in pairs), None if None in highs else max(filter(None, highs), default=0)
        case Repeat(part, least, most):
            low, high = lengths(part)
            return low * least, None if most is None or high is None else high * most
        case And() | Not():
            return 0, None


def _total(highs: list[int | None]) -> int | None:
    total = 0
    for high in highs:
        if high is None:
            return None
        total += high
    return total


def of_length(term: Term, least: int, most: int | None) -> Term:
    """Return the texts of a term that have from `least` to `most` characters. Raises TooLargeError."""
    term = plain(term)
    low, high = lengths(term)
    if low >= least and (most is None or (high is not None and high <= most)):
        return term
    if (most is not None and low > most) or (high is not None and high < least):
        return NEVER
    parts = term.parts if isinstance(term, Seq) else (term,)
    loose = [index for index, part in enumerate(parts) if len(set(lengths(part))) > 1]
    if len(loose) == 1 and isinstance(found := parts[loose[0]], Repeat):
        unit, longest = lengths(found.part)
        if unit == longest and unit:
            fixed = low - unit * found.least
            fewest = max(found.least, -(-(least - fixed) // unit))
            ends = [
                bound for bound in (found.most, None if most is None else (most - fixed) // unit) if bound is not None
            ]
            if ends and min(ends) < fewest:
                return NEVER
            counted = repeat(found.part, fewest, min(ends) if ends else None)
            return seq((*parts[: loose[0]], counted, *parts[loose[0] + 1 :]))
    try:
        return plain(conj((term, repeat(ANY, least, most))))
    except TooLargeError:
        if most is None or least > low:
            raise
        return _bounded(term, most)


def _bounded(term: Term, most: int) -> Term:
    """Return the texts of a term whose loops go round so often that none can have more than `most` characters."""
    low, high = 0, most
    while low < high:
        rounds = (low + high + 1) // 2
        longest = lengths(_rounds(term, rounds))[1]
        low, high = (rounds, high) if longest is not None and longest <= most else (low, rounds - 1)
    if low < LOOPS:
        raise TooLargeError
    return _rounds(term, low)


def _rounds(term: Term, rounds: int) -> Term:
    match term:
        case Seq(parts):
            return seq(_rounds(part, rounds) for part in parts)
        case Alt(parts):
            return alt(_rounds(part, rounds) for part in parts)
        case Repeat(part, least, most):
            bound = least + rounds if most is None else min(most, least + rounds)
            return repeat(_rounds(part, rounds), least, bound)
        case _:
            return term
