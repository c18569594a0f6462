"""Forms that force long texts: a grammar that forces one without end is never asked for it."""

from __future__ import annotations

from typing import Any

import pytest
from schema_walks import Walker

from inferc import StructuredOutputs
from inferc.config import GrammarBackend
from inferc.runtime.grammar.forced import is_forced_text_short

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
TREE = {"type": "object", "properties": {"v": {"type": "null"}, "t": {"$ref": "#"}}, "required": ["v"]}


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
    ],
    ids=lambda value: str(value)[:60],
)
def test_what_a_form_forces_is_short_or_not_asked_for(fields: dict[str, Any], is_short: bool) -> None:
    assert is_forced_text_short(StructuredOutputs(**fields)) == is_short


def test_a_text_without_end_is_not_forced(library: GrammarBackend) -> None:
    place = Walker(StructuredOutputs(grammar='root ::= "b" | "c" x\nx ::= "a" x'), library).grammar.matcher()
    assert place.accept(ord("c")) and place.forced_text() == ""
    assert place.accept(ord("a")) and not place.accept(ord("b"))
