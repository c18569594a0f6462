"""The tools that a conversation of `inferc.LLM` offers: for its template, and for its answers and their calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from inferc.chat.calls import CallForm
from inferc.errors import RequestError
from inferc.runtime.engine.request_output import RequestOutput
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.text.tokenizer import Text
from inferc.runtime.tools.call_reader import read_calls
from inferc.runtime.tools.tools import held, tools_of


class OfferedTools:
    """The tools of a call of `LLM.chat`; answers are held to them only if a choice, or a single call, is asked for."""

    def __init__(self, text: Text, tools: Sequence[dict[str, Any]] | None, choice: Any, is_parallel: bool) -> None:
        """Take the tools as OpenAI has them.

        choice and is_parallel: its `tool_choice` and `parallel_tool_calls`; without either, tools are shown to the
        template as they are, and answers are free. Raises RequestError for what is wrong in them otherwise.
        """
        self._text, self._given = text, tools
        body = {"tools": tools, "tool_choice": choice, "parallel_tool_calls": is_parallel}
        self._tools = None if choice is None and is_parallel else tools_of(body)

    @property
    def for_template(self) -> Sequence[dict[str, Any]] | None:
        """The tools as the chat template reads them."""
        return self._given if self._tools is None else self._tools.for_template

    def held(self, params: SamplingParams) -> SamplingParams:
        """Return sampling parameters that hold an answer to the tools, if it is to be held."""
        return held(params, self._tools, self._text.check_calls)[0]

    def read(self, answers: list[RequestOutput]) -> list[RequestOutput]:
        """Return answers whose outputs have their calls; a call that was cut is none."""
        form = self._form() if self._given else None
        if form is None:
            return answers
        for output in (output for answer in answers for output in answer.outputs):
            said = read_calls(form, output.text)
            output.tool_calls = said.calls[: len(said.calls) - said.is_cut]
        return answers

    def _form(self) -> CallForm | None:
        """Return the form in which the model writes calls; None if it is not known."""
        try:
            return self._text.check_calls()
        except RequestError:
            return None
