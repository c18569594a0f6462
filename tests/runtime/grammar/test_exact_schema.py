"""JSON Schemas as grammars: what is held to exactly, what is admitted, and what is refused at its place."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from schema_walks import Walker

from inferc import RequestError
from inferc.config import GrammarBackend

OPTIONAL_B = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "string"}}, "required": ["a"]}
TREE = {
    "$defs": {
        "tree": {
            "type": "object",
            "properties": {"value": {"type": "integer"}, "left": {"$ref": "#/$defs/tree"}},
            "required": ["value"],
        }
    },
    "$ref": "#/$defs/tree",
}
# A schema, documents that it must admit, and documents that it must not.
EXACT: list[tuple[Any, list[str], list[str]]] = [
    (True, ["1", '"a"', "[{}]"], ["", "a"]),
    ({"type": "object"}, ["{}", '{"x": [1]}'], ["[]"]),
    (OPTIONAL_B, ['{"a":1}', '{"a": 1, "b": "x"}'], ["{}", '{"b":"x"}', '{"a":"x"}']),
    (TREE, ['{"value":1,"left":{"value":2}}'], ['{"left":{"value":2}}']),
    ({"minimum": 5}, ["5", '"a"', "7.5"], ["4", "-1"]),
    ({"type": "integer", "minimum": 1.5, "maximum": 7}, ["2", "7"], ["1", "8"]),
    ({"type": "integer", "multipleOf": 7}, ["0", "14", "-7"], ["13"]),
    ({"enum": [1, 5, 9], "minimum": 4}, ["5", "9"], ["1"]),
    ({"type": "string", "enum": ["a", 3]}, ['"a"'], ["3"]),
    ({"const": {"a": [1, "x"]}}, ['{"a": [1, "x"]}'], ['{"a": [1]}']),
    ({"allOf": [{"type": "integer", "minimum": 3}, {"maximum": 5}]}, ["3", "5"], ["2", "6", '"a"']),
    ({"$defs": {"a": {"type": "integer"}}, "$ref": "#/$defs/a", "minimum": 5}, ["5"], ["4"]),
    ({"$defs": {"a/b": {"type": "null"}}, "$ref": "#/$defs/a~1b"}, ["null"], ["1"]),
    ({"$defs": {"a b": {"type": "null"}}, "$ref": "#/$defs/a%20b"}, ["null"], ["1"]),
    ({"$defs": {"a": {"$anchor": "x", "type": "null"}}, "$ref": "#x"}, ["null"], ["1"]),
    ({"$id": "http://x/y", "$defs": {"a": {"$id": "z", "type": "null"}}, "$ref": "z"}, ["null"], ["1"]),
    ({"definitions": {"a": {"type": "null"}}, "$ref": "#/definitions/a"}, ["null"], ["1"]),
    ({"oneOf": [{"type": "integer"}, {"type": "string"}]}, ["1", '"a"'], ["null"]),
    ({"oneOf": [{"type": "integer", "minimum": 0}, {"type": "integer", "maximum": 10}]}, ["-1", "11"], ["5"]),
    ({"type": "integer", "not": {"const": 3}}, ["2", "4"], ["3"]),
    ({"type": ["integer", "null"], "not": {"type": "null"}}, ["2"], ["null"]),
    ({"type": "array", "prefixItems": [{"type": "null"}], "items": False}, ["[]", "[null]"], ["[null, 1]"]),
    ({"type": "array", "items": {"enum": [1, 2]}, "uniqueItems": True}, ["[]", "[2, 1]"], ["[1, 1]"]),
    (
        {"type": "array", "items": {"enum": ["a", "b", "c", "d", "e"]}, "uniqueItems": True},
        ["[]", '["e","a","c"]', '["b","a","e","d","c"]'],
        ['["a","b","a"]', '["b","b"]'],
    ),
    (
        {"type": "array", "items": {"type": "string"}, "uniqueItems": True, "maxItems": 1},
        ["[]", '["x"]'],
        ['["x","y"]'],
    ),
    (
        {"prefixItems": [True], "contains": {"type": "null"}, "unevaluatedItems": False},
        ["[1,null]", "[null]"],
        ["[1,2]"],
    ),
    (
        {"contains": {"type": "null"}, "minContains": 0, "unevaluatedItems": {"const": 1}},
        ["[]", "[1]", "[null,1,null]"],
        ["[2]", "[null,2]"],
    ),
    ({"type": "array", "contains": {"const": 1}, "maxItems": 2}, ["[1]", "[2, 1]"], ["[]", "[2]"]),
    ({"contains": {"const": 1}, "minContains": 2, "maxItems": 3}, ["[1,1]", "[0,1,1]", "[1,0,1]"], ["[1]", "[0,0,1]"]),
    ({"contains": {"const": 1}}, ["[1]", "[0,0,0,0,0,0,0,1]", "[1,2,3]"], ["[]", "[0,2]"]),
    ({"contains": {"const": 1}, "minContains": 2}, ["[1,1]", "[0,1,0,1,0]"], ["[1]", "[0,1,0]"]),
    ({"contains": {"type": "null"}, "prefixItems": [{"const": 1}]}, ["[1,null]", "[1,2,null,3]"], ["[1]", "[null]"]),
    ({"contains": True}, ["[0]", "[0,1]", '"a"'], ["[]"]),
    ({"contains": {"if": False, "else": True}, "minContains": 2}, ["[0,1]"], ["[0]"]),
    ({"contains": False}, ["1", "{}"], ["[]", "[0]"]),
    ({"not": {"type": "integer"}}, ['"a"', "null", "[1]"], ["1"]),
    (
        {
            "oneOf": [
                {"properties": {"a": {"type": "integer"}}, "required": ["a"]},
                {"properties": {"b": {"type": "string"}}, "required": ["b"]},
            ]
        },
        ['{"a":1}', '{"b":"y","a":"x"}', '{"a":1,"b":2}'],
        ['{"a":1,"b":"y"}', '{"a":"x"}'],
    ),
    ({"type": "string", "minLength": 2, "maxLength": 3}, ['"ab"', '"é東c"'], ['"a"', '"abcd"', '"a\x01"']),
    ({"type": "string", "pattern": "b+c"}, ['"bbc"'], ['"bb"']),
    ({"type": "string", "pattern": '^["\\\\]$'}, ['"\\""', '"\\\\"'], ['"a"', '"\\"']),
    ({"type": "string", "pattern": "^a+$", "maxLength": 3}, ['"aaa"'], ['"aaaa"', '"b"']),
    (
        {"type": "string", "pattern": "^[a-z](-?[a-z])*$", "maxLength": 39},
        ['"a"', '"a-b-cd"', f'"{"a-" * 19}b"'],
        ['"a--b"', '"ab-"', f'"{"ab" * 20}"'],
    ),
    ({"type": "string", "format": "date"}, ['"2024-02-29"'], ['"2023-02-29"', '"2024-13-01"']),
    ({"type": "string", "format": "ipv4"}, ['"10.0.0.255"'], ['"10.0.0.256"', '"10.0.0.01"']),
    ({"type": "string", "format": "zork"}, ['"a"'], ["1"]),
    (
        {"properties": {"a": {"type": "integer"}}, "patternProperties": {"^x": {"type": "null"}}},
        ['{"x1":null}'],
        ['{"x1":1}'],
    ),
    ({"type": "object", "properties": {"a": {}}, "dependentRequired": {"a": ["b"]}}, ["{}"], ['{"a":1}']),
    (
        {
            "type": "object",
            "properties": {"kind": {"enum": ["a", "b"]}, "n": {"type": "integer"}},
            "required": ["kind"],
            "if": {"properties": {"kind": {"const": "a"}}},
            "then": {"required": ["n"]},
        },
        ['{"kind":"b"}', '{"kind":"a","n":1}'],
        ['{"kind":"a"}'],
    ),
]


@pytest.mark.parametrize(("schema", "admitted", "others"), EXACT, ids=lambda value: json.dumps(value)[:60])
def test_what_is_admitted(library: GrammarBackend, schema: Any, admitted: list[str], others: list[str]) -> None:
    walker = Walker(schema, library)
    kind = jsonschema.Draft202012Validator
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    for text in admitted:
        assert validator.is_valid(json.loads(text)), "the example is wrong"
        assert walker.admits(text), text
    assert [text for text in others if walker.admits(text)] == []
    for seed in range(30):
        if (found := walker.document(seed)) is not None:
            assert validator.is_valid(json.loads(found)), found


def nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"items": schema}
    return schema


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"type": "strnig"}, '#/type: expected array, boolean, integer, null, number, object, string, found "strnig"'),
        ({"propertees": {}}, '#/propertees: "propertees" is no keyword; did you mean properties?'),
        ({"type": "array", "contains": {}, "maxContains": 2}, '#/maxContains: "maxContains" is not built'),
        ({"contains": {"const": 1}, "minContains": 9}, "#/contains: minContains 9 is more than 8, among whose"),
        (
            {"type": "array", "allOf": [{"contains": {"const": each}} for each in range(3)], "maxItems": 8},
            "#/allOf/2/contains: more than 256 ways in which lists contain what they must",
        ),
        (
            {"type": "array", "contains": {}, "minContains": 3, "maxItems": 2},
            "#: admits nothing: minContains 3 is more than maxItems 2",
        ),
        ({"type": "array", "contains": False}, "#: admits nothing: #/contains is false"),
        (
            {"type": ["number", "null"], "not": {"type": "integer"}},
            "#/not/type: numbers that are no integers cannot be",
        ),
        ({"type": "number", "allOf": [{"maximum": 1e20}]}, "#/allOf/0/maximum: bounds of numbers beyond 1e15"),
        ({"type": "object", "allOf": [{"minProperties": 3}]}, "#/allOf/0/minProperties: 3 properties that differ"),
        ({"type": "object", "minProperties": 1, "not": {"maxProperties": 2}}, "#/not/maxProperties: 3 properties that"),
        ({"type": "array", "uniqueItems": True, "contains": {"const": 1}}, "#/uniqueItems: found true"),
        ({"type": "number", "multipleOf": 0.3, "minLength": 1}, "#/multipleOf: multiples of 0.3"),
        ({"not": {}}, "#: admits nothing: not #/not, which admits everything"),
        ({"type": "array", "uniqueItems": True}, "#/uniqueItems: found true, which is built for few values"),
        ({"type": "number", "multipleOf": 0.3}, "#/multipleOf: multiples of 0.3 are not built"),
        ({"type": "object", "minProperties": 3}, "#/minProperties: 3 properties that differ are not built"),
        ({"$ref": "https://example.com/a.json"}, '#/$ref: "https://example.com/a.json" is not in this schema'),
        ({"$ref": "#/$defs/none"}, '#/$ref: "#/$defs/none" points at nothing'),
        ({"type": "string", "pattern": "(?=a)b"}, "#/pattern: (?...) other than a group is not built"),
        ({"type": "string", "pattern": r"(a)\1"}, "#/pattern: a back reference"),
        ({"type": "string", "pattern": "(a"}, '#/pattern: missing ")" in the pattern'),
        ({"type": "string", "maxLength": 100_000}, "#/maxLength: found 100000, expected at most 4096"),
        ({"required": "a"}, '#/required: expected a list of names, found "a"'),
        (False, "#: admits nothing"),
        ({"enum": []}, "#: admits nothing: no value of enum is left"),
        ({"type": "integer", "minimum": 5, "maximum": 3}, "#: admits nothing: minimum 5 is more than maximum 3"),
        ({"const": 3, "minimum": 5}, "#: admits nothing: its one value does not hold to the rest"),
        (
            {"type": "object", "properties": {"a": {}}, "required": ["b"], "additionalProperties": False},
            "#: admits nothing: it requires what #/additionalProperties rules out",
        ),
        (
            {"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]},
            "#/properties/a: admits nothing: it never ends",
        ),
        (
            {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"},
            "#/$defs/a: refers to itself without end",
        ),
        (nested(100), "#: nests more than 64 objects and lists"),
        ({"properties": {f"p{number}": {} for number in range(6000)}}, "#: more than 5000 properties in all"),
        (
            {"enum": [f"value-{number}" for number in range(10_000)]},
            "#: more than 2000 values of enum and const in all",
        ),
        (
            {"allOf": [{"anyOf": [{"minimum": i, "maximum": i + j} for i in range(12)]} for j in range(12)]},
            "#/allOf/11/anyOf: the alternatives here multiply to more than 256",
        ),
    ],
    ids=lambda value: json.dumps(value)[:60],
)
def test_what_is_refused(library: GrammarBackend, schema: Any, message: str) -> None:
    with pytest.raises(RequestError) as caught:
        Walker(schema, library)
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_an_optional_property_that_admits_nothing_is_never_written(library: GrammarBackend) -> None:
    empty = {"minimum": 5, "maximum": 3, "type": "integer"}
    walker = Walker({"type": "object", "properties": {"a": {"type": "null"}, "b": empty}}, library)
    assert walker.admits('{"a":null}') and not walker.admits('{"b":4}')


def test_any_of_a_thousand_properties_may_come_next_with_llguidance() -> None:
    walker = Walker({"properties": {f"p{index}": {"type": "null"} for index in range(1000)}}, "llguidance")
    assert walker.admits('{"p7":null,"p999":null}')
    assert not walker.admits('{"p7":null,"p1000":null}')
