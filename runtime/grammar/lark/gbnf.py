"""Grammars in GBNF, llama.cpp's form, written as rules of a Lark grammar for llguidance."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from inferc.errors import RequestError, shown
from inferc.runtime.grammar.lark.terms import greatest_part, times
from inferc.runtime.grammar.lark.writer import Writer
from inferc.runtime.grammar.schema.automata import lengths
from inferc.runtime.grammar.schema.regex import (
    ANY,
    Alt,
    Ranges,
    Repeat,
    Seq,
    Term,
    alt,
    chars,
    literal,
    merged,
    repeat,
    seq,
    without,
)

MOST_NESTING = 100
MOST_TERM = 5_000  # parts of one terminal, above which it is left as rules
MOST_REPEATS = 10_000
NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
SPACE = re.compile(r"(?:\s|#[^\n]*)*")
COUNT = re.compile(r"\{\s*(\d{1,9})\s*(?:(,)\s*(\d{1,9})?\s*)?\}")
ESCAPES = {
    **{each: each for each in "\"'\\[]-/^?.*+(){}|$"},
    "n": "\n",
    "r": "\r",
    "t": "\t",
    "f": "\f",
    "b": "\b",
    "v": "\v",
}
HEX = {"x": 2, "u": 4, "U": 8}


@dataclass(frozen=True)
class Ref:
    """A rule by its name, and where it is named."""

    name: str
    at: int


@dataclass(frozen=True)
class Several:
    """Parts one after the other, or alternatives."""

    parts: tuple[Node, ...]
    is_choice: bool


@dataclass(frozen=True)
class Times:
    """A part that is repeated."""

    part: Node
    least: int
    most: int | None


Node: TypeAlias = Term | Ref | Several | Times


def gbnf_rule(source: str, writer: Writer, root: str = "root") -> Term | str:
    """Return the term of a grammar, or the rule of one that refers back to itself.

    Raises RequestError with the line and column of a fault.
    """
    rules = _Parser(source).rules()
    if root not in rules:
        raise RequestError(f'it has no rule "{root}", with which an answer begins; write {root} ::= …')
    return _Emitter(source, rules, writer).root(root)


def least_of_rules(source: str, most: int) -> int:
    """Return the greatest least length of all rules of a grammar, and of their parts; `most` stands for more, or none.

    Raises RequestError for a fault, and for what is not read.
    """
    rules = _Parser(source).rules()
    known = dict.fromkeys(rules, most)
    greatest = 0

    def least(node: Node) -> int:
        if isinstance(node, Ref):
            return known.get(node.name, 0)
        if isinstance(node, Times):
            found = least(node.part) * node.least
        elif isinstance(node, Several):
            parts = list(map(least, node.parts))
            found = min(parts) if node.is_choice else sum(parts)
        else:
            found = lengths(node)[0]
        return min(most, found)

    for _ in rules:  # until nothing changes: a rule may need all others
        before = dict(known)
        for name, node in rules.items():
            known[name] = least(node)
        if known == before:
            break
    todo = list(rules.values())
    while todo:
        node = todo.pop()
        greatest = max(greatest, least(node), greatest_part(node) if isinstance(node, Term) else 0)
        todo += node.parts if isinstance(node, Several) else [node.part] if isinstance(node, Times) else []
    return min(most, greatest)


def _fault(source: str, at: int, words: str) -> NoReturn:
    line = source.count("\n", 0, at) + 1
    raise RequestError(f"line {line}, column {at - source.rfind(chr(10), 0, at)}: {words}")


class _Parser:
    def __init__(self, source: str) -> None:
        self.source, self.at = source, 0

    def rules(self) -> dict[str, Node]:
        found: dict[str, Node] = {}
        self.space()
        while self.at < len(self.source):
            begin = self.at
            name = self.name() or self.fail("expected the name of a rule")
            self.space()
            if not self.take("::="):
                self.fail("expected ::= after the name of a rule")
            if name in found:
                _fault(self.source, begin, f"a second rule {shown(name)}; give it another name")
            found[name] = self.choice(0)
            self.space()
        return found

    def fail(self, words: str) -> NoReturn:
        here = self.source[self.at : self.at + 1]
        _fault(self.source, self.at, f"{words}, found {shown(here) if here else 'the end'}")

    def space(self) -> None:
        found = SPACE.match(self.source, self.at)
        assert found is not None, "it matches no space, too"
        self.at = found.end()

    def take(self, text: str) -> bool:
        found = self.source.startswith(text, self.at)
        self.at += len(text) * found
        return found

    def name(self) -> str:
        found = NAME.match(self.source, self.at)
        if found is None:
            return ""
        self.at = found.end()
        return found[0]

    def choice(self, depth: int) -> Node:
        if depth > MOST_NESTING:
            self.fail(f"groups are within one another more than {MOST_NESTING} times")
        ways = [self.sequence(depth)]
        while self.take("|"):
            ways.append(self.sequence(depth))
        if all(isinstance(each, Term) for each in ways):
            return alt(ways)  # type: ignore[arg-type]
        return Several(tuple(ways), True)

    def sequence(self, depth: int) -> Node:
        parts: list[Node] = []
        self.space()
        while self.at < len(self.source) and self.source[self.at] not in "|)" and not self.begins_rule():
            parts.append(self.times(self.part(depth)))
            self.space()
        if all(isinstance(each, Term) for each in parts):
            return seq(parts)  # type: ignore[arg-type]
        return parts[0] if len(parts) == 1 else Several(tuple(parts), False)

    def begins_rule(self) -> bool:
        found = NAME.match(self.source, self.at)
        if found is None:
            return False
        behind = SPACE.match(self.source, found.end())
        return behind is not None and self.source.startswith("::=", behind.end())

    def part(self, depth: int) -> Node:
        begin = self.at
        if self.take("("):
            if self.take("="):
                _fault(self.source, begin, "a look ahead (= …) is not built; leave it out")
            found = self.choice(depth + 1)
            if not self.take(")"):
                self.fail("expected )")
            return found
        if self.take('"'):
            return literal(self.quoted())
        if self.take("["):
            return self.klass()
        if self.take("."):
            return ANY
        if name := self.name():
            if self.source.startswith("(", self.at):
                _fault(self.source, begin, f"{shown(name)}( … ) is not built; write it as rules")
            return Ref(name, begin)
        self.fail("expected a text in quotes, a class in brackets, a group or the name of a rule")

    def times(self, part: Node) -> Node:
        while True:
            begin = self.at
            if self.take("*"):
                least, most = 0, None
            elif self.take("+"):
                least, most = 1, None
            elif self.take("?"):
                least, most = 0, 1
            elif self.source.startswith("{", self.at):
                found = COUNT.match(self.source, self.at)
                if found is None:
                    self.fail("expected a count as {3}, {3,} or {3,5}")
                self.at = found.end()
                least = int(found[1])
                most = least if found[2] is None else None if found[3] is None else int(found[3])
                if most is not None and most < least:
                    _fault(self.source, begin, f"found {found[0]}, of which the second count is less than the first")
                if max(least, most or 0) > MOST_REPEATS:
                    _fault(self.source, begin, f"found {found[0]}, at most {MOST_REPEATS} are allowed; lower it")
            else:
                return part
            part = repeat(part, least, most) if isinstance(part, Term) else Times(part, least, most)

    def char(self) -> str:
        if self.at >= len(self.source):
            self.fail("expected the end of what was opened")
        begin, char = self.at, self.source[self.at]
        self.at += 1
        if char != "\\":
            return char
        kind = self.source[self.at : self.at + 1]
        self.at += 1
        if kind in HEX:
            digits = self.source[self.at : self.at + HEX[kind]]
            self.at += HEX[kind]
            if re.fullmatch(f"[0-9a-fA-F]{{{HEX[kind]}}}", digits) and _is_char(int(digits, 16)):
                return chr(int(digits, 16))
        elif kind in ESCAPES:
            return ESCAPES[kind]
        _fault(self.source, begin, f"{shown(self.source[begin : self.at])} is no escape; write \\n, \\x41 or \\u00e9")

    def quoted(self) -> str:
        found = []
        while not self.take('"'):
            found.append(self.char())
        return "".join(found)

    def klass(self) -> Term:
        begin, is_negated = self.at - 1, self.take("^")
        ranges: list[tuple[int, int]] = []
        while not self.take("]"):
            low = high = ord(self.char())
            if self.source.startswith("-", self.at) and not self.source.startswith("-]", self.at):
                self.at += 1
                high = ord(self.char())
            if high < low:
                _fault(self.source, begin, "a range of characters ends before it begins")
            ranges.append((low, high))
        found: Ranges = merged(ranges)
        return chars(without(ANY.ranges, found) if is_negated else found)


class _Emitter:
    """Writes rules: those that do not refer back to themselves become terms, as far as they stay small."""

    def __init__(self, source: str, rules: dict[str, Node], writer: Writer) -> None:
        self.source, self.nodes, self.writer = source, rules, writer
        self.terms: dict[str, Term | None] = {}  # None: of a rule that refers back to itself, or is large
        self.names: dict[str, str] = {}

    def root(self, root: str) -> Term | str:
        order, cyclic = self.order(root)
        for name in order:
            self.terms[name] = None if name in cyclic else self.term(self.nodes[name])
        found = self.terms[root]
        if found is not None:
            return found
        todo = [root]
        while todo:
            name = todo.pop()
            if name not in self.names:
                self.names[name] = self.writer.reserve()
                todo += [ref.name for ref in _refs(self.nodes[name]) if self.terms[ref.name] is None]
        for name, rule in self.names.items():
            self.writer.define(rule, self.text(self.nodes[name]) or '""')
        return self.names[root]

    def order(self, root: str) -> tuple[list[str], set[str]]:
        """Return the rules that the root needs, each behind those that it names, and those that name themselves."""
        done: dict[str, None] = {}
        cyclic: set[str] = set()
        path: dict[str, None] = {}
        todo: list[tuple[str, bool]] = [(root, False)]
        while todo:
            name, is_left = todo.pop()
            if is_left:
                del path[name]
                done[name] = None
                if any(ref.name in cyclic for ref in _refs(self.nodes[name])):
                    cyclic.add(name)
                continue
            if name in path:
                cyclic.add(name)
                continue
            if name in done:
                continue
            path[name] = None
            todo.append((name, True))
            for ref in _refs(self.nodes[name]):
                if ref.name not in self.nodes:
                    _fault(self.source, ref.at, f"there is no rule {shown(ref.name)}; define it")
                if ref.name in path:
                    cyclic.add(ref.name)
                else:
                    todo.append((ref.name, False))
        return list(done), cyclic

    def term(self, node: Node) -> Term | None:
        """Return the term of a node whose rules have some; None if it has none or grows large."""
        found = self.solve(node)
        return found if found is not None and _size(found) <= MOST_TERM else None

    def solve(self, node: Node) -> Term | None:
        if isinstance(node, Ref):
            return self.terms[node.name]
        if isinstance(node, Times):
            part = self.solve(node.part)
            return None if part is None else repeat(part, node.least, node.most)
        if isinstance(node, Several):
            parts = [self.solve(part) for part in node.parts]
            known = [part for part in parts if part is not None]
            return None if len(known) < len(parts) else alt(known) if node.is_choice else seq(known)
        return node

    def text(self, node: Node) -> str:
        if (found := self.term(node)) is not None:
            return self.writer.lexeme(found)
        if isinstance(node, Ref):
            return self.names[node.name]
        if isinstance(node, Times):
            return f"({self.text(node.part)}){times(node.least, node.most)}" if node.most != 0 else ""
        assert isinstance(node, Several), "a term was found"
        texts = [self.text(part) for part in node.parts]
        return f"({' | '.join(text or chr(34) * 2 for text in texts)})" if node.is_choice else " ".join(texts)


def _is_char(code: int) -> bool:
    return any(low <= code <= high for low, high in ANY.ranges)


def _refs(node: Node) -> list[Ref]:
    if isinstance(node, Ref):
        return [node]
    if isinstance(node, Times):
        return _refs(node.part)
    return [ref for part in node.parts for ref in _refs(part)] if isinstance(node, Several) else []


def _size(term: Term) -> int:
    match term:
        case Seq(parts) | Alt(parts):
            return 1 + sum(map(_size, parts))
        case Repeat(part, _, _):
            return 1 + _size(part)
        case _:
            return 1
