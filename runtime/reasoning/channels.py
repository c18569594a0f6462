"""Answers in channels: read as their text comes, counted by their tokens, and held to messages that follow one another.

See inferc.chat.channels for the form.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from inferc.chat.channels import CONSTRAIN, ENDS, RECIPIENT, Channels
from inferc.runtime.reasoning.reader import MAX_SPACES, Parts, State
from inferc.runtime.text.tokenizer import Text

# The first of the characters that stand for control tokens: behind those of markers (inferc.runtime.reasoning), before
# those of calls (inferc.runtime.tools.answer_calls).
FIRST_MARK = 0xDC02
MAX_HEADER = 512  # characters of a header; what is longer is text
BETWEEN = "\n\n"  # stands between two messages of an answer that are texts, or reasoning
FOR_WHOM = re.compile(r"\bto=functions\.([A-Za-z0-9_.-]+)")
NAME = re.compile(r"\w*")

Format = dict[str, Any]


@dataclass(frozen=True)
class Body:
    """A body of a message: reasoning, or else a text, or the arguments of a call of the tool `name`."""

    is_thought: bool = False
    name: str | None = None


@dataclass(frozen=True)
class ChannelMarks:
    """The control tokens of a model's channels, and the characters that stand for them in a text that is read."""

    channels: Channels
    ids: Mapping[str, int]  # of the control tokens, by their texts

    @staticmethod
    def of(text: Text, channels: Channels) -> ChannelMarks:
        """Return those of a tokenizer, which has them (Text.reasoning_marks)."""
        added = {entry.content: token for token, entry in text.tokenizer.get_added_tokens_decoder().items()}
        names = (*channels.tokens, CONSTRAIN, *ENDS)
        return ChannelMarks(channels, {name: added[name] for name in names if name in added})

    @cached_property
    def by_token(self) -> dict[int, str]:
        """The character that stands for each token."""
        return {token: chr(FIRST_MARK + index) for index, token in enumerate(self.ids.values())}

    def mark(self, name: str) -> str:
        """Return the character that stands for a control token, "" where there is no such token."""
        return self.by_token[self.ids[name]] if name in self.ids else ""

    @cached_property
    def closing(self) -> str:
        """The characters of the tokens behind a body."""
        return "".join(map(self.mark, (self.channels.end, *ENDS)))

    def format(self, text: str) -> list[Format]:
        """Return the formats of a text that names control tokens, one after the other."""
        parts = re.split("(" + "|".join(map(re.escape, self.ids)) + ")", text)
        return [
            {"type": "token", "token": self.ids[part]} if part in self.ids else {"type": "const_string", "value": part}
            for part in parts
            if part
        ]

    def header(self, channel: str, kinds: bool = False) -> list[Format]:
        """Return the formats of the header of a message for the user; kinds: it may say that its body is JSON."""
        found = self.format(self.channels.channel + channel)
        kind = [self.kind()] if kinds else []
        return [*found, *kind, *self.format(self.channels.message)]

    def kind(self, is_optional: bool = True) -> Format:
        """Return the format of the words of a header that say that a body is JSON."""
        ways = [sequence(*self.format(f" {CONSTRAIN}json")), *self.format(" json")]
        found: Format = {"type": "or", "elements": ways} if CONSTRAIN in self.ids else ways[-1]
        return {"type": "optional", "content": found} if is_optional else found

    def message(self, channel: str, max_tokens: int | None = None) -> Format:
        """Return the format of a message behind which the answer goes on."""
        return sequence(*self.header(channel), *self.rest(max_tokens))

    def rest(self, max_tokens: int | None = None) -> list[Format]:
        """Return the formats of a body and of what stands before the header of the next message."""
        free: Format = {"type": "any_text"}
        if max_tokens is not None:
            free["max_tokens"] = max_tokens
        return [free, *self.format(self.channels.end + self.channels.start + self.channels.role)]

    def call(self, names: Sequence[tuple[str, list[Format]]]) -> Format:
        """Return the format of a call: of one of the tools with these names, each with the formats of its arguments.

        Whom a message is for stands before its channel, or behind it.
        """
        own = self.channels
        ways = []
        for name, arguments in names:
            texts = (f"{own.channel}{own.calls}{RECIPIENT}{name}", f"{RECIPIENT}{name}{own.channel}{own.calls}")
            heads: Format = {"type": "or", "elements": [sequence(*self.format(each)) for each in texts]}
            ways.append(sequence(heads, self.kind(is_optional=False), *self.format(own.message), *arguments))
        return ways[0] if len(ways) == 1 else {"type": "or", "elements": ways}

    def before(self, state: State, max_tokens: int | None, has_headers: bool) -> Format:
        """Return the format of what comes before the form of an answer: reasoning, and a header unless it has its own.

        max_tokens: reasoning is one message of so many tokens at most.
        """
        thoughts = self.message(self.channels.thoughts, max_tokens)
        found: list[Format] = []
        if state == "begun":
            found += self.rest(max_tokens)
        if state != "begun" or max_tokens is None:
            found.append({"type": "star" if max_tokens is None else "optional", "content": thoughts})
        return sequence(*found, *([] if has_headers else self.header(self.channels.said, kinds=True)))


class _Place:
    """The place of what is read within messages, from behind the beginning of the first one."""

    def __init__(self, marks: ChannelMarks) -> None:
        self._marks, self._channels = marks, marks.channels
        self._start, self._channel = marks.mark(marks.channels.start), marks.mark(marks.channels.channel)
        self._message = marks.mark(marks.channels.message)
        self.header = ""
        self.body: Body | None = None  # None within a header

    def mark(self, mark: str) -> None:
        """Go on by a control token."""
        if mark == self._message and self.body is None:
            self.body = self._named()
        elif mark in self._marks.closing or mark == self._start:
            self.header, self.body = "", None
        elif mark == self._channel and self.body is not None:
            self.header, self.body = mark, None
        elif self.body is None:
            self.header += mark

    def text(self, piece: str) -> str:
        """Go on by a text, and return what of it, and before it, is of the body."""
        if self.body is not None:
            return piece
        self.header += piece
        return "" if self._is_header and len(self.header) <= MAX_HEADER else self.spell()

    def spell(self) -> str:
        """Return what was taken for a header as text."""
        text = re.sub(f"[{''.join(self._marks.by_token.values())}]", "", self.header.removeprefix(self._channels.role))
        self.header, self.body = "", Body()
        return text

    @property
    def has_channel(self) -> bool:
        """True within a header that names its channel."""
        return self._channel in self.header

    @property
    def unsure(self) -> str:
        """The part of what was taken for a header that is text if it is none."""
        return "" if self.has_channel else self.header.removeprefix(self._channels.role)

    @property
    def _is_header(self) -> bool:
        """True if what came since the last body is a header, or may begin one."""
        begun = self.unsure.lstrip()
        return "to=".startswith(begun) or begun.startswith("to=") or self._channels.role.startswith(self.header)

    def _named(self) -> Body:
        name = FOR_WHOM.search(self.header)
        _, _, channel = self.header.partition(self._channel)
        found = NAME.match(channel)
        assert found is not None, "it may be empty"
        if name is not None:
            return Body(name=name[1])
        return Body(is_thought=found[0] == self._channels.thoughts)


class ChannelReader:
    """The reader of one answer: its reasoning apart from its texts and calls.

    tail: what the prompt has behind the last beginning of a message. called: returns the text that begins a call of
    the tool of a name, as what reads calls expects it; None: arguments of calls are text. is_within: reasoning is a
    part of the text.
    """

    def __init__(
        self, marks: ChannelMarks, tail: str, called: Callable[[str], str] | None, is_within: bool = False
    ) -> None:
        self._called, self._place, self._is_within = called, _Place(marks), is_within
        self._pieces = re.compile(f"([{''.join(marks.by_token.values())}])")
        self._spaces = ""  # at the end of reasoning
        self._has = {True: False, False: False}  # whether there were any reasoning, and any text
        self._last: Body | None = None
        self._is_new = False  # nothing of the body came
        self.is_over = False
        self._read(tail)
        self._has, self._spaces, self._is_new = {True: False, False: False}, "", False

    def push(self, text: str) -> Parts:
        """Return what became certain with the next text: of the reasoning, and of the text."""
        return self._read(text)

    def finish(self, is_cut: bool = False) -> Parts:
        """Return what was held back when the answer ended: what has not become a header."""
        place = self._place
        is_header = place.body is not None or place.has_channel or place.unsure.lstrip().startswith("to=")
        return "", "" if is_cut or is_header else self._place.spell()

    def _read(self, text: str) -> Parts:
        thoughts, said = list[str](), list[str]()
        for piece in self._pieces.split(text):
            if self._pieces.fullmatch(piece):
                self._place.mark(piece)
                if self._place.body is not self._last:
                    self._last, self._is_new = self._place.body, True
                    if self._last is not None and not self._last.is_thought:
                        self.is_over = True
                        said.append(self._begun(self._last))
                continue
            part = self._place.text(piece)
            body = self._place.body
            if body is not self._last:
                self._last, self._is_new, self.is_over = body, True, True
            if body is not None and part:
                is_apart = body.is_thought and not self._is_within
                (thoughts if is_apart else said).append(self._joined(body, part, is_apart))
        return "".join(thoughts), "".join(said)

    def _begun(self, body: Body) -> str:
        """Return what stands for the beginning of a call."""
        return "" if body.name is None or self._called is None else self._called(body.name)

    def _joined(self, body: Body, part: str, is_apart: bool) -> str:
        """Return the next part of a body, with what stands between it and the message before."""
        if body.name is not None and self._called is not None:
            return part
        if self._is_new:
            part = part.lstrip() if body.is_thought else part  # a text may be of a form, which spaces belong to
            if not part:
                return ""
            self._spaces = BETWEEN if self._has[is_apart] else ""
            self._is_new, self._has[is_apart] = False, True
        part = self._spaces + part
        self._spaces = ""
        if body.is_thought:
            end = max(len(part.rstrip()), len(part) - MAX_SPACES)
            part, self._spaces = part[:end], part[end:]
        return part


class ChannelCount:
    """The number of tokens of the reasoning of an answer in channels, however it comes in parts.

    `count` and `num_before` are as those of ReasoningCount. tail: as for ChannelReader, as tokens.
    """

    def __init__(self, marks: ChannelMarks, tail: Sequence[int], spelled: Callable[[int], bytes]) -> None:
        self._marks, self._place, self._spelled = marks.by_token, _Place(marks), spelled
        self.count = self.num_before = self._num_read = 0
        self.is_over = False  # whether `num_before` stays
        self.push(tail)
        self.count = self.num_before = self._num_read = 0

    @property
    def state(self) -> State:
        """The place of what is read: before a header, within reasoning, or elsewhere."""
        if self._place.body is not None:
            return "begun" if self._place.body.is_thought else "over"
        return "over" if set(self._place.header) & set(self._marks.values()) else "may_begin"

    def push(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            self._num_read += 1
            if token in self._marks:
                self._place.mark(self._marks[token])
            else:
                self._place.text(self._spelled(token).decode(errors="replace"))
            body = self._place.body
            if body is not None and body.is_thought and token not in self._marks:
                self.count += 1
            if not self.is_over and body is not None and not body.is_thought:
                self.is_over = True
                self.num_before = self._num_read if token in self._marks else 0
            elif not self.is_over:
                self.num_before = self._num_read


def sequence(*formats: Format) -> Format:
    """Return the format of formats that follow one another."""
    return {"type": "sequence", "elements": list(formats)}
