"""Calls in answers: read in pieces of any size, as what the grammar of the same form admits."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from itertools import count
from typing import Any, get_args

import jsonschema
import pytest
from schema_walks import MARKS, Walker

from inferc import StructuredOutputs
from inferc.chat.argument_tags import ArgumentTags
from inferc.chat.calls import ID, NUMBER, CallForm
from inferc.config import GrammarBackend
from inferc.errors import RequestError
from inferc.runtime.tools.answer_calls import AnswerCalls
from inferc.runtime.tools.arguments import MAX_NAME, MAX_VALUE, spelled
from inferc.runtime.tools.call_reader import Call, CallPart, CallReader, Said, read_calls
from inferc.runtime.tools.choices import Choice
from inferc.runtime.tools.tools import Tools

A, B, C, D, E = list(MARKS.values())[:5]  # control tokens
FORMS = {
    "tagged": CallForm(
        '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>", '}\n</tool_call>\n<tool_call>\n{"name": "'
    ),
    "bare": CallForm('{"name": "', '", "parameters": ', "}"),
    "list": CallForm('[CALLS] [{"name": "', '", "arguments": ', "}]", '}, {"name": "'),
    "marked": CallForm("<|calls|><|call|>", "\n```json\n", "\n```<|done|><|all done|>", "\n```<|done|><|call|>"),
    "open": CallForm("<f=", ">", "", "; <f="),
    "lines": CallForm("<calls>\n", " ", "\n</calls>", "\n"),
    "unclosed": CallForm('CALL {"name": "', '", "arguments": ', "}", '}, {"name": "'),
    "apart": CallForm("<f=", ">", "</f>", "</f>; <f="),
    "tags within tags": CallForm(
        "<tool_call>\n<function=",
        ">",
        "\n</function>\n</tool_call>",
        "\n</function>\n</tool_call>\n<tool_call>\n<function=",
        ArgumentTags("\n<parameter=", ">\n", "\n</parameter>"),
    ),
    "tags for keys and values": CallForm(
        "<tool_call>",
        "",
        "\n</tool_call>",
        "\n</tool_call>\n<tool_call>",
        ArgumentTags("\n<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>"),
    ),
    "tags with attributes": CallForm(
        '<mm:tool_call>\n<invoke name="',
        '">',
        "\n</invoke>\n</mm:tool_call>",
        '\n</invoke>\n<invoke name="',
        ArgumentTags('\n<parameter name="', '">', "</parameter>"),
    ),
    "tags around JSON": CallForm("<f=", ">", "</f>", None, ArgumentTags("<a=", ">", "</a>", is_json=True)),
    "numbered": CallForm(f"{A}{B}functions.", f":{NUMBER}{C}", f"{D}{E}", f"{D}{B}functions.", ids="numbered"),
    "control tokens": CallForm(f"{A}{B}function{C}", "\n```json\n", f"\n```{D}{E}", f"\n```{D}\n{B}function{C}"),
    "a control token begins": CallForm(f"{A}", f"{B}", "", f"{A}"),
    "with an id": CallForm(f"{A}", f"{B}{ID}{C}", "", f"{A}", ids="written"),
    "with an id at the end": CallForm(
        f'{A} [{{"name": "', '", "arguments": ', f', "id": "{ID}"}}]', f', "id": "{ID}"}}, {{"name": "', ids="written"
    ),
    "as Python's, in lines": CallForm("<calls>", "(", ")</calls>", ")\n", is_python=True),
    "as Python's, in a list": CallForm(f"{A}[", "(", f")]{B}", "), ", is_python=True),
    "text before a control token": CallForm("<calls>" + A, B, "</calls>", f"{C}{A}"),
}
FUNCTIONS: dict[str, dict[str, Any]] = {
    "get_weather": {
        "name": "get_weather",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
    "now": {"name": "now"},
    "get_weather_map": {
        "name": "get_weather_map",
        "parameters": {"properties": {"a": {"const": "}"}}},
    },
}
NOTHING = {"type": "object", "additionalProperties": False}  # the schema of a tool without one
SCHEMAS = {name: function.get("parameters", NOTHING) for name, function in FUNCTIONS.items()}
WEATHER, NOW = '{"city": "a \\"}{ b", "days": 3}', "{}"


def calls_of(form: CallForm) -> AnswerCalls:
    """Return the calls of an answer of a form, in which marks stand for control tokens."""
    used = "".join((form.before, form.between, form.after, form.joint or ""))
    return AnswerCalls(form, FUNCTIONS, {token: mark for token, mark in MARKS.items() if mark in used})


def written(form: CallForm, calls: list[tuple[str, str]]) -> str:
    """Return an answer's calls as the form has them."""
    said = [name + form.between + arguments_of(form, arguments) for name, arguments in calls]
    if form.joint is None:
        text = " ".join(form.before + each + form.after for each in said)
    else:
        text = form.before + form.joint.join(said) + form.after
    numbers = count()
    return "".join("abcDEF123" if char == ID else str(next(numbers)) if char == NUMBER else char for char in text)


def arguments_of(form: CallForm, arguments: str) -> str:
    """Return arguments, given as JSON, as the form has them."""
    if form.is_python:
        return ", ".join(f"{name}={json.dumps(value)}" for name, value in json.loads(arguments).items())
    if (tags := form.arguments) is None:
        return arguments
    found = ""
    for name, value in json.loads(arguments).items():
        as_text = value if isinstance(value, str) and not tags.is_json else json.dumps(value)
        found += tags.begin + name + tags.middle + as_text + tags.end
    return found


def has_id(form: CallForm, call: Call, number: int) -> bool:
    """Return whether a call has the id that its form gives it."""
    if form.ids == "written" and ID in form.between:
        return call.id == "abcDEF123"
    if form.ids == "numbered":
        return call.id == f"functions.{call.name}:{number}"
    return call.id == f"call_{number}" if form.ids == "ours" else len(call.id) == 9


def in_pieces(form: CallForm, text: str, seed: int) -> tuple[Said, list[str | CallPart]]:
    """Read an answer in pieces of random sizes; return it, and the parts in which it came."""
    sizes, numbers = random.Random(seed), count()
    reader, parts = CallReader(calls_of(form), lambda: f"call_{next(numbers)}"), list[str | CallPart]()
    while text:
        size = sizes.choice((1, 1, 2, 5, 30))
        parts += reader.push(text[:size])
        text = text[size:]
    parts += reader.finish()
    said = Said()
    for part in parts:
        said.add(part)
    return said, parts


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", FORMS)
def test_calls_and_text_are_told_apart_in_any_pieces(name: str, seed: int) -> None:
    form = FORMS[name]
    calls = [("get_weather", WEATHER), ("now", NOW)]
    found, _ = in_pieces(form, "Let me see: \n" + written(form, calls), seed)
    assert found.text == "Let me see:" and not found.is_cut
    assert [(call.name, json.loads(call.arguments)) for call in found.calls] == [
        ("get_weather", json.loads(WEATHER)),
        ("now", {}),
    ]
    assert all(has_id(form, call, number) for number, call in enumerate(found.calls))
    only = read_calls(calls_of(form), written(form, calls[:1])).calls[0]
    assert json.loads(only.arguments) == json.loads(WEATHER)
    assert form.arguments is not None or only.arguments == WEATHER


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize(
    ("text", "expected", "num_calls"),
    [
        ("  plain text \n", "  plain text \n", 0),
        ("", "", 0),
        (" \n", " \n", 0),
        ("a <tool_call>\n and b", "a <tool_call>\n and b", 0),
        ('a <tool_call>\n{"name": "' + "x" * 600, 'a <tool_call>\n{"name": "' + "x" * 600, 0),
        ('cut <tool_call>\n{"name": "get_w', 'cut <tool_call>\n{"name": "get_w', 0),
        ("cut <tool", "cut <tool", 0),
        (written(FORMS["tagged"], [("now", NOW)]) + "\n\n then text \n", "then text \n", 1),
        ("first " + written(FORMS["tagged"], [("now", NOW)]) + "\nthen", "firstthen", 1),
        (written(FORMS["tagged"], [("now", '{"a": [1')])[: -len("}\n</tool_call>")], "", 1),
    ],
)
def test_text_that_is_no_call_stays_text(text: str, expected: str, num_calls: int, seed: int) -> None:
    found, parts = in_pieces(FORMS["tagged"], text, seed)
    assert (found.text, len(found.calls)) == (expected, num_calls)
    assert "" not in parts


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.joint and form.between not in ("", B)])
def test_nothing_is_said_that_was_not_written(name: str, seed: int) -> None:
    form = FORMS[name]
    answer = written(form, [("now", NOW), ("get_weather", WEATHER)])
    start = answer.index("get_weather")
    for end in range(len(form.before) + len("now" + form.between), start + len("get_weather")):
        found, _ = in_pieces(form, answer[:end], seed)
        said = "".join(char for char in answer if char not in MARKS.values())
        assert found.text in said and found.text.endswith("get_weather"[: max(0, end - start)])


@pytest.mark.parametrize("size", [16, 1 << 20])
@pytest.mark.parametrize("name", FORMS)
def test_little_is_held_back_of_long_answers(name: str, size: int) -> None:
    form = FORMS[name]
    for part in (form.before, form.before[:-1], " ", form.before + "f" + form.between + "{}" + form.after):
        text = part * (100_000 // len(part)) if part else "x"
        reader = CallReader(calls_of(form))
        for start in range(0, len(text), size):
            reader.push(text[start : start + size])
        held = sum(len(part) for part in reader.finish() if isinstance(part, str))
        longest = form.before + form.between + form.after + (form.joint or "")
        assert held <= MAX_NAME + len(longest) + (0 if form.arguments is None else len(form.arguments.begin))


def test_arguments_come_as_they_are_written() -> None:
    reader = CallReader(calls_of(FORMS["tagged"]), lambda: "call_0")
    assert reader.push('Hm. <tool_call>\n{"na') == ["Hm."]
    assert reader.push('me": "get_weather", "argu') == []
    assert reader.push('ments": {"ci') == [CallPart(0, '{"ci', "get_weather", "call_0")]
    assert reader.push('ty": "Ro') == [CallPart(0, 'ty": "Ro')]
    assert reader.push('me"}}\n</tool') == [CallPart(0, 'me"}')]
    assert reader.push("_call>") == [] and reader.finish() == [] and reader.num_calls == 1


def walker_of(form: CallForm, tools: Tools, library: GrammarBackend = "xgrammar") -> Walker:
    """Return the walker of answers with tools, which often tries what ends a part of a call."""
    calls = calls_of(form)
    ends = [] if form.arguments is None else [form.arguments.begin, form.arguments.end, form.arguments.end[:-1]]
    tries = [form.before, form.after, form.joint or " ", *ends]
    return Walker(tools.held_to(calls), library, has_controls=bool(calls.marks), tries=tries)


# The libraries, and the forms that each holds calls to.
HELD: list[tuple[GrammarBackend, str]] = [("xgrammar", name) for name in FORMS] + [
    ("llguidance", name) for name, form in FORMS.items() if form.arguments is None
]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("choice", "only", "is_parallel"),
    [("required", None, True), ("required", None, False), ("required", "get_weather", True), ("auto", None, True)],
)
@pytest.mark.parametrize(("library", "name"), HELD)
def test_what_the_grammar_admits_is_read(
    library: GrammarBackend, name: str, choice: Choice, only: str | None, is_parallel: bool, seed: int
) -> None:
    form = FORMS[name]
    walker = walker_of(form, Tools(FUNCTIONS, choice, only, is_parallel), library)
    answer = walker.document(seed)
    if answer is None:
        return  # it went on for long
    found, _ = in_pieces(form, answer, seed)
    whole = read_calls(calls_of(form), answer)
    assert (found.text, [(call.name, call.arguments) for call in found.calls]) == (
        whole.text,
        [(call.name, call.arguments) for call in whole.calls],
    )
    if choice == "required":
        assert found.text == "" and found.calls, answer
        assert is_parallel or len(found.calls) == 1
        assert {call.name for call in found.calls} <= ({only} if only else set(FUNCTIONS))
    for call in found.calls:
        jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])


@pytest.mark.parametrize("choice", ["auto", "required"])
@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.arguments is not None])
def test_llguidance_refuses_arguments_in_tags_by_name(name: str, choice: Choice) -> None:
    with pytest.raises(RequestError) as caught:
        walker_of(FORMS[name], Tools(FUNCTIONS, choice), "llguidance")
    assert str(caught.value) == (
        "the parameters of get_weather: arguments in tags of their own are not built with llguidance;"
        " use xgrammar for it (--structured-outputs-backend xgrammar)"
    )


@pytest.mark.parametrize(("library", "name"), HELD)
def test_an_answer_without_calls_may_not_begin_one(library: GrammarBackend, name: str) -> None:
    form = FORMS[name]
    walker = walker_of(form, Tools(FUNCTIONS, "none"), library)
    assert walker.admits("Hello.") and not walker.admits(written(form, [("now", NOW)]))


@pytest.mark.parametrize(("library", "name"), HELD)
def test_calls_are_of_the_tools_and_under_their_schemas(library: GrammarBackend, name: str) -> None:
    form = FORMS[name]
    walker = walker_of(form, Tools(FUNCTIONS), library)
    assert walker.admits("Hello.") and walker.admits("So: " + written(form, [("get_weather", WEATHER)]))
    for wrong in ([("other", NOW)], [("get_weather", NOW)], [("get_weather", '{"city": "a", "days": "b"}')]):
        assert not walker.admits(written(form, wrong))
    two = [("now", NOW), ("get_weather", WEATHER)]
    one_at_most = walker_of(form, Tools(FUNCTIONS, is_parallel=False), library)
    assert one_at_most.admits(written(form, two[:1])) and not one_at_most.admits(written(form, two))
    assert walker.admits(written(form, two)) == (form.joint is not None)


def test_texts_of_arguments_come_as_they_are_written() -> None:
    reader = CallReader(calls_of(FORMS["tags within tags"]), lambda: "call_0")
    assert reader.push("<tool_call>\n<function=get_weather>") == []
    assert reader.push("\n<parameter=ci") == [CallPart(0, "{", "get_weather", "call_0")]
    assert reader.push('ty>\nRome "Te') == [CallPart(0, '"city": "Rome \\"Te')]
    assert reader.push('rmini"\n</para') == [CallPart(0, 'rmini\\"')]
    assert reader.push("meter>\n<parameter=days>\n1") == [CallPart(0, '", "days": ')]
    assert reader.push("2\n</parameter>\n</function>\n</tool_call>") == [CallPart(0, "12}")]
    assert reader.finish() == [] and reader.num_calls == 1 and not reader.is_cut


MIXED: dict[str, Any] = {
    "name": {"type": "string"},
    "note": {"type": ["string", "null"]},
    "amount": {"anyOf": [{"type": "string"}, {"type": "number"}]},
    "any": {},
    "list": {"type": "array"},
    "flag": {"type": "boolean"},
}


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("name", "null", "null"),
        ("name", '{"a": 1}', '{"a": 1}'),
        ("name", "", ""),
        ("note", "null", None),
        ("note", "nullable", "nullable"),
        ("note", "5", "5"),
        ("amount", "5e3", 5e3),
        ("amount", "5 euros", "5 euros"),
        ("amount", "null", "null"),
        ("any", "true", True),
        ("any", "[1, {}]", [1, {}]),
        ("any", "so [1]", "so [1]"),
        ("list", '["</parameter>", "]"]', ["</parameter>", "]"]),
        ("flag", "true", True),
        ("flag", "False", False),  # as Python writes it
        ("flag", "maybe", "maybe"),
        ("other", "-3", -3),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_values_are_told_by_their_schema(name: str, value: str, expected: Any, seed: int) -> None:
    form = FORMS["tags within tags"]
    assert form.arguments is not None
    text = "f>" + form.arguments.begin + name + form.arguments.middle + value + form.arguments.end
    calls = AnswerCalls(form, {"f": {"parameters": {"properties": MIXED}}})
    sizes, reader, said = random.Random(seed), CallReader(calls), Said()
    answer = form.before + text + form.after
    while answer:
        size = sizes.choice((1, 3, 50))
        for part in reader.push(answer[:size]):
            said.add(part)
        answer = answer[size:]
    assert said.text == "" and json.loads(said.calls[0].arguments) == {name: expected}


def test_a_text_without_end_is_handed_on() -> None:
    form = FORMS["tags within tags"]
    reader = CallReader(AnswerCalls(form, {"f": {"parameters": {"properties": {"a": {"type": "integer"}}}}}))
    parts = reader.push(form.before + "f>\n<parameter=a>\n" + "1" * 3 * MAX_VALUE)
    assert sum(len(part.arguments) for part in parts if isinstance(part, CallPart)) > 2 * MAX_VALUE


def test_control_tokens_outside_of_calls_are_no_text() -> None:
    form = FORMS["control tokens"]
    found = read_calls(calls_of(form), f"a{C}b {B} c")
    assert (found.text, found.calls) == ("ab  c", [])


FORM = StructuredOutputs(json=json.dumps({"enum": ["<f=now>{}</f>", {"a": 1}]}), label="response_format")


@pytest.mark.parametrize("library", get_args(GrammarBackend))
@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.before[0] not in '{["'])
def test_calls_stand_beside_a_form(name: str, library: GrammarBackend) -> None:
    form = FORMS[name]
    if library != "xgrammar" and form.arguments is not None:
        return  # refused by name, as without a form beside them
    calls, tools = replace(calls_of(form), is_first=True), Tools(FUNCTIONS)
    tries = [written(form, [("now", NOW)])]
    walker = Walker(tools.held_to(calls, FORM), library, has_controls=bool(calls.marks), tries=tries)
    called = written(form, [("get_weather", WEATHER), ("now", NOW)][: 1 if form.joint is None else 2])
    assert walker.admits(called) and not walker.admits("Hello.") and not walker.admits("So: " + called)
    for text in ('"<f=now>{}</f>"', '{"a": 1}'):
        assert walker.admits(text) and not walker.admits(text + called)
    seen = set()
    for seed in range(25):
        if (answer := walker.document(seed)) is not None:
            said = read_calls(calls, answer)
            assert (said.text == "") == bool(said.calls) and not said.is_cut
            assert said.calls or json.loads(said.text) in ("<f=now>{}</f>", {"a": 1})
            for call in said.calls:
                jsonschema.validate(json.loads(call.arguments), SCHEMAS[call.name])
            seen.add(bool(said.calls))
    assert seen == {False, True}


@pytest.mark.parametrize(
    ("name", "wanted"),
    [
        ("bare", FORM),
        ("list", FORM),
        ("tagged", StructuredOutputs(regex="<.*", label="response_format")),
        ("numbered", StructuredOutputs(structural_tag={"format": {"type": "any_text"}}, label="response_format")),  # type: ignore[arg-type]
        ("numbered", StructuredOutputs(grammar='start: "a"', label="response_format")),
    ],
)
def test_a_form_that_calls_cannot_be_told_from_is_refused(name: str, wanted: StructuredOutputs) -> None:
    with pytest.raises(RequestError, match="tools: response_format gives the answer a form, too, from which this"):
        Tools(FUNCTIONS).held_to(calls_of(FORMS[name]), wanted)


@pytest.mark.parametrize(
    ("wanted", "right", "wrong"),
    [
        (StructuredOutputs(regex="a+"), "aa", "b"),
        (StructuredOutputs(choice=("yes", "no")), "no", "n"),
        (StructuredOutputs(grammar='root ::= "x" | "y"'), "y", "xy"),
        (StructuredOutputs(json_object=True), '{"b": [1]}', "[]"),
        (StructuredOutputs(json='{"type": "array"}'), '[1, {"a": 2}]', "5"),
    ],
)
def test_control_tokens_are_told_from_any_form(wanted: StructuredOutputs, right: str, wrong: str) -> None:
    form = FORMS["numbered"]
    walker = Walker(Tools(FUNCTIONS).held_to(calls_of(form), wanted), has_controls=True)
    assert walker.admits(right) and not walker.admits(wrong) and walker.admits(written(form, [("now", NOW)]))


def test_json_on_one_line_is_refused_beside_calls() -> None:
    wanted = StructuredOutputs(json="true", disable_any_whitespace=True)
    with pytest.raises(RequestError, match="structured_outputs.json: disable_any_whitespace is not built beside tools"):
        Tools(FUNCTIONS).held_to(calls_of(FORMS["tagged"]), wanted)


def test_only_allowed_tools_are_called() -> None:
    for choice in get_args(Choice)[1:]:
        walker = walker_of(FORMS["tagged"], Tools(FUNCTIONS, choice, allowed=("now",)))
        assert walker.admits(written(FORMS["tagged"], [("now", NOW)]))
        assert not walker.admits(written(FORMS["tagged"], [("get_weather", WEATHER)]))


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("1.5e3", "1.5e3"),
        ("9" * 5_000, "9" * 5_000),
        ("NaN", '"NaN"'),
        ("-Infinity", '"-Infinity"'),
        ("True", "true"),
        ("[" * 5_000, '"' + "[" * 5_000 + '"'),
    ],
)
def test_a_value_is_json_whatever_is_written(value: str, expected: str) -> None:
    assert spelled(value) == expected
