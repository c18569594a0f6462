"""The wishes of requests about reasoning, made into what a model can do; what it cannot is named in warnings.

So are the names of who speaks, which few chat templates write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inferc.runtime.openai.request import OpenAIRequest
from inferc.runtime.text.tokenizer import Text

EFFORT_IGNORED = "reasoning_effort is not read by the model's chat template and was ignored"
THINKING_IGNORED = "thinking was ignored, as the model's chat template tells of no reasoning"
NAME_IGNORED = "name of messages is not read by the model's chat template and was ignored"
READS_NAME = re.compile(r"""\b(?:messages\[[^]]*\]|message|msg|m)\s*(?:\.\s*name\b|\[\s*['"]name|\.get\(\s*['"]name)""")
STAYS_ON = (
    "thinking.type is disabled, and the model's chat template has no variable that turns reasoning off; it was left out"
    " of the answer"
)


def as_the_model_can(request: OpenAIRequest, text: Text) -> OpenAIRequest:
    """Return a request whose wishes about reasoning are what the model can do, and the others among its warnings."""
    return _with_names(_with_effort(_with_thinking(request, text), text), text)


def _with_names(request: OpenAIRequest, text: Text) -> OpenAIRequest:
    """Return a request with a warning if its messages say who speaks and the template does not write it."""
    messages: Any = request.prompts[0] if request.kind == "chat" else ()
    is_named = any(message.get("name") and message["role"] != "tool" for message in messages)
    if not is_named or READS_NAME.search(text.template_source or ""):
        return request
    return replace(request, warnings=(*request.warnings, NAME_IGNORED))


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
    """Return a request whose reasoning_effort does something if the model reasons, or is named among its warnings."""
    template = template_with_effort(request.template, text)
    if template is None:
        return replace(request, warnings=(*request.warnings, EFFORT_IGNORED))
    return replace(request, template=template)


def template_with_effort(template: Mapping[str, Any], text: Text) -> Mapping[str, Any] | None:
    """Return variables of a template whose reasoning_effort does something if the model reasons, None if it cannot.

    A template that does not read it may have a variable that turns reasoning off, as `none` asks for.
    """
    effort, form = template.get("reasoning_effort"), text.reasoning_form
    is_read = "reasoning_effort" in (text.template_source or "")
    if effort is None or form is None or is_read:
        return template
    return {form.switch: False, **template} if effort == "none" and form.switch is not None else None
