"""Calls of tools in OpenAI's chat answers, whole and in parts."""

from __future__ import annotations

from typing import Any

from inferc.runtime.tools.answer_calls import AnswerCalls
from inferc.runtime.tools.call_reader import CallPart, Said, read_calls


def with_calls(choice: dict[str, Any], form: AnswerCalls) -> dict[str, Any]:
    """Return a whole choice whose message has its calls apart from its text."""
    return with_said(choice, read_calls(form, choice["message"]["content"]))


def with_said(choice: dict[str, Any], said: Said) -> dict[str, Any]:
    """Return a whole choice whose message has these calls and this text."""
    if not said.calls:
        is_same = said.text == (choice["message"]["content"] or "")
        return choice if is_same else {**choice, "message": {**choice["message"], "content": said.text or None}}
    calls = [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in said.calls
    ]
    message = {**choice["message"], "content": said.text or None, "tool_calls": calls}
    return {**choice, "message": message, "finish_reason": finish_reason(choice["finish_reason"], not said.is_cut)}


def finish_reason(reason: str | None, has_calls: bool) -> str | None:
    """Return why an answer ended; has_calls: it has calls, all of them whole, which a stop string may prevent."""
    return "tool_calls" if reason == "stop" and has_calls else reason


def delta_of(part: str | CallPart) -> dict[str, Any]:
    """Return the delta of a chunk for a part of an answer."""
    if isinstance(part, str):
        return {"content": part}
    function = {"arguments": part.arguments}
    if part.name is None:
        return {"tool_calls": [{"index": part.index, "function": function}]}
    named = {"index": part.index, "id": part.id, "type": "function"}
    return {"tool_calls": [{**named, "function": {"name": part.name, **function}}]}
