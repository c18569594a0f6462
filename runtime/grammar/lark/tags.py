"""Structural tags as rules of a Lark grammar for llguidance.

Free text is a term of the texts without what ends it, joined with that end, so that its terminal ends there and
nowhere else. llguidance matches terminals greedily: an expression before a schema or a grammar is as long as it can be.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

from inferc.chat.argument_tags import ArgumentTags
from inferc.errors import RequestError, shown
from inferc.runtime.grammar.lark.gbnf import gbnf_rule
from inferc.runtime.grammar.lark.schema import JsonRules
from inferc.runtime.grammar.lark.terms import times, up_to, without_any
from inferc.runtime.grammar.lark.writer import Writer
from inferc.runtime.grammar.schema.ecma import PatternError, pattern_term
from inferc.runtime.grammar.schema.regex import ANY, EMPTY, Chars, Seq, Term, alt, conj, literal, repeat, seq
from inferc.runtime.grammar.tags import Node, Rewriting, checked_tag

OTHER = "use xgrammar for it (--structured-outputs-backend xgrammar)"


@dataclass(frozen=True)
class Free:
    """Text that ends where what comes behind it begins. triggered: makes the rules of the parts within it."""

    excludes: tuple[str, ...] = ()
    triggered: Callable[[str | None], str] | None = None


Part: TypeAlias = Term | str | Free  # a str is what stands in a rule


@dataclass
class TagRules:
    """The rules of one structural tag, in a grammar that is being written.

    hidden: the ids of tokens that are never chosen unless they are named. id_of: returns the id of a token by its text.
    """

    writer: Writer
    hidden: Sequence[int]
    id_of: Callable[[str], int | None]
    _json: dict[int, JsonRules] = field(default_factory=dict)

    def tag(self, value: Any, max_whitespace: int) -> Part:
        """Return the part of a structural tag as a client sent it. Raises RequestError with the place of a fault."""
        return self.part(checked_tag(value, max_whitespace, Rewriting(self._schema, _arguments))["format"], "#/format")

    def json(self, max_whitespace: int) -> JsonRules:
        """Return the rules of JSON with so many spaces and line breaks in a row at most."""
        if max_whitespace not in self._json:
            self._json[max_whitespace] = JsonRules(self.writer, max_whitespace)
        return self._json[max_whitespace]

    def _schema(self, schema: Any, max_whitespace: Any) -> str:
        if type(max_whitespace) is not int or not 0 <= max_whitespace < 2**31:
            raise RequestError(f"max_whitespace_cnt: expected a count, found {shown(max_whitespace)}")
        return self.json(max_whitespace).rule(schema)

    def text(self, part: Part) -> str:
        """Return what stands in a rule for a part behind which the answer ends."""
        if isinstance(part, Free):
            return self.ended(part, None)
        return part if isinstance(part, str) else self.writer.lexeme(part)

    def ended(self, free: Free, end: str | None) -> str:
        """Return what stands for free text, and the text that ends it; None: the end of the answer."""
        if free.triggered is not None:
            return free.triggered(end)
        return self.writer.lexeme(self.free_term(free, end))

    def free_term(self, free: Free, end: str | None) -> Term:
        rest = without_any(each for each in free.excludes if each != end)
        return rest if end is None else conj((up_to(end, free.excludes), _only_behind(free.excludes, end)))

    def joined(self, parts: Sequence[tuple[Part, str]]) -> Part:
        """Join parts that come one after the other; terms become one, which is matched as exactly as all of it."""
        found: list[Part] = []
        for part, place in parts:
            if part == EMPTY or part == "":
                continue
            if found and isinstance(before := found[-1], Free):
                end, rest = _literal_begin(part)
                if end:
                    found[-1] = self._closed(before, end, rest)
                    continue
                if not (isinstance(part, str) and part.startswith("<[")):
                    _refuse(place, f"where free text ends is only seen by a fixed text or a token; {OTHER}")
            if found and isinstance(part, Term) and isinstance(before := found[-1], Term):
                found[-1] = seq((before, part))
            else:
                found.append(part)
        if len(found) == 1:
            return found[0]
        if found and isinstance(last := found[-1], Free):
            return self._behind(found[:-1], last)
        return " ".join(map(self.text, found)) if found else EMPTY

    def _behind(self, first: Sequence[Part], last: Free) -> Free:
        return Free((), lambda end: " ".join((*map(self.text, first), self.ended(last, end))))

    def _closed(self, free: Free, end: str, rest: Term) -> Part:
        if free.triggered is None:
            return seq((self.free_term(free, end), rest))
        return f"{free.triggered(end)} {self.writer.lexeme(rest)}"

    # ------------------------------------------------------------------------------------------------ formats

    def part(self, node: Node, place: str) -> Part:
        """Return the part of one format."""
        made: Part = getattr(self, f"_{node['type']}")(node, place)
        return made

    def _const_string(self, node: Node, place: str) -> Part:
        return literal(_text(node, "value", place))

    def _json_schema(self, node: Node, place: str) -> Part:
        return str(node["json_schema"])  # its rule, by now

    def _any_text(self, node: Node, place: str) -> Part:
        excludes = _texts(node, "excludes", place)
        if node.get("max_chars") is not None:
            most = _count(node, "max_chars", place)
            return conj((repeat(ANY, 0, most), without_any(excludes)))
        if node.get("max_tokens") is None:
            return Free(tuple(excludes))
        most = _count(node, "max_tokens", place)

        def limited(end: str | None) -> str:
            if end is not None:
                _refuse(f"{place}/max_tokens", f"it is only built before a token; {OTHER}")
            if not most:
                return ""
            name = self.writer.reserve()
            self.writer.define(f"{name}[max_tokens={most}]", self.writer.lexeme(without_any(excludes)))
            return name

        return Free(tuple(excludes), limited)

    def _grammar(self, node: Node, place: str) -> Part:
        try:
            return gbnf_rule(_text(node, "grammar", place), self.writer)
        except RequestError as error:
            _refuse(f"{place}/grammar", str(error))

    def _regex(self, node: Node, place: str) -> Part:
        try:
            return pattern_term(f"^({_text(node, 'pattern', place)})$")
        except PatternError as error:
            _refuse(f"{place}/pattern", str(error))

    def _token(self, node: Node, place: str) -> Part:
        return f"<[{self._id(node.get('token'), f'{place}/token')}]>"

    def _exclude_token(self, node: Node, place: str) -> Part:
        return f"<[^{_ranges({*self._ids_of(node, 'exclude_tokens', place), *self.hidden})}]>"

    def _any_tokens(self, node: Node, place: str) -> Part:
        most = None if node.get("max_tokens") is None else _count(node, "max_tokens", place)
        return "" if most == 0 else f"({self._exclude_token(node, place)}){times(0, most)}"

    def _ids_of(self, node: Node, name: str, place: str) -> list[int]:
        given = node.get(name) or []
        if not isinstance(given, list):
            _refuse(f"{place}/{name}", f"expected a list of tokens, found {shown(given)}")
        return [self._id(each, f"{place}/{name}/{index}") for index, each in enumerate(given)]

    def _id(self, token: Any, place: str) -> int:
        found = self.id_of(token) if isinstance(token, str) else token
        if type(found) is not int or found < 0:
            _refuse(place, f"expected the id of a token or its text, found {shown(token)}")
        return found

    def _sequence(self, node: Node, place: str) -> Part:
        return self.joined(self._elements(node, place))

    def _elements(self, node: Node, place: str) -> list[tuple[Part, str]]:
        """Return the parts that a node has in a row: of its last text, what comes behind the node may be a part."""
        if node["type"] != "sequence":
            return [(self.part(node, place), place)]
        return [part for each, at in _each(node, "elements", place) for part in self._elements(each, at)]

    def _or(self, node: Node, place: str) -> Part:
        parts = [self._whole(each, at) for each, at in _each(node, "elements", place)]
        if all(isinstance(part, Term) for part in parts):
            return alt(parts)  # type: ignore[arg-type]
        return f"({' | '.join(self.text(part) or EMPTY_TEXT for part in parts)})"

    def _optional(self, node: Node, place: str) -> Part:
        return self._repeated(node, place, 0, 1)

    def _plus(self, node: Node, place: str) -> Part:
        return self._repeated(node, place, 1, None)

    def _star(self, node: Node, place: str) -> Part:
        return self._repeated(node, place, 0, None)

    def _repeat(self, node: Node, place: str) -> Part:
        least, most = _count(node, "min", place), None if node.get("max") == -1 else _count(node, "max", place)
        if most is not None and most < least:
            _refuse(f"{place}/max", f"found {most}, which is less than min, {least}")
        return self._repeated(node, place, least, most)

    def _repeated(self, node: Node, place: str, least: int, most: int | None) -> Part:
        part = self._whole(node["content"], f"{place}/content")
        if isinstance(part, Term):
            return repeat(part, least, most)
        return f"({self.text(part)}){times(least, most)}" if most != 0 else ""

    def _whole(self, node: Node, place: str) -> Part:
        """Return a part that says itself where it ends."""
        part = self.part(node, place)
        if isinstance(part, Free) and part.triggered is None:
            return self.free_term(part, None)
        if isinstance(part, Free):
            return self.ended(part, None)
        return part

    # --------------------------------------------------------------------------------------------------- tags

    def _tag(self, node: Node, place: str) -> Part:
        begin = self._mark(node.get("begin"), f"{place}/begin")
        return self._after(begin, node, place)

    def _after(self, begin: Part, node: Node, place: str) -> Part:
        """Return a tag that begins with this part."""
        if node["type"] != "tag":
            _refuse(f"{place}/type", f"expected tag, found {shown(node['type'])}")
        content = self._elements(node["content"], f"{place}/content")
        ends = node.get("end")
        if not isinstance(ends, list):
            return self.joined([(begin, place), *content, (self._mark(ends, f"{place}/end"), f"{place}/end")])
        if not ends or not all(isinstance(end, str) for end in ends):
            _refuse(f"{place}/end", f"expected a text, or a list of texts, found {shown(ends)}")
        if isinstance(content[-1][0], Free) and len(ends) > 1:
            _refuse(f"{place}/end", f"several ends of free text are not built; give one, or {OTHER}")
        return self.joined([(begin, place), *content, (alt(map(literal, ends)), f"{place}/end")])

    def _mark(self, value: Any, place: str) -> Part:
        if isinstance(value, str):
            return literal(value)
        if isinstance(value, Mapping) and value.get("type") == "token":
            return self._token(value, place)
        _refuse(place, f"expected a text or a token, found {shown(value)}")

    def _tags_with_separator(self, node: Node, place: str) -> Part:
        parts = [self.part(each, at) for each, at in _each(node, "tags", place)]
        tag = f"({' | '.join(map(self.text, parts))})"
        separator = self.writer.lexeme(literal(str(node.get("separator") or "")))
        rest = "" if node.get("stop_after_first") else f"({separator} {tag})*"
        return f"({tag} {rest})" + ("" if node.get("at_least_one") else "?")

    def _triggered_tags(self, node: Node, place: str) -> Part:
        triggers, excludes = _texts(node, "triggers", place), _texts(node, "excludes", place)
        if not triggers or "" in triggers:
            _refuse(f"{place}/triggers", f"expected texts that are not empty, found {shown(node.get('triggers'))}")
        tags = [(each, at, *self._trigger(each, at, triggers)) for each, at in _each(node, "tags", place)]
        is_needed, is_one = bool(node.get("at_least_one")), bool(node.get("stop_after_first"))

        def rules(end: str | None) -> str:
            """Return what stands for the text and its tags, and for the text that ends it."""
            others = (*triggers, *excludes, *([end] if end is not None else ()))
            # A tag that must come comes at once: nothing is written before the first.
            first = self._tags(tags, lambda trigger: literal(trigger))
            later = self._tags(tags, lambda trigger: self.free_term(Free(others), trigger))
            free = Free((*triggers, *excludes))
            last = self.writer.lexeme(self.free_term(free, end))
            closing = last if not is_one else "" if end is None else self.writer.lexeme(literal(end))
            if is_needed:
                return f"{first} {closing}" if is_one else f"{first} ({later})* {closing}"
            return f"({later} {closing} | {last})" if is_one else f"({later})* {closing}"

        return Free((), rules)

    def _trigger(self, node: Node, place: str, triggers: list[str]) -> tuple[str, str]:
        """Return the trigger of a tag, and what follows it of the tag's begin."""
        begin = node.get("begin")
        if not isinstance(begin, str):
            _refuse(f"{place}/begin", f"expected a text, found {shown(begin)}")
        found = [each for each in triggers if begin.startswith(each)]
        if len(found) != 1:
            words = f"begins with {len(found)} triggers, expected exactly one"
            _refuse(f"{place}/begin", f"{shown(begin)} {words} of {shown(triggers)}")
        return found[0], begin[len(found[0]) :]

    def _tags(self, tags: Sequence[tuple[Node, str, str, str]], before: Callable[[str], Term]) -> str:
        ways = [self._after(seq((before(trigger), literal(rest))), node, at) for node, at, trigger, rest in tags]
        return f"({' | '.join(map(self.text, ways))})"

    def _token_triggered_tags(self, node: Node, place: str) -> Part:
        triggers = self._ids_of(node, "trigger_tokens", place)
        ways = []
        for each, at in _each(node, "tags", place):
            begin = each.get("begin")
            if not isinstance(begin, Mapping) or self._id(begin.get("token"), f"{at}/begin/token") not in triggers:
                _refuse(f"{at}/begin", f"expected one of trigger_tokens, found {shown(begin)}")
            ways.append(self.text(self._after(self._mark(begin, f"{at}/begin"), each, at)))
        tag = f"({' | '.join(ways)})"
        other = f"<[^{_ranges({*triggers, *self._ids_of(node, 'exclude_tokens', place), *self.hidden})}]>"
        is_needed, is_one = bool(node.get("at_least_one")), bool(node.get("stop_after_first"))
        if is_one:  # as with texts, a tag that must come comes at once
            return tag if is_needed else f"({other})* {tag}?"
        return f"{tag if is_needed else ''} ({other} | {tag})*"


EMPTY_TEXT = '""'


def _arguments(schema: Any, tags: ArgumentTags, max_whitespace: int) -> NoReturn:
    raise RequestError(f"arguments in tags of their own are not built with llguidance; {OTHER}")


def _only_behind(excludes: Sequence[str], end: str) -> Term:
    """Return the term of texts that have no excluded text before their end."""
    others = [each for each in excludes if each != end]
    return seq((without_any(others), literal(end))) if others else repeat(ANY, 0, None)


def _literal_begin(part: Part) -> tuple[str, Term]:
    """Return the fixed text that a term begins with, and the term of what follows."""
    if not isinstance(part, Term):
        return "", EMPTY
    parts = part.parts if isinstance(part, Seq) else (part,)
    fixed = []
    for each in parts:
        if not isinstance(each, Chars) or len(each.ranges) != 1 or each.ranges[0][0] != each.ranges[0][1]:
            break
        fixed.append(chr(each.ranges[0][0]))
    return "".join(fixed), seq(parts[len(fixed) :])


def _each(node: Node, name: str, place: str) -> list[tuple[Any, str]]:
    return [(each, f"{place}/{name}/{index}") for index, each in enumerate(node[name])]


def _text(node: Node, name: str, place: str) -> str:
    found = node.get(name)
    if not isinstance(found, str):
        _refuse(f"{place}/{name}", f"expected a text, found {shown(found)}")
    return found


def _texts(node: Node, name: str, place: str) -> list[str]:
    found = node.get(name) or []
    if not isinstance(found, list) or not all(isinstance(each, str) and each for each in found):
        _refuse(f"{place}/{name}", f"expected a list of texts that are not empty, found {shown(found)}")
    return found


def _count(node: Node, name: str, place: str) -> int:
    found = node.get(name)
    if type(found) is not int or not 0 <= found < 2**31:
        _refuse(f"{place}/{name}", f"expected a count, found {shown(found)}")
    return found


def _ranges(ids: set[int]) -> str:
    found: list[list[int]] = []
    for each in sorted(ids):
        if found and each == found[-1][1] + 1:
            found[-1][1] = each
        else:
            found.append([each, each])
    return ",".join(str(low) if low == high else f"{low}-{high}" for low, high in found)


def _refuse(place: str, words: str) -> NoReturn:
    raise RequestError(f"{place}: {words}")
