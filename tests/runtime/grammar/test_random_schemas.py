"""Random schemas: each is refused by place, or every document that its rewriting admits is valid."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings, strategies
from schema_walks import Walker

from inferc.config import GrammarBackend
from inferc.errors import RequestError

NAMES = ("a", "b", "title", "ab")
NAME = strategies.sampled_from(NAMES)
COUNT = strategies.integers(0, 3)
NUMBER = strategies.sampled_from([-3, -1.5, 0, 0.25, 1, 2, 7, 10])
VALUE = strategies.recursive(
    strategies.sampled_from([None, True, False, 0, 1, 1.0, 2.5, -3, "", "a", 'b"', "ab1"]),
    lambda inner: strategies.lists(inner, max_size=2) | strategies.dictionaries(NAME, inner, max_size=2),
    max_leaves=3,
)
PATTERN = strategies.sampled_from(["^a", "b$", "^[a-c]+$", "a|1", "^\\w{2,3}$", "^(ab)*$", '^[^"]b?$'])
TYPE = strategies.sampled_from(["null", "boolean", "integer", "number", "string", "array", "object"])


def schemas(inner: strategies.SearchStrategy[Any]) -> strategies.SearchStrategy[dict[str, Any]]:
    """Return the strategy of schemas with a few keywords each, which may contain `inner` ones."""
    several = strategies.lists(inner, min_size=1, max_size=3)
    named = strategies.dictionaries(NAME, inner, max_size=3)
    keywords: dict[str, strategies.SearchStrategy[Any]] = {
        "type": TYPE | strategies.lists(TYPE, min_size=1, max_size=3, unique=True),
        "enum": strategies.lists(VALUE, min_size=1, max_size=4),
        "const": VALUE,
        "minimum": NUMBER,
        "exclusiveMaximum": NUMBER,
        "maximum": NUMBER,
        "multipleOf": strategies.sampled_from([1, 2, 3, 0.5]),
        "minLength": COUNT,
        "maxLength": COUNT,
        "pattern": PATTERN,
        "format": strategies.sampled_from(["date", "ipv4", "uuid", "other"]),
        "properties": named,
        "patternProperties": strategies.dictionaries(PATTERN, inner, max_size=2),
        "additionalProperties": inner,
        "propertyNames": strategies.fixed_dictionaries({}, optional={"pattern": PATTERN, "enum": several_names()}),
        "required": several_names(),
        "minProperties": COUNT,
        "maxProperties": COUNT,
        "items": inner,
        "prefixItems": several,
        "contains": inner,
        "minItems": COUNT,
        "maxItems": COUNT,
        "uniqueItems": strategies.booleans(),
        "allOf": several,
        "anyOf": several,
        "oneOf": several,
        "not": inner,
        "if": inner,
        "then": inner,
        "else": inner,
        "dependentRequired": strategies.dictionaries(NAME, several_names(), max_size=2),
        "dependentSchemas": named,
        "unevaluatedProperties": inner,
        "unevaluatedItems": inner,
        "$ref": strategies.sampled_from(["#", "#/$defs/x", "#/$defs/y"]),
    }
    some = strategies.lists(strategies.sampled_from(sorted(keywords)), max_size=4, unique=True)
    return some.flatmap(lambda chosen: strategies.fixed_dictionaries({name: keywords[name] for name in chosen}))


def several_names() -> strategies.SearchStrategy[list[str]]:
    return strategies.lists(NAME, max_size=2, unique=True)


SCHEMA = strategies.recursive(strategies.booleans() | schemas(strategies.booleans()), schemas, max_leaves=6)
ROOT = strategies.tuples(schemas(SCHEMA), SCHEMA, SCHEMA).map(
    lambda parts: {**parts[0], "$defs": {"x": parts[1], "y": parts[2]}}
)


def check(schema: dict[str, Any], count: int, library: GrammarBackend) -> bool:
    """Assert that a schema is refused in one line, or that so many random documents under it are valid."""
    try:
        walker = Walker(schema, library)
    except RequestError as error:
        assert str(error).startswith("#") and "\n" not in str(error)
        return False
    kind = jsonschema.Draft202012Validator
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    for seed in range(count):
        if (text := walker.document(seed)) is not None:
            assert validator.is_valid(json.loads(text)), text
    return True


@pytest.mark.slow
@settings(max_examples=1500, deadline=None, derandomize=True)
@given(schema=ROOT)
def test_many_random_schemas(library: GrammarBackend, schema: dict[str, Any]) -> None:
    check(schema, 20, library)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(schema=ROOT)
def test_random_schemas(library: GrammarBackend, schema: dict[str, Any]) -> None:
    check(schema, 20, library)
