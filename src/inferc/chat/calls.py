"""The form in which a model writes calls of tools, found by how its chat template writes the calls of a history.

A model is trained on the texts that its template writes: an answer that calls tools is expected in the words in which
the template would repeat it. These are found as the form of messages is (inferc.chat.form): conversations with one call
and with two are rendered, and what stands around names and arguments is the form. It is what an answer is held to, and
what is read from one, so that the two cannot differ.

Arguments are JSON, or each stands in tags of its own (inferc.chat.argument_tags), or they are Python's keyword
arguments: `f(a=1, b="c")`. Templates that write arguments or an id before the name of the tool have no such form;
neither have those that write the name of the tool twice.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

from inferc.chat.argument_tags import ArgumentTags, argument_tags_of, find_argument_tags
from inferc.chat.form import CALL_ID, NOTHING, ChatForm, Message, Render

USER, SAID, NEXT = "Zqasked", "Zqanswered", "Zqagain"  # what the user says, what is answered, what the user says then
NAMES = ("zqfirst_tool", "zqsecond_tool")
KEY, VALUE = "zqkey", "zqvalue"
# What a form has in place of what the model chooses: a call's id, and the number of a call within a conversation.
ID, NUMBER = "\0", "\1"
SLOTS = {ID: r"[A-Za-z0-9]{9}", NUMBER: r"[0-9]{1,6}"}
# The ids of calls: ours, or ours in nine letters and digits where the template refuses others, as the model writes them
# in place of ID, or made of the tool's name and of NUMBER.
Ids = Literal["ours", "short", "written", "numbered"]
IDS: tuple[Ids, ...] = ("ours", "short", "written", "numbered")
LONG_ID = "call_0123456789abcdef01234567"
OF_NAME = "functions."  # with which an id begins that is numbered
# Arguments, and how Python writes them.
PYTHONS: tuple[tuple[dict[str, Any], tuple[str, ...]], ...] = (
    ({"zqa": 41779}, ("zqa=41779",)),
    ({"zqa": 41779, "zqb": 58833}, ("zqa=41779, zqb=58833",)),
    ({"zqa": "Zq"}, ('zqa="Zq"', "zqa='Zq'")),
)
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


LATER: dict[str, Any] = {"arguments": None, "ids": "ours", "is_python": False}  # what is kept only if it differs


@dataclass(frozen=True)
class CallForm:
    """The form of an answer's calls: `before`, then for each call its tool's name, `between`, arguments, then `after`.

    joint: what stands between one call's arguments and the next one's name, or None if an answer has one call at most.
    arguments: the tags around each argument, or None if arguments are JSON. ids: what the ids of calls are, which the
    template writes as well if they are not ours: the texts then have ID or NUMBER where they stand. is_python:
    arguments are written as Python's.
    """

    before: str
    between: str
    after: str
    joint: str | None = None
    arguments: ArgumentTags | None = None
    ids: Ids = "ours"
    is_python: bool = False

    def __str__(self) -> str:
        """Return an example of a call, as `inferc inspect` shows it."""
        arguments = "{…}" if self.arguments is None else str(self.arguments)
        arguments = "KEY=VALUE, …" if self.is_python else arguments
        shown = f"{self.before}NAME{self.between}{arguments}{self.after}"
        return shown.replace("\n", "\\n").replace(ID, "ID").replace(NUMBER, "NUMBER")

    @property
    def is_first(self) -> bool:
        """True if calls begin the answer, as a bracket alone does not tell them from text."""
        return self.is_python and self.before.strip() == "["

    @property
    def trigger(self) -> str:
        """The beginning of `before` that says that a call follows: its marker, or all of it if it has none."""
        marker = self.before.partition("{")[0].rstrip()
        return marker.rstrip("[ ") or self.before

    def to_json(self) -> dict[str, Any]:
        found = asdict(self)
        unsaid = [name for name, value in LATER.items() if found[name] == value]
        return {name: value for name, value in found.items() if name not in unsaid}


def call_form_of(value: Any) -> CallForm:
    """Return the form that an artifact holds; raise ValueError for what is none."""
    names = ("before", "between", "after", "joint")
    if not isinstance(value, Mapping) or value.keys() - LATER.keys() != set(names):
        raise ValueError(f"expected an object with {', '.join(names)}, found {value!r:.100}")
    for name in names:
        if not isinstance(value[name], str) and not (name == "joint" and value[name] is None):
            raise ValueError(f"{name} is {value[name]!r:.40}, expected a text")
    arguments = None if value.get("arguments") is None else argument_tags_of(value["arguments"])
    if (ids := value.get("ids", "ours")) not in IDS:
        raise ValueError(f"ids is {ids!r:.40}, expected one of {', '.join(IDS)}")
    if type(value.get("is_python", False)) is not bool:
        raise ValueError(f"is_python is {value['is_python']!r:.40}, expected true or false")
    if not value["before"] or not (value["between"] or arguments):
        raise ValueError("before and between: expected texts that are not empty")
    return CallForm(**{**value, "arguments": arguments})


def find_call_form(render: Render, form: ChatForm) -> CallForm | None:
    """Return the form in which a template writes calls, for the form in which it reads messages.

    None: it writes none, or in a form that cannot be told (see the module).
    """
    if form.tool_calls is None or not form.tools:
        return None
    for goes_on in (True, False):  # some templates refuse a user's words right after a call
        said = _text(render, form, [_words(form, SAID)], goes_on)
        if said is None:
            continue
        for is_numbered in (False, True):  # some write ids in place of names, which then are in them
            one = _text(render, form, [calls_of(form, NAMES[:1], is_numbered=is_numbered)], goes_on)
            found = None if one is None else _around(said, one, NAMES[0], is_numbered)
            if found is None:
                continue
            other = _text(render, form, [calls_of(form, NAMES[1:], is_numbered=is_numbered)], goes_on)
            if other is None or _around(said, other, NAMES[1], is_numbered) != found:
                return None  # what stands around a call depends on its name
            two = _text(render, form, [calls_of(form, NAMES, is_numbered=is_numbered)], goes_on)
            joint = None if two is None else _joint(found, said, two, is_numbered)
            ids: Ids = "numbered" if is_numbered else "written" if ID in "".join(found) else "ours"
            if ids == "ours" and _text(render, form, [calls_of(form, NAMES[:1], call_id=LONG_ID)], goes_on) is None:
                ids = "short"
            return CallForm(*found, joint=joint, ids=ids)
        for find in (_tagged, _python):
            if (other_form := find(render, form, said, goes_on)) is not None:
                return other_form
    return None


def _slotted(text: str, is_numbered: bool) -> str:
    """Return a rendered text with slots in place of ids, or of the numbers in them."""
    if not is_numbered:
        return text.replace(CALL_ID, ID)
    return re.sub(f"({re.escape(OF_NAME)}(?:{'|'.join(NAMES)}):)[01]", lambda found: found[1] + NUMBER, text)


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


def _around(said: str, called: str, name: str, is_numbered: bool = False) -> tuple[str, str, str] | None:
    """Return what stands before a call's name, between it and the arguments, and after these.

    said: a text's rendering, whose surroundings are those of any answer; called: that of one call of the tool `name`.
    """
    head, is_there, tail = said.partition(SAID)
    called = _slotted(called, is_numbered)
    if not is_there or not called.startswith(head) or not called.endswith(tail):
        return None
    inner = called[len(head) : len(called) - len(tail)]
    before, is_there, rest = inner.partition(name)
    arguments = _arguments(rest)
    if not is_there or not before.strip() or arguments is None:  # spaces alone do not tell a call from text
        return None
    start, end = arguments
    between, after = rest[:start], rest[end:]
    if not between or between[0] in SLOTS or name in rest or ID in before or between.count(ID) > 1:
        return None
    if is_numbered and between.count(NUMBER) != 1:
        return None
    return before, between, after


Called: TypeAlias = Callable[[Sequence[str], Mapping[str, Any]], str | None]


def _caller(render: Render, form: ChatForm, said: str, goes_on: bool) -> Called | None:
    """Return what renders calls with the same arguments, without what stands around any answer."""
    head, is_there, tail = said.partition(SAID)

    def called(names: Sequence[str], arguments: Mapping[str, Any]) -> str | None:
        text = _text(render, form, [calls_of(form, names, arguments)], goes_on)
        if text is None or CALL_ID in text or not text.startswith(head) or not text.endswith(tail):
            return None
        return text[len(head) : len(text) - len(tail)]

    return called if is_there else None


def _tagged(render: Render, form: ChatForm, said: str, goes_on: bool) -> CallForm | None:
    """Return the form of calls whose arguments have tags of their own."""
    called, head = _caller(render, form, said, goes_on), said.partition(SAID)[0]
    if called is None or (found := find_argument_tags(partial(called, NAMES[:1]), NAMES[0])) is None:
        return None
    other = find_argument_tags(partial(called, NAMES[1:]), NAMES[1])
    if other != found or not found.before.strip():
        return None
    joint = _between_calls(called, found.before, found.between, found.after, head)
    return CallForm(found.before, found.between, found.after, joint, found.tags)


def _python(render: Render, form: ChatForm, said: str, goes_on: bool) -> CallForm | None:
    """Return the form of calls whose arguments are written as Python's."""
    called, head = _caller(render, form, said, goes_on), said.partition(SAID)[0]
    bare = None if called is None else called(NAMES[:1], {})
    if called is None or bare is None or bare.count(NAMES[0]) != 1:
        return None
    before, _, behind = bare.partition(NAMES[0])
    between, after = behind[:1], behind[1:]
    if between != "(" or not after.startswith(")") or not before.strip():
        return None
    for arguments, written in PYTHONS:
        if called(NAMES[:1], arguments) not in [f"{before}{NAMES[0]}({each}{after}" for each in written]:
            return None
    return CallForm(before, between, after, _between_calls(called, before, between, after, head), is_python=True)


def _between_calls(called: Called, before: str, between: str, after: str, head: str) -> str | None:
    """Return what stands between two calls without arguments; None if the template writes one alone."""
    two = called(NAMES, {})
    if two is None or not two.startswith(before + NAMES[0] + between) or not two.endswith(NAMES[1] + between + after):
        return None
    joint = two[len(before + NAMES[0] + between) : len(two) - len(NAMES[1] + between + after)]
    return None if head.strip() and head.strip() in joint else joint  # each call is an answer of its own


def _joint(found: tuple[str, str, str], said: str, called: str, is_numbered: bool) -> str | None:
    """Return what stands between two calls, or None if the template writes one alone."""
    before, between, after = found
    called = _slotted(called, is_numbered)
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


def calls_of(
    form: ChatForm,
    names: Sequence[str],
    arguments: Mapping[str, Any] | None = None,
    is_numbered: bool = False,
    call_id: str = CALL_ID,
) -> Message:
    """Return a message with calls of the tools with these names, as a template of this form reads it."""
    given: Any = {KEY: VALUE} if arguments is None else arguments
    given = given if form.tool_calls == "object" else json.dumps(given)
    nothing: Message = {}
    if form.no_content != "absent":
        nothing = {"content": None if form.no_content == "none" else NOTHING[form.content]}
    ids = [f"{OF_NAME}{name}:{index}" if is_numbered else call_id for index, name in enumerate(names)]
    calls = [
        {"id": call_id, "type": "function", "function": {"name": name, "arguments": given}}
        for call_id, name in zip(ids, names, strict=True)
    ]
    return {"role": "assistant", **nothing, "tool_calls": calls}
