"""Reasoning in OpenAI's chats, as other servers have added it: what a body asks for, and where an answer has it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

from inferc.errors import RequestError, shown
from inferc.runtime.openai.messages import REASONING
from inferc.runtime.step.sampling_params import check_integer

# Where an answer shows its reasoning: apart from its text, nowhere, or within the text as the model writes it.
Shown: TypeAlias = Literal["apart", "left_out", "in_text"]

LIMITS = ("max_reasoning_tokens", "thinking_token_budget")  # the second is vLLM's
MAX_LIMIT = 2**31 - 1
# The names under which clients read it: DeepSeek's and SGLang's, then vLLM's and OpenRouter's.
NAMES = REASONING


@dataclass(frozen=True)
class Thinking:
    """The reasoning that a client asks for or rules out, whether or not the model can do so (Anthropic's `thinking`).

    budget: after so many tokens it ends, if its end can be forced.
    """

    is_on: bool
    budget: int | None = None


def shown_of(body: Mapping[str, Any]) -> Shown:
    """Return where a body wants to see reasoning; `include_reasoning` is vLLM's, `separate_reasoning` SGLang's."""
    if body.get("include_reasoning") is False:
        return "left_out"
    return "in_text" if body.get("separate_reasoning") is False else "apart"


def limit_of(body: Mapping[str, Any]) -> int | None:
    """Return the most tokens that a body allows for reasoning, or None. Raises RequestError for a wrong number."""
    given = {name: body[name] for name in LIMITS if body.get(name) is not None}
    for name, value in given.items():
        check_integer(name, value, 0, MAX_LIMIT, "leave it out for no limit")
    if len(set(given.values())) > 1:
        first, second = (f"{name} is {shown(value)}" for name, value in given.items())
        raise RequestError(f"{first} and {second}; leave one out")
    return next(iter(given.values()), None)


def reasoning_delta(reasoning: str) -> dict[str, Any]:
    """Return the delta of a chunk for a part of the reasoning."""
    return dict.fromkeys(NAMES, reasoning)


def with_reasoning(choice: dict[str, Any], reasoning: str) -> dict[str, Any]:
    """Return a whole choice whose message has its reasoning; one that was cut within it has no content."""
    if not reasoning:
        return choice
    message = choice["message"]
    return {**choice, "message": {**message, "content": message["content"] or None, **reasoning_delta(reasoning)}}
