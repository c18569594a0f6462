"""The form in which a model writes calls of tools, found by how its chat template writes the calls of a history.

A model is trained on the texts that its template writes: an answer that calls tools is expected in the words in which
the template would repeat it. These are found as the form of messages is (inferc.chat.form): conversations with one call
and with two are rendered, and what stands around names and arguments is the form. It is what an answer is held to, and
what is read from one, so that the two cannot differ.

Templates that write arguments otherwise than as JSON, before the name of the tool, or with an id that the model would
have to invent, have no such form; neither have those that write the name of the tool twice.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from inferc.chat.form import CALL_ID, NOTHING, ChatForm, Message, Render

USER, SAID, NEXT = "Zqasked", "Zqanswered", "Zqagain"  # what the user says, what is answered, what the user says then
NAMES = ("zqfirst_tool", "zqsecond_tool")
KEY, VALUE = "zqkey", "zqvalue"
TOOLS: tuple[Message, ...] = tuple(
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "A tool.",
            "parameters": {"type": "object", "properties": {KEY: {"type": "string", "description": "A text."}}},
        },
    }
    for name in NAMES
)


@dataclass(frozen=True)
class CallForm:
    """The form of an answer's calls: `before`, then for each call its tool's name, `between` and JSON, then `after`.

    joint: what stands between one call's arguments and the next one's name, or None if an answer has one call at most.
    """

    before: str
    between: str
    after: str
    joint: str | None = None

    def __str__(self) -> str:
        """Return an example of a call, as `inferc inspect` shows it."""
        return f"{self.before}NAME{self.between}{{…}}{self.after}".replace("\n", "\\n")

    @property
    def trigger(self) -> str:
        """The beginning of `before` that says that a call follows: its marker, or all of it if it has none."""
        marker = self.before.partition("{")[0].rstrip()
        return marker.rstrip("[ ") or self.before

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def call_form_of(value: Any) -> CallForm:
    """Return the form that an artifact holds; raise ValueError for what is none."""
    names = ("before", "between", "after", "joint")
    if not isinstance(value, Mapping) or value.keys() != set(names):
        raise ValueError(f"expected an object with {', '.join(names)}, found {value!r:.100}")
    for name in names:
        if not isinstance(value[name], str) and not (name == "joint" and value[name] is None):
            raise ValueError(f"{name} is {value[name]!r:.40}, expected a text")
    if not value["before"] or not value["between"]:
        raise ValueError("before and between: expected texts that are not empty")
    return CallForm(**value)


def find_call_form(render: Render, form: ChatForm) -> CallForm | None:
    """Return the form in which a template writes calls, for the form in which it reads messages.

    None: it writes none, or in a form that cannot be told (see the module).
    """
    if form.tool_calls is None or not form.tools:
        return None
    for goes_on in (True, False):  # some templates refuse a user's words right after a call
        said = _text(render, form, [_words(form, SAID)], goes_on)
        one = _text(render, form, [_calls(form, NAMES[:1])], goes_on)
        if said is None or one is None:
            continue
        found = _around(said, one, NAMES[0])
        if found is None:
            continue
        other = _text(render, form, [_calls(form, NAMES[1:])], goes_on)
        if other is None or _around(said, other, NAMES[1]) != found:
            return None  # what stands around a call depends on its name
        two = _text(render, form, [_calls(form, NAMES)], goes_on)
        return CallForm(*found, joint=None if two is None else _joint(found, said, two))
    return None


def _text(render: Render, form: ChatForm, answer: Sequence[Message], goes_on: bool) -> str | None:
    """Return what is rendered after the user's words, or None if the template raises."""
    user, then = (
        {"role": "user", "content": content_of(form, USER)},
        {"role": "user", "content": content_of(form, NEXT)},
    )
    try:
        text = render([user, *answer, *([then] if goes_on else [])], False, TOOLS)
    except Exception:  # noqa: BLE001 (a template raises whatever its operators do)
        return None
    _, is_there, behind = text.rpartition(USER)
    return behind if is_there else None


def _around(said: str, called: str, name: str) -> tuple[str, str, str] | None:
    """Return what stands before a call's name, between it and the arguments, and after these.

    said: a text's rendering, whose surroundings are those of any answer; called: that of one call of the tool `name`.
    """
    head, is_there, tail = said.partition(SAID)
    if not is_there or CALL_ID in called or not called.startswith(head) or not called.endswith(tail):
        return None
    inner = called[len(head) : len(called) - len(tail)]
    before, is_there, rest = inner.partition(name)
    arguments = _arguments(rest)
    if not is_there or not before.strip() or arguments is None:  # spaces alone do not tell a call from text
        return None
    start, end = arguments
    if not rest[:start]:
        return None
    return before, rest[:start], rest[end:]


def _joint(found: tuple[str, str, str], said: str, called: str) -> str | None:
    """Return what stands between two calls, or None if the template writes one alone."""
    before, between, after = found
    head, _, tail = said.partition(SAID)
    second = called.find(NAMES[1], len(head))
    if second < 0 or not called.startswith(head + before + NAMES[0] + between):
        return None
    first = _arguments(called[len(head) + len(before) + len(NAMES[0]) :])
    assert first is not None, "the arguments follow what stands between"
    end = len(head) + len(before) + len(NAMES[0]) + first[1]
    rest = called[second + len(NAMES[1]) :]
    last = _arguments(rest)
    if last is None or rest[: last[0]] != between or rest[last[1] :] != after + tail or end > second:
        return None  # the second call differs from the first one, as where calls are numbered
    joint = called[end:second]
    return None if head.strip() and head.strip() in joint else joint  # each call is an answer of its own


def _arguments(text: str) -> tuple[int, int] | None:
    """Return where the arguments, as JSON, begin and end; None if they are not there."""
    start = text.find("{")
    while start >= 0:
        try:
            value, end = json.JSONDecoder().raw_decode(text, start)
        except ValueError:
            value, end = None, 0
        if value == {KEY: VALUE}:
            return start, end
        start = text.find("{", start + 1)
    return None


def content_of(form: ChatForm, words: str) -> Any:
    """Return words as the content of a message in a template's form."""
    return words if form.content == "text" else [{"type": "text", "text": words}]


def _words(form: ChatForm, words: str) -> Message:
    return {"role": "assistant", "content": content_of(form, words)}


def _calls(form: ChatForm, names: Sequence[str]) -> Message:
    given: Any = {KEY: VALUE} if form.tool_calls == "object" else json.dumps({KEY: VALUE})
    nothing: Message = {}
    if form.no_content != "absent":
        nothing = {"content": None if form.no_content == "none" else NOTHING[form.content]}
    calls = [{"id": CALL_ID, "type": "function", "function": {"name": name, "arguments": given}} for name in names]
    return {"role": "assistant", **nothing, "tool_calls": calls}
