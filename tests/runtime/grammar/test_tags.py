"""Structural tags: what they admit, that schemas within them are held to exactly, and refusals at their place."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import numpy as np
import pytest
from schema_walks import END, MARKS, Walker, backend

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


TOKENS: list[dict[str, Any]] = [{"type": "token", "token": END + 1 + index} for index in range(4)]
TRIGGERED: dict[str, Any] = {
    "type": "token_triggered_tags",
    "trigger_tokens": [END + 1, END + 2],
    "tags": [
        {"type": "tag", "begin": TOKENS[0], "content": {"type": "regex", "pattern": "a{2}"}, "end": TOKENS[2]},
        {"type": "tag", "begin": TOKENS[1], "content": {"type": "json_schema", "json_schema": OTHER}, "end": "!"},
    ],
    "exclude_tokens": [END + 3],
}
A, B, C, D = list(MARKS.values())[:4]


@pytest.mark.parametrize("is_needed", [False, True])
@pytest.mark.parametrize("is_one", [False, True])
def test_tags_that_tokens_trigger(library: GrammarBackend, is_needed: bool, is_one: bool) -> None:
    form: Any = {"format": {**TRIGGERED, "at_least_one": is_needed, "stop_after_first": is_one}}
    walker = Walker(StructuredOutputs(structural_tag=form), library, has_controls=True)
    one, other = f"{A}aa{C}", f"{B}{DAY}!"
    assert walker.admits(one) and walker.admits(other)
    assert [text for text in ("", "é\n", D, "x" + one) if walker.admits(text) == is_needed] == []
    assert [text for text in (one + other, one + "x") if walker.admits(text) == is_one] == []
    assert [text for text in (C, A, f"{A}a{C}", f"{A}aa", f"{B}{{}}!", f"{A}{DAY}!") if walker.admits(text)] == []


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("is_one", [False, True])
def test_both_libraries_admit_the_same_tags_of_tokens(library: GrammarBackend, is_one: bool, seed: int) -> None:
    form: Any = StructuredOutputs(structural_tag={"format": {**TRIGGERED, "stop_after_first": is_one}})  # type: ignore[arg-type]
    tries = [f"{A}aa{C}", f"{B}{DAY}!", A, B]
    found = Walker(form, library, has_controls=True, tries=tries).document(seed)
    other: GrammarBackend = "llguidance" if library == "xgrammar" else "xgrammar"
    assert found is None or Walker(form, other, has_controls=True).admits(found)


@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({**TRIGGERED, "trigger_tokens": [END + 2]}, "begin|trigger"),
        ({**TRIGGERED, "trigger_tokens": "a"}, "trigger_tokens"),
        ({**TRIGGERED, "tags": [tag("<a>", SCHEMA, "</a>")]}, "begin"),
        ({**TRIGGERED, "tags": [{"type": "const_string", "value": "a", "begin": TOKENS[0]}]}, "tag"),
        ({"type": "triggered_tags", "triggers": ["<"], "tags": [{"type": "any_text", "begin": "<"}]}, "tag"),
    ],
)
def test_wrong_tags_of_tokens_are_refused(library: GrammarBackend, form: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        Walker(StructuredOutputs(structural_tag={"format": form}), library, has_controls=True)  # type: ignore[arg-type]
    assert "\n" not in str(caught.value) and len(str(caught.value)) < 400


def test_the_text_that_ends_a_tag_may_go_on_from_its_last_part(library: GrammarBackend) -> None:
    """Between two tags stands what begins as the end does."""
    each = {"type": "json_schema", "json_schema": OTHER}
    number = [{"type": "const_string", "value": ", "}, {"type": "regex", "pattern": "[0-9]{2}"}]
    again = {"type": "sequence", "elements": [*number, {"type": "const_string", "value": "; "}, each]}
    content = {"type": "sequence", "elements": [each, {"type": "star", "content": again}, *number]}
    form: Any = {"format": {"type": "tag", "begin": "<", "content": content, "end": ";>"}}
    walker = Walker(StructuredOutputs(structural_tag=form), library)
    assert walker.admits(f"<{DAY}, 12;>") and walker.admits(f"<{DAY}, 12; {DAY}, 34;>")
    assert not walker.admits(f"<{DAY}, 12>") and not walker.admits(f"<{DAY}, 1;>")
