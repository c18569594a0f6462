"""Texts that stand as they are between two tags, as formats of a structural tag: none contains the tag behind it.

A regular term is written as rules of a grammar, one for each pair of what the term has left and of how much of the tag
was just written. Once the term admits anything, xgrammar's own format for free text goes on, which costs next to
nothing a token; a rule or a pattern that goes round costs milliseconds.
"""

from __future__ import annotations

from typing import Any, TypeAlias

from inferc.runtime.grammar.schema.automata import TooLargeError, alphabet, plain
from inferc.runtime.grammar.schema.regex import (
    ALL,
    ANY,
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
    literal,
    merged,
    repeat,
    seq,
    without,
)
from inferc.runtime.grammar.schema.spelling import pattern_of

Format: TypeAlias = dict[str, Any]

MOST_STATES = 600
FEW = 8  # characters at the begin of a counted text, within which it is told from other values
REST = -1


def raw_text(term: Term, closing: str) -> Format | None:
    """Return the format of a term's texts that do not contain `closing`; None if there are none.

    It admits less where many characters are counted, or told apart: they then have no `<`, or another character of
    `closing`. Raises TooLargeError.
    """
    if term == NEVER:
        return None
    bounds = _bounds(term)
    if bounds is not None and not isinstance(term, And):
        least, most = bounds
        if most is not None and most > FEW:
            return _pattern(_told_by(closing), least, most)
        if most is None and least > FEW:
            return _sequence(_pattern(closing[0], least, least), _free(closing, None))
        if most is None and not least:
            return _free(closing, None)
    try:
        return _Rules(term, closing, None if bounds is None else bounds[1]).format()
    except TooLargeError:
        found = _without(plain(term), ord(_told_by(closing)))
        return None if found == NEVER else {"type": "regex", "pattern": pattern_of(found)}


def _bounds(term: Term) -> tuple[int, int | None] | None:
    """Return the least and the greatest number of characters, if a term says nothing else, or another one beside it."""
    match term:
        case Repeat(part, least, most) if part == ANY:
            return least, most
        case And(parts):
            found = [each for each in map(_bounds, parts) if each is not None]
            return found[0] if len(found) == 1 and not found[0][0] else None
        case _:
            return (1, 1) if term == ANY else None


def _free(closing: str, most: int | None) -> Format:
    """Return the format of any text, of at most so many characters."""
    if most is None:
        return {"type": "any_text", "excludes": [closing]}  # of any bytes, so their characters are not counted
    return _pattern(_told_by(closing), 0, most)


def _told_by(closing: str) -> str:
    """Return the character of a tag without which a text cannot have it."""
    return next((each for each in "<[" if each in closing), closing[0])


def _pattern(without_char: str, least: int, most: int) -> Format:
    """Return the format of texts without a character, of so many others."""
    other = chars(without(ANY.ranges, ((ord(without_char), ord(without_char)),)))
    return {"type": "regex", "pattern": pattern_of(repeat(other, least, most))}


def _sequence(*formats: Format) -> Format:
    return {"type": "sequence", "elements": list(formats)}


class _Rules:
    """The rules of a term's texts, up to where it admits anything. most: the number of characters, if it is bounded."""

    def __init__(self, term: Term, closing: str, most: int | None) -> None:
        self._closing = closing
        limit = FEW + len(closing)
        self._limit = limit if most is not None and most > limit + FEW else None
        self._rest = most if self._limit is None else (most or 0) - limit
        self._ids: dict[tuple[Term, int], int] = {(term, 0): 0}
        self._edges: list[dict[int, Ranges]] = []
        self._ends: list[bool] = []
        classes = alphabet(alt([term, literal(closing)]))
        todo, depths = [(term, 0)], [0]
        while len(self._edges) < len(todo):
            state, depth = todo[len(self._edges)], depths[len(self._edges)]
            here: dict[int, Ranges] = {}
            for ranges in classes:
                there = self._next(state, chr(ranges[0][0]), depth)
                if there is None:
                    continue
                if isinstance(there, tuple) and there not in self._ids:
                    self._ids[there] = len(self._ids)
                    todo.append(there)
                    depths.append(depth + 1)
                to = self._ids[there] if isinstance(there, tuple) else there
                here[to] = merged((*here.get(to, ()), *ranges))
            self._edges.append(here)
            self._ends.append(admits_empty(state[0]))
            if len(self._ids) > MOST_STATES:
                raise TooLargeError

    def _next(self, state: tuple[Term, int], char: str, depth: int) -> tuple[Term, int] | int | None:
        """Return what follows a character: a state, the free rest, or nothing if it may not be written."""
        (left, written), closing = state, self._closing
        left = after(left, ord(char))
        text = closing[:written] + char
        count = next(n for n in range(len(text), -1, -1) if closing.startswith(text[len(text) - n :]))
        if left == NEVER or count == len(closing):
            return None
        if not count and (left == ALL or (self._limit is not None and _is_free(left))):
            return REST
        if self._limit is not None:  # little is counted one by one
            is_told = _is_free(left)
            if (written and char == closing[0]) or (not is_told and depth >= FEW) or depth >= self._limit:
                return None
        return left, count

    def format(self) -> Format | None:
        """Return the format: what the rules end with, or the free rest behind them."""
        ways: list[Format] = []
        live = self._alive({index for index, is_end in enumerate(self._ends) if is_end})
        if 0 in live:
            ways.append(self._grammar(live, False))
        live = self._alive({index for index, here in enumerate(self._edges) if REST in here})
        if 0 in live:
            ways.append(_sequence(self._grammar(live, True), _free(self._closing, self._rest)))
        return None if not ways else ways[0] if len(ways) == 1 else {"type": "or", "elements": ways}

    def _alive(self, ends: set[int]) -> set[int]:
        back: dict[int, list[int]] = {}
        for state, here in enumerate(self._edges):
            for to in here:
                back.setdefault(to, []).append(state)
        live, todo = set(ends), list(ends)
        while todo:
            for state in back.get(todo.pop(), ()):
                if state not in live:
                    live.add(state)
                    todo.append(state)
        return live

    def _grammar(self, live: set[int], goes_on: bool) -> Format:
        rules = ["root ::= s0"]
        for state in sorted(live):
            ways = ['""'] if self._ends[state] and not goes_on else []
            for to, ranges in self._edges[state].items():
                if to == REST and goes_on:
                    ways.append(_class(ranges))
                elif to in live:
                    ways.append(f"{_class(ranges)} s{to}")
            rules.append(f"s{state} ::= {' | '.join(ways)}")
        return {"type": "grammar", "grammar": "\n".join(rules)}


def _is_free(term: Term) -> bool:
    return term == ALL or (isinstance(term, Repeat) and term.part == ANY and not term.least)


def _class(ranges: Ranges) -> str:
    return "[" + "".join(f"\\U{low:08x}-\\U{high:08x}" for low, high in ranges) + "]"


def _without(term: Term, code: int) -> Term:
    """Return a plain term without a character."""
    match term:
        case Chars(ranges):
            return chars(without(ranges, ((code, code),)))
        case Seq(parts):
            return seq(_without(part, code) for part in parts)
        case Alt(parts):
            return alt(found for part in parts if (found := _without(part, code)) != NEVER)
        case Repeat(part, least, most):
            return repeat(_without(part, code), least, most)
        case And() | Not():
            raise AssertionError("solve the term first")


def other_than(term: Term, others: list[Term]) -> Term:
    """Return the texts of a term that none of others admits."""
    return conj([term, *map(_not, others)])


def _not(term: Term) -> Term:
    return ALL if term == NEVER else Not(term)
