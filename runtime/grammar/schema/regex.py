"""Regular languages over characters: terms, and their derivatives (Brzozowski 1964, doi:10.1145/321239.321249).

A term is hashable, and two terms of equal structure are equal.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import TypeAlias

Ranges: TypeAlias = tuple[tuple[int, int], ...]  # inclusive, sorted, apart from one another
LAST = sys.maxunicode


@dataclass(frozen=True)
class Chars:
    """One character out of these ranges of code points."""

    ranges: Ranges


@dataclass(frozen=True)
class Seq:
    """Several terms one after the other; none is the empty text."""

    parts: tuple[Term, ...]


@dataclass(frozen=True)
class Alt:
    """Any of several terms; none admits no text."""

    parts: tuple[Term, ...]


@dataclass(frozen=True)
class Repeat:
    """A term repeated from `least` to `most` times, without end if `most` is None."""

    part: Term
    least: int
    most: int | None


@dataclass(frozen=True)
class And:
    """The texts that all of these terms admit."""

    parts: frozenset[Term]


@dataclass(frozen=True)
class Not:
    """The texts that the term does not admit."""

    part: Term


Term: TypeAlias = Chars | Seq | Alt | Repeat | And | Not
EMPTY, NEVER = Seq(()), Alt(())
# Lone surrogates have no UTF-8, so no text contains them.
ANY = Chars(((0, 0xD7FF), (0xE000, LAST)))
ALL = Repeat(ANY, 0, None)


# ---------------------------------------------------------------------------------------------------- making


def merged(ranges: Iterable[tuple[int, int]]) -> Ranges:
    """Return ranges sorted, with those that touch made one."""
    result: list[tuple[int, int]] = []
    for low, high in sorted(ranges):
        if result and low <= result[-1][1] + 1:
            result[-1] = (result[-1][0], max(high, result[-1][1]))
        else:
            result.append((low, high))
    return tuple(result)


def without(ranges: Ranges, others: Ranges) -> Ranges:
    """Return the characters of `ranges` that are not in `others`."""
    result, rest = [], list(ranges)
    for low, high in others:
        kept = []
        for first, last in rest:
            if last < low:
                result.append((first, last))
            elif first > high:
                kept.append((first, last))
            else:
                if first < low:
                    result.append((first, low - 1))
                if last > high:
                    kept.append((high + 1, last))
        rest = kept
    return merged([*result, *rest])


def both(ranges: Ranges, others: Ranges) -> Ranges:
    """Return the characters that are in both."""
    return without(ranges, without(ANY.ranges, others))


def chars(ranges: Iterable[tuple[int, int]]) -> Term:
    found = both(merged(ranges), ANY.ranges)
    return Chars(found) if found else NEVER


def literal(text: str) -> Term:
    """Return the term that admits this text alone."""
    return seq(chars([(ord(each), ord(each))]) for each in text)


def seq(parts: Iterable[Term]) -> Term:
    flat: list[Term] = []
    for part in parts:
        if part == NEVER:
            return NEVER
        parts_ = part.parts if isinstance(part, Seq) else (part,)
        flat += parts_[1:] if flat and parts_ and flat[-1] == parts_[0] == ALL else parts_
    return flat[0] if len(flat) == 1 else Seq(tuple(flat))


def alt(parts: Iterable[Term]) -> Term:
    flat: dict[Term, None] = {}
    ranges: list[tuple[int, int]] = []
    for part in parts:
        for each in part.parts if isinstance(part, Alt) else (part,):
            if isinstance(each, Chars):
                ranges += each.ranges
                each = CHARS_HERE
            flat[each] = None
    found = [Chars(merged(ranges)) if each == CHARS_HERE else each for each in flat]
    return found[0] if len(found) == 1 else Alt(tuple(found))


CHARS_HERE = Chars(())


def repeat(part: Term, least: int, most: int | None) -> Term:
    if most == 0 or part == EMPTY:
        return EMPTY
    if part == NEVER:
        return EMPTY if least == 0 else NEVER
    if (least, most) == (1, 1):
        return part
    if isinstance(part, Repeat) and (part.least, part.most) == (0, None):
        return part
    return Repeat(part, least, most)


def conj(parts: Iterable[Term]) -> Term:
    flat: set[Term] = set()
    for part in parts:
        flat |= part.parts if isinstance(part, And) else {part}
    flat.discard(ALL)
    if NEVER in flat:
        return NEVER
    return ALL if not flat else flat.pop() if len(flat) == 1 else And(frozenset(flat))


def negation(part: Term) -> Term:
    if part == NEVER:
        return ALL
    if part == ALL:
        return NEVER
    return part.part if isinstance(part, Not) else Not(part)


# ------------------------------------------------------------------------------------------------ derivatives


@lru_cache(maxsize=65_536)
def admits_empty(term: Term) -> bool:
    """Return whether the term admits the empty text."""
    match term:
        case Chars():
            return False
        case Seq(parts):
            return all(map(admits_empty, parts))
        case Alt(parts):
            return any(map(admits_empty, parts))
        case Repeat(part, least, _):
            return least == 0 or admits_empty(part)
        case And(several):
            return all(map(admits_empty, several))
        case Not(part):
            return not admits_empty(part)


def after(term: Term, char: int) -> Term:
    """Return the term for what may follow this character."""
    match term:
        case Chars(ranges):
            return EMPTY if any(low <= char <= high for low, high in ranges) else NEVER
        case Seq(parts):
            found = []
            for index, part in enumerate(parts):
                found.append(seq((after(part, char), *parts[index + 1 :])))
                if not admits_empty(part):
                    break
            return alt(found)
        case Alt(parts):
            return alt(after(part, char) for part in parts)
        case Repeat(part, least, most):
            rest = repeat(part, max(least - 1, 0), None if most is None else most - 1)
            return seq((after(part, char), rest))
        case And(several):
            return conj(after(part, char) for part in sorted(several, key=repr))
        case Not(part):
            return negation(after(part, char))


def matches(term: Term, text: str) -> bool:
    """Return whether the term admits the text."""
    for each in text:
        term = after(term, ord(each))
        if term == NEVER:
            return False
    return admits_empty(term)
