"""Reasoning over gRPC: apart from the text of a real server's answers, whole and streamed, as over HTTP."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from http_calls import request
from serving import Server
from thinking import MAY_BEGIN
from thinking_server import CHAT, HI, SAMPLED, SCHEMA, Thinking, serve

from inferc.client import Client
from inferc.errors import RequestError
from inferc.serve.grpc.chats import conversation_of
from inferc.serve.protos.inferc.v1 import inference_pb2 as pb

TOOLS = [{"type": "function", "function": {"name": "look", "parameters": SCHEMA}}]
FORM = pb.StructuredOutputs(json=json.dumps(SCHEMA))
OFF = {"chat_template_kwargs": {"enable_thinking": False}}
ASKED: dict[str, Any] = {name: value for name, value in SAMPLED.items() if name != "messages"}


@pytest.fixture(scope="module")
def free(tiny_llama_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Thinking]:
    """A server of a model that may begin to reason, and to which the template may say that it does not."""
    yield from serve(tiny_llama_folder, tmp_path_factory.mktemp("free"), MAY_BEGIN, "token")


@pytest.fixture(scope="module")
def client(free: Thinking) -> Iterator[Client]:
    with Client(free.address) as client:
        yield client


def begins(free: Thinking) -> dict[str, Any]:
    """Return parameters that make the model begin to reason."""
    return {**ASKED, "logit_bias": {free.tokens["<think>"]: 100}}


@pytest.mark.parametrize(
    ("options", "body"),
    [
        ({"structured_outputs": FORM, "n": 2}, {"structured_outputs": {"json": SCHEMA}, "n": 2}),
        ({"tools": TOOLS, "tool_choice": "required"}, {"tools": TOOLS, "tool_choice": "required"}),
        ({"reasoning": "left_out", "max_tokens": 20}, {"include_reasoning": False, "max_tokens": 20}),
        ({"reasoning": "in_text", "max_tokens": 20}, {"separate_reasoning": False, "max_tokens": 20}),
    ],
)
def test_answers_are_those_of_a_chat_over_http(free: Thinking, client: Client, options: Any, body: Any) -> None:
    outputs = client.complete([HI], max_reasoning_tokens=6, **{**begins(free), **options})
    sent = {**SAMPLED, "logit_bias": {str(free.tokens["<think>"]): 100}, "max_reasoning_tokens": 6, **body}
    for output, choice in zip(outputs, request(free.url, CHAT, sent).json["choices"], strict=True):
        message = choice["message"]
        assert (output.text, output.reasoning) == (message["content"] or "", message.get("reasoning", ""))
        calls = [call["function"]["arguments"] for call in message.get("tool_calls", [])]
        assert [call.arguments for call in output.tool_calls] == calls
        assert output.finish_reason == choice["finish_reason"]
    assert bool(outputs[0].reasoning) == ("reasoning" not in options)


def test_reasoning_comes_in_parts_and_is_counted(free: Thinking, client: Client) -> None:
    asked = {"max_reasoning_tokens": 6, "structured_outputs": FORM, **begins(free)}
    deltas = list(client.generate([HI], **asked))
    (output,) = client.complete([HI], **asked)
    assert "".join(delta.reasoning for delta in deltas) == output.reasoning != ""
    assert "".join(delta.text for delta in deltas) == output.text != ""
    usage = deltas[-1].usage
    assert usage is not None and usage.reasoning_tokens == 6


def test_a_form_begins_at_once_where_reasoning_is_turned_off(free: Thinking, client: Client) -> None:
    for variables in (OFF, {"chat_template_kwargs": {"reasoning_effort": "none"}}):
        (output,) = client.complete([HI], structured_outputs=FORM, **variables, **begins(free))
        assert not output.reasoning and json.loads(output.text)["city"] in ("Rome", "Paris")


def test_plain_prompts_have_none(client: Client) -> None:
    *_, last = client.generate("hi", **ASKED)
    assert last.usage is not None and not last.usage.HasField("reasoning_tokens")


def test_histories_have_reasoning(client: Client) -> None:
    for name in ("reasoning_content", "reasoning"):
        history: list[dict[str, Any]] = [HI, {"role": "assistant", "content": None, name: "Hm"}, HI]
        text = client.detokenize(client.tokenize(history), skip_special_tokens=False)
        assert "<|assistant|><think>\nHm\n</think>\n\n<|user|>hi" in text


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        ([HI], {"max_reasoning_tokens": -1}, "max_reasoning_tokens is -1; expected at least 0"),
        ([HI], {"reasoning": "aside"}, 'reasoning is "aside"; known: apart, left_out, in_text'),
        ([HI], {"chat_template_kwargs": 5}, "chat_template_kwargs is 5; expected a mapping"),
        ([HI], {"chat_template_kwargs": {"tools": []}}, "chat_template_kwargs: tools is set by the request itself"),
        ("hi", {"max_reasoning_tokens": 5}, "max_reasoning_tokens: a chat has it; give the prompt as a list of chat"),
        ([{"role": "assistant", "content": "a", "reasoning": 5}], {}, "its reasoning is 5; expected a text"),
    ],
)
def test_what_cannot_be_asked_is_refused(client: Client, prompt: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as raised:
        client.complete(prompt, **options)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", 'chat_template_kwargs: expected a JSON object, found "{"'),
        ("[]", 'chat_template_kwargs: expected a JSON object, found "[]"'),
        ("[" * 100_000, "chat_template_kwargs: expected a JSON object, found"),
        (" " * (1 << 20) + "{}", "chat_template_kwargs: found 1048578 characters, at most 1048576 are allowed"),
    ],
)
def test_a_client_of_its_own_is_told_what_is_wrong(text: str, message: str) -> None:
    chat = pb.Chat(messages=[pb.ChatMessage(role="user", content="hi")], chat_template_kwargs=text)
    with pytest.raises(RequestError) as raised:
        asyncio.run(conversation_of(chat))
    assert message in str(raised.value)


def test_a_limit_is_refused_where_no_reasoning_is_known(server: Server) -> None:
    with Client(server.address) as client, pytest.raises(RequestError, match="max_reasoning_tokens"):
        client.complete([HI], max_reasoning_tokens=5)
