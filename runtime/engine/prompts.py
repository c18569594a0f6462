"""The prompts of `inferc.LLM`: texts, lists of token ids, and mappings that hold either, alone or in lists."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from inferc.errors import RequestError, shown

# A mapping is one of vLLM's: {"prompt": text} or {"prompt_token_ids": ids}, either with a "cache_salt".
Prompt: TypeAlias = str | Sequence[int] | Mapping[str, Any]
KEYS = ("prompt", "prompt_token_ids", "cache_salt")


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt as it is served: its token ids if it was given so, else its text.

    cache_salt: that of SamplingParams, where the prompt itself has one.
    """

    text: str | None = None
    token_ids: list[int] | None = None
    cache_salt: str | None = None


def parse_prompts(prompts: Any, prompt_token_ids: Any = None) -> list[ParsedPrompt]:
    """Return the prompts of a call, which was given one prompt or a list of them.

    prompt_token_ids: ids of one prompt or of several, instead of `prompts`. Raises RequestError naming what is no
    prompt.
    """
    if prompt_token_ids is not None:
        if prompts is not None:
            raise RequestError("found prompts and prompt_token_ids; give one of them")
        prompts = prompt_token_ids
    elif prompts is None:
        raise RequestError("there is no prompt: give a text, a list of token ids, or a list of either")
    if isinstance(prompts, (str, Mapping)) or (_are_ids(prompts) and len(prompts)):
        return [parse_prompt(prompts)]
    if not isinstance(prompts, Sequence) or isinstance(prompts, (bytes, bytearray)):
        raise RequestError(f"a prompt is a text or a list of token ids, found {shown(prompts)}")
    return [parse_prompt(each) for each in prompts]


def parse_prompt(prompt: Any) -> ParsedPrompt:
    """Return one prompt; raise RequestError if it is none."""
    if isinstance(prompt, str):
        return ParsedPrompt(text=prompt)
    if isinstance(prompt, Mapping):
        return _of_mapping(prompt)
    if not _are_ids(prompt):
        raise RequestError(f"a prompt is a text or a list of token ids, found {shown(prompt)}")
    return ParsedPrompt(token_ids=list(prompt))


def _of_mapping(prompt: Mapping[str, Any]) -> ParsedPrompt:
    given = {name: value for name, value in prompt.items() if value is not None}
    for name in given:
        if name not in KEYS:
            raise RequestError(f"a prompt with {shown(name)} is not built yet; a prompt's keys are {', '.join(KEYS)}")
    text, ids, salt = (given.get(name) for name in KEYS)
    if text is not None and not isinstance(text, str):
        raise RequestError(f"prompt: expected a text, found {shown(text)}")
    if ids is not None and not _are_ids(ids):
        raise RequestError(f"prompt_token_ids: expected a list of token ids, found {shown(ids)}")
    if text is None and ids is None:
        raise RequestError(f"found {shown(dict(prompt))} for a prompt; expected a text as prompt, or prompt_token_ids")
    return ParsedPrompt(text, None if ids is None else list(ids), salt)


def _are_ids(value: object) -> bool:
    """Return whether a value is a list of token ids, which may be empty."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes, bytearray)):
        return False
    return all(isinstance(item, int) and not isinstance(item, bool) for item in value)
