"""Calls that are written as Python's: what they may be under a schema, and JSON of what was written."""

from __future__ import annotations

import ast
import json
import random
from typing import Any, get_args

import jsonschema
import pytest
from schema_walks import Walker

from inferc import StructuredOutputs
from inferc.chat.named_forms import CALLS
from inferc.config import GrammarBackend
from inferc.errors import RequestError
from inferc.runtime.tools.answer_calls import AnswerCalls
from inferc.runtime.tools.call_reader import CallPart, CallReader, Said, read_calls
from inferc.runtime.tools.python_calls import python_arguments
from inferc.runtime.tools.tools import Tools

PYTHONIC = CALLS["pythonic"]
SCHEMAS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "type": "object",
        "properties": {
            "unit": {"enum": ["c", "f", None]},
            "city": {"type": "string"},
            "wind": {"type": "boolean"},
            "days": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        },
        "required": ["city", "wind"],
    },
    "find": {
        "type": "object",
        "properties": {
            "a": {"type": ["number", "null"]},
            "b": {"$ref": "#/$defs/place"},
            "c": {"type": "array", "items": {"type": "boolean"}},
        },
        "$defs": {"place": {"type": "object", "properties": {"x": {"type": "integer"}}, "required": ["x"]}},
    },
    "now": {"type": "object", "additionalProperties": False},
}
FUNCTIONS: dict[str, dict[str, Any]] = {
    name: {"name": name, **({} if name == "now" else {"parameters": schema})} for name, schema in SCHEMAS.items()
}
CALLED = '[get_weather(city="Rome", wind=True, days=None), now(), find(b={"x": 1}, c=[true])]'
LIBRARIES = get_args(GrammarBackend)


def calls_of() -> AnswerCalls:
    return AnswerCalls(PYTHONIC, FUNCTIONS)


def in_pieces(text: str, seed: int) -> Said:
    sizes, reader, said = random.Random(seed), CallReader(calls_of()), Said()
    while text:
        size = sizes.choice((1, 1, 2, 5, 30))
        for part in reader.push(text[:size]):
            said.add(part)
        text = text[size:]
    for part in reader.finish():
        said.add(part)
    said.is_cut = reader.is_cut
    return said


@pytest.mark.parametrize("seed", range(4))
def test_calls_are_read_in_any_pieces(seed: int) -> None:
    said = in_pieces(CALLED, seed)
    assert said.text == "" and not said.is_cut
    assert [(call.name, json.loads(call.arguments)) for call in said.calls] == [
        ("get_weather", {"city": "Rome", "wind": True, "days": None}),
        ("now", {}),
        ("find", {"b": {"x": 1}, "c": [True]}),
    ]


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello.",
        "See [f(a=1)].",
        "[1, 2]",
        "[f",
        " [now()]",
        "[get_weather",
        "[a page](https://example.org) says so.",
        "[1] Rome (Italy) is warm.",
        "[[now()]]",
        "[ [now()]",
    ],
)
def test_calls_begin_an_answer_or_it_is_text(text: str, seed: int) -> None:
    said = in_pieces(text, seed)
    assert (said.text, said.calls) == (text, [])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    "value",
    [
        "1",
        "-2.5e3",
        "True",
        "None",
        "'a'",
        '"a, b) = c]"',
        "'say \"no\"'",
        r'"it\'s"',
        r'"\x41\n\t\\ é \u00e9 \U0001f600 \d \a"',
        "[1, 'b', [None, True]]",
        "{'a': {'b': [False]}, \"c\": (1, 2)}",
        "[]",
        "{}",
        "'a\nb'",
        "[1, 2,]",
        "(1,)",
        "{1: [2], None: {'a': 3,},}",
        "'a' \"b\"",
        "'''a'''",
    ],
)
def test_a_value_is_what_python_reads(value: str, seed: int) -> None:
    said = in_pieces(f"[find(first={value}, second = {value} )]", seed)
    literal = value.replace("\n", r"\n") if "\n" in value else value
    expected = json.loads(json.dumps(ast.literal_eval(literal.replace(r"\d", r"\\d"))))
    assert json.loads(said.calls[0].arguments) == {"first": expected, "second": expected}


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("g(1, 'a)')", "\"g(1, 'a)')\""),
        ("1 + 2", '"1 + 2"'),
        ("NaN", '"NaN"'),
        ("", "null"),
        (r"'\x4g \u12 \q'", r'"\\x4g \\u12 \\q"'),
        ("'a\\\nb'", '"ab"'),
        ("{\r'x, y':\r1\r}", '{\r"x, y":\r1}'),
        ("9" * 5000, "9" * 5000),
        ("[1}", "[1]"),
    ],
)
def test_what_json_lacks_is_json_all_the_same(value: str, expected: str, seed: int) -> None:
    said = in_pieces(f"[find(a={value}, b=None)]", seed)
    assert said.calls[0].arguments == f'{{"a": {expected}, "b": null}}' and said.text == ""


def test_a_text_comes_as_it_is_written() -> None:
    reader = CallReader(calls_of(), lambda: "call_0")
    assert reader.push("[find(") == [CallPart(0, "{", "find", "call_0")]
    assert reader.push("a='Ro") == [CallPart(0, '"a": "Ro')]
    assert reader.push('me "now"') == [CallPart(0, 'me \\"now\\"')]
    assert reader.push("', b=Tr") == [CallPart(0, '", "b": ')]
    assert reader.push("ue)]") == [CallPart(0, "true}")]


@pytest.mark.parametrize("library", LIBRARIES)
@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_what_may_be_written_is_read(choice: Any, library: GrammarBackend) -> None:
    tries = ["[get_weather(", "[find(", CALLED, 'city="', ")]", "), "]
    walker = Walker(Tools(FUNCTIONS, choice).held_to(calls_of()), library, tries=tries)
    seen = set()
    for seed in range(60):
        if (answer := walker.document(seed)) is None:
            continue
        said = read_calls(calls_of(), answer)
        assert not said.is_cut and (said.text == "") == (bool(said.calls) or not answer)
        assert choice != "required" or said.calls
        for call in said.calls:
            jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
        seen.add(bool(said.calls))
    assert seen == {"auto": {False, True}, "required": {True}, "none": {False}}[choice]


@pytest.mark.parametrize("library", LIBRARIES)
def test_calls_are_of_the_tools_and_under_their_schemas(library: GrammarBackend) -> None:
    walker = Walker(Tools(FUNCTIONS).held_to(calls_of()), library)
    for text in (CALLED, "[now()]", "", "Hello [now()].", "[find()]", "[find(a=None)]", "[find(c=[])]"):
        assert walker.admits(text), text
    for text in (
        "[other()]",
        "[now(a=1)]",
        '[get_weather(city="a")]',
        "[get_weather(city=1, wind=True)]",
        '[get_weather(city="a", wind=true)]',
        "[find(a=1, a=2)]",
        "[find(b={})]",
        "[1]",
        "[now()] then",
    ):
        assert not walker.admits(text), text
    single = Walker(Tools(FUNCTIONS, is_parallel=False).held_to(calls_of()), library)
    assert single.admits("[now()]") and not single.admits("[now(), now()]")


def nested(depth: int) -> dict[str, Any]:
    """Return a schema of alternatives within alternatives."""
    found: dict[str, Any] = {"type": "null"}
    for _ in range(depth):
        found = {"anyOf": [found]}
    return found


@pytest.mark.parametrize("depth", [1, 16, 17, 300])
def test_words_are_found_within_alternatives_as_far_as_they_are_looked_for(depth: int) -> None:
    made = python_arguments("f", {"properties": {"a": nested(depth)}, "required": ["a"]})["elements"][0]["elements"][1]
    assert (made == {"type": "const_string", "value": "None"}) == (depth < 16)


@pytest.mark.parametrize(
    ("schema", "said"),
    [
        ({"properties": {"a-b": {}}}, 'f: the name "a-b" cannot be written in calls as Python'),
        ({"properties": {"a": {}}, "minProperties": 1}, "f: #/minProperties is not built in calls that are written as"),
        ({"properties": {"a": {}}, "required": ["b"]}, 'f: #/required has "b", which is no property'),
        ({"properties": {"a": {}}, "required": [["a"]]}, 'f: #/required has ["a"], which is no property'),
        ({"properties": {"a": nested(5_000)}}, "f: it is no JSON: maximum recursion depth exceeded"),
        (
            {
                "properties": {f"p{index}": {"$ref": "#/$defs/a"} for index in range(1_000)},
                "required": ["p0"],
                "$defs": {"a": {"enum": ["x" * 1_000]}},
            },
            "f: properties and what they refer to take 1053000 bytes in calls that are written as Python",
        ),
        ({"properties": {f"p{index}": {} for index in range(25)}}, "f: 25 properties of which none is required"),
    ],
)
def test_schemas_that_cannot_be_held_to_are_refused(schema: dict[str, Any], said: str) -> None:
    with pytest.raises(RequestError) as caught:
        python_arguments("f", schema)
    assert str(caught.value).startswith(said)


def test_a_form_of_json_cannot_stand_beside_a_list() -> None:
    with pytest.raises(RequestError, match="from which this model's calls could not be told"):
        Tools(FUNCTIONS).held_to(calls_of(), StructuredOutputs(json_object=True))
