"""Conversations and the tools that they offer, as messages of gRPC."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inferc.errors import RequestError
from inferc.runtime.openai.messages import REASONING
from inferc.runtime.tools.tools import Tools, tools_of
from inferc.serve.protos.inferc.v1 import inference_pb2 as pb

OF_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")
OF_CHATS = ("max_reasoning_tokens", "reasoning", "chat_template_kwargs")
OF_MESSAGES = ("role", "content", "tool_calls", "tool_call_id", *REASONING)


def offered(options: Mapping[str, Any]) -> Tools | None:
    """Return the tools that options offer, as OpenAI has them or read already; raise RequestError for wrong ones."""
    tools = options.get("tools")
    return tools if isinstance(tools, Tools) else tools_of(options)


def chat_of(messages: Sequence[Any], tools: Tools | None = None, options: Mapping[str, Any] | None = None) -> pb.Chat:
    """Return a conversation; raise RequestError for a message that cannot be sent.

    options: those of OF_CHATS.
    """
    made = [_message(index, message) for index, message in enumerate(messages)]
    fields = {name: value for name, value in (options or {}).items() if value is not None}
    if (variables := fields.get("chat_template_kwargs")) is not None:
        if not isinstance(variables, Mapping):
            raise RequestError(f"chat_template_kwargs is {variables!r:.80}; expected a mapping")
        fields["chat_template_kwargs"] = json.dumps(variables)
    if tools is None:
        return pb.Chat(messages=made, **fields)
    if tools.allowed is not None:
        raise RequestError("tool_choice: allowed_tools is not sent over gRPC; send these tools alone")
    return pb.Chat(
        messages=made,
        **fields,
        tools=[json.dumps(function) for function in tools.functions.values()],
        tool_choice=tools.choice,
        tool=tools.only or "",
        parallel_tool_calls=tools.is_parallel,
    )


def _message(index: int, message: Any) -> pb.ChatMessage:
    where = f"message {index} of the chat"
    if not isinstance(message, Mapping):
        raise RequestError(f"{where} is {message!r:.80}; it needs a role and a content")
    calls, thought = message.get("tool_calls"), next((message[name] for name in REASONING if message.get(name)), "")
    if not isinstance(thought, str):
        raise RequestError(f"{where}: its reasoning is {thought!r:.80}; expected a text")
    for name in ("role", "content"):
        is_empty = name == "content" and (calls or thought) and message.get(name) is None
        if not isinstance(message.get(name), str) and not is_empty:
            found = f"{message[name]!r:.80}" if name in message else "none"
            raise RequestError(f"{where} needs a {name}, a text; found {found}")
    for name, value in message.items():
        if name not in OF_MESSAGES and value:
            raise RequestError(f"{where}: {name} is {value!r:.80}, which is not sent over gRPC; leave it out")
    if not isinstance(answers := message.get("tool_call_id") or "", str):
        raise RequestError(f"{where}: tool_call_id is {answers!r:.80}; expected a text")
    if calls is not None and (isinstance(calls, str) or not isinstance(calls, Sequence)):
        raise RequestError(f"{where}: tool_calls is {calls!r:.80}; expected a list")
    made = [_call(f"messages[{index}].tool_calls[{number}]", call) for number, call in enumerate(calls or ())]
    content = message.get("content") or ""
    return pb.ChatMessage(
        role=message["role"], content=content, tool_calls=made, tool_call_id=answers, reasoning=thought
    )


def _call(where: str, call: Any) -> pb.ToolCall:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}: expected an object with a function that has a name, found {call!r:.80}")
    arguments, name = function.get("arguments") or {}, call.get("id") or ""
    if not isinstance(arguments, (str, Mapping)):
        raise RequestError(f"{where}.function.arguments: expected an object or JSON, found {arguments!r:.80}")
    if not isinstance(name, str):
        raise RequestError(f"{where}.id: expected a text, found {name!r:.80}")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return pb.ToolCall(id=name, name=function["name"], arguments=text)
