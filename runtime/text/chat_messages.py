"""The conversion of clients' messages into the form that a chat template reads (inferc.chat.form)."""

from __future__ import annotations

import difflib
import json
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from inferc.chat.form import NOTHING, THOUGHTS, ChatForm, Message
from inferc.errors import RequestError, shown

REASONING = THOUGHTS
MISTYPED = 0.9  # how much a key is like "content" that cannot have been meant otherwise


def formed(messages: Sequence[Mapping[str, Any]], form: ChatForm) -> list[Message]:
    """Convert messages of any accepted form into the form of a template. Raises RequestError for an invalid message.

    A message is a mapping with a `role` and, as in the OpenAI API, `content` (text, a list of text parts, or null) and
    `tool_calls` (arguments as JSON or as a mapping). A null value is left out for the template, as transformers does,
    because most templates would write None otherwise.
    """
    if not messages:
        raise RequestError("messages: expected at least one message")
    found = [_formed(f"messages[{index}]", message, form) for index, message in enumerate(messages)]
    return found if form.several_calls else _one_by_one(found, form)


def _formed(where: str, message: Mapping[str, Any], form: ChatForm) -> Message:
    """Convert one message; its fields keep their order, since a template may write a message as a whole."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where}: expected an object with a role and a content, found {shown(message)}")
    role, calls, content = message["role"], message.get("tool_calls"), message.get("content")
    if "content" not in message:
        for name in message:
            if difflib.get_close_matches(str(name).lower(), ("content",), 1, MISTYPED):
                raise RequestError(f"{where}: {shown(name)} is not known; did you mean content?")
    if role == "developer" and not form.developer:
        role = "system"  # "developer" is the newer name of this role
    if role == "tool" and not form.tool_results:
        raise RequestError(f"{where}: the model's chat template leaves out what tools answer; leave the message out")
    if role == "system" and not form.system:
        raise RequestError(f"{where}: the model's chat template leaves out system messages; say it as the user")
    if calls and not form.calls_beside_text:
        if content:
            raise RequestError(
                f"{where}: the model's chat template leaves out calls of tools in a message with a text; leave one of"
                " them out"
            )
        content = None
    found: Message = {}
    for name, value in (message if "content" in message else {"role": role, "content": None, **message}).items():
        if name == "role":
            found[name] = role
        elif name == "content":
            found.update(_content(f"{where}.content", content, form))
        elif name == "tool_calls":
            if calls:
                found[name] = _tool_calls(f"{where}.tool_calls", calls, form)
        elif value is not None:
            found[name] = value
    if calls and content and not form.thoughts_beside_text:
        found = _within_thoughts(found, form)
    return _with_reasoning(found)


def _within_thoughts(message: Message, form: ChatForm) -> Message:
    """Return a message with calls whose text is a part of its reasoning, if it has any: the template takes one."""
    thought = next((message[name] for name in REASONING if name in message), None)
    if not isinstance(thought, str) or not thought:
        return message
    text = message["content"] if form.content == "text" else "".join(part["text"] for part in message["content"])
    rest = {name: value for name, value in message.items() if name not in ("content", *REASONING)}
    return {**rest, **_content("", None, form), REASONING[0]: f"{thought}\n\n{text}"}


def _one_by_one(messages: Sequence[Message], form: ChatForm) -> list[Message]:
    """Return a conversation with one call a message, each followed by what its tool answered."""
    found: list[Message] = []
    at = 0
    while at < len(messages):
        message, calls = messages[at], messages[at].get("tool_calls", [])
        at += 1
        if len(calls) < 2:
            found.append(message)
            continue
        results: list[Message] = []
        while at < len(messages) and messages[at]["role"] == "tool":
            results.append(messages[at])
            at += 1
        silent = {"role": message["role"], **_content("", None, form)}
        for index, (call, own) in enumerate(zip(calls, _of_calls(calls, results), strict=True)):
            found += [{**(silent if index else message), "tool_calls": [call]}, *own]
    return found


def _of_calls(calls: Sequence[Message], results: Sequence[Message]) -> list[list[Message]]:
    """Return the results of each call: those of its id, the others in their order for calls that have none."""
    found: list[list[Message]] = [[] for _ in calls]
    waiting: dict[str, deque[int]] = {}
    for index, call in enumerate(calls):
        if isinstance(name := call.get("id"), str):
            waiting.setdefault(name, deque()).append(index)
    others = []
    for result in results:
        name = result.get("tool_call_id")
        if not isinstance(name, str) or (places := waiting.get(name)) is None:
            others.append(result)
            continue
        found[places[0]].append(result)
        if len(places) > 1:  # some clients give several calls one id
            places.popleft()
    free = iter([index for index, own in enumerate(found) if not own])
    for result in others:
        found[next(free, -1)].append(result)
    return found


def _with_reasoning(message: Message) -> Message:
    """Return the message with its reasoning under every name that templates read."""
    found = next((message[name] for name in REASONING if name in message), None)
    return message if found is None else {**message, **dict.fromkeys(REASONING, found)}


def _tool_calls(where: str, calls: Any, form: ChatForm) -> list[Message]:
    if not isinstance(calls, Sequence) or isinstance(calls, str):
        raise RequestError(f"{where}: expected a list, found {shown(calls)}")
    return [_tool_call(f"{where}[{index}]", call, form) for index, call in enumerate(calls)]


def _content(where: str, content: Any, form: ChatForm) -> Message:
    """Return the content entry of a message, or an empty dict if it has none."""
    if content is None:
        if form.no_content == "absent":
            return {}
        return {"content": None if form.no_content == "none" else NOTHING[form.content]}
    texts = [content] if isinstance(content, str) else _texts(where, content)
    if form.content != "parts":
        texts = ["".join(texts)]
    return {"content": texts[0] if form.content == "text" else [{"type": "text", "text": text} for text in texts]}


def _texts(where: str, content: Any) -> list[str]:
    if not isinstance(content, Sequence):
        raise RequestError(f"{where}: expected text, found {shown(content)}")
    for part in content:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            found = part.get("type") if isinstance(part, Mapping) else part
            raise RequestError(f"{where}: this model takes text parts only, found {shown(found)}")
    return [part["text"] for part in content]


def _tool_call(where: str, call: Any, form: ChatForm) -> Message:
    """Convert a tool call: clients send its arguments as JSON, but most templates read them as a mapping."""
    if form.tool_calls is None:
        raise RequestError(f"{where}: the model's chat template leaves out calls of tools; leave it out")
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where}: expected an object with a function that has a name, found {shown(call)}")
    given = function.get("arguments")
    if not isinstance(given, (str, Mapping)) and given is not None:
        raise RequestError(f"{where}.function.arguments: expected an object or JSON, found {shown(given)}")
    arguments = given or {}
    if form.tool_calls == "object" and isinstance(arguments, str):
        arguments = _parsed(f"{where}.function.arguments", arguments)
    elif form.tool_calls == "json" and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    whole = {name: value for name, value in call.items() if value is not None}
    return {**whole, "function": {**function, "arguments": arguments}}


def _parsed(where: str, text: str) -> Mapping[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise RequestError(f"{where}: expected a JSON object, found {shown(text)}")
    return found
