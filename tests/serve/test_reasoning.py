"""Reasoning over HTTP: told from answers of a real server, whole and streamed, and limited; forms begin behind it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from clients import run_client, run_node_client
from command_line import run_inferc
from http_calls import request
from serving import Server
from thinking import BEGUN, MARKERS, MAY_BEGIN, Kind
from thinking_server import CHAT, HI, SAMPLED, SCHEMA, Thinking, said, serve, streamed

from inferc.runtime.openai.reasoning_wishes import EFFORT_IGNORED

OFF = {"chat_template_kwargs": {"enable_thinking": False}}
FORMAT = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
BAD = {"type": "object", "properties": {"a": {"contains": {"const": 1}, "maxContains": 3}}}
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]


@pytest.fixture(scope="module", params=get_args(Kind))
def begun(
    tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[Thinking]:
    """A server of a model whose prompts begin its reasoning, with markers of each kind."""
    yield from serve(tiny_llama_folder, tmp_path_factory.mktemp("begun"), BEGUN, request.param)


@pytest.fixture(scope="module")
def free(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thinking]:
    """A server of a model that may begin to reason, and to which the template may say that it does not."""
    yield from serve(tiny_llama_folder, tmp_path_factory.mktemp("free"), MAY_BEGIN, "token")


# ------------------------------------------------------------------------------------- begun by the prompt


@pytest.mark.parametrize("n", [1, 2])
def test_a_form_begins_behind_the_reasoning(begun: Thinking, n: int) -> None:
    reply = begun.ask(response_format=FORMAT, n=n, **begun.briefly)
    for choice in reply["choices"]:
        assert choice["finish_reason"] == "stop" and choice["message"]["reasoning"]
        assert json.loads(choice["message"]["content"])["city"] in ("Rome", "Paris")
        assert not any(marker in text for marker in MARKERS for text in said(choice["message"]))
    if begun.kind != "text":  # the reasoning ends with the character that is being written at its limit
        assert 12 * n <= reply["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 15 * n


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ({"choice": [" yes", "\nno"]}, r" yes|\nno"),
        ({"regex": r"\s[ab]{3}"}, r"\s[ab]{3}"),
        ({"grammar": 'root ::= "  " [ab]'}, "  [ab]"),
        ({"grammar": 'start: " a" | " b"'}, " [ab]"),
        ({"structural_tag": {"format": {"type": "const_string", "value": "\n\nyes"}}}, "\n\nyes"),
        ({"json": SCHEMA, "disable_any_whitespace": True}, r'\{"city": "(Rome|Paris)"\}'),
    ],
)
def test_every_form_is_held_to_behind_reasoning(begun: Thinking, form: Any, expected: str) -> None:
    (choice,) = begun.ask(structured_outputs=form, **begun.briefly)["choices"]
    assert choice["message"]["reasoning"] and re.fullmatch(expected, choice["message"]["content"])


def test_calls_come_behind_the_reasoning(begun: Thinking) -> None:
    (choice,) = begun.ask(tools=TOOLS, tool_choice="required", parallel_tool_calls=False, **begun.briefly)["choices"]
    message = choice["message"]
    assert choice["finish_reason"] == "tool_calls" and message["content"] is None and message["reasoning"]
    assert json.loads(message["tool_calls"][0]["function"]["arguments"])["city"] in ("Rome", "Paris")


@pytest.mark.parametrize("extra", [{}, {"response_format": FORMAT}, {"tools": TOOLS}, {"logprobs": True}])
def test_an_answer_that_is_cut_within_reasoning_has_no_content(begun: Thinking, extra: dict[str, Any]) -> None:
    reply = begun.ask(max_tokens=5, **extra)
    (choice,) = reply["choices"]
    assert choice["finish_reason"] == "length" and choice["message"]["content"] is None
    assert choice["message"]["reasoning"] and "tool_calls" not in choice["message"]
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 5}
    assert len((choice["logprobs"] or {}).get("content", [])) == (5 if "logprobs" in extra else 0)


@pytest.mark.parametrize("name", ["max_reasoning_tokens", "thinking_token_budget"])
@pytest.mark.parametrize("limit", [0, 1, 7])
def test_the_reasoning_ends_at_its_limit(begun: Thinking, name: str, limit: int) -> None:
    if begun.kind == "text":
        reply = request(begun.url, CHAT, {**SAMPLED, name: limit})
        assert reply.status == 400 and reply.error["param"] == "max_reasoning_tokens"
        assert "</think>, which is no token of its own" in reply.error["message"]
        return
    reply = begun.ask(**{name: limit}, max_tokens=20, logprobs=True, return_token_ids=True)
    (choice,) = reply["choices"]
    count = reply["usage"]["completion_tokens_details"]["reasoning_tokens"]
    assert choice["token_ids"].index(begun.tokens["</think>"]) == count
    assert limit <= count <= limit + 3, "with the character that is being written"
    assert len(choice["logprobs"]["content"]) == len(choice["token_ids"])
    assert choice["message"]["content"] and bool(choice["message"].get("reasoning")) == (limit > 0)


def test_a_stream_may_have_the_reasoning_at_once(begun: Thinking) -> None:
    body = {**SAMPLED, **begun.briefly, "max_tokens": 30}
    whole = request(begun.url, CHAT, body).json["choices"][0]["message"]
    deltas = {
        grows: [
            event["choices"][0]["delta"]
            for event in request(begun.url, CHAT, {**body, "stream": True, "stream_reasoning": grows}).events
        ]
        for grows in (True, False)
    }
    parts = {grows: [each["reasoning"] for each in found if "reasoning" in each] for grows, found in deltas.items()}
    assert parts[False] == [whole["reasoning"]] and len(parts[True]) > 1
    said = {grows: "".join(each.get("content") or "" for each in found) for grows, found in deltas.items()}
    assert said[True] == said[False] == (whole["content"] or "")


def test_a_stop_string_ends_reasoning_too(begun: Thinking) -> None:
    whole = begun.ask(**begun.briefly, max_tokens=30)["choices"][0]["message"]["reasoning"]
    (choice,) = begun.ask(**begun.briefly, max_tokens=30, stop=whole[3])["choices"]
    assert choice["finish_reason"] == "stop" and choice["message"]["content"] is None
    assert choice["message"]["reasoning"] == whole[: whole.index(whole[3])].strip()


@pytest.mark.parametrize("include", [False, True])
def test_a_stop_string_may_be_the_marker_of_the_end(begun: Thinking, include: bool) -> None:
    """A control token stops nothing, as no text shows it."""
    stop = {"stop": ["</think>"], "include_stop_str_in_output": include}
    (choice,) = begun.ask(**begun.briefly, **stop)["choices"]
    assert (choice["message"]["content"] is None) == (begun.kind != "control")
    assert begun.kind == "control" or choice["finish_reason"] == "stop"
    assert "</think>" not in choice["message"]["reasoning"]


def test_reasoning_is_left_out_or_left_in(begun: Thinking) -> None:
    limits = {"response_format": FORMAT, **begun.briefly}
    apart = begun.ask(**limits)
    left_out = begun.ask(include_reasoning=False, **limits)
    assert left_out["usage"] == {**apart["usage"], "prompt_tokens_details": left_out["usage"]["prompt_tokens_details"]}
    message = apart["choices"][0]["message"]
    assert left_out["choices"][0]["message"] == {"role": "assistant", "content": message["content"], "refusal": None}
    body = {**SAMPLED, **limits, "separate_reasoning": False}
    whole = request(begun.url, CHAT, body).json["choices"][0]["message"]
    parts = [each["choices"][0] for each in request(begun.url, CHAT, {**body, "stream": True}).events]
    assert "reasoning" not in whole and streamed(parts)[2] == whole["content"]
    assert whole["content"].startswith(message["reasoning"]) and whole["content"].endswith(message["content"])
    assert ("</think>" in whole["content"]) == (begun.kind != "control")


def test_calls_beside_a_form_come_behind_reasoning_that_stays_in_the_text(begun: Thinking) -> None:
    body = {**SAMPLED, **begun.briefly, "tools": TOOLS, "response_format": FORMAT, "n": 8}
    found = []
    for separates in (True, False):
        choices = request(begun.url, CHAT, {**body, "separate_reasoning": separates}).json["choices"]
        calls = [each["message"].get("tool_calls", []) for each in choices]
        found.append([[call["function"] for call in of_one] for of_one in calls])
    assert found[0] == found[1] and [] in found[0] and any(found[0])


def test_usage_so_far_has_the_reasoning(begun: Thinking) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    goes_on = {str(token): -100 for token in begun.tokens.values()}
    body = {**SAMPLED, "max_tokens": 9, "stream": True, "stream_options": options, "logit_bias": goes_on}
    usages = [each["usage"] for each in request(begun.url, CHAT, body).events]
    found = [each["completion_tokens_details"]["reasoning_tokens"] for each in usages]
    assert found == [each["completion_tokens"] for each in usages] and found[-1] == 9


# ----------------------------------------------------------------------------------- begun by the model


def test_a_model_reasons_if_it_begins_to(free: Thinking) -> None:
    (choice,) = free.ask(response_format=FORMAT, max_reasoning_tokens=6, **free.at_once)["choices"]
    assert choice["message"]["reasoning"] and json.loads(choice["message"]["content"])
    never = {"logit_bias": {str(free.tokens["<think>"]): -100}}
    (choice,) = free.ask(response_format=FORMAT, max_reasoning_tokens=6, **never)["choices"]
    assert "reasoning" not in choice["message"] and json.loads(choice["message"]["content"])
    (choice,) = free.ask(max_reasoning_tokens=3, max_tokens=20, **never)["choices"]
    assert "reasoning" not in choice["message"] and len(choice["message"]["content"]) > 3


def test_text_is_told_from_reasoning_without_a_form(free: Thinking) -> None:
    reply = free.ask(max_tokens=10, **free.at_once)
    (choice,) = reply["choices"]
    assert choice["message"]["content"] is None and choice["message"]["reasoning"] == "<think>" * 9
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 9}
    (choice,) = free.ask(max_tokens=10, logit_bias={str(free.tokens["</think>"]): 100})["choices"]
    assert "reasoning" not in choice["message"] and choice["message"]["content"] == "</think>" * 10


@pytest.mark.parametrize("extra", [{"response_format": FORMAT}, {"tools": TOOLS, "tool_choice": "required"}])
def test_a_form_begins_at_once_where_the_template_rules_reasoning_out(free: Thinking, extra: dict[str, Any]) -> None:
    reply = free.ask(max_reasoning_tokens=6, **OFF, **extra, **free.at_once)
    (choice,) = reply["choices"]
    assert "reasoning" not in choice["message"] and choice["finish_reason"] != "length"
    assert reply["usage"]["completion_tokens_details"] == {"reasoning_tokens": 0}


def test_the_effort_none_turns_reasoning_off(free: Thinking, begun: Thinking) -> None:
    reply = free.ask(reasoning_effort="none", max_reasoning_tokens=6, response_format=FORMAT, **free.at_once)
    assert "reasoning" not in reply["choices"][0]["message"] and "warnings" not in reply
    reply = free.ask(reasoning_effort="high", max_tokens=5, chat_template_kwargs={"enable_thinking": True})
    assert reply["warnings"] == [EFFORT_IGNORED]
    events = request(begun.url, CHAT, {**SAMPLED, "reasoning_effort": "none", "max_tokens": 5, "stream": True}).events
    assert events[0]["warnings"] == [EFFORT_IGNORED]


def test_a_limit_holds_beside_tools_that_may_be_called(free: Thinking) -> None:
    reply = free.ask(max_reasoning_tokens=6, max_tokens=30, tools=TOOLS)
    assert 6 <= reply["usage"]["completion_tokens_details"]["reasoning_tokens"] <= 9
    assert reply["choices"][0]["message"]["reasoning"]


@pytest.mark.parametrize("name", ["reasoning_content", "reasoning"])
@pytest.mark.parametrize("content", ["Yes", None])
def test_histories_have_reasoning(free: Thinking, name: str, content: str | None) -> None:
    history = [HI, {"role": "assistant", "content": content, name: "Hm"}, HI]
    sent = request(free.url, CHAT, {"messages": history, "max_tokens": 3, "return_token_ids": True})
    assert sent.status == 200, sent.body
    text = request(free.url, "/detokenize", {"tokens": sent.json["prompt_token_ids"]}).json["prompt"]
    assert f"<|assistant|><think>\nHm\n</think>\n\n{content or ''}<|user|>hi<|assistant|>" in text


# -------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "message", "param"),
    [
        ({"max_reasoning_tokens": -1}, "max_reasoning_tokens is -1; expected at least 0", "max_reasoning_tokens"),
        ({"thinking_token_budget": "3"}, 'thinking_token_budget: expected an integer, found "3"', "thinking_token"),
        (
            {"max_reasoning_tokens": 3, "thinking_token_budget": 4},
            "max_reasoning_tokens is 3 and thinking_token_budget is 4; leave one out",
            "max_reasoning_tokens",
        ),
        ({"max_reasoning_tokens": 3, "ignore_eos": True}, "ignore_eos is true, and an answer that", "ignore_eos"),
        ({"stream_reasoning": 3}, "stream_reasoning: expected true or false, found 3", "stream_reasoning"),
        (
            {"messages": [HI, {"role": "assistant", "content": "", "reasoning": [1]}, HI]},
            "messages[1].reasoning: expected a text",
            "messages",
        ),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": BAD}}},
            "response_format.json_schema.schema: #/properties/a/maxContains: ",
            "response_format",
        ),
    ],
)
def test_what_cannot_be_done_is_refused(
    free: Thinking, change: dict[str, Any], message: str, param: str, stream: bool
) -> None:
    reply = request(free.url, CHAT, {**SAMPLED, "stream": stream, **change})
    assert reply.status == 400, reply.body
    assert reply.error["message"].startswith(message) and (reply.error["param"] or "").startswith(param)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a"}),
        ("/v1/responses", {"input": "a"}),
        (CHAT, {"messages": [HI]}),
    ],
)
def test_a_limit_is_refused_where_no_reasoning_is_known(server: Server, path: str, body: dict[str, Any]) -> None:
    reply = request(server.url, path, {**body, "max_reasoning_tokens": 5})
    assert reply.status == 400 and reply.error["param"] == "max_reasoning_tokens"


def test_answers_of_models_that_do_not_reason_are_as_before(server: Server) -> None:
    reply = request(server.url, CHAT, {**SAMPLED, "max_tokens": 5}).json
    assert set(reply["choices"][0]["message"]) == {"role", "content", "refusal"}
    assert "completion_tokens_details" not in reply["usage"]


def test_inspect_shows_the_form(free: Thinking) -> None:
    printed = run_inferc("inspect", free.out).stdout
    assert (
        "reasoning <think>\\n…\\n</think>\\n\\n, enable_thinking turns it off by <think>\\n\\n</think>\\n\\n" in printed
    )


@pytest.mark.slow
def test_openai_reads_reasoning(free: Thinking) -> None:
    seen = run_client("openai", "check_reasoning.py", free.url, "out", str(free.tokens["<think>"]))
    assert seen["reasoning"] and seen["city"] in ("Rome", "Paris") and seen["reasoning_tokens"] == 6
    assert seen["streamed"] == [seen["reasoning"], seen["content"]]


@pytest.mark.slow
def test_the_ai_sdk_reads_reasoning_and_sends_it_back(free: Thinking) -> None:
    seen = run_node_client("check_reasoning.mjs", free.url, "out", str(free.tokens["<think>"]))
    thought, text = seen["whole"]
    assert thought and text and seen["streamed"] == [thought, text] and seen["tokens"] == [6, 6]
    parts = [f"{kind}-{each}" for kind in ("reasoning", "text") for each in ("start", "delta", "end")]
    assert seen["kinds"] == ["start", "start-step", *parts, "finish-step", "finish"]
    answered = {"role": "assistant", "content": text, "reasoning_content": thought}
    history = [HI, answered, {"role": "user", "content": "and?"}]
    counts = [request(free.url, "/tokenize", {"messages": each}).json["count"] for each in ([HI], history)]
    assert seen["inputs"] == counts


def test_drafts_change_nothing_of_reasoning_and_its_limit(free: Thinking) -> None:
    asked = {"response_format": FORMAT, "max_reasoning_tokens": 20, "temperature": 0, **free.at_once}
    expected = free.ask(**asked)
    with Server(free.out, "--speculate", "ngram") as server:
        found = Thinking(server.url, free.out, free.kind, free.tokens).ask(**asked)
    assert found["choices"] == expected["choices"] and json.loads(found["choices"][0]["message"]["content"])
    for name in ("completion_tokens", "completion_tokens_details"):
        assert found["usage"][name] == expected["usage"][name]


def test_both_libraries_hold_to_a_form_behind_reasoning(free: Thinking) -> None:
    asked = {"response_format": FORMAT, "max_reasoning_tokens": 20, "temperature": 0, **free.at_once}
    with Server(free.out, "--structured-outputs-backend", "llguidance") as server:
        found = Thinking(server.url, free.out, free.kind, free.tokens).ask(**asked)
    assert found["choices"] == free.ask(**asked)["choices"]
