"""The document of a JSON Schema: its limits, the places of its schemas, and what their references point at."""

from __future__ import annotations

import difflib
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NoReturn
from urllib.parse import unquote, urljoin

from inferc.errors import RequestError, nearest, shown

MOST_NESTING = 64
MOST_PROPERTIES = 5_000
MOST_VALUES = 2_000
MOST_VALUES_TEXT = 64 * 1024
MOST_TEXT = 256 * 1024
PLACE_SHOWN = 160

ONE = ("items", "additionalItems", "contains", "additionalProperties", "propertyNames", "not", "if", "then", "else")
ONE_MORE = ("unevaluatedItems", "unevaluatedProperties")
SEVERAL = ("allOf", "anyOf", "oneOf", "prefixItems")
NAMED = ("properties", "patternProperties", "dependentSchemas", "$defs", "definitions", "dependencies")
ASSERTING = frozenset(
    (*ONE, *ONE_MORE, *SEVERAL, *NAMED, "$ref", "$dynamicRef", "type", "enum", "const")
    + ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")
    + ("minLength", "maxLength", "pattern", "format", "minItems", "maxItems", "uniqueItems", "minContains")
    + ("maxContains", "required", "minProperties", "maxProperties", "dependentRequired")
)
# Known words that state nothing, and words of other dialects that look like those that do.
SILENT = frozenset(
    ("title", "description", "default", "examples", "example", "deprecated", "readOnly", "writeOnly", "$comment")
    + ("$schema", "$id", "$anchor", "$dynamicAnchor", "$vocabulary", "contentEncoding", "contentMediaType")
    + ("contentSchema", "defs", "schema", "id", "nullable", "discriminator", "xml", "externalDocs", "strict")
    + ("$recursiveRef", "$recursiveAnchor")
)
ALIKE = 0.82


def refuse(place: str, text: str) -> NoReturn:
    """Raise the RequestError of a place in the schema, in one line."""
    if len(place) > PLACE_SHOWN:
        place = f"{place[:PLACE_SHOWN]}…"
    raise RequestError(f"{place if place.isprintable() else place.encode('unicode_escape').decode()}: {text}")


def step(place: str, *names: str | int) -> str:
    """Return the place of what is within a place, as a JSON pointer."""
    return "/".join((place, *(str(name).replace("~", "~0").replace("/", "~1") for name in names)))


@dataclass(frozen=True)
class Schema:
    """One schema of the document. base: the URI that references in it are relative to."""

    raw: dict[str, Any] | bool
    place: str
    base: str


class Document:
    """All schemas of a document; raises RequestError where it is too large, or is no schema."""

    def __init__(self, raw: Any) -> None:
        self.schemas: list[Schema] = []
        self.by_place: dict[str, int] = {}
        self.by_uri: dict[str, int] = {}
        self.dynamic: dict[str, list[int]] = {}
        self._check_size(raw)
        dialect = raw.get("$schema") if isinstance(raw, dict) else None
        # Up to draft 7 nothing beside $ref is read. All but $id is here, which only admits less.
        self.is_old = isinstance(dialect, str) and any(f"draft-0{each}" in dialect for each in (3, 4, 6, 7))
        # Before 2020-12 an item that `contains` matches is evaluated by nothing.
        self.evaluates_contained = not (isinstance(dialect, str) and "2019-09" in dialect)
        self.alternatives: dict[int, list[int]] = {}  # by the number of `any_of`
        self._any_of: dict[tuple[int, ...], int] = {}
        self._register(raw)
        self.true = len(self.schemas)
        self.schemas.append(Schema(True, "#", ""))

    def number(self, place: str) -> int:
        """Return the number of the schema at a place."""
        return self.by_place[place]

    def any_of(self, numbers: list[int]) -> int:
        """Return the number of a schema of the document's own that holds where any of some others does."""
        key = tuple(dict.fromkeys(numbers))
        if key not in self._any_of:
            self._any_of[key] = len(self.schemas)
            self.alternatives[len(self.schemas)] = list(key)
            self.schemas.append(Schema({}, self.schemas[key[0]].place, ""))
        return self._any_of[key]

    def target(self, number: int, keyword: str) -> int:
        """Return the number of the schema that a reference points at."""
        schema = self.schemas[number]
        place = step(schema.place, keyword)
        reference = schema.raw[keyword] if isinstance(schema.raw, dict) else ""
        if not isinstance(reference, str):
            refuse(place, f"expected a text, found {shown(reference)}; write #/$defs/NAME")
        # urljoin does not know every scheme.
        uri = schema.base + reference if reference.startswith("#") else urljoin(schema.base, reference)
        resource, _, fragment = uri.partition("#")
        fragment = unquote(fragment)
        if keyword == "$dynamicRef" and len(self.dynamic.get(fragment, ())) > 1:
            refuse(place, f"{shown(reference)} has several $dynamicAnchor; only one is built")
        if resource not in self.by_uri:
            refuse(place, f"{shown(reference)} is not in this schema; put it into $defs and write #/$defs/NAME")
        if fragment and not fragment.startswith("/"):
            if (found := self.by_uri.get(f"{resource}#{fragment}")) is None:
                refuse(place, f"no $anchor {shown(fragment)} in this schema; write #/$defs/NAME")
            return found
        return self._within(self.by_uri[resource], fragment, place, reference)

    def _within(self, number: int, pointer: str, place: str, reference: str) -> int:
        schema = self.schemas[number]
        here: Any = schema.raw
        names = [each.replace("~1", "/").replace("~0", "~") for each in pointer.split("/")[1:]]
        for name in names:
            if isinstance(here, dict) and name in here:
                here = here[name]
            elif isinstance(here, list) and name.isascii() and name.isdecimal() and int(name) < len(here):
                here = here[int(name)]
            else:
                refuse(place, f"{shown(reference)} points at nothing; write #/$defs/NAME of a schema that is there")
        where = step(schema.place, *names)
        if where not in self.by_place:
            if not isinstance(here, dict | bool):
                refuse(place, f"{shown(reference)} points at no schema; write #/$defs/NAME")
            self._register(here, where, schema.base)
        return self.by_place[where]

    def _check_size(self, raw: Any) -> None:
        """Raise RequestError if the document is too deep or too large, or has what JSON has not."""
        size, todo = 0, [(raw, 1)]
        while todo:
            here, depth = todo.pop()
            if depth > MOST_NESTING and isinstance(here, dict | list):
                refuse("#", f"nests more than {MOST_NESTING} objects and lists; use $defs and $ref")
            if isinstance(here, dict):
                for name, each in here.items():
                    if not isinstance(name, str):
                        refuse("#", f"expected texts as names, found {shown(name)}")
                    todo += (name, depth), (each, depth + 1)
                size += 2
            elif isinstance(here, list):
                todo += ((each, depth + 1) for each in here)
                size += 2
            elif isinstance(here, str):
                size += len(here) + 3
                if not here.isascii() and any("\ud800" <= each <= "\udfff" for each in here):
                    refuse("#", f"{shown(here)} has half of a surrogate pair; write whole characters")
            elif isinstance(here, float) and not math.isfinite(here):
                refuse("#", f"{here} is no JSON; write a finite number")
            elif here is None or isinstance(here, bool | int | float):
                size += 4
            else:
                refuse("#", f"expected JSON, found {shown(here)}")
            if size > MOST_TEXT:
                refuse(
                    "#", f"the schema has more than {MOST_TEXT // 1024} KiB of text; leave out descriptions, or parts"
                )

    def _register(self, raw: Any, place: str = "#", base: str = "") -> None:
        properties = values = text = 0
        todo: list[tuple[Any, str, str]] = [(raw, place, base)]
        while todo:
            here, place, base = todo.pop()
            if not isinstance(here, dict | bool):
                refuse(place, f"expected a schema (an object, true or false), found {shown(here)}")
            number = len(self.schemas)
            if isinstance(here, dict):
                base = self._identify(here, place, base, number)
                self._check_words(here, place)
                properties += len(here["properties"]) if isinstance(here.get("properties"), dict) else 0
                for value in _values(here):
                    values += 1
                    text += sum(map(len, _texts(value)))
            elif not number:
                self.by_uri[""] = number
            self.schemas.append(Schema(here, place, base))
            self.by_place[place] = number
            if properties > MOST_PROPERTIES:
                refuse(place, f"more than {MOST_PROPERTIES} properties in all; use fewer")
            if values > MOST_VALUES or text > MOST_VALUES_TEXT:
                limit = f"{MOST_VALUES} values of enum and const in all, of {MOST_VALUES_TEXT // 1024} KiB of text"
                refuse(place, f"more than {limit}; use fewer, or a pattern")
            if isinstance(here, dict):
                todo += [(each, inner, base) for each, inner in reversed(list(_children(here, place)))]

    def _identify(self, raw: dict[str, Any], place: str, base: str, number: int) -> str:
        """Register the names that a schema gives itself; return the base of what is in it."""
        own = None if "$ref" in raw and self.is_old else raw.get("$id")
        if not number:
            self.by_uri[""] = number
        if isinstance(own, str):
            if own.startswith("#") and len(own) > 1:
                self.by_uri[f"{base}{own}"] = number
            else:
                base = urljoin(base, own).partition("#")[0]
                self.by_uri[base] = number
        for keyword in ("$anchor", "$dynamicAnchor"):
            if isinstance(name := raw.get(keyword), str):
                self.by_uri[f"{base}#{name}"] = number
                if keyword == "$dynamicAnchor":
                    self.dynamic.setdefault(name, []).append(number)
        return base

    def _check_words(self, raw: dict[str, Any], place: str) -> None:
        for word in raw:
            if word in ASSERTING or word in SILENT or word.startswith("x-"):
                continue
            if difflib.get_close_matches(word, ASSERTING, 1, ALIKE):
                refuse(step(place, word), f"{shown(word)} is no keyword; {nearest(word, sorted(ASSERTING))}")


def _children(raw: dict[str, Any], place: str) -> Iterator[tuple[Any, str]]:
    """Yield the schemas in a schema with their places; raises RequestError for what should hold some and does not."""
    for keyword, held in raw.items():
        inner = step(place, keyword)
        if keyword in SEVERAL or (keyword == "items" and isinstance(held, list)):
            if not isinstance(held, list):
                refuse(inner, f"expected a list of schemas, found {shown(held)}")
            for index, each in enumerate(held):
                yield each, step(inner, index)
        elif keyword in ONE or keyword in ONE_MORE:
            yield held, inner
        elif keyword in NAMED:
            if not isinstance(held, dict):
                refuse(inner, f"expected an object of schemas, found {shown(held)}")
            for name, each in held.items():
                if keyword != "dependencies" or not isinstance(each, list):
                    yield each, step(inner, name)


def _values(raw: dict[str, Any]) -> list[Any]:
    found = raw["enum"] if isinstance(raw.get("enum"), list) else []
    return [*found, raw["const"]] if "const" in raw else found


def _texts(value: Any) -> Iterator[str]:
    todo = [value]
    while todo:
        here = todo.pop()
        if isinstance(here, dict):
            todo += (*here, *here.values())
        elif isinstance(here, list):
            todo += here
        elif isinstance(here, str):
            yield here
