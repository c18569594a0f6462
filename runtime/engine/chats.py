"""The conversations of one call of `LLM.chat`: the tools that they offer, and the reasoning and calls of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from inferc.errors import RequestError, shown
from inferc.runtime.engine.request_output import CompletionOutput, RequestOutput
from inferc.runtime.reasoning.reasoning import Reasoning, reasoning_of
from inferc.runtime.step.sampling_params import SamplingParams, check_integer
from inferc.runtime.text.text_stream import TextStream
from inferc.runtime.text.tokenizer import Text
from inferc.runtime.tools.answer_calls import AnswerCalls
from inferc.runtime.tools.call_reader import read_calls
from inferc.runtime.tools.tools import held, tools_of

OF_CHAT = (
    "messages",
    "sampling_params",
    "use_tqdm",
    "add_generation_prompt",
    "tools",
    "tool_choice",
    "parallel_tool_calls",
    "chat_template_kwargs",
    "separate_reasoning",
    "max_reasoning_tokens",
)


class Chats:
    """The wishes of a call of `LLM.chat` about its answers.

    They are held to tools only if a choice, or a single call, is asked for. If `separates`, their texts are what comes
    behind the reasoning, where a form begins; otherwise the texts have it, and a form begins with the first token.
    Answers in channels are read in any case, as their reasoning and text are messages apart.
    """

    def __init__(
        self,
        text: Text,
        tools: Sequence[dict[str, Any]] | None,
        choice: Any,
        is_parallel: bool,
        separates: bool,
        max_reasoning_tokens: int | None,
    ) -> None:
        """Take the tools as OpenAI has them.

        choice and is_parallel: its `tool_choice` and `parallel_tool_calls`; without either, tools are shown to the
        template as they are, and answers are free. Raises RequestError for what is wrong in them otherwise, and for a
        limit that cannot be held.
        """
        if type(separates) is not bool:
            raise RequestError(f"separate_reasoning: expected True or False, found {shown(separates)}")
        form = text.reasoning_form
        in_channels = form is not None and form.channels is not None
        if max_reasoning_tokens is not None:
            check_integer("max_reasoning_tokens", max_reasoning_tokens, 0, 2**31 - 1, "leave it out for no limit")
            if not separates and not in_channels:
                raise RequestError(
                    f"max_reasoning_tokens is {max_reasoning_tokens}, which holds for separate reasoning alone; set"
                    " separate_reasoning=True"
                )
        self._text, self._given, self._limit = text, tools, max_reasoning_tokens
        self._separates = separates or in_channels
        body = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": is_parallel}
        self._tools = None if choice is None and is_parallel else tools_of(body)
        self._asked: list[tuple[SamplingParams, Reasoning | None]] = []  # for each conversation

    @property
    def for_template(self) -> Sequence[dict[str, Any]] | None:
        """The tools as the chat template reads them."""
        return self._given if self._tools is None else self._tools.for_template

    def asked(self, prompt: list[int], params: SamplingParams) -> tuple[SamplingParams, Mapping[int, str] | None]:
        """Return the parameters and the marks of the answer to the next conversation, given as its token ids."""
        params = held(params, self._tools, lambda: self._text)[0]
        if self._separates:
            called = None if self._calls is None else self._calls.begun
            reasoning, params = reasoning_of(self._text, prompt, params, self._limit, called)
        else:
            form = self._text.reasoning_form if params.structured_outputs is None else None
            reasoning = None if form is None else Reasoning.after(self._text, form, prompt)
        self._asked.append((params, reasoning))
        return params, reasoning.marks if reasoning is not None and self._separates else None

    def read(self, answers: list[RequestOutput]) -> list[RequestOutput]:
        """Return answers whose outputs have their reasoning and their calls; a call that was cut is none."""
        calls = self._calls
        for answer, (params, reasoning) in zip(answers, self._asked, strict=True):
            for output in answer.outputs:
                said = output.text if reasoning is None else self._said(output, params, reasoning)
                if calls is not None:
                    if calls.marks:
                        said = self._marked(output, params, reasoning, calls)
                    found = read_calls(calls, said)
                    output.tool_calls = found.calls[: len(found.calls) - found.is_cut]
        return answers

    def _said(self, output: CompletionOutput, params: SamplingParams, reasoning: Reasoning) -> str:
        """Give an output its reasoning, and return what it says behind it."""
        text = output.text if self._separates else _marked(self._text, output, params, reasoning.marks)
        told = reasoning.told(text, output.token_ids, output.finish_reason)
        output.reasoning = told.reasoning
        if self._separates:
            text = told.text if self._calls is None else self._calls.shown(told.text)
            output.text = output.new_text = text
        return told.text

    def _marked(
        self, output: CompletionOutput, params: SamplingParams, reasoning: Reasoning | None, calls: AnswerCalls
    ) -> str:
        """Return what an output says behind its reasoning, with the marks of calls."""
        if reasoning is None:
            return _marked(self._text, output, params, calls.marks)
        text = _marked(self._text, output, params, {**calls.marks, **reasoning.marks})
        return reasoning.told(text, output.token_ids, output.finish_reason).text

    @cached_property
    def _calls(self) -> AnswerCalls | None:
        """The calls that answers may have; None without tools, and if their form is not known."""
        if not self._given:
            return None
        functions = [tool.get("function") for tool in self._given or () if isinstance(tool, Mapping)]
        named = {each.get("name", ""): each for each in functions if isinstance(each, Mapping)}
        try:
            return AnswerCalls.of(self._text, named)
        except RequestError:
            return None


def _marked(text: Text, output: CompletionOutput, params: SamplingParams, marks: Mapping[int, str]) -> str:
    """Return the text of an output with the marks of tokens, which its own text does not tell from others."""
    stream = TextStream(text, params, marks)
    delta = stream.push(output.token_ids, None if isinstance(output.stop, str) else output.finish_reason)
    return delta.text if delta.finish_reason is not None else delta.text + stream.push((), output.finish_reason).text
