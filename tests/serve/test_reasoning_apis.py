"""Reasoning in the APIs beside chats, over a real server: whole, streamed, and as the next request has it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from clients import run_client
from http_calls import request
from message_events import events, put_together
from serving import Server
from thinking import BEGUN, MAY_BEGIN
from thinking_server import CHAT, HI, SAMPLED, SCHEMA, Thinking, serve

from inferc.runtime.openai.reasoning_wishes import EFFORT_IGNORED, STAYS_ON, THINKING_IGNORED
from inferc.runtime.openai.responses import SUMMARY_IGNORED

MESSAGES, COUNT = "/v1/messages", "/v1/messages/count_tokens"
FORMAT = {"type": "json_schema", "schema": SCHEMA}
TOOLS = [{"name": "look", "input_schema": SCHEMA}]
ADAPTIVE = {"thinking": {"type": "adaptive"}}
DISABLED = {"thinking": {"type": "disabled"}}


@pytest.fixture(scope="module")
def free(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thinking]:
    """A server of a model that may begin to reason, and to which the template may say that it does not."""
    yield from serve(tiny_llama_folder, tmp_path_factory.mktemp("free"), MAY_BEGIN, "token")


@pytest.fixture(scope="module")
def begun(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thinking]:
    """A server of a model whose prompts begin its reasoning, whose markers are text."""
    yield from serve(tiny_llama_folder, tmp_path_factory.mktemp("begun"), BEGUN, "text")


# ------------------------------------------------------------------------------------ Anthropic's messages


def enabled(budget: int) -> dict[str, Any]:
    return {"thinking": {"type": "enabled", "budget_tokens": budget}}


def message(url: str, **changes: Any) -> Any:
    """Return a message, after a check that a stream tells of the same."""
    body = {**SAMPLED, **changes}
    reply = request(url, MESSAGES, body)
    assert reply.status == 200, reply.body
    found, told = reply.json, put_together(events(request(url, MESSAGES, {**body, "stream": True}).body))
    for each in (found, told):
        for block in each["content"]:
            block.pop("id", None)
    for name in ("content", "stop_reason", "stop_sequence", "warnings"):
        assert told.get(name) == found.get(name)
    assert told["usage"]["output_tokens_details"] == found["usage"]["output_tokens_details"]
    return found


def test_thoughts_are_a_block_before_the_text(free: Thinking) -> None:
    asked = {"output_config": {"format": FORMAT}, **free.at_once}
    found = message(free.url, **enabled(6), **asked)
    thought, text = found["content"]
    assert thought["type"] == "thinking" and thought["thinking"] and thought["signature"]
    assert text["type"] == "text" and json.loads(text["text"])["city"] in ("Rome", "Paris")
    assert found["usage"]["output_tokens_details"] == {"thinking_tokens": 6} and found["stop_reason"] == "end_turn"
    said = free.ask(
        max_reasoning_tokens=6,
        response_format={"type": "json_schema", "json_schema": {"schema": SCHEMA, "name": "a"}},
        **free.at_once,
    )["choices"][0]["message"]
    assert (thought["thinking"], text["text"]) == (said["reasoning"], said["content"])
    assert "warnings" not in found


def test_an_answer_that_is_cut_within_its_thoughts_has_no_text(free: Thinking) -> None:
    found = message(free.url, **ADAPTIVE, max_tokens=9, **free.at_once)
    assert [block["type"] for block in found["content"]] == ["thinking"] and found["stop_reason"] == "max_tokens"
    assert found["usage"]["output_tokens_details"] == {"thinking_tokens": 8}


def test_calls_come_behind_thoughts(free: Thinking) -> None:
    choice = {"type": "any", "disable_parallel_tool_use": True}
    found = message(free.url, **enabled(6), tools=TOOLS, tool_choice=choice, **free.at_once)
    assert [block["type"] for block in found["content"]] == ["thinking", "tool_use"]
    assert found["content"][1]["input"]["city"] in ("Rome", "Paris") and found["stop_reason"] == "tool_use"


@pytest.mark.parametrize("change", [{}, {"thinking": {"type": "adaptive", "display": "omitted"}}])
def test_who_asks_for_no_thoughts_gets_text_without_any(free: Thinking, change: dict[str, Any]) -> None:
    asked = {"max_reasoning_tokens": 6, "max_tokens": 30, **free.at_once}
    shown = message(free.url, **ADAPTIVE, **asked)
    found = message(free.url, **change, **asked)
    assert found["content"] == shown["content"][1:] != []
    assert found["usage"]["output_tokens_details"] == {"thinking_tokens": 6}


def test_reasoning_stays_within_the_text_on_demand(free: Thinking) -> None:
    found = message(free.url, separate_reasoning=False, max_reasoning_tokens=6, max_tokens=30, **free.at_once)
    assert found["content"][0]["text"].startswith("<think>") and "</think>" in found["content"][0]["text"]


def test_reasoning_is_turned_off_where_the_template_can(free: Thinking, begun: Thinking) -> None:
    found = message(free.url, **DISABLED, output_config={"format": FORMAT}, **free.at_once)
    assert found["usage"]["output_tokens_details"] == {"thinking_tokens": 0} and "warnings" not in found
    assert json.loads(found["content"][0]["text"])
    found = message(begun.url, **DISABLED, output_config={"format": FORMAT}, **begun.briefly)
    assert found["warnings"] == [STAYS_ON] and found["usage"]["output_tokens_details"]["thinking_tokens"] > 0
    (block,) = found["content"]
    assert json.loads(block["text"])["city"] in ("Rome", "Paris")


def test_token_counts_are_those_of_the_prompt(free: Thinking) -> None:
    counts = []
    for change in (ADAPTIVE, DISABLED):
        counted = request(free.url, COUNT, {"messages": [HI], **change}).json["input_tokens"]
        usage = request(free.url, MESSAGES, {"messages": [HI], "max_tokens": 3, **change}).json["usage"]
        assert counted == usage["input_tokens"] + usage["cache_read_input_tokens"]
        counts.append(counted)
    assert counts[1] > counts[0], "the template says that there is no reasoning"


def test_a_budget_that_cannot_be_held_is_named(begun: Thinking) -> None:
    found = message(begun.url, **enabled(4), **begun.briefly)
    assert found["content"][0]["type"] == "thinking"
    (warning,) = found["warnings"]
    assert warning.startswith("thinking.budget_tokens was ignored: the model ends its reasoning with </think>")


def test_an_effort_that_is_not_read_is_named(free: Thinking) -> None:
    assert message(free.url, output_config={"effort": "low"}, max_tokens=3)["warnings"] == [EFFORT_IGNORED]


def test_models_that_do_not_reason_say_so(server: Server) -> None:
    for change, warnings in ((enabled(1024), [THINKING_IGNORED]), (ADAPTIVE, [THINKING_IGNORED]), (DISABLED, None)):
        reply = request(server.url, MESSAGES, {**SAMPLED, "max_tokens": 4, **change})
        assert reply.status == 200 and reply.json.get("warnings") == warnings, reply.body
        assert [block["type"] for block in reply.json["content"]] == ["text"]
        assert "output_tokens_details" not in reply.json["usage"]
    reply = request(server.url, MESSAGES, {**SAMPLED, "max_reasoning_tokens": 4})
    assert reply.status == 400 and "max_reasoning_tokens" in reply.json["error"]["message"]


def test_the_next_message_has_the_thoughts(free: Thinking) -> None:
    answer = message(free.url, **enabled(6), max_tokens=30, **free.at_once)["content"]
    body = {"max_tokens": 3, "messages": [HI, {"role": "assistant", "content": answer}, HI]}
    thought, text = answer[0]["thinking"], answer[1]["text"]
    said = {"role": "assistant", "content": text, "reasoning": thought}
    chat = request(free.url, CHAT, {**body, "messages": [HI, said, HI], "return_token_ids": True}).json
    prompt = request(free.url, "/detokenize", {"tokens": chat["prompt_token_ids"]}).json["prompt"]
    assert f"<think>\n{thought}\n</think>\n\n{text}" in prompt
    assert request(free.url, COUNT, body).json["input_tokens"] == chat["usage"]["prompt_tokens"]


@pytest.mark.slow
def test_anthropics_client_reads_thoughts(free: Thinking) -> None:
    seen = run_client("anthropic", "check_thinking.py", free.url, "out", str(free.tokens["<think>"]))
    (thought, text), usage = seen["content"], seen["usage"]
    assert thought["type"] == "thinking" and json.loads(text["text"])["city"] in ("Rome", "Paris")
    assert usage["output_tokens_details"] == {"thinking_tokens": 6}
    assert seen["streamed"] == [thought["thinking"], text["text"], thought["signature"]]
    assert seen["final"] == seen["content"] and seen["then"] == "text"


# -------------------------------------------------------------------------------------------- responses

RESPONSES = "/v1/responses"
ASKED: dict[str, Any] = {"input": "hi", "temperature": 1, "seed": 5, "max_output_tokens": 120}
LOGPROBS: dict[str, Any] = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}


def response(url: str, **changes: Any) -> Any:
    """Return a response, after a check that a stream tells of the same."""
    body = {**ASKED, **changes}
    reply = request(url, RESPONSES, body)
    assert reply.status == 200, reply.body
    found = reply.json
    blocks = request(url, RESPONSES, {**body, "stream": True}).body.decode().split("\n\n")[:-1]
    told = [json.loads(block.split("\ndata: ")[1]) for block in blocks]
    items: list[dict[str, Any]] = []
    for event in told[2:-1]:
        if event["type"] == "response.output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
        elif event["type"] == "response.content_part.added":
            assert items[-1]["content"] == []
            items[-1]["content"] = [event["part"]]
        elif event["type"] in ("response.reasoning_text.delta", "response.output_text.delta"):
            (part,) = items[-1]["content"]
            part["text"] += event["delta"]
            part.update({"logprobs": part["logprobs"] + event["logprobs"]} if "logprobs" in event else {})
        elif event["type"] in ("response.reasoning_text.done", "response.output_text.done"):
            assert event["text"] == items[-1]["content"][0]["text"]
        elif event["type"] == "response.content_part.done":
            assert event["part"] == items[-1]["content"][0]
        elif event["type"] == "response.function_call_arguments.delta":
            items[-1]["arguments"] += event["delta"]
        elif event["type"] == "response.output_item.done":
            items[-1]["status"] = event["item"]["status"]
            assert event["item"] == items[-1]
    last = told[-1]["response"]
    assert last["output"] == items and told[-1]["type"] == f"response.{found['status']}"
    for each in (*found["output"], *last["output"]):
        each.pop("id")
        each.pop("call_id", None)
    for name in ("output", "status", "warnings"):
        assert last.get(name) == found.get(name)
    assert last["usage"]["output_tokens_details"] == found["usage"]["output_tokens_details"]
    return found


def thought_and(found: Any, kind: str = "message") -> tuple[str, Any]:
    """Return the text of a response's reasoning, and its other item, of this type."""
    reasoning, item = found["output"]
    assert reasoning == {
        "type": "reasoning",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": reasoning["content"][0]["text"]}],
        "status": "completed",
    }
    assert item["type"] == kind and item["status"] == "completed"
    return reasoning["content"][0]["text"], item


def test_reasoning_is_an_item_before_the_message(free: Thinking) -> None:
    asked = {"max_reasoning_tokens": 6, **free.at_once}
    found = response(free.url, text={"format": {**FORMAT, "name": "a"}}, **asked)
    thought, item = thought_and(found)
    form = {"type": "json_schema", "json_schema": {"schema": SCHEMA, "name": "a"}}
    said = free.ask(response_format=form, **asked)["choices"][0]["message"]
    assert (thought, item["content"][0]["text"]) == (said["reasoning"], said["content"])
    assert found["usage"]["output_tokens_details"] == {"reasoning_tokens": 6} and found["status"] == "completed"


def test_log_probabilities_are_those_of_the_text(free: Thinking, begun: Thinking) -> None:
    """In a stream they come with the text, however late it is known to be text."""
    form = {"text": {"format": {**FORMAT, "name": "a"}}}
    for thinking, extra in ((free, {"max_reasoning_tokens": 6, **free.at_once}), (begun, begun.briefly)):
        _, item = thought_and(response(thinking.url, **form, **LOGPROBS, **extra))
        (part,) = item["content"]
        spelled = b"".join(bytes(row["bytes"]) for row in part["logprobs"])
        assert spelled.decode().strip().removesuffix("</s>") == part["text"]
    whole = response(free.url, **LOGPROBS, reasoning={"effort": "none"}, max_output_tokens=9)
    assert len(whole["output"][-1]["content"][0]["logprobs"]) == 9


def test_calls_come_behind_the_item_of_reasoning(free: Thinking) -> None:
    tools = [{"type": "function", "name": "look", "parameters": SCHEMA}]
    asked = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False}
    _, item = thought_and(response(free.url, max_reasoning_tokens=6, **asked, **free.at_once), "function_call")
    assert json.loads(item["arguments"])["city"] in ("Rome", "Paris")


def test_a_response_that_is_cut_within_reasoning_has_no_message(free: Thinking) -> None:
    for extra in ({}, LOGPROBS):
        found = response(free.url, max_output_tokens=9, **extra, **free.at_once)
        assert [(item["type"], item["status"]) for item in found["output"]] == [("reasoning", "incomplete")]
        assert found["status"] == "incomplete" and found["usage"]["output_tokens_details"] == {"reasoning_tokens": 8}


def test_a_response_leaves_reasoning_out_on_demand(free: Thinking) -> None:
    asked = {"max_reasoning_tokens": 6, "max_output_tokens": 30, **free.at_once}
    _, item = response(free.url, **asked)["output"]
    found = response(free.url, include_reasoning=False, **asked)
    assert found["output"] == [item] and found["usage"]["output_tokens_details"] == {"reasoning_tokens": 6}


def test_what_a_response_cannot_do_about_reasoning_is_named(free: Thinking) -> None:
    found = response(free.url, reasoning={"effort": "low", "summary": "auto"}, max_output_tokens=3)
    assert found["warnings"] == [SUMMARY_IGNORED, EFFORT_IGNORED]
    found = response(free.url, reasoning={"effort": "none"}, max_output_tokens=9, **free.at_once)
    assert "warnings" not in found and found["usage"]["output_tokens_details"] == {"reasoning_tokens": 0}
    assert [item["type"] for item in found["output"]] == ["message"]


@pytest.mark.parametrize("called", [False, True])
def test_the_next_input_has_the_reasoning(free: Thinking, called: bool) -> None:
    tools = [{"type": "function", "name": "look", "parameters": SCHEMA}]
    extra = {"tools": tools, "tool_choice": "required", "parallel_tool_calls": False} if called else {}
    reply = request(free.url, RESPONSES, {**ASKED, "max_reasoning_tokens": 6, **extra, **free.at_once}).json
    thought, item = reply["output"][0]["content"][0]["text"], reply["output"][1]
    turns = [HI, *reply["output"]]
    if called:
        turns.append({"type": "function_call_output", "call_id": item["call_id"], "output": "sunny"})
        function = {"name": item["name"], "arguments": item["arguments"]}
        said = {"content": None, "tool_calls": [{"id": item["call_id"], "type": "function", "function": function}]}
        then = [{"role": "tool", "tool_call_id": item["call_id"], "content": "sunny"}]
    else:
        turns.append(HI)
        said, then = {"content": item["content"][0]["text"]}, [HI]
    messages = [HI, {"role": "assistant", "reasoning_content": thought, **said}, *then]
    offered = {"tools": [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]} if called else {}
    chat = request(free.url, CHAT, {"messages": messages, "max_tokens": 3, **offered}).json
    found = request(
        free.url, RESPONSES, {"input": turns, "max_output_tokens": 3, "tools": tools if called else []}
    ).json
    assert found["usage"]["input_tokens"] == chat["usage"]["prompt_tokens"]
    counted = request(free.url, COUNT, {"messages": [HI]}).json["input_tokens"]
    assert found["usage"]["input_tokens"] > counted + 6


@pytest.mark.slow
def test_openais_client_reads_items_of_reasoning(free: Thinking) -> None:
    seen = run_client("openai", "check_reasoning_items.py", free.url, "out", str(free.tokens["<think>"]))
    assert seen["kinds"] == ["reasoning", "message"] and seen["reasoning_tokens"] == 6
    assert seen["reasoning"] and json.loads(seen["text"])["city"] in ("Rome", "Paris")
    assert seen["streamed"] == [seen["reasoning"], seen["text"]] and seen["again"]
