"""The form in which a chat template reads messages, found by which words arrive in the text that it renders.

The source of a template does not tell the form. Content may be a text or a list of parts, of which some templates read
the first alone; missing content may be a missing key, none or an empty text; the arguments of a tool call may be an
object or JSON. A template that gets another form than it reads leaves words out, or writes Python's repr of a list.
Therefore conversations with words that no template contains are rendered in each form, and the form is the one in which
all words arrive. What arrives in no form is a part of the form, too: a conversation that has it is refused, as it would
otherwise be answered without it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, Literal, TypeAlias

Message: TypeAlias = dict[str, Any]
Content = Literal["text", "parts", "part"]
NoContent = Literal["absent", "none", "empty"]
Arguments = Literal["object", "json"]
# Renders messages, with or without the beginning of an answer, with a list of tools if any; raises where the template
# does.
Render: TypeAlias = Callable[[Sequence[Message], bool, Sequence[Message] | None], str]

CONTENTS: tuple[Content, ...] = ("text", "parts", "part")
# "absent" is what transformers makes of null. A template that then loses a call or fails may test for none instead
# ("none"), or call methods of strings on the content ("empty").
NO_CONTENTS: tuple[NoContent, ...] = ("absent", "none", "empty")
ARGUMENTS: tuple[Arguments, ...] = ("object", "json")

CONVERSATIONS = (("user",), ("system", "user"), ("user", "assistant", "user"), ("user", "assistant"))
# Words of lowercase letters, which survive trimming and can be found whatever their case.
WORD, LEAD, LEAK, KEY, VALUE, RESULT = "zqword", "zqlead", "zqleak", "zqkey", "zqvalue", "zqresult"
TOOL, OTHER = "zqtool", "zqother"
THOUGHTS = ("reasoning_content", "thinking", "reasoning")  # the names of a message's reasoning; the first is standard
CALL_ID = "zqcall001"  # nine letters and digits, which some templates require
TOOLS: tuple[Message, ...] = (
    {
        "type": "function",
        "function": {"name": TOOL, "description": "A tool.", "parameters": {"type": "object", "properties": {}}},
    },
)


NOTHING: dict[Content, Any] = {"text": "", "parts": [], "part": [{"type": "text", "text": ""}]}
SAID: dict[Content, str] = {"text": "text", "parts": "a list of parts", "part": "a list of one part"}


LATER = ("several_calls", "thoughts_beside_text")  # fields that are kept only where they are false


@dataclass(frozen=True)
class ChatForm:
    """The form of messages that a template reads.

    content: a text, a list of parts, or a list of one part. tool_calls: how the arguments of a call are given, None
    where the template leaves calls out. The other fields: whether the template writes what a tool answered, calls of a
    message that has a text too, which tools there are, messages of the roles system and developer, all calls of a
    message, and a message with calls, a text and reasoning.
    """

    content: Content = "text"
    no_content: NoContent = "absent"
    tool_calls: Arguments | None = "object"
    tool_results: bool = True
    calls_beside_text: bool = True
    tools: bool = True
    system: bool = True
    developer: bool = True
    several_calls: bool = True
    thoughts_beside_text: bool = True

    def to_json(self) -> dict[str, Any]:
        """Return the form as an artifact holds it."""
        found = asdict(self)
        return {name: value for name, value in found.items() if name not in LATER or value is False}

    def __str__(self) -> str:
        """Return the form as `inferc inspect` shows it."""
        content = f"content as {SAID[self.content]}"
        if self.no_content != "absent":
            content += f", null content as {'none' if self.no_content == 'none' else 'an empty one'}"
        if self.tool_calls is not None:
            content += f", arguments of tool calls as {'an object' if self.tool_calls == 'object' else 'JSON'}"
        lost = {
            "tool calls": self.tool_calls is None,
            "tool results": not self.tool_results,
            "calls beside text": not self.calls_beside_text,
            "list of tools": not self.tools,
            "system messages": not self.system,
            "developer messages": not self.developer and not self.system,
        }
        if not self.several_calls:
            content += ", calls of a message one by one"
        as_system = ", developer messages as system messages" if self.system and not self.developer else ""
        return content + "".join(f", no {what}" for what, is_lost in lost.items() if is_lost) + as_system


def form_of(value: Any) -> ChatForm:
    """Return the form that an artifact holds; raise ValueError for what is none."""
    known = {
        "content": CONTENTS,
        "no_content": NO_CONTENTS,
        "tool_calls": (None, *ARGUMENTS),
        **dict.fromkeys(("tool_results", "calls_beside_text", "tools", "system", "developer"), (False, True)),
    }
    if not isinstance(value, Mapping) or value.keys() - set(LATER) != known.keys():
        raise ValueError(f"expected an object with {', '.join(known)}, found {value!r:.100}")
    for name, choices in (*known.items(), *((name, (False, True)) for name in LATER if name in value)):
        if not any(type(value[name]) is type(choice) and value[name] == choice for choice in choices):
            raise ValueError(f"{name} is {value[name]!r:.40}, expected one of {', '.join(map(repr, choices))}")
    return ChatForm(**value)


def find_form(render: Render) -> ChatForm | None:
    """Return the form that a template reads; None if every form loses what the user says.

    A template that raises on all conversations tells nothing, and gets the form that most templates read.
    """
    best, most = None, (0, 0)
    any_rendered = False
    for content in CONTENTS:
        has_rendered, arrived = _arrived(render, content)
        any_rendered |= has_rendered
        if arrived > most and arrived[0]:
            best, most = content, arrived
    if best is None:
        return None if any_rendered else ChatForm()
    no_content, tool_calls = _find_calls(render, best)
    return ChatForm(
        best,
        no_content,
        tool_calls,
        tool_results=_writes_results(render, best, no_content, tool_calls),
        calls_beside_text=_writes_calls_beside_text(render, best, tool_calls),
        tools=_writes_tools(render, best),
        system=_writes_role(render, best, "system") is not False,
        developer=_writes_role(render, best, "developer") is True,
        several_calls=_writes_all_calls(render, best, no_content, tool_calls),
        thoughts_beside_text=_writes_thoughts_beside_text(render, best, no_content, tool_calls),
    )


def _arrived(render: Render, content: Content) -> tuple[bool, tuple[int, int]]:
    """Return whether any conversation was rendered, and how many words arrived.

    The second result counts the conversations in which the last word of the user arrived, then all words that arrived.
    """
    has_rendered, num_last, num_words = False, 0, 0
    for roles in CONVERSATIONS:
        words = [WORD + "abc"[index] for index in range(len(roles))]
        messages = [{"role": role, "content": _said(content, word)} for role, word in zip(roles, words, strict=True)]
        text = _rendered(render, messages, roles[-1] == "user", None)
        if text is None:
            continue
        has_rendered = True
        if LEAK in text:
            return True, (0, 0)  # the template wrote Python's repr of the list
        there = [word in text for word in words]
        num_last += there[len(roles) - 1 - roles[::-1].index("user")]
        num_words += sum(there)
    return has_rendered, (num_last, num_words)


def _find_calls(render: Render, content: Content) -> tuple[NoContent, Arguments | None]:
    """Return how an assistant's message without content is given, and how the arguments of its calls are."""
    user = {"role": "user", "content": _said(content, WORD)}
    has_rendered = False
    for arguments, no_content in product(ARGUMENTS, NO_CONTENTS):
        message = {"role": "assistant", "tool_calls": [_call(arguments)]}
        for tools in (TOOLS, None):  # some templates write calls only if they get a list of tools
            text = _rendered(render, [user, {**message, **_nothing(content, no_content)}], False, tools)
            if text is None:
                continue
            has_rendered = True
            with_content = _rendered(render, [user, {**message, "content": _said(content, WORD)}], False, tools)
            if _has_call(text) and _num_none(text) <= _num_none(with_content):
                return no_content, arguments
    with_content = _rendered(render, [user, {"role": "assistant", "content": _said(content, WORD)}], False, None)
    for no_content in NO_CONTENTS:
        text = _rendered(render, [user, {"role": "assistant", **_nothing(content, no_content)}], False, None)
        if text is not None and _num_none(text) <= _num_none(with_content):
            return no_content, None if has_rendered else "object"
    return "absent", None if has_rendered else "object"


def _has_call(text: str) -> bool:
    """Return whether key and value of a call's arguments arrived, neither as Python's repr nor as JSON within JSON."""
    return KEY in text and VALUE in text and f"'{KEY}'" not in text and f'\\"{KEY}' not in text


def _num_none(text: str | None) -> int:
    """Return how often the word None stands in the text; templates may hold it themselves."""
    return 0 if text is None else text.count("None")


def _writes_results(render: Render, content: Content, no_content: NoContent, arguments: Arguments | None) -> bool:
    """Return whether the answer of a tool arrives, or true if the template raises for messages of tools."""
    messages: list[Message] = [
        {"role": "user", "content": _said(content, WORD)},
        {"role": "assistant", **_nothing(content, no_content), "tool_calls": [_call(arguments or "object")]},
        {"role": "tool", "tool_call_id": CALL_ID, "name": TOOL, "content": _said(content, RESULT)},
    ]
    found = [_rendered(render, messages, True, tools) for tools in (TOOLS, None)]
    texts = [text for text in found if text is not None]
    return not texts or any(RESULT in text and LEAK not in text for text in texts)


def _writes_calls_beside_text(render: Render, content: Content, arguments: Arguments | None) -> bool:
    """Return whether a call in a message that also has a text arrives, or true if the template raises for it.

    It is true as well where the template leaves all calls out.
    """
    messages: list[Message] = [
        {"role": "user", "content": _said(content, WORD)},
        {"role": "assistant", "content": _said(content, WORD), "tool_calls": [_call(arguments or "object")]},
    ]
    found = [_rendered(render, messages, False, tools) for tools in (TOOLS, None)]
    texts = [text for text in found if text is not None]
    return arguments is None or not texts or any(map(_has_call, texts))


def _writes_all_calls(render: Render, content: Content, no_content: NoContent, arguments: Arguments | None) -> bool:
    """Return whether all calls of a message arrive, or true where the template raises for two or leaves all out."""
    calls = [_call(arguments or "object", value) for value in (VALUE, OTHER)]
    text = _with_calls(render, content, {**_nothing(content, no_content), "tool_calls": calls})
    return arguments is None or text is None or not _has_call(text) or OTHER in text


def _writes_thoughts_beside_text(
    render: Render, content: Content, no_content: NoContent, arguments: Arguments | None
) -> bool:
    """Return whether the template does not raise for a call beside a text and reasoning alone, and not for either."""
    call: Message = {"tool_calls": [_call(arguments or "object")]}
    thoughts: Message = dict.fromkeys(THOUGHTS, RESULT)
    said: Message = {"content": _said(content, WORD)}
    alone = [
        _with_calls(render, content, {**each, **call}) for each in (said, {**_nothing(content, no_content), **thoughts})
    ]
    return None in alone or _with_calls(render, content, {**said, **thoughts, **call}) is not None


def _with_calls(render: Render, content: Content, answer: Message) -> str | None:
    """Return what is rendered of an answer with calls; None where the template raises with tools and without."""
    messages: list[Message] = [{"role": "user", "content": _said(content, WORD)}, {"role": "assistant", **answer}]
    found = [_rendered(render, messages, False, tools) for tools in (TOOLS, None)]
    return next((text for text in found if text is not None), None)


def _writes_tools(render: Render, content: Content) -> bool:
    text = _rendered(render, [{"role": "user", "content": _said(content, WORD)}], True, TOOLS)
    return text is None or TOOL in text


def _writes_role(render: Render, content: Content, role: str) -> bool | None:
    """Return whether a message of that role arrives; None where the template refuses it."""
    messages = [{"role": role, "content": _said(content, RESULT)}, {"role": "user", "content": _said(content, WORD)}]
    text = _rendered(render, messages, True, None)
    return None if text is None else RESULT in text


def _rendered(
    render: Render, messages: Sequence[Message], goes_on: bool, tools: Sequence[Message] | None
) -> str | None:
    """Return the rendered text, in lowercase except for the word None; None where the template raises."""
    try:
        text = render(messages, goes_on, tools)
    except Exception:  # noqa: BLE001 (a template raises whatever its operators do)
        return None
    return "None".join(part.lower() for part in text.split("None"))


def _said(content: Content, word: str) -> Any:
    """Return a word as content; in a list of parts it is the last.

    A part has an entry that is seen only where the template writes the list itself.
    """
    if content == "text":
        return word
    texts = (word,) if content == "part" else (LEAD, word)
    return [{"type": "text", "text": text, "extra": LEAK} for text in texts]


def _nothing(content: Content, no_content: NoContent) -> Message:
    if no_content == "absent":
        return {}
    return {"content": None if no_content == "none" else NOTHING[content]}


def _call(arguments: Arguments, value: str = VALUE) -> Message:
    given = {KEY: value} if arguments == "object" else f'{{"{KEY}": "{value}"}}'
    return {"id": CALL_ID, "type": "function", "function": {"name": TOOL, "arguments": given}}
