"""Arguments in tags of their own, as formats of a structural tag: texts as they stand, and other values as JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any

from inferc.chat.argument_tags import ArgumentTags
from inferc.errors import shown
from inferc.runtime.grammar.schema.automata import TooLargeError, plain
from inferc.runtime.grammar.schema.cases import Key
from inferc.runtime.grammar.schema.documents import refuse
from inferc.runtime.grammar.schema.exact import Rewriter
from inferc.runtime.grammar.schema.kinds import TEXT, ArgumentKinds, Kinds, kind_of, look_term
from inferc.runtime.grammar.schema.raw_texts import Format, other_than, raw_text
from inferc.runtime.grammar.schema.regex import (
    ALL,
    ANY,
    NEVER,
    Term,
    alt,
    chars,
    conj,
    literal,
    repeat,
    without,
)
from inferc.runtime.grammar.schema.shapes import Leaf, ListShape, Node, ObjectShape, Shape
from inferc.runtime.grammar.schema.spelling import pattern_of, spelled

MOST_WAYS = 64  # in which the properties of a counted object may be there
CONTROL = ((0, 32), (127, 160))  # characters that no free name has
# The values of a schema that says nothing, beside texts.
FREE: tuple[dict[str, Any], ...] = (
    {"enum": [None, True, False]},
    {"type": "number"},
    {"type": "array", "items": {}},
    {"type": "object", "additionalProperties": True},
)


def tagged_arguments(
    schema: Any, tags: ArgumentTags, max_whitespace: int, spell: Callable[[Term], str] = spelled
) -> Format:
    """Return the format of the arguments under a schema, each in tags.

    It admits what `exact_schema` says of JSON. Further, no text contains the tag behind it, and where an argument may
    be a text or another value, no text looks like one of the latter (inferc.runtime.grammar.schema.kinds). Raises
    RequestError as `exact_schema` does, and for names that no tag can have. spell: writes the patterns within JSON.
    """
    return _Tagger(Rewriter(schema, spell), ArgumentKinds(schema), tags, max_whitespace).format()


class _Tagger:
    def __init__(self, rewriter: Rewriter, kinds: ArgumentKinds, tags: ArgumentTags, max_whitespace: int) -> None:
        self.rewriter, self.kinds, self.tags, self.max_whitespace = rewriter, kinds, tags, max_whitespace

    def format(self) -> Format:
        node = self.rewriter.nodes[self.rewriter.root()]
        ways: list[Format] = []
        for shape in node.shapes:
            if isinstance(shape, ObjectShape):
                ways += self.objects(shape)
            elif isinstance(shape, Leaf):
                ways += self.listed(node, shape)
        if not ways:
            refuse(node.place, "admits no object; arguments are one")
        return _any(ways)

    def listed(self, node: Node, leaf: Leaf) -> Iterator[Format]:
        """Yield the arguments that a schema lists as whole objects, or that it says nothing of."""
        if not leaf.form:
            yield {"type": "star", "content": self.free(node.place, ALL, None)}
            return
        refuse(node.place, "whole objects of arguments are not listed in this model's calls; name properties")

    def objects(self, shape: ObjectShape) -> Iterator[Format]:
        least, most = shape.least, shape.most
        others = shape.others
        optional = [name for name in shape.names if name not in shape.required]
        if least > max(1, len(shape.required)) and others:
            if least > len(shape.names):
                words = f"{least} properties that differ are not built where names are free"
                refuse(shape.least_place, f"{words}; name them with properties, or leave minProperties out")
            others = []
        is_counted = least > len(shape.required) or (most is not None and (others or most < len(shape.names)))
        if not is_counted:
            yield self.arguments(shape, set(shape.required), set(optional), others, (0, None))
            return
        if 2 ** len(optional) > MOST_WAYS:
            words = f"{len(optional)} properties that may be missing cannot be counted in this model's calls"
            refuse(shape.place, f"{words}; leave out minProperties, maxProperties")
        for count in range(len(optional) + 1):
            num = len(shape.required) + count
            for chosen in combinations(optional, count):
                bounds = (max(0, least - num), None if most is None else most - num)
                if (bounds[1] is None or bounds[1] >= bounds[0]) and (others or not bounds[0]):
                    yield self.arguments(shape, shape.required | set(chosen), set(), others, bounds)

    def arguments(
        self,
        shape: ObjectShape,
        needed: set[str],
        optional: set[str],
        others: list[tuple[Term, Key]],
        bounds: tuple[int, int | None],
    ) -> Format:
        """Return the format of named arguments in order, then of so many others."""
        found: list[Format] = []
        for name, key in shape.names.items():
            if name in needed:
                found.append(self.named(name, key))
            elif name in optional:
                found.append({"type": "optional", "content": self.named(name, key)})
        free = _any([self.free(shape.place, term, key) for term, key in others]) if others else None
        if free is not None and bounds[1] != 0:
            least, most = bounds
            if (least, most) == (0, None):
                found.append({"type": "star", "content": free})
            else:
                found.append({"type": "repeat", "min": least, "max": -1 if most is None else most, "content": free})
        return {"type": "sequence", "elements": found} if found else _text("")

    def named(self, name: str, key: Key) -> Format:
        node = self.rewriter.nodes[key]
        if self.tags.middle in name + self.tags.middle[:-1] or not name:
            refuse(node.place, f"the name {shown(name)} cannot be told in this model's calls; use another one")
        value = self.value(node, self.kinds.of(name))
        if value is None:
            refuse(node.place, "no value can be told in this model's calls; give it a plain type")
        return _sequence(_text(self.tags.begin + name + self.tags.middle), value, _text(self.tags.end))

    def free(self, place: str, term: Term, key: Key | None) -> Format:
        """Return the format of an argument whose name is free, and none that the schema names anywhere."""
        named = [literal(each) for each in self.kinds.names]
        used = sorted({ord(each) for each in self.tags.middle + self.tags.begin if not each.isalnum()})
        plain_chars = chars(without(without(ANY.ranges, CONTROL), tuple((code, code) for code in used)))
        try:
            name = plain(other_than(conj([term, repeat(plain_chars, 1, None)]), named))
            pattern = pattern_of(name)
        except TooLargeError:
            refuse(place, "the names of other properties are too long written out; set additionalProperties to false")
        node = Node(place, [Leaf({})]) if key is None else self.rewriter.nodes[key]
        value = None if name == NEVER else self.value(node, self.kinds.of_others)
        if value is None:
            refuse(place, "other properties cannot be told in this model's calls; set additionalProperties to false")
        as_named = {"type": "regex", "pattern": pattern}
        return _sequence(_text(self.tags.begin), as_named, _text(self.tags.middle), value, _text(self.tags.end))

    def value(self, node: Node, kinds: Kinds) -> Format | None:
        """Return the format of an argument's value, None if it has none of these kinds."""
        if self.tags.is_json:
            return self.json(self.rewriter.of_shapes(node, node.shapes))
        terms: list[Term] = []
        others: list[Shape] = []
        for shape in node.shapes:
            of_texts, of_others = _parts(shape, kinds)
            terms += of_texts
            others += of_others
        looks = [look_term(kind) for kind in sorted(kinds - {TEXT})]
        term = ALL if ALL in terms else alt(terms)
        try:
            as_text = raw_text(other_than(term, looks) if looks and terms else term, self.tags.end)
        except TooLargeError:
            refuse(node.place, "its texts are too intricate for this model's calls; make the pattern simpler")
        ways = [] if as_text is None else [as_text]
        if others:
            ways.append(self.json(self.rewriter.of_shapes(node, others)))
        return _any(ways) if ways else None

    def json(self, schema: dict[str, Any]) -> Format:
        return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": self.max_whitespace}


def _parts(shape: Shape, kinds: Kinds) -> tuple[list[Term], list[Shape]]:
    """Return the texts of a shape, and what it has beside them, of these kinds."""
    if not isinstance(shape, Leaf):
        return [], [shape] if ("array" if isinstance(shape, ListShape) else "object") in kinds else []
    form = shape.form
    if shape.term is not None:
        return ([shape.term] if TEXT in kinds else []), []
    if not form:
        others: list[Shape] = [part for each in FREE for part in _parts(Leaf(dict(each)), kinds)[1]]
        return ([ALL] if TEXT in kinds else []), others
    if "enum" in form:
        texts = [each for each in form["enum"] if isinstance(each, str) and TEXT in kinds]
        rest = [each for each in form["enum"] if not isinstance(each, str) and kind_of(each) in kinds]
        return [literal(each) for each in texts], [Leaf({"enum": rest})] if rest else []
    kind = "number" if form.get("type") == "integer" else form.get("type")
    return [], [shape] if kind in kinds else []


def _any(ways: list[Format]) -> Format:
    return ways[0] if len(ways) == 1 else {"type": "or", "elements": ways}


def _sequence(*formats: Format) -> Format:
    return {"type": "sequence", "elements": list(formats)}


def _text(value: str) -> Format:
    return {"type": "const_string", "value": value}
