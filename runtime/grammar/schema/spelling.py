"""Terms as patterns for xgrammar: of the inside of a JSON string, as JSON spells its characters, or of bare texts.

xgrammar has two readers of patterns. The first unrolls every repetition, or recounts it at every token; the second
is taken for a pattern that has a character beyond ASCII, and compiles long repetitions of short blocks well. So every
pattern begins with such a character, no times.
"""

from __future__ import annotations

from inferc.runtime.grammar.schema.automata import TooLargeError
from inferc.runtime.grammar.schema.regex import LAST, Alt, And, Chars, Not, Ranges, Repeat, Seq, Term, without

BEYOND = chr(LAST)
SPECIAL: Ranges = ((0, 31), (34, 34), (92, 92))  # what JSON writes with a backslash
SHORT = {8: "b", 9: "t", 10: "n", 12: "f", 13: "r", 34: '"', 92: "\\\\"}
BLOCK = 64
FEW = 8  # up to so many repetitions a character may be one with a backslash
MOST_TEXT = 48 * 1024


def spelled(term: Term) -> str:
    """Return the pattern of a plain term. Raises TooLargeError.

    In a bounded repetition the characters that JSON writes with a backslash are left out, unless there are no
    others: counting characters of two spellings takes xgrammar a second a token.
    """
    text = f"{BEYOND}{{0}}{_spelled(term, False)}"
    if len(text) > MOST_TEXT:
        raise TooLargeError
    return text


def pattern_of(term: Term) -> str:
    """Return the pattern of a plain term's texts as they stand, not as JSON spells them. Raises TooLargeError."""
    text = f"{BEYOND}{{0}}{_spelled(term, None)}"
    if len(text) > MOST_TEXT:
        raise TooLargeError
    return text


def _spelled(term: Term, is_counted: bool | None) -> str:
    """Return the pattern; is_counted: whether within a repetition that is counted, None for texts as they stand."""
    match term:
        case Chars(ranges):
            return _ranges(ranges) if is_counted is None else _class(ranges, is_counted)
        case Seq(parts):
            return "".join(
                f"({_spelled(part, is_counted)})" if isinstance(part, Alt) else _spelled(part, is_counted)
                for part in parts
            )
        case Alt(parts):
            return "|".join(_spelled(part, is_counted) for part in parts)
        case Repeat(part, least, most):
            return _repeated(part, least, most, is_counted)
        case And() | Not():
            raise AssertionError("solve the term first")


def _repeated(part: Term, least: int, most: int | None, is_counted: bool | None) -> str:
    counted = _grouped(part, None if is_counted is None else is_counted or max(least, most or 0) > FEW)
    if most is None:
        return _exactly(counted, least) + _grouped(part, is_counted) + "*"
    return _exactly(counted, least) + _at_most(counted, most - least)


def _exactly(unit: str, count: int) -> str:
    blocks, rest = divmod(count, BLOCK)
    whole = f"({unit}{{{BLOCK}}}){{{blocks}}}" if blocks > 1 else f"{unit}{{{BLOCK}}}" * blocks
    return whole + (f"{unit}{{{rest}}}" if rest else "")


def _at_most(unit: str, count: int) -> str:
    """Return the pattern of up to `count` units: blocks, then less than a block, or after all blocks the rest."""
    if count == 0:
        return ""
    if count <= BLOCK:
        return f"{unit}{{0,{count}}}"
    blocks, rest = divmod(count, BLOCK)
    tail = f"{unit}{{0,{BLOCK - 1}}}|{unit}{{{BLOCK}}}" + (f"{unit}{{0,{rest}}}" if rest else "")
    return (f"({unit}{{{BLOCK}}}){{0,{blocks - 1}}}" if blocks > 1 else "") + f"({tail})"


def _grouped(part: Term, is_counted: bool | None) -> str:
    text = _spelled(part, is_counted)
    return text if isinstance(part, Chars) and text[0] in "[(" else f"({text})"


def _class(ranges: Ranges, is_counted: bool) -> str:
    free = without(ranges, SPECIAL)
    if free and is_counted:
        return _ranges(free)
    special = [code for low, high in ranges for code in range(low, min(high, 92) + 1) if code < 32 or code in SHORT]
    if free:
        # Characters that only a code point names, such as \\u0001, are left out where there are others.
        short = "".join(SHORT[code] for code in special if code in SHORT)
        return f"(\\\\[{short}]|{_ranges(free)})" if short else _ranges(free)
    ways = [f"\\\\{SHORT[code]}" if code in SHORT else f"\\\\u00{code:02x}" for code in special]
    return ways[0] if len(ways) == 1 else f"({'|'.join(ways)})"


def _ranges(ranges: Ranges) -> str:
    if len(ranges) == 1 and ranges[0][0] == ranges[0][1]:
        return _char(ranges[0][0])
    return f"[{''.join(_char(low) if low == high else f'{_char(low)}-{_char(high)}' for low, high in ranges)}]"


def _char(code: int) -> str:
    char = chr(code)
    if char.isascii() and char.isalnum() or char in " !#%&',:;<=>@_`~":
        return char
    return f"\\u{{{code:x}}}"
