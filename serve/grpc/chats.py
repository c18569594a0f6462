"""Conversations of gRPC requests with the tools that they offer, and the calls of their answers."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, get_args

from inferc.errors import RequestError, nearest, shown
from inferc.runtime.openai.reasoning import LIMITS, Shown, limit_of
from inferc.runtime.openai.request import template_of
from inferc.runtime.openai.tool_calls import finish_reason
from inferc.runtime.tools.answer_calls import AnswerCalls
from inferc.runtime.tools.call_reader import CallPart, CallReader
from inferc.runtime.tools.tools import Tools, tools_of
from inferc.serve.grpc import protocol
from inferc.serve.models.long_texts import in_text_thread
from inferc.serve.models.streams import Delta
from inferc.serve.protos.inferc.v1 import inference_pb2 as pb

# Of the texts of all tools: more takes milliseconds to read, and much more would block other threads for long.
LARGE_CHARACTERS, MAX_CHARACTERS = 1 << 14, 1 << 20


@dataclass(frozen=True)
class Conversation:
    """A conversation in the form that a chat template takes, and the tools that it offers.

    template: further variables of the template. reasoning: where the answer shows it, which ends after
    max_reasoning_tokens.
    """

    messages: list[dict[str, Any]]
    tools: Tools | None = None
    template: Mapping[str, Any] = field(default_factory=dict)
    reasoning: Shown = "apart"
    max_reasoning_tokens: int | None = None

    @property
    def variables(self) -> dict[str, Any]:
        """The variables of the chat template beside the messages."""
        return {**self.template, **({} if self.tools is None else {"tools": self.tools.for_template})}


async def conversation_of(chat: pb.Chat) -> Conversation:
    """Read a conversation; raise RequestError for one without messages, and for wrong fields."""
    if not chat.messages:
        raise RequestError("chat has no messages; give at least one")
    count = sum(map(len, chat.tools))
    for name, found in (("tools", count), ("chat_template_kwargs", len(chat.chat_template_kwargs))):
        if found > MAX_CHARACTERS:
            raise RequestError(f"{name}: found {found} characters, at most {MAX_CHARACTERS} are allowed; send less")
    read, is_large = partial(_read, chat), max(count, len(chat.chat_template_kwargs)) > LARGE_CHARACTERS
    return await in_text_thread(read) if is_large else read()


def _read(chat: pb.Chat) -> Conversation:
    messages = [_message(each) for each in chat.messages]
    tools = _tools(chat) if chat.tools or chat.tool_choice or chat.tool else None
    limit = chat.max_reasoning_tokens if chat.HasField("max_reasoning_tokens") else None
    shown_where: Any = chat.reasoning or "apart"
    if shown_where not in get_args(Shown):
        raise RequestError(f"reasoning is {shown(shown_where)}; {nearest(shown_where, get_args(Shown))}")
    return Conversation(
        messages, tools, _variables(chat.chat_template_kwargs), shown_where, limit_of({LIMITS[0]: limit})
    )


def _variables(text: str) -> dict[str, Any]:
    try:
        given = json.loads(text or "{}")
    except (ValueError, RecursionError):
        given = text
    if not isinstance(given, dict):
        raise RequestError(f"chat_template_kwargs: expected a JSON object, found {shown(text)}")
    return template_of({"chat_template_kwargs": given})


def _message(message: pb.ChatMessage) -> dict[str, Any]:
    found: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        found["reasoning_content"] = message.reasoning
    if message.tool_calls:
        found["content"] = message.content or None
        found["tool_calls"] = [
            {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in message.tool_calls
        ]
    return {**found, "tool_call_id": message.tool_call_id} if message.tool_call_id else found


def _tools(chat: pb.Chat) -> Tools | None:
    choice: Any = chat.tool_choice or None
    if chat.tool:
        if choice not in (None, "required"):
            raise RequestError(f"tool_choice is {shown(choice)}, and tool is {shown(chat.tool)}; leave one out")
        choice = {"type": "function", "function": {"name": chat.tool}}
    given = [{"type": "function", "function": _function(index, text)} for index, text in enumerate(chat.tools)]
    is_parallel = chat.parallel_tool_calls if chat.HasField("parallel_tool_calls") else True
    return tools_of({"tools": given, "tool_choice": choice, "parallel_tool_calls": is_parallel})


def _function(index: int, text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        raise RequestError(f"tools[{index}]: expected a function as a JSON object, found {shown(text)}") from None


@dataclass
class Calls:
    """The reader of the calls in the outputs of one answer."""

    form: AnswerCalls
    _readers: dict[int, CallReader] = field(default_factory=dict)

    def read(self, response: pb.GenerateResponse, delta: Delta) -> None:
        """Replace the text of a response to a delta by what became certain: text, and parts of calls."""
        reader = self._readers.setdefault(delta.index, CallReader(self.form))
        is_last = delta.finish_reason is not None
        parts = [*reader.push(delta.text), *(reader.finish() if is_last else [])]
        response.text = "".join(part for part in parts if isinstance(part, str))
        response.tool_calls.extend(_part(part) for part in parts if isinstance(part, CallPart))
        has_calls = reader.num_calls > 0 and not reader.is_cut
        response.finish_reason = protocol.FINISH_REASONS[finish_reason(delta.finish_reason, has_calls)]


def _part(part: CallPart) -> pb.ToolCallPart:
    return pb.ToolCallPart(index=part.index, id=part.id, name=part.name, arguments=part.arguments)


def whole_calls(parts: Sequence[pb.ToolCallPart]) -> list[pb.ToolCall]:
    """Return the calls that parts are of."""
    written: dict[int, list[str]] = {}
    named: dict[int, Mapping[str, str]] = {}
    for part in parts:
        written.setdefault(part.index, []).append(part.arguments)
        if part.name:
            named[part.index] = {"id": part.id, "name": part.name}
    return [pb.ToolCall(**named[index], arguments="".join(texts)) for index, texts in sorted(written.items())]
