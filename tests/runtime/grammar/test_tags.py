"""Structural tags: what they admit, that schemas within them are held to exactly, and refusals at their place."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from schema_walks import Walker, backend

from inferc import RequestError, StructuredOutputs
from inferc.config import GrammarBackend

SCHEMA = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Paris"]}, "days": {"type": "integer", "multipleOf": 3}},
    "required": ["city", "days"],
}
OTHER = {"type": "object", "properties": {"day": {"pattern": "^[0-9]{3}$"}}, "required": ["day"]}


def tag(begin: str, schema: Any, end: str) -> dict[str, Any]:
    return {"type": "tag", "begin": begin, "content": {"type": "json_schema", "json_schema": schema}, "end": end}


TAGS = [tag("<a>", SCHEMA, "</a>"), tag("<b>", OTHER, "</b>")]
FREE: dict[str, Any] = {"format": {"type": "triggered_tags", "triggers": ["<a>", "<b>"], "tags": TAGS}}
TRIP, DAY = '{"city": "Rome", "days": 6}', '{"day": "123"}'


@pytest.mark.parametrize(
    ("value", "good", "bad"),
    [
        (FREE, ["no tag < a", f"so <a>{TRIP}</a> and <b>{DAY}</b>."], [f"<a>{DAY}</a>", "<a>", "<b>{}</b>"]),
        (
            {
                "structures": [{"begin": "<a>", "schema": SCHEMA, "end": "</a>"}],
                "triggers": ["<a>"],
            },
            ["", f"<a>{TRIP}</a>"],
            ["<a>{}</a>"],
        ),
        (
            {
                "format": {
                    "type": "sequence",
                    "elements": [
                        {"type": "const_string", "value": "Go: "},
                        {"type": "tags_with_separator", "tags": TAGS, "separator": "; ", "at_least_one": True},
                        {"type": "optional", "content": {"type": "regex", "pattern": "!{1,2}"}},
                    ],
                }
            },
            [f"Go: <a>{TRIP}</a>", f"Go: <b>{DAY}</b>; <a>{TRIP}</a>!!"],
            ["Go: ", "", f"Go: <b>{DAY}</b>;", "Go: <a>{}</a>"],
        ),
    ],
)
def test_tags_hold_parts_of_an_answer(
    library: GrammarBackend, value: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    walker = Walker(StructuredOutputs(structural_tag=value), library)  # type: ignore[arg-type]
    assert [text for text in good if not walker.admits(text)] == []
    assert [text for text in bad if walker.admits(text)] == []


@pytest.mark.parametrize("seed", range(20))
def test_each_schema_is_held_to_exactly(library: GrammarBackend, seed: int) -> None:
    elements = [tag("<a>", SCHEMA, "</a>"), tag("<b>", OTHER, "</b>"), tag("<c>", {"type": "number"}, "</c>")]
    value = {"format": {"type": "sequence", "elements": elements}}
    walker = Walker(StructuredOutputs(structural_tag=value), library)  # type: ignore[arg-type]
    found = walker.document(seed)
    assert found is not None
    for name, schema in (("a", SCHEMA), ("b", OTHER), ("c", {"type": "number"})):
        text = found.partition(f"<{name}>")[2].partition(f"</{name}>")[0]
        jsonschema.Draft202012Validator(schema).validate(json.loads(text))


def test_whitespace_in_schemas_is_bounded_or_none(library: GrammarBackend) -> None:
    form = {"format": tag("<a>", SCHEMA, "</a>")}
    wide = '<a>{\n    "city": "Rome",\n    "days": 6\n}</a>'
    walker = Walker(StructuredOutputs(structural_tag=form), library)  # type: ignore[arg-type]
    assert walker.admits(wide) and not walker.admits(wide.replace("    ", " " * 30))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("{", "it is no JSON"),
        ("[]", "expected an object with a format, found"),
        ({"type": "structural_tag"}, "expected an object with a format, found one with type"),
        ({"format": 3}, "#/format: expected an object with a type, found 3"),
        ({"format": {"type": "tagg"}}, '#/format/type: "tagg" is no format that is held to; did you mean tag?'),
        ({"format": {"type": "or", "elements": []}}, "#/format/elements: expected a list of at least one format"),
        (
            {"format": {"type": "or", "elements": [{"type": "any_text"}, tag("a", {"type": "sting"}, "b")]}},
            "#/format/elements/1/content/json_schema: ",
        ),
        ({"format": {"type": "json_schema", "json_schema": {"type": 3}, "label": "the first"}}, "^the first: #/type"),
        (
            {"format": {"type": "json_schema", "json_schema": {}, "style": "qwen_xml"}},
            '#/format/style: "qwen_xml" is not built',
        ),
        (
            {"format": {"type": "json_schema", "json_schema": {}, "excludes": ["a"]}},
            "#/format/excludes: it is not built",
        ),
        ({"structures": [{"begin": "a", "schema": {}}], "triggers": ["a"]}, "#/structures/0: end is missing"),
        ({"structures": 3, "triggers": ["a"]}, "#/structures: expected a list of objects, found 3"),
        ({"format": {"type": "const_string"}}, "value"),
        ({"format": {"type": "triggered_tags", "triggers": ["<x>"], "tags": TAGS}}, "trigger"),
    ],
)
def test_refusals_say_where(library: GrammarBackend, value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        backend(library).compile(StructuredOutputs(structural_tag=value))
    assert ".cc" not in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ('{"format": {"type": "const_string", "value": "\\ud800"}}', "it is not text: it has half of a surrogate pair"),
        ('{"format": {"type": "regex", "pattern": "\\ud800"}}', "it is not text: it has half of a surrogate pair"),
        ({"a\n" * 9999: 1}, "expected an object with a format, found one with a a"),
        ({str(index): 1 for index in range(9999)}, "found one with 0, 1, 2, 3, 4$"),
        ({"format": {"type": "json_schema", "json_schema": {}, "a\n" * 9999: 1}}, "#/format/a a"),
        ({"format": {"type": "json_schema", "json_schema": {"type": 3}, "label": "a\n" * 9999}}, "a a: #/type"),
        ({"format": {"type": "json_schema", "json_schema": {"type": 3}, "label": {"a": 1}}}, "#/format/json_schema: #"),
        (
            {"format": tag(3, {}, "")},  # type: ignore[arg-type]
            "^(Invalid structural tag error: Tag format's begin|#/format/begin: expected a text)",
        ),
    ],
)
def test_refusals_of_hostile_tags_are_one_line(library: GrammarBackend, value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        backend(library).compile(StructuredOutputs(structural_tag=value))
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_formats_within_formats_are_bounded(library: GrammarBackend) -> None:
    value: dict[str, Any] = {"type": "any_text"}
    for _ in range(40):
        value = {"type": "optional", "content": value}
    with pytest.raises(RequestError, match="within one another more than 32 times"):
        backend(library).compile(StructuredOutputs(structural_tag={"format": value}))  # type: ignore[arg-type]


@pytest.mark.parametrize("named", ["token", "begin", "exclude_token"])
def test_tags_that_differ_in_the_ids_of_tokens_alone_are_told_apart(library: GrammarBackend, named: str) -> None:
    for token in (*b"xyz", *b"xyz"):
        one: dict[str, Any] = {"type": "token", "token": token}
        if named == "begin":
            one = {"type": "tag", "begin": one, "content": {"type": "any_text"}, "end": "+"}
        if named == "exclude_token":
            one = {"type": "exclude_token", "exclude_tokens": [token]}
        text = {"type": "sequence", "elements": [{"type": "const_string", "value": "!"}, one]}
        walker = Walker(StructuredOutputs(structural_tag={"format": text}), library)  # type: ignore[arg-type]
        matcher = walker.grammar.matcher()
        assert matcher.accept(ord("!"))
        matcher.fill(walker.bits, 0)
        allowed = np.flatnonzero(np.unpackbits(walker.bits.view(np.uint8), bitorder="little"))
        assert (set(b"xyz") & set(allowed.tolist()) == {token}) == (named != "exclude_token")
        assert (token in allowed) == (named != "exclude_token")
