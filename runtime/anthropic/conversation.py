"""The conversation of a body of Anthropic's Messages API, as the messages of a chat.

What tools answered is a block within a user's message there, and a message of its own in a chat.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferc.errors import RequestError, shown

# The types of blocks in a message of each role.
BLOCKS = {
    "user": ("text", "tool_result"),
    "assistant": ("text", "tool_use", "thinking"),
    "system": ("text",),
}
# The fields of a block by its type; `cache_control` may be in each, as a cache of prefixes needs no marks.
OF_BLOCKS = {
    "text": ("text",),
    "tool_result": ("tool_use_id", "content", "is_error"),
    "tool_use": ("id", "name", "input", "caller"),
    "thinking": ("thinking", "signature"),
}
GAP = "\n\n"  # between the texts of messages that are one turn, and between blocks of the system's
ERROR = "Error: "  # before what a tool answered with is_error: no chat template has a place for that

Message = dict[str, Any]


def conversation_of(body: Mapping[str, Any]) -> list[Message]:
    """Return a body's conversation; raise RequestError for what is not text, a call of a tool or its result.

    Messages of one role that follow one another are one, as most templates want turns.
    """
    given = body.get("messages")
    if not given:
        raise RequestError(f"messages: expected a list of at least one message, found {shown(given)}")
    found: list[Message] = []
    if system := GAP.join(_texts("system", body.get("system") or "", ("text",))):
        found.append({"role": "system", "content": system})
    for index, message in enumerate(given):
        for turn in _turns(f"messages[{index}]", message):
            _add(turn, found)
    if found[-1]["role"] == "assistant":
        raise RequestError(
            f"messages[{len(given) - 1}]: it is the assistant's, and to go on with it is not built yet; end with a"
            " message of the user"
        )
    return found


def _add(turn: Message, found: list[Message]) -> None:
    last = found[-1] if found else {}
    if last.get("role") != turn["role"] or turn["role"] == "tool" or "tool_calls" in last:
        found.append(turn)
        return
    joined: Message = {
        name: GAP.join(each[name] for each in (last, turn) if each.get(name))
        for name in ("content", "reasoning_content")
        if name in last or name in turn
    }
    found[-1] = {**last, **turn, **joined}


def _turns(where: str, message: Any) -> list[Message]:
    """Return the messages of a chat that one of this API stands for."""
    role = message.get("role") if isinstance(message, Mapping) else None
    if not isinstance(message, Mapping) or not isinstance(role, str) or role not in BLOCKS:
        raise RequestError(
            f"{where}: expected an object with a role (user, assistant) and a content, found {shown(message)}"
        )
    for name, value in message.items():
        if name not in ("role", "content") and value:
            raise RequestError(f"{where}.{name:.40} is {shown(value)}, which is not built yet; leave it out")
    blocks = _blocks(f"{where}.content", message.get("content"), BLOCKS[role])
    if role == "assistant":
        return [_assistant(blocks)]
    found: list[Message] = []
    for place, block in blocks:
        if block["type"] == "tool_result":
            found.append(_result(place, block))
        elif found and found[-1]["role"] == role:
            found[-1]["content"] += _text(place, block)
        else:
            found.append({"role": role, "content": _text(place, block)})
    return found or [{"role": role, "content": ""}]


def _assistant(blocks: list[tuple[str, Mapping[str, Any]]]) -> Message:
    texts, thoughts, calls = [], [], []
    for place, block in blocks:
        if block["type"] == "tool_use":
            calls.append(_call(place, block))
        elif block["type"] == "text":
            texts.append(_text(place, block))
        else:
            thoughts.append(_text(place, block, "thinking"))
    text = "".join(texts)
    return {
        "role": "assistant",
        "content": text or None if calls else text,
        **({"tool_calls": calls} if calls else {}),
        **({"reasoning_content": "".join(thoughts)} if thoughts else {}),
    }


def _call(where: str, block: Mapping[str, Any]) -> dict[str, Any]:
    arguments = block.get("input")
    if not isinstance(arguments, Mapping):
        raise RequestError(f"{where}.input: expected an object, found {shown(arguments)}")
    if (caller := block.get("caller") or {"type": "direct"}) != {"type": "direct"}:
        raise RequestError(f"{where}.caller is {shown(caller)}, which is not built yet; leave it out")
    function = {"name": _text(where, block, "name"), "arguments": arguments}
    return {"id": _text(where, block, "id"), "type": "function", "function": function}


def _result(where: str, block: Mapping[str, Any]) -> Message:
    text = "".join(_texts(f"{where}.content", block.get("content") or "", ("text",)))
    if type(is_error := block.get("is_error") or False) is not bool:
        raise RequestError(f"{where}.is_error: expected true or false, found {shown(is_error)}")
    content = ERROR + text if is_error else text
    return {"role": "tool", "tool_call_id": _text(where, block, "tool_use_id"), "content": content}


def _texts(where: str, content: Any, kinds: tuple[str, ...]) -> list[str]:
    return [_text(place, block) for place, block in _blocks(where, content, kinds)]


def _blocks(where: str, content: Any, kinds: tuple[str, ...]) -> list[tuple[str, Mapping[str, Any]]]:
    """Return the blocks of a content, each with its place; kinds: the types that it may have."""
    if isinstance(content, str):
        return [(where, {"type": "text", "text": content})]
    if not isinstance(content, list):
        raise RequestError(f"{where}: expected a text or a list of blocks, found {shown(content)}")
    return [(f"{where}[{index}]", _block(f"{where}[{index}]", block, kinds)) for index, block in enumerate(content)]


def _block(where: str, block: Any, kinds: tuple[str, ...]) -> Mapping[str, Any]:
    kind = block.get("type") if isinstance(block, Mapping) else block
    if kind == "redacted_thinking":
        raise RequestError(f"{where}: redacted_thinking was encrypted by another server; leave the block out")
    if not isinstance(block, Mapping) or kind not in kinds:
        raise RequestError(f"{where}: expected a block of type {' or '.join(kinds)}, found {shown(kind)}")
    for name, value in block.items():
        if name not in ("type", "cache_control", *OF_BLOCKS[kind]) and value:
            raise RequestError(f"{where}.{name:.40} is {shown(value)}, which is not built yet; leave it out")
    return block


def _text(where: str, block: Mapping[str, Any], name: str = "text") -> str:
    if not isinstance(text := block.get(name), str):
        raise RequestError(f"{where}.{name}: expected a text, found {shown(text)}")
    return text
