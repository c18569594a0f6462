"""The log probabilities of one place of a text, also as a mapping from token id, which is the form that vLLM has."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from inferc.runtime.step.plan import Logprobs
from inferc.runtime.text.tokenizer import Text


@dataclass(frozen=True)
class Logprob:
    """The log probability of one token at one place, its rank there, and its text if there is a tokenizer."""

    logprob: float
    rank: int
    decoded_token: str | None


@dataclass(frozen=True)
class TokenLogprobs(Logprobs, Mapping[int, Logprob]):
    """The log probabilities of the chosen token and of the most likely ones.

    As a mapping it has the chosen token first, then those of `top`; a token is there once. A copy or a pickle has no
    tokenizer, so its decoded tokens are None.
    """

    _text: ClassVar[Text | None] = None  # no field: a tokenizer is neither compared nor copied

    @staticmethod
    def of(row: Logprobs, text: Text | None, num_top: int | None = None) -> TokenLogprobs:
        """Return an engine's row with the texts of its tokens; num_top: how many of the likeliest ones are kept."""
        made = TokenLogprobs(row.token_id, row.logprob, row.rank, row.top[:num_top])
        object.__setattr__(made, "_text", text)
        return made

    def __getitem__(self, token_id: int) -> Logprob:
        if token_id == self.token_id:
            return self._entry(token_id, self.logprob, self.rank)
        for index, (each, logprob) in enumerate(self.top):
            if each == token_id:
                return self._entry(token_id, logprob, index + 1)
        raise KeyError(token_id)

    def __iter__(self) -> Iterator[int]:
        yield self.token_id
        yield from (each for each, _ in self.top if each != self.token_id)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenLogprobs, (self.token_id, self.logprob, self.rank, self.top)

    def _entry(self, token_id: int, logprob: float, rank: int) -> Logprob:
        text = self._text
        return Logprob(logprob, rank, None if text is None else text.decode([token_id], skip_special_tokens=False))
