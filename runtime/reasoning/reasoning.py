"""The reasoning of one answer, as its prompt leaves it: how it is read, and what is held to a form behind it."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from inferc.chat.reasoning import ReasoningForm
from inferc.errors import RequestError
from inferc.runtime.grammar.vocabulary import NO_TEXT
from inferc.runtime.reasoning.channels import ChannelCount, ChannelMarks, ChannelReader
from inferc.runtime.reasoning.reader import ReasoningCount, ReasoningReader, State
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.structured_outputs import StructuredOutputs
from inferc.runtime.text.detokenizer import Detokenizer
from inferc.runtime.text.tokenizer import Text

# Stand for the tokens that are markers, in a text that is read: halves of surrogate pairs, which no decoded text has.
MARKS = ("\udc00", "\udc01")
TAIL = 64  # tokens at the end of a prompt in which a marker is looked for
ANY: dict[str, Any] = {"type": "structural_tag", "format": {"type": "any_text"}}


@dataclass(frozen=True)
class Told:
    """A whole answer: its reasoning, the text behind it, and how many tokens the reasoning has."""

    reasoning: str
    text: str
    num_tokens: int


@dataclass(frozen=True)
class Reasoning:
    """The way in which the reasoning of one answer is read.

    - form: that of the model; state: where the prompt leaves the answer.
    - is_held: what comes behind the reasoning is held to a form.
    - called: returns the text that begins a call of the tool of a name, for what reads calls; None if nothing does.
    - tail: in channels, the tokens of the prompt behind the last beginning of a message.
    - is_within: the text has the reasoning, as the model writes it; in channels, without the headers of messages.
    """

    text: Text
    form: ReasoningForm
    state: State
    is_held: bool = False
    called: Callable[[str], str] | None = None
    tail: Sequence[int] = ()
    is_within: bool = False

    @staticmethod
    def after(
        text: Text,
        form: ReasoningForm,
        prompt_token_ids: Sequence[int],
        called: Callable[[str], str] | None = None,
    ) -> Reasoning:
        """Return how the answer to a prompt is read, at whose end a template may begin reasoning, or rule it out."""
        if form.channels is not None and text.reasoning_marks:
            found = Reasoning(text, form, "may_begin", called=called)
            start = found.in_channels.ids[form.channels.start]
            ids = prompt_token_ids[-TAIL:]
            at = next((at for at in range(len(ids) - 1, -1, -1) if ids[at] == start), None)
            found = replace(found, tail=() if at is None else tuple(ids[at + 1 :]))
            count = found.count()
            assert isinstance(count, ChannelCount)
            return replace(found, state=count.state)
        written = b"".join(map(text.token_bytes, prompt_token_ids[-TAIL:])).decode(errors="replace").rstrip()
        state: State = "may_begin"
        if written.endswith(form.opening):
            state = "begun"
        elif written.endswith(form.closing):
            state = "over"
        return Reasoning(text, form, state)

    @property
    def marks(self) -> Mapping[int, str]:
        """The characters that stand for tokens that are markers, in the text that `reader` reads."""
        if self.is_in_channels:
            return self.in_channels.by_token
        of_markers = dict(zip((self.form.opening, self.form.closing), MARKS, strict=True))
        return {token: of_markers[marker] for token, marker in self.text.reasoning_marks.items()}

    @property
    def is_read(self) -> bool:
        """True if the text of the answer is what `reader` makes of it."""
        return not self.is_within or self.is_in_channels

    @property
    def is_in_channels(self) -> bool:
        """True if the answer is made of messages in channels."""
        return self.form.channels is not None and bool(self.text.reasoning_marks)

    @cached_property
    def in_channels(self) -> ChannelMarks:
        """The control tokens of the model's channels."""
        assert self.form.channels is not None
        return ChannelMarks.of(self.text, self.form.channels)

    def reader(self) -> ReasoningReader | ChannelReader:
        """Return a reader of an answer whose text has `marks`."""
        if self.is_in_channels:
            tail = Detokenizer(self.text, marks=self.marks).push(self.tail)
            return ChannelReader(self.in_channels, tail, self.called, self.is_within)
        form, marks = self.form, self.marks
        opening, closing = MARKS if marks else (form.opening, form.closing)
        hidden = self.text.special_ids
        shown = {mark: "" if token in hidden else self.text.reasoning_marks[token] for token, mark in marks.items()}
        return ReasoningReader(opening, closing, self.state, form.trail if self.is_held else None, shown)

    def told(self, text: str, token_ids: Sequence[int], finish_reason: str | None) -> Told:
        """Return the parts of a whole answer, whose text has `marks`."""
        reader, count = self.reader(), self.count()
        count.push(token_ids)
        parts = zip(reader.push(text), reader.finish(is_cut=finish_reason == "length"), strict=True)
        reasoning, said = map("".join, parts)
        return Told(reasoning, said, count.count)

    def count(self) -> ReasoningCount | ChannelCount:
        """Return what counts the reasoning of an answer."""
        if self.is_in_channels:
            return ChannelCount(self.in_channels, self.tail, self.text.token_bytes)
        marks, form = self.text.reasoning_marks, self.form

        def spelled(token: int) -> bytes:
            return (NO_TEXT if token in marks else b"") + self.text.token_bytes(token)

        first = NO_TEXT if marks else b""
        return ReasoningCount(first + form.opening.encode(), first + form.closing.encode(), self.state, spelled)

    def held(
        self, wanted: StructuredOutputs | None, max_tokens: int | None = None
    ) -> tuple[Reasoning, StructuredOutputs | None]:
        """Return the form of the whole answer if `wanted` is that of what comes behind the reasoning.

        max_tokens: after so many tokens the reasoning ends. Raises RequestError if its end cannot be forced.
        """
        if self.state == "over" or (wanted is None and max_tokens is None):
            return self, wanted
        if max_tokens is not None and not self.text.reasoning_marks:
            raise RequestError(
                f"max_reasoning_tokens: the model ends its reasoning with {self.form.closing}, which is no token of its"
                " own, so its end cannot be forced; leave it out"
            )
        if self.is_in_channels:
            return self._held_in_channels(wanted, max_tokens)
        # Between the tags of a structural tag any bytes may stand, also those of a marker: there the limit would not
        # hold for reasoning that need not come.
        is_needed = max_tokens is not None and wanted is not None and wanted.kind == "structural_tag"
        if wanted is None:
            anything: Any = ANY
            wanted = StructuredOutputs(structural_tag=anything, label="max_reasoning_tokens")
        before = self._thoughts(max_tokens)
        if self.state == "may_begin":
            before = _sequence(_text(self.form.lead), self._marker(self.form.opening), before)
            before = before if is_needed else {"type": "optional", "content": before}
        return replace(self, is_held=True), replace(wanted, before=json.dumps(before, ensure_ascii=False))

    def _held_in_channels(
        self, wanted: StructuredOutputs | None, max_tokens: int | None
    ) -> tuple[Reasoning, StructuredOutputs]:
        if wanted is None:
            anything: Any = ANY
            wanted = StructuredOutputs(structural_tag=anything, label="max_reasoning_tokens")
        before = self.in_channels.before(self.state, max_tokens, wanted.has_headers)
        return replace(self, is_held=True), replace(wanted, before=json.dumps(before, ensure_ascii=False))

    def _thoughts(self, max_tokens: int | None) -> dict[str, Any]:
        """Return the format of thoughts and their end."""
        form = self.form
        # A marker that is a token is chosen where it is named alone; another one is told by its text.
        free: dict[str, Any] = {"type": "any_text"}
        if not self.text.reasoning_marks:
            free["excludes"] = [form.closing]
        if max_tokens is not None:
            free["max_tokens"] = max_tokens
        return _sequence(free, self._marker(form.closing), _text(form.trail))

    def _marker(self, marker: str) -> dict[str, Any]:
        token = next((token for token, each in self.text.reasoning_marks.items() if each == marker), None)
        return _text(marker) if token is None else {"type": "token", "token": token}


def reasoning_of(
    text: Text,
    prompt_token_ids: Sequence[int],
    params: SamplingParams,
    max_tokens: int | None = None,
    called: Callable[[str], str] | None = None,
) -> tuple[Reasoning | None, SamplingParams]:
    """Return how the reasoning of the answer to a chat is read, None for a model that has none, and its parameters.

    max_tokens: after so many tokens the reasoning ends. called: as Reasoning has it. Raises RequestError if that cannot
    be done.
    """
    if max_tokens is not None:
        text.check_reasoning()
    if (form := text.reasoning_form) is None:
        return None, params
    reasoning = Reasoning.after(text, form, prompt_token_ids, called)
    reasoning, wanted = reasoning.held(params.structured_outputs, max_tokens)
    return reasoning, params if wanted is None else replace(params, structured_outputs=wanted)


def _sequence(*formats: dict[str, Any]) -> dict[str, Any]:
    return {"type": "sequence", "elements": [each for each in formats if each != _text("")]}


def _text(value: str) -> dict[str, Any]:
    return {"type": "const_string", "value": value}
