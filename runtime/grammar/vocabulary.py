"""The bytes of each token of a model, which a grammar's masks are made from."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from inferc.runtime.text.tokenizer import Text

NO_TEXT = b"\xff"  # no character's first byte


@dataclass(frozen=True)
class Vocabulary:
    """The tokens of a model as grammars match them.

    tokens: the bytes of each id; control tokens, and ids that the tokenizer does not have, have none and are never
    chosen. The markers of reasoning, and those of calls, have bytes that are no text, so they are chosen only where a
    grammar names their ids. end_ids: the tokens that end an answer once it is complete.
    """

    tokens: tuple[bytes, ...]
    end_ids: tuple[int, ...]

    @staticmethod
    def of(text: Text, vocab_size: int, end_ids: tuple[int, ...]) -> Vocabulary:
        """Return the vocabulary of a tokenizer, for a model with `vocab_size` logits."""
        hidden = text.special_ids | set(end_ids)
        marks = text.reasoning_marks.keys() | (text.call_tokens.keys() - set(end_ids))

        def spelled(token: int) -> bytes:
            if token in marks:
                return NO_TEXT + text.token_bytes(token)
            return b"" if token in hidden else text.token_bytes(token)

        return Vocabulary(tuple(map(spelled, range(vocab_size))), end_ids)
