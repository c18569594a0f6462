"""The messages of a chat as bodies have them, checked before a chat template reads them."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inferc.errors import RequestError, shown

REASONING = ("reasoning_content", "reasoning")
# Fields of a message beside role and content, which the chat template reads, by the message's role.
OF_MESSAGES = {
    "assistant": ("tool_calls", *REASONING, "name"),
    "tool": ("tool_call_id", "name"),
    **dict.fromkeys(("user", "system", "developer"), ("name",)),
}
# What OpenAI's clients add to an answer when they read it for their caller, who sends it back with the next request.
ADDED, ADDED_TO_A_CALL = ("parsed",), ("parsed_arguments",)


def messages_of(body: Mapping[str, Any], has_calls: bool = False) -> list[dict[str, Any]]:
    """Return the conversation of a body. Raises RequestError for a message that is not of text.

    has_calls: messages may have calls of tools and be what tools answered.
    """
    messages = body.get("messages")
    if not messages:
        raise RequestError(f"messages: expected a list of at least one message, found {shown(messages)}")
    return [_message(index, each, has_calls) for index, each in enumerate(messages)]


def _message(index: int, message: Any, has_calls: bool) -> dict[str, Any]:
    """Check a message of text or text parts. Other contents (audio, images) are refused unless empty.

    Calls of tools, and what belongs to them, are handed on as they are: their form depends on the chat template.
    """
    where = f"messages[{index}]"
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where}: expected an object with a role and a content, found {shown(message)}")
    if message["role"] == "assistant":
        message = _as_answered(message)
    more = {name: message[name] for name in OF_MESSAGES.get(message["role"], ()) if has_calls and message.get(name)}
    for name, value in message.items():
        if name not in ("role", "content", *more) and value:
            raise RequestError(f"{where}.{name:.40} is {shown(value)}, which is not built yet; leave it out")
    for name in (*REASONING, "tool_call_id", "name"):
        if not isinstance(more.get(name, ""), str):
            raise RequestError(f"{where}.{name}: expected a text, found {shown(more[name])}")
    if "tool_calls" in more:
        _check_calls(f"{where}.tool_calls", more["tool_calls"])
    content = message.get("content")
    if content is None and not {"tool_calls", *REASONING}.isdisjoint(more):
        return {"role": message["role"], "content": None, **more}
    parts = []
    for part in content if isinstance(content, list) else [{"type": "text", "text": content}]:
        if not isinstance(part, Mapping) or part.get("type") != "text":
            found = part.get("type") if isinstance(part, Mapping) else part
            raise RequestError(f"{where}.content: this model takes text parts only, found {shown(found)}")
        if not isinstance(text := part.get("text"), str):
            raise RequestError(f"{where}.content: expected text, found {shown(text)}")
        parts.append({"type": "text", "text": text})
    return {"role": message["role"], "content": parts if isinstance(content, list) else content, **more}


def _as_answered(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return an assistant's message without what a client has added to it."""
    found = {name: value for name, value in message.items() if name not in ADDED}
    if isinstance(calls := found.get("tool_calls"), list):
        found["tool_calls"] = [_call_as_answered(call) for call in calls]
    return found


def _call_as_answered(call: Any) -> Any:
    if not isinstance(call, Mapping) or not isinstance(function := call.get("function"), Mapping):
        return call  # what is wrong with it is told by who reads it
    return {**call, "function": {name: value for name, value in function.items() if name not in ADDED_TO_A_CALL}}


def _check_calls(where: str, calls: Any) -> None:
    """Raise RequestError for calls of a wrong form, whatever the chat template makes of them."""
    if not isinstance(calls, list):
        raise RequestError(f"{where}: expected a list, found {shown(calls)}")
    for index, call in enumerate(calls):
        at = f"{where}[{index}]"
        function = call.get("function") if isinstance(call, Mapping) else None
        if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
            raise RequestError(f"{at}: expected an object with a function that has a name, found {shown(call)}")
        if not isinstance(call.get("id", ""), str | None):
            raise RequestError(f"{at}.id: expected a text, found {shown(call['id'])}")
        if call.get("type", "function") not in (None, "function"):
            raise RequestError(f"{at}.type is {shown(call['type'])}; expected function: others are not built")
        given = function.get("arguments")
        if isinstance(given, str):
            try:
                is_object = not given.strip() or isinstance(json.loads(given), dict)
            except (ValueError, RecursionError):
                is_object = False
        else:
            is_object = given is None or isinstance(given, Mapping)
        if not is_object:
            raise RequestError(f"{at}.function.arguments: expected an object, or one as JSON, found {shown(given)}")


def joined(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert messages of `parse_request` for an interface whose content is a single text."""
    return [
        {**each, "content": "".join(part["text"] for part in each["content"])}
        if isinstance(each["content"], list)
        else dict(each)
        for each in messages
    ]
