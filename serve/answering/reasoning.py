"""The reasoning of a request's answers, told from their text as it comes, and counted."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from inferc.runtime.openai.reasoning import Shown
from inferc.runtime.openai.request import OpenAIRequest
from inferc.runtime.reasoning.reader import ReasoningCount, ReasoningReader
from inferc.runtime.reasoning.reasoning import Reasoning
from inferc.runtime.text.tokenizer import Text
from inferc.serve.models.streams import Delta

EFFORT_IGNORED = "reasoning_effort is not read by the model's chat template and was ignored"
THINKING_IGNORED = "thinking was ignored, as the model's chat template tells of no reasoning"
STAYS_ON = (
    "thinking.type is disabled, and the model's chat template has no variable that turns reasoning off; it was left out"
    " of the answer"
)


def as_the_model_can(request: OpenAIRequest, text: Text) -> OpenAIRequest:
    """Return a request whose wishes about reasoning are what the model can do, and the others among its warnings."""
    return _with_effort(_with_thinking(request, text), text)


def _with_thinking(request: OpenAIRequest, text: Text) -> OpenAIRequest:
    asked, form = request.thinking, text.reasoning_form
    if asked is None or (form is None and not asked.is_on):
        return request
    if form is None:
        return replace(request, warnings=(*request.warnings, THINKING_IGNORED))
    ignored, limit = [], request.max_reasoning_tokens
    if form.switch is None and not asked.is_on:
        ignored.append(STAYS_ON)
    if asked.budget is not None and text.reasoning_marks:
        limit = asked.budget
    elif asked.budget is not None:
        ignored.append(
            f"thinking.budget_tokens was ignored: the model ends its reasoning with {form.closing}, which is no token"
            " of its own, so its end cannot be forced"
        )
    return replace(
        request,
        template=request.template if form.switch is None else {form.switch: asked.is_on, **request.template},
        max_reasoning_tokens=limit,
        warnings=(*request.warnings, *ignored),
    )


def _with_effort(request: OpenAIRequest, text: Text) -> OpenAIRequest:
    """Return a request whose reasoning_effort does something if the model reasons, or is named among its warnings.

    A template that does not read it may have a variable that turns reasoning off, as `none` asks for.
    """
    effort, form = request.template.get("reasoning_effort"), text.reasoning_form
    is_read = "reasoning_effort" in (text.template_source or "")
    if effort is None or form is None or is_read:
        return request
    if effort == "none" and form.switch is not None:
        return replace(request, template={form.switch: False, **request.template})
    return replace(request, warnings=(*request.warnings, EFFORT_IGNORED))


class ReasoningApart:
    """The readers of the choices of one request, whose prompt leaves the reasoning of each as `reasoning` says."""

    def __init__(self, reasoning: Reasoning, shown: Shown) -> None:
        self._reasoning, self._shown = reasoning, shown
        self._readers: dict[int, ReasoningReader] = {}
        self._counts: dict[int, ReasoningCount] = {}

    @property
    def marks(self) -> Mapping[int, str] | None:
        """The characters that streams write for markers that are tokens; None: they write them as other tokens."""
        return None if self._shown == "in_text" else self._reasoning.marks

    @property
    def num_tokens(self) -> int:
        """The number of tokens of all choices' reasoning so far."""
        return sum(each.count for each in self._counts.values())

    def num_before(self, index: int, is_whole: bool = False) -> int | None:
        """Return how many tokens of a choice stand before its text, None if more may come; is_whole: none will."""
        if self._shown == "in_text" or index not in self._counts:
            return 0
        count = self._counts[index]
        return count.num_before if is_whole or count.is_over else None

    def of(self, index: int, delta: Delta) -> Delta:
        """Return a delta of choice `index` with its reasoning apart, as the request wants to see it."""
        if index not in self._counts:
            self._counts[index], self._readers[index] = self._reasoning.count(), self._reasoning.reader()
        self._counts[index].push(delta.token_ids)
        if self._shown == "in_text":
            return delta
        reader = self._readers[index]
        thought, text = reader.push(delta.text)
        if delta.finish_reason is not None:
            more, last = reader.finish(is_cut=delta.finish_reason == "length")
            thought, text = thought + more, text + last
        return replace(delta, text=text, reasoning=thought if self._shown == "apart" else "")
