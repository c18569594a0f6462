"""Patterns of JSON Schema (ECMA-262) as terms over whole texts: a part without an anchor may have text around it."""

from __future__ import annotations

from inferc.runtime.grammar.schema.regex import (
    ALL,
    ANY,
    EMPTY,
    Alt,
    Ranges,
    Seq,
    Term,
    alt,
    chars,
    merged,
    repeat,
    seq,
    without,
)

DIGIT: Ranges = ((48, 57),)
WORD: Ranges = ((48, 57), (65, 90), (95, 95), (97, 122))
SPACE: Ranges = merged(
    [(9, 13), (32, 32), (0xA0, 0xA0), (0x1680, 0x1680), (0x2000, 0x200A), (0x2028, 0x2029)]
    + [(0x202F, 0x202F), (0x205F, 0x205F), (0x3000, 0x3000)]
)
# Characters that some readers count as space and others do not.
DOUBTFUL: Ranges = ((0x1C, 0x1F), (0x85, 0x85), (0xFEFF, 0xFEFF))
DOT: Ranges = without(ANY.ranges, ((10, 10), (13, 13), (0x2028, 0x2029)))
CLASSES: dict[str, Ranges] = {
    "d": DIGIT,
    "D": without(ANY.ranges, DIGIT),
    "w": WORD,
    "W": without(ANY.ranges, WORD),
    "s": SPACE,
    "S": without(ANY.ranges, merged([*SPACE, *DOUBTFUL])),
}
WIDEST = {**CLASSES, "s": merged([*SPACE, *DOUBTFUL]), "S": without(ANY.ranges, SPACE)}
CONTROLS = {"t": 9, "n": 10, "v": 11, "f": 12, "r": 13, "0": 0}
SYNTAX = r"^$\.*+?()[]{}|/-"
MOST_REPEATS = 4_096
MOST_CHARS = 4_096
MOST_NESTING = 32


class PatternError(Exception):
    """A pattern that is wrong, or that has what is no regular language; the text says what and what to do."""


class Anchor:
    """The begin or the end of the text, as the parser meets it."""


BEGIN, END = Anchor(), Anchor()
Part = Term | Anchor | list["Part"]


def pattern_term(pattern: str, is_widest: bool = False) -> Term:
    """Return the term of the whole texts in which the pattern is found. Raises PatternError.

    is_widest: whether to take in what only some readers of the pattern find.
    """
    if len(pattern) > MOST_CHARS:
        raise PatternError(f"the pattern has {len(pattern)} characters; at most {MOST_CHARS} are allowed")
    parser = _Parser(pattern, WIDEST if is_widest else CLASSES)
    branches = parser.branches(0)
    if parser.at < len(pattern):
        raise PatternError('unmatched ")" in the pattern; write \\)')
    return alt(_anchored(branch) for branch in branches)


def _anchored(branch: list[Term | Anchor]) -> Term:
    begins = ends = False
    while branch and branch[0] is BEGIN:
        begins, branch = True, branch[1:]
    while branch and branch[-1] is END:
        ends, branch = True, branch[:-1]
    terms = [each for each in branch if not isinstance(each, Anchor)]
    if len(terms) < len(branch):
        raise PatternError("^ or $ in the middle of the pattern is not built; write it first or last")
    return seq((EMPTY if begins else ALL, *terms, EMPTY if ends else ALL))


def core(term: Term) -> Term:
    """Return the term of a pattern that has no anchors without the text around it."""
    if isinstance(term, Alt):
        return alt(map(core, term.parts))
    if isinstance(term, Seq) and len(term.parts) > 2 and term.parts[0] == term.parts[-1] == ALL:
        return seq(term.parts[1:-1])
    return term


class _Parser:
    def __init__(self, pattern: str, classes: dict[str, Ranges]) -> None:
        self.pattern, self.classes, self.at = pattern, classes, 0

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.at)

    def take(self, text: str) -> bool:
        found = self.peek(text)
        self.at += len(text) * found
        return found

    def next(self) -> str:
        if self.at >= len(self.pattern):
            raise PatternError("the pattern ends too early; close what it opens")
        self.at += 1
        return self.pattern[self.at - 1]

    def branches(self, depth: int) -> list[list[Term | Anchor]]:
        """Return the alternatives up to the end or an unmatched bracket; groups with anchors are multiplied out."""
        if depth > MOST_NESTING:
            raise PatternError(f"the pattern nests more than {MOST_NESTING} groups; nest fewer")
        done: list[list[Term | Anchor]] = []
        open_: list[list[Term | Anchor]] = [[]]
        while self.at < len(self.pattern) and not self.peek(")"):
            if self.take("|"):
                done, open_ = done + open_, [[]]
                continue
            choices = self.piece(depth)
            open_ = [before + choice for before in open_ for choice in choices]
            if len(open_) > 256:
                raise PatternError("too many combinations of ^ and $ in groups; write them once, first or last")
        return done + open_

    def piece(self, depth: int) -> list[list[Term | Anchor]]:
        """Return the alternatives of one atom with its repetition: one, unless it is a group that has anchors."""
        if self.take("^"):
            return [[BEGIN]]
        if self.take("$"):
            return [[END]]
        choices = self.atom(depth)
        bounds = self.bounds()
        if bounds is None and any(isinstance(each, Anchor) for choice in choices for each in choice):
            return choices
        if any(isinstance(each, Anchor) for choice in choices for each in choice):
            raise PatternError("a repeated group with ^ or $ is not built; write it without")
        term = alt(seq(each for each in choice if not isinstance(each, Anchor)) for choice in choices)
        return [[term if bounds is None else repeat(term, *bounds)]]

    def atom(self, depth: int) -> list[list[Term | Anchor]]:
        if self.take("("):
            if self.take("?"):
                self.group_kind()
            choices = self.branches(depth + 1)
            if not self.take(")"):
                raise PatternError('missing ")" in the pattern; close the group')
            return choices
        if self.take("["):
            return [[self.char_class()]]
        if self.take("."):
            return [[chars(DOT)]]
        if self.take("\\"):
            return [[chars(self.escape(in_class=False))]]
        char = self.next()
        if char in "*+?":
            raise PatternError(f"nothing to repeat before {char} in the pattern; write \\{char}")
        return [[chars([(ord(char), ord(char))])]]

    def group_kind(self) -> None:
        if self.take(":"):
            return
        if self.take("<") and not self.peek("=") and not self.peek("!"):
            end = self.pattern.find(">", self.at)
            if end > self.at:
                self.at = end + 1
                return
        raise PatternError("(?...) other than a group is not built (lookaround, flags); write the pattern without")

    def bounds(self) -> tuple[int, int | None] | None:
        """Return the repetition that follows an atom, or None."""
        found: tuple[int, int | None] | None = None
        for sign, pair in (("*", (0, None)), ("+", (1, None)), ("?", (0, 1))):
            if self.take(sign):
                found = pair
                break
        else:
            found = self.counts()
        if found is not None:
            self.take("?")
            if self.peek("*") or self.peek("+") or self.peek("?"):
                raise PatternError("two repetitions in a row in the pattern; put a group between them")
        return found

    def counts(self) -> tuple[int, int | None] | None:
        end = self.pattern.find("}", self.at)
        if not self.peek("{") or end < 0:
            return None
        low, comma, high = self.pattern[self.at + 1 : end].partition(",")
        if not low.isdecimal() or not low.isascii() or (high and not (high.isdecimal() and high.isascii())):
            return None
        if max(len(low), len(high)) > 4 or max(int(low), int(high or 0)) > MOST_REPEATS:
            raise PatternError(f"the pattern repeats more than {MOST_REPEATS} times; repeat less, or without a bound")
        self.at = end + 1
        least, most = int(low), int(high) if high else None if comma else int(low)
        if most is not None and most < least:
            raise PatternError(f"{{{least},{most}}} in the pattern is out of order; write the smaller number first")
        return least, most

    def char_class(self) -> Term:
        is_negated, found = self.take("^"), list[tuple[int, int]]()
        while not self.take("]"):
            low = self.class_atom()
            if self.peek("-") and not self.peek("-]"):
                self.at += 1
                high = self.class_atom()
                if len(low) == len(high) == 1 and low[0][0] == low[0][1] and high[0][0] == high[0][1]:
                    if low[0][0] > high[0][0]:
                        raise PatternError("a range of characters in the pattern is out of order; swap its ends")
                    found.append((low[0][0], high[0][0]))
                    continue
                found += [(45, 45), *high]
            found += low
        ranges = merged(found)
        return chars(without(ANY.ranges, ranges) if is_negated else ranges)

    def class_atom(self) -> Ranges:
        if self.take("\\"):
            return self.escape(in_class=True)
        char = ord(self.next())
        return ((char, char),)

    def escape(self, in_class: bool) -> Ranges:
        char = self.next()
        if char in self.classes:
            return self.classes[char]
        if char == "b" and in_class:
            return ((8, 8),)
        if char in CONTROLS and not (char == "0" and self.pattern[self.at : self.at + 1].isdecimal()):
            code = CONTROLS[char]
        elif char == "c" and self.pattern[self.at : self.at + 1].isascii() and self.pattern[self.at :][:1].isalpha():
            code = ord(self.next()) % 32
        elif char == "x":
            code = self.hexadecimal(self.pattern[self.at : self.at + 2], 2)
        elif char == "u":
            code = self.unicode()
        elif char in SYNTAX or not (char.isalnum() or char == "_"):
            code = ord(char)
        else:
            kind = {"b": "a word boundary", "B": "a word boundary", "p": "\\p", "P": "\\P", "k": "a back reference"}
            words = "a back reference" if char.isdecimal() else kind.get(char, f"\\{char}")
            raise PatternError(f"{words} in the pattern is not built; write out the characters")
        return ((code, code),)

    def unicode(self) -> int:
        if self.take("{"):
            end = self.pattern.find("}", self.at)
            digits = self.pattern[self.at : max(end, self.at)]
            code = self.hexadecimal(digits, len(digits) or 1)
            self.at += 1
            if len(digits) > 6 or code > 0x10FFFF:
                raise PatternError(f"\\u{{{digits:.9}}} in the pattern is no character; 10FFFF is the last")
            return code
        code = self.hexadecimal(self.pattern[self.at : self.at + 4], 4)
        if 0xD800 <= code <= 0xDBFF and self.peek("\\u"):
            low = self.pattern[self.at + 2 : self.at + 6]
            if len(low) == 4 and low[0] in "dD" and low[1] in "cdefCDEF":
                self.at += 2
                return 0x10000 + ((code - 0xD800) << 10) + self.hexadecimal(low, 4) - 0xDC00
        return code

    def hexadecimal(self, digits: str, count: int) -> int:
        if len(digits) != count or any(each not in "0123456789abcdefABCDEF" for each in digits):
            raise PatternError("an escape in the pattern lacks hexadecimal digits; write \\x41, \\u0041 or \\u{41}")
        self.at += count
        return int(digits, 16)
