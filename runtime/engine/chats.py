"""The conversations of one call of `LLM.chat`: the tools that they offer, and the reasoning and calls of answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from inferc.chat.calls import CallForm
from inferc.errors import RequestError, shown
from inferc.runtime.engine.request_output import CompletionOutput, RequestOutput
from inferc.runtime.reasoning.reasoning import Reasoning, reasoning_of
from inferc.runtime.step.sampling_params import SamplingParams, check_integer
from inferc.runtime.text.text_stream import TextStream
from inferc.runtime.text.tokenizer import Text
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
        if max_reasoning_tokens is not None:
            check_integer("max_reasoning_tokens", max_reasoning_tokens, 0, 2**31 - 1, "leave it out for no limit")
            if not separates:
                raise RequestError(
                    f"max_reasoning_tokens is {max_reasoning_tokens}, which holds for separate reasoning alone; set"
                    " separate_reasoning=True"
                )
        self._text, self._given, self._separates, self._limit = text, tools, separates, max_reasoning_tokens
        body = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": is_parallel}
        self._tools = None if choice is None and is_parallel else tools_of(body)
        self._asked: list[tuple[SamplingParams, Reasoning | None]] = []  # for each conversation

    @property
    def for_template(self) -> Sequence[dict[str, Any]] | None:
        """The tools as the chat template reads them."""
        return self._given if self._tools is None else self._tools.for_template

    def asked(self, prompt: list[int], params: SamplingParams) -> tuple[SamplingParams, Mapping[int, str] | None]:
        """Return the parameters and the marks of the answer to the next conversation, given as its token ids."""
        params = held(params, self._tools, self._text.check_calls)[0]
        if self._separates:
            reasoning, params = reasoning_of(self._text, prompt, params, self._limit)
        else:
            form = self._text.reasoning_form if params.structured_outputs is None else None
            reasoning = None if form is None else Reasoning.after(self._text, form, prompt)
        self._asked.append((params, reasoning))
        return params, reasoning.marks if reasoning is not None and self._separates else None

    def read(self, answers: list[RequestOutput]) -> list[RequestOutput]:
        """Return answers whose outputs have their reasoning and their calls; a call that was cut is none."""
        form = self._form() if self._given else None
        for answer, (params, reasoning) in zip(answers, self._asked, strict=True):
            for output in answer.outputs:
                said = output.text if reasoning is None else self._said(output, params, reasoning)
                if form is not None:
                    found = read_calls(form, said)
                    output.tool_calls = found.calls[: len(found.calls) - found.is_cut]
        return answers

    def _said(self, output: CompletionOutput, params: SamplingParams, reasoning: Reasoning) -> str:
        """Give an output its reasoning, and return what it says behind it."""
        text = output.text if self._separates else _marked(output, params, reasoning)
        told = reasoning.told(text, output.token_ids, output.finish_reason)
        output.reasoning = told.reasoning
        if self._separates:
            output.text = output.new_text = told.text
        return told.text

    def _form(self) -> CallForm | None:
        """Return the form in which the model writes calls; None if it is not known."""
        try:
            return self._text.check_calls()
        except RequestError:
            return None


def _marked(output: CompletionOutput, params: SamplingParams, reasoning: Reasoning) -> str:
    """Return the text of an output with the marks of its markers, which its own text does not tell from others."""
    stream = TextStream(reasoning.text, params, reasoning.marks)
    delta = stream.push(output.token_ids, None if isinstance(output.stop, str) else output.finish_reason)
    return delta.text if delta.finish_reason is not None else delta.text + stream.push((), output.finish_reason).text
