"""The side of a program that computes: an engine in this process, or a server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeAlias

Messages: TypeAlias = Sequence[Mapping[str, Any]]
MARK = "zqgenerated"  # stands in messages for what was generated: a word that templates leave as it is
# What a continuation is tokenized behind, if the tokenizer writes a space before the first word of a text.
ANCHORS = ("\n", ".", "a", "1")


@dataclass(frozen=True)
class Part:
    """A part of an answer as it comes; the last one has a finish_reason ("stop" or "length").

    num_cached: how many tokens of the prompt were found in the prefix cache, as far as it is known yet.
    """

    text: str
    token_ids: tuple[int, ...]
    finish_reason: str | None = None
    num_cached: int = 0


class Request(Protocol):
    """A generation; iterating over it starts it, and ends early once it is cancelled."""

    def __iter__(self) -> Iterator[Part]: ...

    def cancel(self) -> None:
        """End the request and what iterates over it, from any thread."""


class Endpoint(ABC):
    """A model that programs run on; its methods may be called by several threads at once.

    All raise RequestError for what cannot be served, and other InfercErrors where the engine or the server fails.
    """

    @property
    @abstractmethod
    def end_token_ids(self) -> frozenset[int]:
        """The tokens with which the model ends an answer."""

    @abstractmethod
    def tokenize(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text."""

    @abstractmethod
    def tokenize_turn(self, messages: Messages, num_known: int, add_generation_prompt: bool) -> list[int]:
        """Return the token ids of what a conversation has behind its first `num_known` messages (text/turns.py)."""

    @abstractmethod
    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, special ones included."""

    @abstractmethod
    def token_bytes(self, token_ids: Sequence[int]) -> bytes:
        """Return the bytes that the tokens stand for, joined."""

    @abstractmethod
    def open(self, token_ids: Sequence[int], sampling: Mapping[str, Any]) -> Request:
        """Return a generation behind a prompt; sampling: fields of SamplingParams over the model's defaults."""

    @abstractmethod
    def score(self, token_ids: Sequence[int], first: int, cache_salt: str) -> list[float]:
        """Return the log probability of each token from `first` on, given those before it."""

    def encode(self, text: str, *, begins: bool) -> list[int]:
        """Return the token ids of a text that begins a prompt, or that goes on behind other tokens.

        Tokens are never merged with those before, which stay as they are. A tokenizer that writes a space before the
        first word of a text writes none here.
        """
        ids = self.tokenize(text, begins)
        if begins or self._writes_no_space:
            return ids
        for anchor in ANCHORS:
            head, whole = self.tokenize(anchor, False), self.tokenize(anchor + text, False)
            rest = whole[len(head) :]
            if whole[: len(head)] == head and self.token_bytes(rest) == text.encode():
                return rest
        return ids

    @cached_property
    def _writes_no_space(self) -> bool:
        return self.token_bytes(self.tokenize("a", False)) == b"a"

    def kept(self, token_ids: Sequence[int], text: str, ends: Sequence[int]) -> list[int]:
        """Return the token ids of an answer that ended by itself, as text is appended to it: without its end.

        token_ids: as generated. text: without the end token or the stop string. ends: tokens that end it beside the
        model's own. They stay as generated up to the one that a stop string begins in; what is before it there is
        tokenized again.
        """
        ids = list(token_ids)
        if ids and (ids[-1] in self.end_token_ids or ids[-1] in ends):
            return ids[:-1]
        for count in range(len(ids), 0, -1):
            found = self.token_bytes(ids[:count]).decode(errors="replace")  # as texts of answers are
            if not (self._writes_no_space or text.startswith(" ")):  # such a tokenizer's text has none at its start
                found = found.removeprefix(" ")
            if text.startswith(found):
                rest = text[len(found) :]
                return ids[:count] + (self.encode(rest, begins=False) if rest else [])
        return self.encode(text, begins=False) if text else []
