"""Random JSON Schemas, whose keywords contradict one another as often as not."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies

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
