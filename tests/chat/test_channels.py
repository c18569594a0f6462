"""Channels found by rendering a template in the style of gpt-oss's, and the form of its calls."""

from __future__ import annotations

from typing import Any

import pytest
from harmony import HARMONY as TEMPLATE
from harmony import TOKENS
from rendering import rendered, rendered_with

from inferc.chat.calls import find_call_form
from inferc.chat.channels import HARMONY, find_channel_calls, find_channels, is_in_channels
from inferc.chat.form import find_form, form_of
from inferc.chat.named_forms import CALLS, OF_HARMONY, REASONING
from inferc.chat.reasoning import find_reasoning_form
from inferc.runtime.text.chat_messages import formed


def test_channels_and_their_calls_are_found() -> None:
    render = rendered(TEMPLATE)
    form = find_form(render)
    assert form is not None and find_call_form(render, form) is None
    reasoning = find_reasoning_form(rendered_with(TEMPLATE), form, TEMPLATE, TOKENS)
    assert reasoning is not None and reasoning.channels == HARMONY and reasoning.switch is None
    calls = find_channel_calls(render, form, HARMONY)
    assert calls is not None and is_in_channels(calls)
    assert str(calls) == "<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}"
    assert all(CALLS[name] == calls and REASONING[name] == reasoning for name in OF_HARMONY)


@pytest.mark.parametrize(
    ("begin", "end"),
    [
        ("<think>", "</think>"),
        ("<|channel|>analysis<|message|>", "<|end|>"),
        ("<|channel|>analysis", "<|end|><|start|>assistant<|channel|>final<|message|>"),
        ("<|channel|>final<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
        ("<|start|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    ],
)
def test_other_markers_are_no_channels(begin: str, end: str) -> None:
    assert find_channels(begin, end, TOKENS) is None
    assert find_channels(HARMONY.begin, HARMONY.turn, ()) is None


@pytest.mark.parametrize("lost", [" to=functions.{{ call.name }}", "<|channel|>commentary json"])
def test_calls_that_are_written_otherwise_are_no_messages_in_a_channel(lost: str) -> None:
    render = rendered(TEMPLATE.replace(lost, ""))
    form = find_form(render)
    assert form is not None and find_channel_calls(render, form, HARMONY) is None


def test_what_the_template_cannot_write_of_a_message_is_known() -> None:
    form = find_form(rendered(TEMPLATE))
    assert form is not None and not form.several_calls and not form.thoughts_beside_text
    assert form_of(form.to_json()) == form
    assert str(form) == "content as text, arguments of tool calls as an object, calls of a message one by one"


def test_several_calls_are_written_one_by_one_each_with_its_result() -> None:
    render = rendered(TEMPLATE)
    form = find_form(render)
    assert form is not None
    calls = [
        {"id": f"c{index}", "type": "function", "function": {"name": name, "arguments": "{}"}}
        for index, name in enumerate(("first", "second"))
    ]
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {"role": "assistant", "content": "I look.", "reasoning_content": "Hm.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "c1", "content": "two"},
        {"role": "tool", "tool_call_id": "c0", "content": "one"},
    ]
    text = render(formed(messages, form), True, None)
    assert text.partition("Hi<|end|>")[2] == (
        "<|start|>assistant<|channel|>analysis<|message|>Hm.\n\nI look.<|end|>"
        "<|start|>assistant to=functions.first<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.first to=assistant<|channel|>commentary<|message|>"one"<|end|>'
        "<|start|>assistant to=functions.second<|channel|>commentary json<|message|>{}<|call|>"
        '<|start|>functions.second to=assistant<|channel|>commentary<|message|>"two"<|end|>'
        "<|start|>assistant"
    )
    answered = [*messages, {"role": "assistant", "content": "Both."}, {"role": "user", "content": "So?"}]
    assert "Hm." not in render(formed(answered, form), True, None), "the template drops reasoning that was answered"


@pytest.mark.parametrize(
    ("ids", "of_results", "expected"),
    [
        (["a", "b", "c"], ["c", "a", "b"], [[1], [2], [0]]),
        (["a", "a"], ["a", "a"], [[0], [1]]),
        (["a", "b"], [None, None], [[0], [1]]),
        ([None, "b"], ["x", "b"], [[0], [1]]),
        (["a", "b"], ["a", "a"], [[0, 1], []]),
        (["a", "b"], [["a"], "b", "x"], [[0], [1, 2]]),
    ],
)
def test_results_follow_their_calls(ids: list[Any], of_results: list[Any], expected: list[list[int]]) -> None:
    form = find_form(rendered(TEMPLATE))
    assert form is not None
    function = {"name": "now", "arguments": "{}"}
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": "Hi"},
        {
            "role": "assistant",
            "content": None,
            "kept": "once",
            "tool_calls": [{"id": i, "function": function} for i in ids],
        },
        *[{"role": "tool", "tool_call_id": i, "content": str(at)} for at, i in enumerate(of_results)],
    ]
    _, *found = formed(messages, form)
    assert [each["role"] for each in found].count("assistant") == len(ids) and "kept" in found[0]
    assert not any("kept" in each for each in found[1:]), "what a message has beside its calls is not there for each"
    assert [int(each["content"]) for each in found if each["role"] == "tool"] == [at for own in expected for at in own]
    starts = [at for at, each in enumerate(found) if each["role"] == "assistant"]
    ends = [*starts[1:], len(found)]
    assert [end - start - 1 for start, end in zip(starts, ends, strict=True)] == list(map(len, expected))
