"""The calls that one answer may have: how its model writes them, and what tools they are of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

from inferc.chat.calls import ID, NUMBER, CallForm
from inferc.runtime.grammar.schema.kinds import ArgumentKinds
from inferc.runtime.reasoning.channels import ChannelMarks
from inferc.runtime.text.tokenizer import Text
from inferc.runtime.tools.arguments import Arguments, JsonArguments, TaggedArguments
from inferc.runtime.tools.python_calls import PythonArguments

# The first of the characters that stand for control tokens in a text that is read: halves of surrogate pairs, which no
# decoded text has. Those of reasoning come before it (inferc.runtime.reasoning.reasoning).
FIRST_MARK = 0xDC10


@dataclass(frozen=True)
class AnswerCalls:
    """The form of an answer's calls, in which `marks` stand for control tokens, and the tools' functions by name.

    marks: the character that stands for each of these tokens. channels: those of the model, in which calls are
    messages. is_first: calls begin the answer, or there are none.
    """

    form: CallForm
    functions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    marks: Mapping[int, str] = field(default_factory=dict)
    channels: ChannelMarks | None = None
    is_first: bool = False

    @staticmethod
    def of(text: Text, functions: Mapping[str, Mapping[str, Any]]) -> AnswerCalls:
        """Return the calls of a model's answers. Raises RequestError if their form is not known."""
        form, tokens = text.check_calls(), text.call_tokens
        marks = {token: chr(FIRST_MARK + index) for index, token in enumerate(tokens)}
        # The longest name first, as tokens are told from texts.
        named = sorted(((name, marks[token]) for token, name in tokens.items()), key=lambda each: -len(each[0]))

        def marked(written: str) -> str:
            for name, mark in named:
                written = written.replace(name, mark)
            return written

        before = marked(form.before)
        found = replace(
            form,
            before=before.lstrip() if marks else before,  # a control token alone begins calls
            between=marked(form.between),
            after=marked(form.after),
            joint=None if form.joint is None else marked(form.joint),
        )
        reasoning = text.reasoning_form
        channels = None if reasoning is None else reasoning.channels
        return AnswerCalls(found, functions, marks, None if channels is None else ChannelMarks.of(text, channels))

    @cached_property
    def behind_name(self) -> tuple[str, ...]:
        """The texts one of which stands behind a name, and ends it."""
        form = self.form
        begin = form.between.partition(ID)[0].partition(NUMBER)[0]
        if form.arguments is None:
            return (begin,)
        behind = (form.arguments.begin, form.after, form.joint or form.after)
        return tuple(dict.fromkeys(begin + each for each in behind))

    def arguments(self, name: str) -> Arguments:
        """Return a reader of the arguments of a call of the tool with this name."""
        tags = self.form.arguments
        if self.form.is_python:
            return PythonArguments()
        if tags is None:
            return JsonArguments()
        parameters = self.functions.get(name, {}).get("parameters")
        return TaggedArguments(tags, ArgumentKinds(parameters or {}).of)

    def begun(self, name: str) -> str:
        """Return the text that begins a call of the tool with this name, for what reads calls."""
        return self.form.before + name + self.form.between

    def shown(self, text: str) -> str:
        """Return a text without marks, as it is without control tokens."""
        return text.translate(self._hidden) if self.marks else text

    @cached_property
    def _hidden(self) -> dict[int, None]:
        return dict.fromkeys(map(ord, self.marks.values()))
