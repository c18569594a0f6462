"""The form that a request asks of its answer: how it is given, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest

from inferc import RequestError, SamplingParams, StructuredOutputs
from inferc.runtime.step.structured_outputs import MAX_BYTES, MAX_CHOICES

SCHEMA = {"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}


def test_a_schema_is_kept_as_text_with_its_order() -> None:
    form = StructuredOutputs(json=SCHEMA)  # type: ignore[arg-type]
    assert form.kind == form.form == "json"
    assert form.source == '{"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}'
    assert form == StructuredOutputs(json=form.source) and hash(form) == hash(StructuredOutputs(json=form.source))


def test_a_pydantic_model_gives_its_schema() -> None:
    class Person:
        @staticmethod
        def model_json_schema() -> dict[str, Any]:
            return SCHEMA

    assert StructuredOutputs(json=Person) == StructuredOutputs(json=SCHEMA)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fields", "kind", "source"),
    [
        ({"json": True}, "json", "true"),
        ({"json_object": True}, "json_object", ""),
        ({"regex": "a+"}, "regex", "a+"),
        ({"choice": ["yes", 'n"o']}, "choice", '["yes", "n\\"o"]'),
        ({"grammar": 'root ::= "a"'}, "ebnf", 'root ::= "a"'),
        ({"grammar": 'start: "a"'}, "lark", 'start: "a"'),
        ({"structural_tag": {"format": {"type": "any_text"}}}, "structural_tag", '{"format": {"type": "any_text"}}'),
    ],
)
def test_kinds(fields: dict[str, Any], kind: str, source: str) -> None:
    form = StructuredOutputs.of(fields)
    assert form is not None and (form.kind, form.source) == (kind, source)
    assert form.label == f"structured_outputs.{form.form}"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({}, "expected one of json, json_object, regex, choice, grammar, structural_tag, found none"),
        ({"json_object": False}, "found none"),
        ({"regex": "a", "choice": ["b"]}, "found regex and choice"),
        ({"rexeg": "a"}, 'structured_outputs: it has no field "rexeg"; did you mean regex?'),
        ({"label": "a"}, 'has no field "label"'),
        ({"regex": "a", "whitespace_pattern": " ?"}, "structured_outputs.whitespace_pattern is not built yet"),
        ({"structural_tag": [1]}, r"structured_outputs.structural_tag: expected a structural tag, found \[1\]"),
        ("json", "structured_outputs: expected an object"),
        ({"regex": ""}, "structured_outputs.regex: expected a text that is not empty"),
        ({"regex": 3}, "structured_outputs.regex: expected a text that is not empty, found 3"),
        ({"regex": "\ud83d"}, "structured_outputs.regex: it is not text"),
        ({"json": [1]}, r"structured_outputs.json: expected a JSON Schema, found \[1\]"),
        ({"json": {"a": {1, 2}}}, "structured_outputs.json: it is no JSON"),
        ({"json": "x" * (MAX_BYTES + 1)}, f"it has {MAX_BYTES + 1} bytes, at most {MAX_BYTES} are allowed"),
        ({"json_object": 1}, "structured_outputs.json_object: expected true or false, found 1"),
        ({"choice": "yes"}, 'structured_outputs.choice: expected a list of texts, found "yes"'),
        ({"choice": []}, r"structured_outputs.choice: expected a list of texts, found \[\]"),
        ({"choice": ["a", ""]}, 'expected texts that are not empty, found "" among them'),
        ({"choice": ["a"] * (MAX_CHOICES + 1)}, f"found {MAX_CHOICES + 1} texts, at most {MAX_CHOICES}"),
    ],
)
def test_wrong_forms(value: Any, message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(structured_outputs=value)


def test_vllms_fields_that_ask_for_nothing_pass() -> None:
    fields = {"regex": "a", "disable_fallback": True, "whitespace_pattern": None, "disable_any_whitespace": None}
    assert StructuredOutputs.of(fields) == StructuredOutputs(regex="a")


@pytest.mark.parametrize("other", [{"ignore_eos": True}, {"min_tokens": 1}])
def test_what_a_form_excludes(other: dict[str, Any]) -> None:
    (name,) = other
    with pytest.raises(
        RequestError, match=f"{name} is .*, and an answer that is held to a form .by structured_outputs"
    ):
        SamplingParams(structured_outputs={"regex": "a"}, **other)  # type: ignore[arg-type]


def test_a_models_least_number_of_tokens_gives_way() -> None:
    from inferc.runtime.step.sampling_params import from_request

    params = from_request({"structured_outputs": {"regex": "a"}}, {"min_tokens": 4, "max_tokens": 9})
    assert params.min_tokens == 0 and params.max_tokens == 9
