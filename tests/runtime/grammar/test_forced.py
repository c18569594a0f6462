"""Forms that force long texts: a grammar that forces one without end is never asked for it."""

from __future__ import annotations

from typing import Any

import pytest
from schema_walks import END, Walker

from inferc import StructuredOutputs
from inferc.config import GrammarBackend
from inferc.runtime.grammar.forced import is_forced_text_short
from inferc.runtime.grammar.masks import Constraint

DOUBLING = "\n".join([*(f"r{each} ::= r{each + 1} r{each + 1}" for each in range(40)), 'r40 ::= "a"', "root ::= r0"])
PAIRS: dict[str, Any] = {
    f"d{each}": {
        "type": "object",
        "properties": {name: {"$ref": f"#/$defs/d{each + 1}"} for name in "ab"},
        "required": ["a", "b"],
    }
    for each in range(40)
}
CONST = {"type": "const_string", "value": "a"}
TAGS = {"begin": "<", "middle": ">", "end": "</>", "is_json": False}
TREE = {"type": "object", "properties": {"v": {"type": "null"}, "t": {"$ref": "#"}}, "required": ["v"]}


def arguments(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the form of arguments in tags of their own."""
    whole = {"type": "object", **schema}
    return {"structural_tag": {"format": {"type": "arguments", "json_schema": whole, "tags": TAGS}}}


@pytest.mark.parametrize(
    ("fields", "is_short"),
    [
        ({"choice": ["yes", "no"]}, True),
        ({"json_object": True}, True),
        ({"regex": r"\d{4}-ab+"}, True),
        ({"regex": "((a{1000}){1000}){1000}"}, False),
        ({"regex": "b|(a{1000}){1000}"}, False),
        ({"regex": r"\p{L}"}, False),
        ({"json": {"const": {"name": 1}}}, True),
        ({"json": TREE}, True),
        ({"json": {"type": "array", "items": {"const": 1}, "minItems": 4096}}, True),
        (
            {"json": {"type": "array", "minItems": 4000, "items": {"type": "array", "minItems": 4000}}},
            False,
        ),
        ({"json": {"$defs": {**PAIRS, "d40": {"const": 1}}, "$ref": "#/$defs/d0"}}, False),
        ({"json": {"type": "string", "pattern": "^((a{1000}){1000})$"}}, False),
        ({"grammar": 'root ::= "(" root ")" | "x"'}, True),
        ({"grammar": 'root ::= "a" root'}, False),
        ({"grammar": 'root ::= "b" | "c" x\nx ::= "a" x'}, False),
        ({"grammar": DOUBLING}, False),
        ({"grammar": 'root ::= "b" | ("a"{1000}){1000}'}, False),
        ({"grammar": 'start: "a" start'}, False),
        ({"structural_tag": {"format": CONST}}, True),
        ({"structural_tag": {"format": {"type": "repeat", "min": 10**9, "max": -1, "content": CONST}}}, False),
        ({"structural_tag": {"format": {"type": "grammar", "grammar": 'root ::= "a" root'}}}, False),
        (
            {"structural_tag": {"structures": [{"begin": "<", "schema": {"const": 1}, "end": ">"}], "triggers": ["<"]}},
            True,
        ),
        (arguments({"properties": {"a": {"type": "string"}, "b": {"items": TREE}}, "required": ["a"]}), True),
        (arguments({"properties": {"type": {"const": "repeat"}, "min": {"enum": ["regex"]}}}), True),
        (arguments({"additionalProperties": {"type": ["string", "integer"]}}), True),
        (arguments({"properties": {"a": {"type": "string", "pattern": "^b|((a{1000}){1000})$"}}}), False),
        (arguments({"properties": {"a": {"items": {"pattern": "^((a{1000}){1000})$", "type": "string"}}}}), False),
        (arguments({"properties": {"a": {"type": "array", "minItems": 4000, "items": {"minItems": 4000}}}}), True),
        (
            arguments({"properties": {"a": {"minItems": 4000, "items": {"type": "array", "minItems": 4000}}}}),
            False,
        ),
        (arguments({"properties": {"a": {"type": "regex"}}}), False),
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_a_form_forces_is_short_or_not_asked_for(fields: dict[str, Any], is_short: bool) -> None:
    assert is_forced_text_short(StructuredOutputs(**fields)) == is_short


def test_a_text_without_end_is_not_forced(library: GrammarBackend) -> None:
    place = Walker(StructuredOutputs(grammar='root ::= "b" | "c" x\nx ::= "a" x'), library).grammar.matcher()
    assert place.accept(ord("c")) and place.forced_text() == ""
    assert place.accept(ord("a")) and not place.accept(ord("b"))


def test_what_is_forced_ends_before_a_control_token(library: GrammarBackend) -> None:
    """The library llguidance forces nothing in a form that names a token: where one must come, it fails for good."""
    tokens = [{"type": "token", "token": END + 1 + index} for index in range(2)]
    parts = [{"type": "any_text"}, tokens[0], CONST, CONST, tokens[1], {"type": "regex", "pattern": "b"}]
    form: Any = {"format": {"type": "sequence", "elements": parts}}
    walker = Walker(StructuredOutputs(structural_tag=form), library, has_controls=True)
    place, found = walker.grammar.matcher(), []
    written = [*b"xy", END + 1, *b"aa", END + 2, *b"b"]
    for count, token in enumerate(written):
        assert Constraint(place).count_fitting([*written[count:], END]) == len(written) + 1 - count
        found.append(place.forced_text())
        place.fill(walker.bits, 0)
        assert walker.bits[0, token // 32] >> (token % 32) & 1, "it is in the mask"
        assert not place.accept(END) and place.accept(token)
    assert found == (["", "", "", "aa", "a", "", "b"] if library == "xgrammar" else [""] * 7)
    assert place.accept(END)
