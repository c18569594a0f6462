"""Arguments in tags of their own: what the grammar admits is read as arguments that hold to the schema."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from random_schemas import ROOT
from schema_walks import Walker

from inferc import StructuredOutputs
from inferc.chat.argument_tags import ArgumentTags
from inferc.errors import RequestError
from inferc.runtime.grammar.schema.kinds import KINDS, ArgumentKinds, look_term, looks_like
from inferc.runtime.grammar.schema.regex import matches
from inferc.runtime.tools.arguments import TaggedArguments

LINES = ArgumentTags("\n<parameter=", ">\n", "\n</parameter>")
PAIRS = ArgumentTags("\n<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>")
END = "\n</call>"
TEXT = {"type": "string"}


def walker_of(schema: Any, tags: ArgumentTags) -> Walker:
    arguments = {"type": "arguments", "json_schema": schema, "tags": asdict(tags)}
    elements = [arguments, {"type": "const_string", "value": END}]
    tag: Any = {"type": "structural_tag", "format": {"type": "sequence", "elements": elements}}
    tries = [tags.end, "b" + tags.end, tags.end[:3], "null", "5", '{"', "true", "[1]"]
    return Walker(StructuredOutputs(structural_tag=tag), tries=tries)


def read(schema: Any, tags: ArgumentTags, text: str) -> Any:
    """Read arguments at once and one character after the other; return what they are."""
    kinds = ArgumentKinds(schema)
    found, left, is_ended = TaggedArguments(tags, kinds.of).read(text)
    assert is_ended and left == END
    reader, rest, parts = TaggedArguments(tags, kinds.of), "", ""
    for char in text:
        part, rest, is_ended = reader.read(rest + char)
        parts += part
        if is_ended:
            break
    assert parts == found
    return json.loads(found)


def written(tags: ArgumentTags, **arguments: str) -> str:
    return "".join(tags.begin + name + tags.middle + value + tags.end for name, value in arguments.items()) + END


def check(schema: Any, tags: ArgumentTags, count: int) -> int:
    """Assert that random arguments under a schema hold to it; return how many there were."""
    walker = walker_of(schema, tags)
    documents = [document for seed in range(count) if (document := walker.document(seed)) is not None]
    kind = jsonschema.Draft202012Validator
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    for document in documents:
        assert validator.is_valid(read(schema, tags, document)), document
    return len(documents)


SCHEMAS: list[Any] = [
    TEXT,
    {"type": "string", "minLength": 1},
    {"type": "string", "minLength": 3, "maxLength": 80},
    {"type": "string", "maxLength": 5},
    {"type": "string", "minLength": 12},
    {"type": ["string", "null"], "maxLength": 50},
    {"enum": ["null", "5", "<a>", ""]},
    {"enum": ["null", "5", None, 7, "true", True]},
    {"type": ["string", "number"], "minimum": 0, "maximum": 10},
    {"anyOf": [{"type": "string", "format": "date"}, {"type": "null"}]},
    {"type": "string", "pattern": "a.*b"},
    {"type": "string", "pattern": "^[^a]*$"},
    {"type": "string", "not": {"const": "a"}},
    {"type": ["string", "boolean"], "const": True},
    {"type": ["string", "object"], "properties": {"s": TEXT}},
    {"oneOf": [{"type": "string", "maxLength": 3}, {"type": "integer"}]},
    {"not": TEXT},
    {"type": "array", "items": TEXT},
    {"$ref": "#/$defs/x"},
    {},
    True,
]


@pytest.mark.parametrize("tags", [LINES, PAIRS], ids=["lines", "pairs"])
@pytest.mark.parametrize("index", range(len(SCHEMAS)))
def test_arguments_hold_to_their_schema(index: int, tags: ArgumentTags) -> None:
    schema: dict[str, Any] = {
        "type": "object",
        "properties": {"a": SCHEMAS[index], "b": SCHEMAS[(index * 7 + 3) % len(SCHEMAS)]},
        "required": ["a"],
        "$defs": {"x": {"type": ["string", "null", "integer"], "minLength": 2}},
    }
    if index % 3 == 0:
        schema["additionalProperties"] = {"type": ["integer", "string"]}
    if index % 4 == 0:
        schema["minProperties"] = 2
    assert check(schema, tags, 20)


@settings(max_examples=20, deadline=None, derandomize=True)
@given(ROOT)
def test_random_schemas_of_arguments(schema: dict[str, Any]) -> None:
    try:
        check(schema, LINES, 10)
    except RequestError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(
    ("schema", "admitted", "refused"),
    [
        (TEXT, ["", "a\nb", '{"a', "null", "</parameter>", "\n"], ["\n</parameter>", "a\n</parameter>b"]),
        ({"type": ["string", "null"]}, ["", "null", "nul", "nulls", "\n", "5"], ["x\n</parameter>y"]),
        ({"type": ["string", "integer"], "maximum": 9}, ["9", "a", "9a", "-"], ["10", "1.5", "1e3"]),
        ({"type": ["string", "array"], "items": {"const": 1}}, ["[1,1]", "a[", ""], ["[", "[2]", "[a"]),
        ({"type": "string", "minLength": 2, "maxLength": 3}, ["ab", "a\nb"], ["", "a", "abcd"]),
        ({"type": ["string", "null"], "maxLength": 60}, ["null", "nul", "x" * 39, "\n"], ["x" * 61]),
        ({"const": "a b"}, ["a b"], ["a", '"a b"']),
        ({"type": "number"}, ["1", "-2.5e3"], ["one", '"1"', ""]),
        ({"type": "boolean"}, ["true", "false"], ["True", "null"]),
    ],
)
def test_texts_stand_as_they_are_and_other_values_as_json(schema: Any, admitted: list[str], refused: list[str]) -> None:
    whole = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
    walker = walker_of(whole, LINES)
    assert [value for value in admitted if not walker.admits(written(LINES, a=value))] == []
    assert [value for value in refused if walker.admits(written(LINES, a=value))] == []


def test_arguments_come_in_the_schema_s_order_and_others_may_be_missing() -> None:
    schema = {"type": "object", "properties": {"a": TEXT, "b": TEXT, "c": TEXT}, "required": ["b"]}
    walker = walker_of(schema, LINES)
    assert walker.admits(written(LINES, b="1")) and walker.admits(written(LINES, a="1", b="2", c="3"))
    assert not walker.admits(written(LINES, a="1")) and not walker.admits(written(LINES, b="1", a="2"))
    assert not walker.admits(written(LINES, b="1", d="2"))


def test_other_arguments_have_free_names() -> None:
    walker = walker_of(
        {"type": "object", "properties": {"a": TEXT}, "additionalProperties": {"type": "integer"}}, LINES
    )
    assert walker.admits(written(LINES, a="x", more="1", **{"so-and.so": "2"}))
    assert not walker.admits(written(LINES, more="x")) and not walker.admits(written(LINES, **{"a>b": "1"}))


@pytest.mark.parametrize("tags", [ArgumentTags("<a=", ">", "</a>", is_json=True)])
def test_texts_may_be_json(tags: ArgumentTags) -> None:
    schema = {"type": "object", "properties": {"a": {"type": ["string", "null"]}}, "required": ["a"]}
    walker = walker_of(schema, tags)
    assert walker.admits(written(tags, a='"</a>"')) and not walker.admits(written(tags, a="x"))
    assert read(schema, tags, written(tags, a='"</a>"')) == {"a": "</a>"}


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"a>\n": TEXT}}, '#/properties/a>\\n: the name "a>'),
        ({"enum": [{"a": 1}]}, "#: whole objects of arguments are not listed in this model's calls"),
        (
            {"properties": {f"p{i}": TEXT for i in range(9)}, "minProperties": 3},
            "#: 9 properties that may be missing cannot be counted",
        ),
        ({"properties": {"a": {"enum": ["x\n</parameter>"]}}}, "#/properties/a: no value can be told"),
        ({"properties": {"a": {"maxLength": -1}}}, "#/properties/a/maxLength: expected a count"),
    ],
)
def test_what_cannot_be_told_is_refused_with_its_place(schema: Any, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        walker_of({"type": "object", **schema}, LINES)
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("tags", "said"),
    [
        (None, "arguments: expected an object with begin, middle, end, is_json"),
        ({**asdict(LINES), "end": ""}, "arguments.end is '', expected a text that is not empty"),
        ({**asdict(LINES), "end": "aba"}, "arguments.end is 'aba', expected a text that does not end as it begins"),
        ({**asdict(LINES), "is_json": 1}, "arguments.is_json is 1, expected true or false"),
    ],
)
def test_wrong_tags_are_refused(tags: Any, said: str) -> None:
    with pytest.raises(RequestError) as caught:
        node: Any = {"type": "structural_tag", "format": {"type": "arguments", "json_schema": {}, "tags": tags}}
        Walker(StructuredOutputs(structural_tag=node))
    assert said in str(caught.value)


@pytest.mark.parametrize(
    ("schema", "expected"),
    [
        ({"type": "integer"}, {"number"}),
        ({"type": ["string", "null"]}, {"string", "null"}),
        ({"anyOf": [{"type": "string"}, {"$ref": "#/$defs/b"}]}, {"string", "boolean"}),
        ({"enum": ["a", 1, None]}, {"string", "number", "null"}),
        ({"const": {"a": 1}}, {"object"}),
        ({"allOf": [{"type": ["string", "array"]}, {"type": ["array", "null"]}]}, {"array"}),
        ({"$ref": "#/$defs/loop"}, set(KINDS)),
        ({"$ref": "elsewhere"}, set(KINDS)),
        (True, set(KINDS)),
        (False, set()),
    ],
)
def test_the_kinds_of_an_argument(schema: Any, expected: set[str]) -> None:
    known = {"b": {"type": "boolean"}, "loop": {"anyOf": [{"$ref": "#/$defs/loop"}, {"type": "string"}]}}
    kinds = ArgumentKinds({"properties": {"a": schema}, "$defs": known, "additionalProperties": {"type": "null"}})
    assert kinds.of("a") == expected and kinds.of("z") == {"null"} and kinds.names == ["a"]


def test_kinds_are_found_in_alternatives_of_the_whole() -> None:
    schema = {"oneOf": [{"properties": {"a": {"type": "string"}}}, {"properties": {"a": {"type": "integer"}}}]}
    assert ArgumentKinds(schema).of("a") == {"string", "number"}
    assert ArgumentKinds({}).of("a") == KINDS


TEXTS = ["null", "nul", "true", "5", "-5", "05", "1.5e-3", "1.", "", "[", "{}", " {", "[a", "x"]


@pytest.mark.parametrize("kind", sorted(KINDS - {"string"}))
def test_the_reader_and_the_grammar_tell_texts_by_the_same_words(kind: str) -> None:
    assert [text for text in TEXTS if looks_like(text, frozenset((kind,)))] == [
        text for text in TEXTS if matches(look_term(kind), text)
    ]
