"""The kinds of values that an argument may have by its tool's schema, and the texts that look like one of a kind.

An argument in tags of its own is a text as it stands, or another value as JSON. Where the schema has both, a text that
looks like one of its other values is one. The grammar writes no text that looks so, and the reader tells them by the
same words, so that the two cannot differ.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Any, TypeAlias

from inferc.runtime.grammar.schema.ecma import pattern_term
from inferc.runtime.grammar.schema.regex import ALL, Term, literal, seq

Kinds: TypeAlias = frozenset[str]

TEXT = "string"
KINDS: Kinds = frozenset(("null", "boolean", "number", "string", "array", "object"))
OPENING = {"{": "object", "[": "array"}  # a text that begins so looks like one
LOOKS = {
    "null": "null",
    "boolean": "true|false",
    "number": r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?",
}
SHORT = re.compile(r"[a-z]{0,5}|[-+.eE0-9]*")  # what the other kinds' texts begin with
MOST_DEPTH = 16
MOST_SEEN = 1_000  # schemas of one object that are looked into
IN_PLACE = ("allOf", "anyOf", "oneOf")
IN_PLACE_ONE = ("if", "then", "else")


@cache
def look_term(kind: str) -> Term:
    """Return the term of the texts that look like a kind."""
    if kind in LOOKS:
        return pattern_term(f"^(?:{LOOKS[kind]})$")
    return seq((literal(next(begin for begin, each in OPENING.items() if each == kind)), ALL))


def looks_like(text: str, kinds: Kinds) -> bool:
    """Return whether a text looks like a value of one of these kinds."""
    return OPENING.get(text[:1]) in kinds or any(re.fullmatch(LOOKS[kind], text) for kind in kinds & LOOKS.keys())


def may_look_like(text: str, kinds: Kinds) -> bool:
    """Return whether a text may look like a value of one of these kinds once more follows, or does already."""
    return bool(SHORT.fullmatch(text)) or looks_like(text, kinds)


class ArgumentKinds:
    """The kinds of each argument of a tool, from above: a value of another kind is never written.

    Only keywords that name kinds are read, each at most once.
    """

    def __init__(self, parameters: Any) -> None:
        self._root = parameters
        self._objects = list(self._in_place(parameters))
        self._kinds: dict[str | None, Kinds] = {}
        self._known: dict[int, Kinds] = {}  # by the id of a schema within the root

    @property
    def names(self) -> list[str]:
        """The names of arguments that the schema knows, in order."""
        held = [schema.get("properties") for schema in self._objects]
        return list(dict.fromkeys(name for each in held if isinstance(each, Mapping) for name in each))

    @property
    def of_others(self) -> Kinds:
        """The kinds of arguments whose names it does not know."""
        return self.of(None)

    def of(self, name: str | None) -> Kinds:
        """Return the kinds of the argument with this name."""
        if name not in self._kinds:
            found = [self._of_schema(schema) for schema in self._schemas(name)]
            self._kinds[name] = frozenset[str]().union(*found) if found else KINDS
        return self._kinds[name]

    def _in_place(self, schema: Any) -> Iterator[Mapping[str, Any]]:
        """Yield the schemas that hold for the object of all arguments."""
        todo, seen = [schema], set[int]()
        while todo and len(seen) < MOST_SEEN:
            each = todo.pop()
            if not isinstance(each, Mapping) or id(each) in seen:
                continue
            seen.add(id(each))
            yield each
            for name in IN_PLACE:
                todo += each[name] if isinstance(each.get(name), list) else ()
            todo += [each[name] for name in IN_PLACE_ONE if name in each]
            dependent = [each.get(name) for name in ("dependentSchemas", "dependencies")]
            todo += [inner for held in dependent if isinstance(held, Mapping) for inner in held.values()]
            if (target := self._target(each)) is not None:
                todo.append(target)

    def _schemas(self, name: str | None) -> Iterator[Any]:
        others = []
        is_named = False
        for schema in self._objects:
            properties, patterns = schema.get("properties"), schema.get("patternProperties")
            if isinstance(properties, Mapping) and name in properties:
                is_named = True
                yield properties[name]
            others += list(patterns.values()) if isinstance(patterns, Mapping) else []
            others += [schema[each] for each in ("additionalProperties", "unevaluatedProperties") if each in schema]
        if not is_named:
            yield from others

    def _of_schema(self, schema: Any, depth: int = 0) -> Kinds:
        if isinstance(schema, bool):
            return KINDS if schema else frozenset()
        if not isinstance(schema, Mapping) or depth == MOST_DEPTH:
            return KINDS
        if id(schema) not in self._known:
            self._known[id(schema)] = KINDS  # where it refers to itself
            self._known[id(schema)] = self._read(schema, depth + 1)
        return self._known[id(schema)]

    def _read(self, schema: Mapping[str, Any], depth: int) -> Kinds:
        found = KINDS
        if "type" in schema:
            given = schema["type"] if isinstance(schema["type"], list) else [schema["type"]]
            found &= {"number" if each == "integer" else each for each in given if isinstance(each, str)}
        if isinstance(schema.get("enum"), list):
            found &= set(map(kind_of, schema["enum"]))
        if "const" in schema:
            found &= {kind_of(schema["const"])}
        for each in schema["allOf"] if isinstance(schema.get("allOf"), list) else ():
            found &= self._of_schema(each, depth)
        for name in ("anyOf", "oneOf"):
            if isinstance(schema.get(name), list):
                found &= frozenset[str]().union(*(self._of_schema(each, depth) for each in schema[name]))
        return found if (target := self._target(schema)) is None else found & self._of_schema(target, depth)

    def _target(self, schema: Mapping[str, Any]) -> Any:
        """Return what a reference within the document points at; None if it is none."""
        reference = schema.get("$ref")
        if not isinstance(reference, str) or not reference.startswith("#/"):
            return self._root if reference == "#" else None
        found: Any = self._root
        for name in reference[2:].split("/"):
            name = name.replace("~1", "/").replace("~0", "~")
            if not isinstance(found, Mapping) or name not in found:
                return None
            found = found[name]
        return found


def kind_of(value: Any) -> str:
    """Return the kind of a value that JSON has."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, str):
        return TEXT
    return "number" if isinstance(value, int | float) else "array" if isinstance(value, list) else "object"
