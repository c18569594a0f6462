"""Anthropic's Messages API: as it goes over the wire, and by Anthropic's client."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from pathlib import Path
from typing import Any

import pytest
from clients import run_client
from command_line import run_inferc
from http_calls import Reply, request
from message_events import events, put_together
from serving import Server
from tool_models import TOOLS, WEATHER, check_arguments

from inferc.runtime.anthropic.request import parse_messages
from inferc.runtime.openai.answer import Usage
from inferc.serve.errors import EngineUnavailable
from inferc.serve.http.messages_api import _MessageForm
from inferc.serve.models.streams import Delta

MESSAGES, COUNT, CHAT = "/v1/messages", "/v1/messages/count_tokens", "/v1/chat/completions"
HI = [{"role": "user", "content": "Write a function that adds two numbers."}]
BODY: dict[str, Any] = {"messages": HI, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
OFFERED = [
    {"name": "get_weather", "description": "The weather.", "input_schema": WEATHER},
    {"name": "now", "input_schema": {"type": "object"}},
]
SAMPLED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "hi"}],
    "max_tokens": 120,
    "tools": OFFERED,
    "temperature": 1,
    "seed": 5,
}


def error(reply: Reply) -> dict[str, Any]:
    """Return an error in Anthropic's form."""
    found = reply.json
    assert set(found) == {"type", "error"} and found["type"] == "error" and set(found["error"]) == {"type", "message"}
    return dict(found["error"])


def test_a_message_is_what_a_chat_says(url: str, tiny_artifact: Path) -> None:
    chat = request(url, CHAT, BODY).json
    reply = request(url, MESSAGES, BODY, {"anthropic-version": "2023-06-01", "anthropic-beta": "a,b"})
    message = reply.json
    assert message["content"] == [{"type": "text", "text": chat["choices"][0]["message"]["content"]}]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", tiny_artifact.name)
    assert message["id"].startswith("msg_") and reply.headers["request-id"] == reply.headers["x-request-id"]
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None) and "warnings" not in message
    usage = message["usage"]
    assert usage["input_tokens"] + usage["cache_read_input_tokens"] == chat["usage"]["prompt_tokens"]
    assert (usage["output_tokens"], usage["cache_creation_input_tokens"]) == (12, 0)
    counted = request(url, COUNT, {"messages": HI})
    assert counted.json == {"input_tokens": chat["usage"]["prompt_tokens"]}


def test_input_tokens_are_those_that_were_not_cached(url: str) -> None:
    long = {**BODY, "messages": [{"role": "user", "content": "a b c d e f g h " * 12}], "cache_salt": "of this test"}
    first, again = (request(url, MESSAGES, long).json["usage"] for _ in range(2))
    assert first["cache_read_input_tokens"] == 0 < again["cache_read_input_tokens"]
    assert again["input_tokens"] == first["input_tokens"] - again["cache_read_input_tokens"] > 0
    streamed = put_together(events(request(url, MESSAGES, {**long, "stream": True}).body))["usage"]
    assert streamed == again


def test_a_stream_tells_of_the_same_message(url: str) -> None:
    whole = request(url, MESSAGES, BODY).json
    found = events(request(url, MESSAGES, {**BODY, "stream": True}).body)
    message = put_together(found)
    for name in ("content", "stop_reason", "stop_sequence", "model", "role", "type"):
        assert message[name] == whole[name]


def test_the_sequence_that_stopped_is_named(url: str) -> None:
    text = request(url, MESSAGES, BODY).json["content"][0]["text"]
    body = {**BODY, "stop_sequences": ["\0", text[4:6]]}
    message = request(url, MESSAGES, body).json
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", text[4:6])
    assert message["content"][0]["text"] == text[: text.index(text[4:6])]
    streamed = put_together(events(request(url, MESSAGES, {**body, "stream": True}).body))
    for name in ("content", "stop_reason", "stop_sequence"):
        assert streamed[name] == message[name]


def test_an_answer_that_ends_by_itself_ends_its_turn(url: str) -> None:
    form = {"type": "json_schema", "schema": {"enum": ["yes", "no"]}}
    body = {"messages": HI, "max_tokens": 20, "output_config": {"format": form}}
    message = request(url, MESSAGES, body).json
    assert message["stop_reason"] == "end_turn" and json.loads(message["content"][0]["text"]) in ("yes", "no")
    streamed = put_together(events(request(url, MESSAGES, {**body, "stream": True}).body))
    assert streamed["stop_reason"] == "end_turn" and streamed["stop_sequence"] is None


def test_fields_that_are_not_known_are_named(url: str) -> None:
    for stream in (False, True):
        reply = request(url, MESSAGES, {**BODY, "temprature": 1, "stream": stream})
        message = events(reply.body)[0]["message"] if stream else reply.json
        assert message["warnings"] == ["temprature is not known and was ignored; did you mean temperature?"]


# --------------------------------------------------------------------------------------------------- tools


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ({"type": "any", "disable_parallel_tool_use": True}, {"get_weather", "now"}),
        ({"type": "tool", "name": "get_weather", "disable_parallel_tool_use": True}, {"get_weather"}),
    ],
)
def test_calls_come_whole_and_in_parts(tooled: Server, choice: Any, names: set[str]) -> None:
    body = {**SAMPLED, "tool_choice": choice}
    whole = request(tooled.url, MESSAGES, body).json
    found = events(request(tooled.url, MESSAGES, {**body, "stream": True}).body)
    (block,), (streamed,) = whole["content"], put_together(found)["content"]
    assert block["type"] == "tool_use" and block["id"].startswith("toolu_") and block["id"] != streamed["id"]
    assert block["name"] in names
    check_arguments(block["name"], block["input"])
    assert (streamed["name"], streamed["input"]) == (block["name"], block["input"])
    assert whole["stop_reason"] == put_together(found)["stop_reason"] == "tool_use"
    starts = [event["content_block"] for event in found if event["type"] == "content_block_start"]
    assert [start["input"] for start in starts] == [{}], "it comes by and by"


def test_several_calls_are_several_blocks(tooled: Server) -> None:
    for seed in range(8):
        body = {**SAMPLED, "tool_choice": {"type": "any"}, "seed": seed, "max_tokens": 160}
        message = request(tooled.url, MESSAGES, body).json
        if message["stop_reason"] != "tool_use" or len(message["content"]) < 2:
            continue
        for block in message["content"]:
            check_arguments(block["name"], block["input"])
        assert len({block["id"] for block in message["content"]}) == len(message["content"])
        streamed = put_together(events(request(tooled.url, MESSAGES, {**body, "stream": True}).body))
        assert [each["input"] for each in streamed["content"]] == [each["input"] for each in message["content"]]
        return
    pytest.fail("no seed gives several calls")


def test_a_call_that_was_cut_is_no_block(tooled: Server) -> None:
    body = {**SAMPLED, "tool_choice": {"type": "tool", "name": "get_weather"}, "max_tokens": 15}
    message = request(tooled.url, MESSAGES, body).json
    assert (message["content"], message["stop_reason"]) == ([], "max_tokens")
    found = events(request(tooled.url, MESSAGES, {**body, "stream": True}).body)
    assert found[-2]["delta"]["stop_reason"] == "max_tokens" and found[-3]["type"] == "content_block_stop"


def test_an_answer_is_a_call_or_of_a_form(tooled: Server) -> None:
    form = {"output_config": {"format": {"type": "json_schema", "schema": WEATHER}}}
    for seed in range(4):
        (block, *others) = request(tooled.url, MESSAGES, {**SAMPLED, **form, "seed": seed, "max_tokens": 150}).json[
            "content"
        ]
        assert block["type"] == "tool_use" or (not others and json.loads(block["text"]).keys() == {"city", "days"})


def test_without_a_choice_to_call_there_is_text(tooled: Server) -> None:
    message = request(tooled.url, MESSAGES, {**SAMPLED, "tool_choice": {"type": "none"}, "max_tokens": 20}).json
    assert [block["type"] for block in message["content"]] == ["text"]


def test_the_model_reads_what_a_chat_would_have_it_read(tooled: Server) -> None:
    call = {"id": "toolu_1", "type": "function", "function": {"name": "now", "arguments": '{"a": 1}'}}
    chat = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "12:00"},
    ]
    ours = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "now", "input": {"a": 1}}]},
        {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": "12:00"}]},
    ]
    tools = [{"name": "get_weather", "input_schema": WEATHER}, {"name": "now", "input_schema": {}}]
    said = request(tooled.url, CHAT, {"messages": chat, "tools": TOOLS, "max_tokens": 3, "temperature": 0}).json
    message = request(tooled.url, MESSAGES, {"messages": ours, "tools": tools, "max_tokens": 3, "temperature": 0}).json
    assert message["content"][0]["text"] == said["choices"][0]["message"]["content"]
    counted = request(tooled.url, COUNT, {"messages": ours, "tools": tools}).json
    assert counted == {"input_tokens": said["usage"]["prompt_tokens"]}


# -------------------------------------------------------------------------------------------------- errors


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("change", "status", "kind", "text"),
    [
        ({"max_tokens": "a"}, 400, "invalid_request_error", "max_tokens: expected an integer"),
        ({"messages": [{"role": "user", "content": "a" * 900}]}, 400, "invalid_request_error", "the prompt has"),
        ({"model": "other"}, 404, "not_found_error", "other"),
        ({"tools": OFFERED}, 400, "invalid_request_error", "tools: the model's chat template does not tell"),
    ],
)
def test_errors_have_their_form(
    url: str, change: dict[str, Any], status: int, kind: str, text: str, stream: bool
) -> None:
    reply = request(url, MESSAGES, {**BODY, **change, "stream": stream})
    assert reply.status == status and error(reply)["type"] == kind and text in error(reply)["message"]


def test_counting_refuses_as_answering_does(url: str) -> None:
    reply = request(url, COUNT, {"messages": HI, "tools": OFFERED})
    assert reply.status == 400 and "tools: the model's chat template" in error(reply)["message"]
    assert error(request(url, COUNT, {"messages": []}))["type"] == "invalid_request_error"


def test_faults_outside_of_a_body_have_the_form_too(url: str) -> None:
    assert error(request(url, MESSAGES, b"{"))["type"] == "invalid_request_error"
    assert request(url, MESSAGES, method="GET").status == 405
    found = error(request(url, f"{MESSAGES}/batches", {}))
    assert found["type"] == "not_found_error" and found["message"].startswith('there is no path "/v1/messages/batches"')
    assert "param" in request(url, "/v1/messagesx", {}).error, "another path"


def test_models_are_listed_in_the_form_of_who_asks(url: str, tiny_artifact: Path) -> None:
    theirs = request(url, "/v1/models", headers={"anthropic-version": "2023-06-01"}).json
    assert [each["id"] for each in theirs["data"]] == [tiny_artifact.name] and theirs["data"][0]["type"] == "model"
    assert (theirs["has_more"], theirs["last_id"]) == (False, tiny_artifact.name)
    assert request(url, "/v1/models").json["data"][0]["object"] == "model"
    missing = request(url, "/v1/models/other", headers={"anthropic-version": "2023-06-01"})
    assert missing.status == 404 and error(missing)["type"] == "not_found_error"


def test_a_key_comes_in_either_header(tiny_artifact: Path, tmp_path: Path) -> None:
    keys = str(tmp_path / "keys.json")
    secret = run_inferc("keys", "create", keys, "ann").stdout.strip()
    with Server(tiny_artifact, "--api-keys", keys) as server:
        for headers in ({"x-api-key": secret}, {"authorization": f"Bearer {secret}"}):
            assert request(server.url, MESSAGES, BODY, headers).status == 200
        reply = request(server.url, MESSAGES, BODY, {"x-api-key": "wrong"})
        assert reply.status == 401 and error(reply)["type"] == "authentication_error"
        assert error(request(server.url, COUNT, {"messages": HI}))["type"] == "authentication_error"


class _Answering:
    """An answer whose engine is lost after the first delta."""

    calls = None
    request = parse_messages(BODY)

    async def deltas(self) -> AsyncGenerator[tuple[int, int, Delta], None]:
        yield 0, 0, Delta(0, "a", [1], None, [])
        raise EngineUnavailable("the engine died", 2.0)

    def usage_of(self, number: int, count: int) -> Usage:
        return Usage(3, 0, count)

    def close(self) -> None: ...


def test_an_error_within_a_stream_is_an_event() -> None:
    async def told() -> bytes:
        answering: Any = _Answering()
        return b"".join([part async for part in _MessageForm("0", "m").events(answering)])

    found = events(asyncio.run(told()))
    assert [event["type"] for event in found[:-1]] == ["message_start", "content_block_start", "content_block_delta"]
    assert found[-1]["error"] == {"type": "overloaded_error", "message": "the engine died"}


# ---------------------------------------------------------------------------------------- Anthropic's client


@pytest.fixture(scope="module")
def seen(url: str, tiny_artifact: Path, tooled: Server) -> Any:
    return run_client("anthropic", "check_messages.py", url, tiny_artifact.name, tooled.url, "tooled")


@pytest.mark.slow
def test_anthropics_client_gets_and_streams_messages(seen: Any, url: str, tiny_artifact: Path) -> None:
    plain = seen["plain"]
    whole, chat = plain["whole"], request(url, CHAT, BODY).json
    text = chat["choices"][0]["message"]["content"]
    assert [block["text"] for block in whole["content"]] == [text] and whole["stop_reason"] == "max_tokens"
    assert plain["request_id"].startswith("req-") and whole["model"] == tiny_artifact.name
    assert "".join(plain["pieces"]) == text == plain["final"]["content"][0]["text"]
    assert plain["final"]["stop_reason"] == "max_tokens" and plain["final"]["usage"]["output_tokens"] == 12
    assert plain["stopped"] == [text[: text.index(text[4:6])], "stop_sequence", text[4:6]]
    assert plain["turns"]["content"][0]["text"] and plain["count"] == chat["usage"]["prompt_tokens"]
    assert plain["parsed"][0] in ("yes", "no") and plain["parsed"][1] == "end_turn"
    assert seen["many"] == [text] * 16
    assert plain["models"] == [tiny_artifact.name] and plain["model"]["max_input_tokens"] == 256
    assert (plain["model"]["type"], plain["model"]["display_name"]) == ("model", tiny_artifact.name)


@pytest.mark.slow
def test_anthropics_client_calls_tools(seen: Any) -> None:
    whole, final = seen["tooled"]["whole"], seen["tooled"]["final"]
    (block,), (streamed,) = whole["content"], final["content"]
    check_arguments(block["name"], block["input"])
    assert (streamed["type"], streamed["name"], streamed["input"]) == ("tool_use", block["name"], block["input"])
    assert whole["stop_reason"] == final["stop_reason"] == "tool_use" and seen["tooled"]["num_deltas"] > 1
    answered, usage = seen["tooled"]["answered"], seen["tooled"]["answered"]["usage"]
    assert answered["content"][0]["type"] == "text" and answered["stop_reason"] in ("end_turn", "max_tokens")
    assert seen["tooled"]["count"] == usage["input_tokens"] + usage["cache_read_input_tokens"]


@pytest.mark.slow
def test_anthropics_client_raises_its_own_errors(seen: Any) -> None:
    errors = seen["plain"]["errors"]
    for name in ("model", "retrieve"):
        assert errors[name][:3] == ["NotFoundError", 404, "not_found_error"]
    for name, text in (
        ("long", "the prompt has"),
        ("tools", "tools: the model's chat template does not tell how it writes calls"),
        ("count", "messages: expected a list of at least one message"),
        ("stream", "max_tokens"),
    ):
        assert errors[name][:3] == ["BadRequestError", 400, "invalid_request_error"] and text in errors[name][3]
