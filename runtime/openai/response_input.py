"""The input of OpenAI's Responses API, messages, reasoning and calls of tools, as the messages of a chat."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferc.errors import RequestError, shown

ROLES = ("user", "assistant", "system", "developer")
OF_A_MESSAGE = ("type", "role", "content", "id", "status", "phase")
PARTS = ("input_text", "output_text")
THOUGHTS = ("reasoning_text", "summary_text")
# The fields of items that are calls of tools and their results; `id` and `status` are those of an answer's items.
OF_A_CALL = ("type", "call_id", "name", "arguments", "parsed_arguments", "id", "status")  # one is a client's own
OF_REASONING = ("type", "content", "summary", "id", "status")
OF_A_RESULT = ("type", "call_id", "output", "id", "status")


def input_messages(body: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the conversation. System messages at its start are merged, since templates read only one."""
    given, instructions = body.get("input"), body.get("instructions")
    if isinstance(given, str):
        messages = [{"role": "user", "content": given}]
    elif isinstance(given, list) and given:
        messages = []
        for index, item in enumerate(given):
            _add(_message(f"input[{index}]", item), messages)
    else:
        raise RequestError(f"input: expected a text or a list of at least one item, found {shown(given)}")
    count = next((at for at, each in enumerate(messages) if each["role"] != "system"), len(messages))
    first = [*([instructions] if instructions else []), *(each["content"] for each in messages[:count])]
    system = [{"role": "system", "content": "\n\n".join(first)}] if first else []
    return [*system, *messages[count:]]


def _message(where: str, item: Any) -> dict[str, Any]:
    if not isinstance(item, Mapping):
        raise RequestError(f"{where}: expected an object, found {shown(item)}")
    kind = item.get("type") or "message"
    if kind == "item_reference":
        raise RequestError(f"{where}: it refers to an item that was stored, and nothing is stored here; send the item")
    known = {
        "message": OF_A_MESSAGE,
        "function_call": OF_A_CALL,
        "function_call_output": OF_A_RESULT,
        "reasoning": OF_REASONING,
    }
    if not isinstance(kind, str) or kind not in known:
        raise RequestError(
            f"{where}: items of type {shown(kind)} are not built yet; send messages, reasoning, calls of functions and"
            " their outputs"
        )
    for name, value in item.items():
        if name not in known[kind] and value:
            raise RequestError(f"{where}.{name:.40} is {shown(value)}, which is not built yet; leave it out")
    if kind == "function_call":
        function = {"name": _named(where, item, "name"), "arguments": _named(where, item, "arguments")}
        call = {"id": _named(where, item, "call_id"), "type": "function", "function": function}
        return {"role": "assistant", "content": None, "tool_calls": [call]}
    if kind == "function_call_output":
        return {
            "role": "tool",
            "tool_call_id": _named(where, item, "call_id"),
            "content": _text(f"{where}.output", item.get("output")),
        }
    if kind == "reasoning":
        name = "content" if item.get("content") else "summary"
        thought = _text(f"{where}.{name}", item.get(name) or [], THOUGHTS)
        return {"role": "assistant", "content": None, "reasoning_content": thought}
    role = item.get("role")
    if role not in ROLES:
        raise RequestError(f"{where}: its role is {shown(role)}; expected one of {', '.join(ROLES)}")
    return {
        "role": "system" if role == "developer" else str(role),
        "content": _text(f"{where}.content", item.get("content")),
    }


def _add(message: dict[str, Any], messages: list[dict[str, Any]]) -> None:
    """Add a message to a conversation.

    A call of a tool goes on with what the assistant said or called before it, and reasoning stands before all of that.
    """
    last = messages[-1] if messages else {}
    if "tool_calls" in message and last.get("role") == "assistant":
        messages[-1] = {**last, "tool_calls": [*last.get("tool_calls", ()), *message["tool_calls"]]}
    elif message["role"] == "assistant" and _is_thought(last):
        thoughts = [each["reasoning_content"] for each in (last, message) if each.get("reasoning_content")]
        messages[-1] = {**message, "reasoning_content": "\n\n".join(thoughts)}
    elif message.get("reasoning_content") != "":
        messages.append(message)


def _is_thought(message: Mapping[str, Any]) -> bool:
    return "reasoning_content" in message and message["content"] is None and "tool_calls" not in message


def _named(where: str, item: Mapping[str, Any], name: str) -> str:
    if not isinstance(text := item.get(name), str):
        raise RequestError(f"{where}.{name}: expected a text, found {shown(text)}")
    return text


def _text(where: str, content: Any, types: tuple[str, ...] = PARTS) -> str:
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise RequestError(f"{where}: expected a text or a list of parts, found {shown(content)}")
    texts = []
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") not in types:
            found = part.get("type") if isinstance(part, Mapping) else part
            raise RequestError(f"{where}: this model takes {' and '.join(types)} only, found {shown(found)}")
        if not isinstance(text := part.get("text"), str):
            raise RequestError(f"{where}: expected text, found {shown(text)}")
        texts.append(text)
    return "".join(texts)
