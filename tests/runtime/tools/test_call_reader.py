"""Calls in answers: read in pieces of any size, as what the grammar of the same form admits."""

from __future__ import annotations

import json
import random
from itertools import count
from typing import Any

import pytest
from schema_walks import Walker

from inferc.chat.calls import CallForm
from inferc.runtime.tools.call_reader import MAX_NAME, Call, CallPart, CallReader, Said, read_calls
from inferc.runtime.tools.tools import Choice, Tools

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
WEATHER, NOW = '{"city": "a \\"}{ b", "days": 3}', "{}"


def written(form: CallForm, calls: list[tuple[str, str]]) -> str:
    """Return an answer's calls as the form has them."""
    said = [name + form.between + arguments for name, arguments in calls]
    if form.joint is None:
        return " ".join(form.before + each + form.after for each in said)
    return form.before + form.joint.join(said) + form.after


def in_pieces(form: CallForm, text: str, seed: int) -> tuple[Said, list[str | CallPart]]:
    """Read an answer in pieces of random sizes; return it, and the parts in which it came."""
    sizes, numbers = random.Random(seed), count()
    reader, parts = CallReader(form, lambda: f"call_{next(numbers)}"), list[str | CallPart]()
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
    assert found == Said("Let me see:", [Call("call_0", "get_weather", WEATHER), Call("call_1", "now", NOW)])
    assert read_calls(form, written(form, calls[:1])).calls[0].arguments == WEATHER


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
@pytest.mark.parametrize("name", [name for name, form in FORMS.items() if form.joint])
def test_nothing_is_said_that_was_not_written(name: str, seed: int) -> None:
    form = FORMS[name]
    answer = written(form, [("now", NOW), ("get_weather", WEATHER)])
    start = answer.index("get_weather")
    for end in range(len(form.before) + len("now" + form.between), start + len("get_weather")):
        found, _ = in_pieces(form, answer[:end], seed)
        assert found.text in answer and found.text.endswith("get_weather"[: max(0, end - start)])


@pytest.mark.parametrize("size", [4, 1 << 20])
@pytest.mark.parametrize("name", FORMS)
def test_little_is_held_back_of_long_answers(name: str, size: int) -> None:
    form = FORMS[name]
    for part in (form.before, form.before[:-1], " ", form.before + "f" + form.between + "{}" + form.after):
        text = part * (200_000 // len(part))
        reader = CallReader(form)
        for start in range(0, len(text), size):
            reader.push(text[start : start + size])
        held = sum(len(part) for part in reader.finish() if isinstance(part, str))
        assert held <= MAX_NAME + len(form.before + form.between)


def test_arguments_come_as_they_are_written() -> None:
    reader = CallReader(FORMS["tagged"], lambda: "call_0")
    assert reader.push('Hm. <tool_call>\n{"na') == ["Hm."]
    assert reader.push('me": "get_weather", "argu') == []
    assert reader.push('ments": {"ci') == [CallPart(0, '{"ci', "get_weather", "call_0")]
    assert reader.push('ty": "Ro') == [CallPart(0, 'ty": "Ro')]
    assert reader.push('me"}}\n</tool') == [CallPart(0, 'me"}')]
    assert reader.push("_call>") == [] and reader.finish() == [] and reader.num_calls == 1


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize(
    ("choice", "only", "is_parallel"),
    [("required", None, True), ("required", None, False), ("required", "get_weather", True), ("auto", None, True)],
)
@pytest.mark.parametrize("name", FORMS)
def test_what_the_grammar_admits_is_read(
    name: str, choice: Choice, only: str | None, is_parallel: bool, seed: int
) -> None:
    form = FORMS[name]
    walker = Walker(Tools(FUNCTIONS, choice, only, is_parallel).held_to(form))
    answer = walker.document(seed)
    if answer is None:
        return  # it went on for long
    found = read_calls(form, answer)
    if choice == "required":
        assert found.text == "" and found.calls, answer
        assert is_parallel or len(found.calls) == 1
        assert {call.name for call in found.calls} <= ({only} if only else set(FUNCTIONS))
    for call in found.calls:
        arguments = json.loads(call.arguments)
        assert set(arguments) <= set(FUNCTIONS[call.name].get("parameters", {}).get("properties", {}))


@pytest.mark.parametrize("name", FORMS)
def test_an_answer_without_calls_may_not_begin_one(name: str) -> None:
    form = FORMS[name]
    walker = Walker(Tools(FUNCTIONS, "none").held_to(form))
    assert walker.admits("Hello.") and not walker.admits(written(form, [("now", NOW)]))


@pytest.mark.parametrize("name", FORMS)
def test_calls_are_of_the_tools_and_under_their_schemas(name: str) -> None:
    form = FORMS[name]
    walker = Walker(Tools(FUNCTIONS).held_to(form))
    assert walker.admits("Hello.") and walker.admits("So: " + written(form, [("get_weather", WEATHER)]))
    for wrong in ([("other", NOW)], [("get_weather", NOW)], [("get_weather", '{"city": 1}')]):
        assert not walker.admits(written(form, wrong))
    two = [("now", NOW), ("get_weather", WEATHER)]
    one_at_most = Walker(Tools(FUNCTIONS, is_parallel=False).held_to(form))
    assert one_at_most.admits(written(form, two[:1])) and not one_at_most.admits(written(form, two))
    assert walker.admits(written(form, two)) == (form.joint is not None)
