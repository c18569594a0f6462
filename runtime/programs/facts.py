"""The pieces of a program's text, its variables, and the facts of what was generated or chosen."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Piece:
    """A part of a program's text as it is appended; name: the variable that it belongs to, "" for none."""

    text: str
    name: str = ""


@dataclass(frozen=True)
class Generated:
    """The facts of a generation; finish_reason is "stop" or "length".

    token_ids: as generated, with what ended it. num_prompt_tokens, num_cached_tokens: the tokens before it, and how
    many of them the prefix cache had.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    num_prompt_tokens: int
    num_cached_tokens: int


@dataclass(frozen=True)
class Selected:
    """The facts of a choice.

    token_ids, logprobs: those of each choice's tokens, given the text and the tokens before.
    """

    text: str
    choices: tuple[str, ...]
    token_ids: tuple[tuple[int, ...], ...]
    logprobs: tuple[tuple[float, ...], ...]


@dataclass
class Slot:
    """A variable; info is None for one that the program set itself."""

    value: Any = None
    is_set: bool = False
    info: Any = None
