"""Tools over gRPC: calls of a real server's answers, whole and streamed, and what is refused."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from http_calls import request
from pieces import in_pieces
from serving import Server
from tool_models import TOOLS, check_arguments

from inferc.client import AsyncClient, Client, Delta
from inferc.errors import RequestError
from inferc.serve.grpc.chats import conversation_of
from inferc.serve.protos.inferc.v1 import inference_pb2 as pb

HI = [{"role": "user", "content": "hi"}]
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 5, "max_tokens": 120}
ONE = {"type": "function", "function": {"name": "get_weather"}}


@pytest.fixture(scope="module")
def client(tooled: Server) -> Iterator[Client]:
    with Client(tooled.address) as client:
        yield client


def over_http(server: Server, **body: Any) -> list[dict[str, Any]]:
    choices = request(server.url, "/v1/chat/completions", {"messages": HI, "tools": TOOLS, **SAMPLED, **body}).json
    return list(choices["choices"])


@pytest.mark.parametrize("choice", ["required", ONE, "auto", "none"])
def test_answers_are_those_of_a_chat_over_http(tooled: Server, client: Client, choice: Any) -> None:
    body = {"tool_choice": choice, "parallel_tool_calls": choice != ONE, "n": 3}
    outputs = client.complete(HI, tools=TOOLS, **SAMPLED, **body)
    for output, expected in zip(outputs, over_http(tooled, **body), strict=True):
        message = expected["message"]
        assert (output.text, output.finish_reason) == (message["content"] or "", expected["finish_reason"])
        calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
        assert [(call.name, call.arguments) for call in output.tool_calls] == calls
        assert all(call.id.startswith("call_") for call in output.tool_calls)


def test_calls_come_in_parts(client: Client) -> None:
    options: dict[str, Any] = {"tools": TOOLS, "tool_choice": ONE, "parallel_tool_calls": False}

    def parts(deltas: Iterable[Delta]) -> list[pb.ToolCallPart]:
        return [part for delta in deltas for part in delta.tool_calls]

    deltas = in_pieces(lambda: list(client.generate(HI, **options, **SAMPLED)), lambda found: len(parts(found)))
    first, *rest = parts(deltas)
    assert first.name == "get_weather" and first.id and not any(part.name or part.id for part in rest)
    check_arguments(first.name, json.loads(first.arguments + "".join(part.arguments for part in rest)))
    assert len(rest) > 1 and deltas[-1].finish_reason == "tool_calls" and not any(delta.text for delta in deltas)


def test_the_async_client_has_them_too(tooled: Server) -> None:
    async def work() -> str:
        async with AsyncClient(tooled.address) as client:
            options: dict[str, Any] = {"tools": TOOLS, "tool_choice": ONE, "parallel_tool_calls": False}
            (output,) = await client.complete(HI, **options, **SAMPLED)
            return output.tool_calls[0].name

    assert asyncio.run(work()) == "get_weather"


def test_histories_have_calls_and_results(tooled: Server, client: Client) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "now", "arguments": {"a": 1}}}
    history: list[dict[str, Any]] = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "12:00"},
    ]
    text = client.detokenize(client.tokenize(history), skip_special_tokens=False)
    assert '<|user|>hi<|assistant|><call>now={"a": 1}</call><|tool|>12:00<|assistant|>' in text
    (output,) = client.complete(history, tools=TOOLS, temperature=0.0, max_tokens=4)
    body = {"messages": history, "tools": TOOLS, "temperature": 0, "max_tokens": 4}
    said = request(tooled.url, "/v1/chat/completions", body).json["choices"][0]["message"]["content"]
    assert output.text == said


@pytest.mark.parametrize(
    ("prompt", "options", "message"),
    [
        (HI, {"tools": [{"type": "web_search"}]}, 'tools[0].type is "web_search"; expected function'),
        (HI, {"tools": TOOLS, "tool_choice": "sometimes"}, 'tool_choice is "sometimes"'),
        (HI, {"tool_choice": "required"}, "there are no tools"),
        ("hi", {"tools": TOOLS}, "tools: a conversation offers them"),
        (HI, {"tools": TOOLS, "structured_outputs": pb.StructuredOutputs(regex="a")}, "gives the answer a form, too"),
        ([{"role": "assistant", "content": None, "tool_calls": [5]}], {}, "messages[0].tool_calls[0]: expected an obj"),
        ([{"role": "assistant", "content": None, "tool_calls": 5}], {}, "tool_calls is 5; expected a list"),
        ([{"role": "tool", "content": "a", "tool_call_id": 5}], {}, "tool_call_id is 5; expected a text"),
        ([{"role": "user", "content": "a", "name": "b"}], {}, "name is 'b', which is not sent over gRPC"),
    ],
)
def test_what_cannot_be_asked_is_refused(client: Client, prompt: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError) as raised:
        client.complete(prompt, **options)
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("chat", "message"),
    [
        (pb.Chat(tools=["{"]), "tools[0]: expected a function as a JSON object, found"),
        (pb.Chat(tools=["[" * 100_000]), "tools[0]: expected a function as a JSON object, found"),
        (pb.Chat(tools=[" " * (1 << 20) + "{}"]), "tools: found 1048578 characters"),
        (pb.Chat(tools=["5"]), "tools[0].function: expected an object with a name, found 5"),
        (pb.Chat(tools=['{"name": "f"}'], tool="g"), 'tool_choice: there is no tool "g"'),
        (pb.Chat(tools=['{"name": "f"}'], tool="f", tool_choice="none"), 'tool_choice is "none", and tool is "f"'),
        (pb.Chat(tool="f"), "there are no tools"),
    ],
)
def test_a_client_of_its_own_is_told_what_is_wrong(chat: pb.Chat, message: str) -> None:
    chat.messages.add(role="user", content="hi")
    with pytest.raises(RequestError) as raised:
        asyncio.run(conversation_of(chat))
    assert message in str(raised.value)


def test_a_model_that_knows_no_tools_refuses_them(served: str) -> None:
    with Client(served) as client, pytest.raises(RequestError, match="does not tell how it writes calls"):
        client.complete(HI, tools=TOOLS)
