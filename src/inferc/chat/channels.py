"""The form of answers whose reasoning, calls of tools and texts are messages of their own, each in a channel.

An answer goes on behind the beginning of a message that its prompt ends with (`<|start|>assistant`), and has further
ones after it. A message has a header, which names its channel and whom it is for, and a body:

    <|channel|>analysis<|message|>…<|end|>                                             reasoning
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{…}<|call|>    a call
    <|start|>assistant<|channel|>final<|message|>…<|return|>                            the text

Source: OpenAI's description of the format, docs/format.md of github.com/openai/harmony.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from inferc.chat.calls import NAMES, TOOLS, USER, CallForm, calls_of, content_of
from inferc.chat.form import ChatForm, Render

RECIPIENT = " to=functions."  # before the name of the tool that a call is of
CONSTRAIN = "<|constrain|>"  # stands before the kind of a body that is held to one
ENDS = ("<|call|>", "<|return|>")  # of an answer: what a body ends with beside `end`


@dataclass(frozen=True)
class Channels:
    """The tokens and names of which the headers of messages are made.

    start, role: what begins another message of the answer. channel, message: what stands before a channel's name, and
    before a body. end: what ends a body behind which the answer goes on. thoughts, calls, said: names of channels.
    """

    start: str
    role: str
    channel: str
    message: str
    end: str
    thoughts: str
    calls: str
    said: str

    @property
    def tokens(self) -> tuple[str, ...]:
        """The control tokens that an answer must be able to have."""
        return (self.start, self.channel, self.message, self.end)

    @property
    def begin(self) -> str:
        """The header of reasoning at the beginning of an answer."""
        return f"{self.channel}{self.thoughts}{self.message}"

    @property
    def turn(self) -> str:
        """The text that stands between reasoning and the answer behind it."""
        return f"{self.end}{self.start}{self.role}{self.channel}{self.said}{self.message}"

    @property
    def call_form(self) -> CallForm:
        """The form of a call, of which an answer has one at most, as its end is that of the answer."""
        kind = f" {CONSTRAIN}json{self.message}"
        return CallForm(f"{self.channel}{self.calls}{RECIPIENT}", kind, "")


HARMONY = Channels("<|start|>", "assistant", "<|channel|>", "<|message|>", "<|end|>", "analysis", "commentary", "final")


def channels_of(value: Any) -> Channels:
    """Return the channels that an artifact holds; raise ValueError for what are none."""
    names = [each.name for each in fields(Channels)]
    if not isinstance(value, Mapping) or value.keys() != set(names):
        raise ValueError(f"channels: expected an object with {', '.join(names)}, found {value!r:.100}")
    for name in names:
        if not isinstance(value[name], str) or not value[name]:
            raise ValueError(f"channels.{name} is {value[name]!r:.40}, expected a text that is not empty")
    return Channels(**value)


def is_in_channels(form: CallForm) -> bool:
    """Return whether calls of this form are messages in a channel."""
    return form.before.endswith(RECIPIENT)


def find_channels(begin: str, end: str, control_tokens: Sequence[str]) -> Channels | None:
    """Return the channels of a template that writes this before and after reasoning; None if these are none."""
    controls = "|".join(re.escape(each) for each in sorted(control_tokens, key=len, reverse=True))
    if not controls:
        return None
    opening = re.fullmatch(rf"({controls})(\w+)({controls})", begin.strip())
    closing = re.fullmatch(rf"({controls})({controls})(\w+)({controls})(\w+)({controls})", end.strip())
    if opening is None or closing is None:
        return None
    channel, thoughts, message = opening.groups()
    closed, start, role, again, said, body = closing.groups()
    if (again, body) != (channel, message) or said == thoughts:
        return None
    return Channels(start, role, channel, message, closed, thoughts, HARMONY.calls, said)


def find_channel_calls(render: Render, form: ChatForm, channels: Channels) -> CallForm | None:
    """Return the form of calls of a template that writes them in a channel; None if it writes none there."""
    if form.tool_calls is None or not form.tools:
        return None
    user = {"role": "user", "content": content_of(form, USER)}
    try:
        text = render([user, calls_of(form, NAMES[:1])], False, TOOLS)
    except Exception:  # noqa: BLE001 (a template raises whatever its operators do)
        return None
    header = text.rpartition(USER)[2].rpartition(channels.message)[0].rpartition(channels.start)[2]
    is_call = f"{RECIPIENT}{NAMES[0]}" in header and f"{channels.channel}{channels.calls}" in header
    return channels.call_form if is_call else None
