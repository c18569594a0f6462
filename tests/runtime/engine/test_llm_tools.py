"""Tools in `LLM.chat`: free answers, answers that are held to them, and the calls in either."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_calls import request
from serving import Server
from tool_models import TOOLS, check_arguments

from inferc import LLM, SamplingParams
from inferc.errors import RequestError

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
PARAMS = SamplingParams(temperature=1.0, seed=5, max_tokens=120)


@pytest.fixture(scope="module")
def llm(tooled_artifact: Path) -> Iterator[LLM]:
    with LLM(tooled_artifact) as llm:
        yield llm


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "get_weather"}}])
def test_answers_that_are_held_are_those_over_http(llm: LLM, tooled: Server, choice: Any) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False}
    first, second = llm.chat([HI, HI], PARAMS, **options)
    (output,) = first.outputs
    body = {"messages": HI, "temperature": 1, "seed": 5, "max_tokens": 120, **options}
    (call,) = request(tooled.url, "/v1/chat/completions", body).json["choices"][0]["message"]["tool_calls"]
    assert [(each.name, each.arguments) for each in output.tool_calls] == [
        (call["function"]["name"], call["function"]["arguments"])
    ]
    check_arguments(output.tool_calls[0].name, json.loads(output.tool_calls[0].arguments))
    assert output.text == f"<call>{call['function']['name']}={call['function']['arguments']}</call>"
    assert second.outputs[0].tool_calls[0].id != output.tool_calls[0].id


def test_a_single_call_is_held_to_without_a_choice(llm: LLM) -> None:
    starts = SamplingParams(temperature=1.0, seed=5, max_tokens=60, n=4)
    (answer,) = llm.chat(HI, starts, tools=TOOLS, parallel_tool_calls=False)
    assert all(len(output.tool_calls) <= 1 for output in answer.outputs)
    with pytest.raises(RequestError, match="another tool's"):
        llm.chat(HI, starts, tools=[TOOLS[1], TOOLS[1]], parallel_tool_calls=False)


def test_free_answers_have_the_calls_in_their_text(llm: LLM) -> None:
    """By a form of its own, the answer is a text with a call in it."""
    said = 'so <call>now={"a": 1}</call> <call>now={}</call>'
    params = SamplingParams(max_tokens=120, structured_outputs={"choice": [said]})  # type: ignore[arg-type]
    (answer,) = llm.chat(HI, params, tools=TOOLS)
    (output,) = answer.outputs
    assert output.text == said
    assert [(call.name, call.arguments) for call in output.tool_calls] == [("now", '{"a": 1}'), ("now", "{}")]
    (without,) = llm.chat(HI, params)
    assert without.outputs[0].text == said and without.outputs[0].tool_calls == []


def test_a_call_that_was_cut_is_none(llm: LLM) -> None:
    params = SamplingParams(temperature=1.0, seed=5, max_tokens=20)
    (answer,) = llm.chat(HI, params, tools=TOOLS[:1], tool_choice="required")
    assert answer.outputs[0].text.startswith("<call>get_weather={") and answer.outputs[0].tool_calls == []


def test_what_cannot_be_held_to_is_refused(llm: LLM, tiny_artifact: Path) -> None:
    with pytest.raises(RequestError, match='tool_choice is "sometimes"'):
        llm.chat(HI, PARAMS, tools=TOOLS, tool_choice="sometimes")
    with pytest.raises(RequestError, match="there are no tools"):
        llm.chat(HI, PARAMS, tool_choice="required")
    formed = SamplingParams(structured_outputs={"regex": "a"})  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="gives the answer a form, too"):
        llm.chat(HI, formed, tools=TOOLS, tool_choice="auto")
    with LLM(tiny_artifact) as other, pytest.raises(RequestError, match="tools: the model's chat template"):
        other.chat(HI, PARAMS, tools=TOOLS, tool_choice="required")
