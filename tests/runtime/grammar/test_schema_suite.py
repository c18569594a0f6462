"""The official tests of JSON Schema: schemas are held to or refused by place, and what is invalid is never admitted."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from itertools import islice, permutations, product
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from schema_walks import Walker

from inferc.config import GrammarBackend
from inferc.errors import RequestError

INSTALLED = Path(__file__).parents[3] / ".venv-schema-suite"
FOLDER = INSTALLED / "json" / "tests" / "draft2020-12"
MOST_EQUAL = 200
DOCUMENTS = 20
WHOLE = 2**53

pytestmark = pytest.mark.slow


@dataclass
class Outcome:
    """The schemas of a folder, compiled or refused, and the instances that came out otherwise than the tests say.

    narrower: how many valid instances a schema has that are not admitted.
    """

    compiled: dict[str, tuple[Any, Walker]] = field(default_factory=dict)
    refused: list[tuple[str, Any, str]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    narrower: dict[str, int] = field(default_factory=Counter)
    valid: int = 0
    invalid: int = 0


@cache
def outcome(folder: str, library: GrammarBackend) -> Outcome:
    if not (INSTALLED / ".installed").exists():
        pytest.skip("the tests of JSON Schema are not installed: make .venv-schema-suite/.installed")
    found = Outcome()
    for file in sorted((FOLDER / folder).glob("*.json")):
        for group in json.loads(file.read_text(encoding="utf-8")):
            name = f"{file.stem}: {group['description']}"
            try:
                walker = Walker(group["schema"], library)
            except RequestError as error:
                found.refused.append((name, group["schema"], str(error)))
                continue
            found.compiled[name] = group["schema"], walker
            for test in group["tests"]:
                is_admitted = any(map(walker.admits, spellings(test["data"])))
                found.valid += test["valid"]
                found.invalid += not test["valid"]
                if is_admitted and not test["valid"]:
                    found.wrong.append(f"{name}: {test['description']}")
                elif test["valid"] and not is_admitted:
                    found.narrower[name] += 1
    return found


def spellings(value: Any) -> Iterator[str]:
    """Yield texts of a value: in other orders of properties, whole numbers with .0, indented, with escapes."""
    for each in islice(equals(value), MOST_EQUAL):
        yield json.dumps(each)
        yield json.dumps(each, ensure_ascii=False)
        yield json.dumps(each, separators=(",", ":"))
        yield json.dumps(each, indent=2)


def equals(value: Any) -> Iterator[Any]:
    """Yield values that are the same as JSON, itself first."""
    if isinstance(value, dict):
        for names in permutations(value):
            for held in product(*(list(islice(equals(value[name]), 4)) for name in names)):
                yield dict(zip(names, held, strict=True))
    elif isinstance(value, list):
        yield from map(list, product(*(list(islice(equals(each), 4)) for each in value)))
    else:
        yield value
        if isinstance(value, float) and value.is_integer():
            yield int(value)
        elif isinstance(value, int) and not isinstance(value, bool) and abs(value) <= WHOLE:
            yield float(value)


def at(schema: Any, place: str) -> Any:
    """Return what is at a place as messages name it; raises if there is nothing."""
    here = schema
    for name in place.split("/")[1:]:
        name = name.replace("~1", "/").replace("~0", "~")
        if isinstance(here, dict) and name not in here:
            name = name.encode().decode("unicode_escape")
        here = here[int(name)] if isinstance(here, list) else here[name]
    return here


@pytest.mark.parametrize("folder", ["", "optional", "optional/format"])
def test_what_is_refused_is_refused_by_the_place_of_a_keyword(library: GrammarBackend, folder: str) -> None:
    for name, schema, message in outcome(folder, library).refused:
        place, _, words = message.partition(": ")
        assert place.startswith("#") and "\n" not in message, name
        assert place != "#" or words.startswith("admits nothing: "), (name, message)
        at(schema, place)


# Formats without a pattern are annotations.
ANNOTATIONS = ("ecmascript-regex: \\a is", "regex: validation", "uri-template: ")


@pytest.mark.parametrize("folder", ["", "optional", "optional/format"])
def test_no_invalid_instance_is_admitted(library: GrammarBackend, folder: str) -> None:
    assert [each for each in outcome(folder, library).wrong if not each.startswith(ANNOTATIONS)] == []


@pytest.mark.parametrize("folder", ["", "optional/format"])
def test_random_documents_are_valid(library: GrammarBackend, folder: str) -> None:
    kind = jsonschema.Draft202012Validator
    for name, (schema, walker) in outcome(folder, library).compiled.items():
        validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
        for seed in range(DOCUMENTS):
            if (text := walker.document(seed)) is not None:
                assert validator.is_valid(json.loads(text)), (name, text)


REFUSED = {
    "#": 10,  # what admits nothing
    "$ref": 22,  # other documents
    "$dynamicRef": 8,
    "maxContains": 6,
    "minProperties": 1,
    "multipleOf": 6,
    "unevaluatedProperties": 2,
    "uniqueItems": 3,
}


def test_as_many_schemas_are_refused_for_each_keyword_as_documented(library: GrammarBackend) -> None:
    found = outcome("", library)
    places = [message.partition(": ")[0] for _, _, message in found.refused]
    assert Counter(place.rpartition("/")[2] for place in places) == REFUSED
    assert len(found.compiled) == 310


# How many valid instances are not admitted, by why, and by schema.
NARROWER = {
    "an object that names properties has no others": {
        "additionalProperties: additionalProperties are allowed by default": 1,
        "anyOf: anyOf complex types": 1,
        "dependentSchemas: dependent subschema incompatible with root": 2,
        "dynamicRef: A $dynamicRef that initially resolves to a schema without a matching $dynamicAnchor "
        "behaves like a normal $ref to $anchor": 1,
        "not: forbidden property": 1,
        "patternProperties: regexes are not anchored by default and are case sensitive": 2,
        "properties: object properties validation": 1,
    },
    "a pattern that is not anchored is the whole text": {"pattern: pattern is not anchored": 1},
    "numbers that are no integers are left out where they alone are ruled in": {"oneOf: oneOf": 1},
    "one alternative is written at a time, and an if alone is none": {
        "unevaluatedItems: unevaluatedItems and contains interact to control item dependency relationship": 1,
        "unevaluatedItems: unevaluatedItems can see annotations from if without then and else": 1,
        "unevaluatedProperties: unevaluatedProperties can see annotations from if without then and else": 1,
        "unevaluatedProperties: unevaluatedProperties with anyOf": 1,
    },
    "vocabularies are not read": {
        "vocabulary: schema that uses custom metaschema with with no validation vocabulary": 1
    },
}


def test_valid_instances_are_admitted_but_for_what_is_documented(library: GrammarBackend) -> None:
    found = outcome("", library)
    formats = {name: count for name, count in found.narrower.items() if name.startswith("format: ")}
    assert set(formats.values()) == {1}, "each is of an instance that is valid because a format may be ignored"
    others = {name: count for name, count in found.narrower.items() if name not in formats}
    assert others == {name: count for names in NARROWER.values() for name, count in names.items()}
    assert (found.valid, found.invalid, sum(formats.values())) == (661, 392, 17)
