"""Regular terms as terminals of llguidance's Lark grammars, plain or as the inside of a JSON string."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence

from inferc.errors import RequestError
from inferc.runtime.grammar.schema.automata import TooLargeError, lengths
from inferc.runtime.grammar.schema.regex import (
    ALL,
    ANY,
    EMPTY,
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
    alt,
    chars,
    conj,
    literal,
    negation,
    repeat,
    seq,
    without,
)

MOST_TEXT = 256 * 1024
SOME = repeat(ANY, 1, None)
# What JSON writes with a backslash, and the short ways to.
SPECIAL: Ranges = ((0, 31), (34, 34), (92, 92))
SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\"}
_HEX = chars([(48, 57), (65, 70), (97, 102)])
QUOTE, BACKSLASH = literal('"'), literal("\\")


def _class(text: str) -> Term:
    return alt(map(literal, text))


def _any_string() -> Term:
    """Return the term of all JSON strings, but for escapes of half a surrogate pair."""
    last = repeat(_HEX, 2, 2)
    plain = alt((seq((chars(without(_HEX.ranges, ((68, 68), (100, 100)))), _HEX, last)),))  # type: ignore[union-attr]
    low, high, end = (_class(each) for each in ("01234567", "89abAB", "cdefCDEF"))
    lead = seq((BACKSLASH, literal("u")))
    pair = seq((lead, _class("dD"), high, last, lead, _class("dD"), end, last))
    escaped = alt(
        (seq((BACKSLASH, _class('"\\/bfnrt'))), seq((lead, alt((plain, seq((_class("dD"), low, last)))))), pair)
    )
    unescaped = chars(without(ANY.ranges, SPECIAL))
    return seq((QUOTE, repeat(alt((unescaped, escaped)), 0, None), QUOTE))


ANY_STRING = _any_string()


def json_string(term: Term) -> Term:
    """Return the term of the JSON strings whose texts are those of a plain term; each is spelled one way."""
    return ANY_STRING if term == ALL else seq((QUOTE, _in_string(term), QUOTE))


def _in_string(term: Term) -> Term:
    match term:
        case Chars(ranges):
            return _char_in_string(ranges)
        case Seq(parts):
            return seq(map(_in_string, parts))
        case Alt(parts):
            return alt(map(_in_string, parts))
        case Repeat(part, least, most):
            return repeat(_in_string(part), least, most)
        case And() | Not():
            raise AssertionError("solve the term first")


def _char_in_string(ranges: Ranges) -> Term:
    free = without(ranges, SPECIAL)
    # Characters that only a code point names, such as \\u0001, are left out where there are others.
    ways = [chars(free)] if free else []
    for code in (code for low, high in ranges for code in range(low, min(high, 92) + 1)):
        if code in SHORT:
            ways.append(literal(f"\\{SHORT[code]}"))
        elif code < 32 and not free:
            ways.append(literal(f"\\u{code:04x}"))
    return alt(ways)


# ---------------------------------------------------------------------------------------------------- writing


def terminal(term: Term) -> str:
    """Return what a terminal of a Lark grammar is defined by. Raises TooLargeError."""
    text = _terminal(term)
    if len(text) > MOST_TEXT:
        raise TooLargeError
    return text


def not_empty(term: Term) -> tuple[Term, bool]:
    """Return the term of a term's texts that are not empty, and whether the empty one was among them.

    A rule of llguidance does not see that a terminal in it may be empty, so none may be.
    """
    return (conj((term, SOME)), True) if admits_empty(term) else (term, False)


def quoted(text: str) -> str:
    """Return a text as a literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def _terminal(term: Term) -> str:
    if _is_plain(term):
        return f"/{_pattern(term)}/" if term not in (EMPTY, NEVER) else '""' if term == EMPTY else '("a" & "b")'
    match term:
        case Seq(parts):
            return " ".join(f"({_terminal(part)})" for part in parts)
        case Alt(parts):
            return " | ".join(f"({_terminal(part)})" for part in parts)
        case Repeat(part, least, most):
            return f"({_terminal(part)}){times(least, most)}"
        case And(several):
            return " & ".join(f"({_terminal(part)})" for part in sorted(several, key=repr))
        case Not(part):
            return f"~({_terminal(part)})"
        case Chars():
            raise AssertionError("it is plain")


def _is_plain(term: Term) -> bool:
    match term:
        case Chars():
            return True
        case Seq(parts) | Alt(parts):
            return all(map(_is_plain, parts))
        case Repeat(part, _, _):
            return _is_plain(part)
        case And() | Not():
            return False


def _pattern(term: Term) -> str:
    match term:
        case Chars(ranges):
            return _chars(ranges)
        case Seq(parts):
            return "".join(f"({_pattern(part)})" if isinstance(part, Alt) else _pattern(part) for part in parts)
        case Alt(parts):
            return "|".join(map(_pattern, parts))
        case Repeat(part, least, most):
            unit = _pattern(part) if isinstance(part, Chars) else f"({_pattern(part)})"
            return unit + times(least, most)
        case And() | Not():
            raise AssertionError("it is not plain")


def times(least: int, most: int | None) -> str:
    """Return what repeats the part before it."""
    if most is None:
        return "*" if least == 0 else f"{{{least},}}"
    return f"{{{least},{most}}}"


def _chars(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _char(ranges[0][0])
    return f"[{''.join(_char(low) if low == high else f'{_char(low)}-{_char(high)}' for low, high in ranges)}]"


def _char(code: int) -> str:
    char = chr(code)
    return char if char.isascii() and char.isalnum() else f"\\x{{{code:x}}}"


def greatest_part(term: Term) -> int:
    """Return the greatest of the least numbers of characters of a plain term and of all its parts."""
    match term:
        case Seq(parts) | Alt(parts):
            inner = max(map(greatest_part, parts), default=0)
        case Repeat(part, _, _):
            inner = greatest_part(part)
        case _:
            inner = 0
    return max(lengths(term)[0], inner)


# --------------------------------------------------------------------------------------------------- free text


def without_any(texts: Iterable[str]) -> Term:
    """Return the term of the texts in which none of these occurs."""
    found = [literal(each) for each in texts]
    return negation(seq((ALL, alt(found), ALL))) if found else ALL


def up_to(end: str, others: Sequence[str] = ()) -> Term:
    """Return the term of the texts that end with `end`, before which neither it nor any other text occurs."""
    if not end:
        raise RequestError("a text that ends another one is empty; give it at least one character")
    before = [literal(each) for each in {end, *others}]
    return conj((seq((ALL, literal(end))), negation(seq((ALL, alt(before), ANY, ALL)))))
