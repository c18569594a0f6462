"""Texts that a grammar leaves no choice but to write, as the tokens that most likely spell them."""

from __future__ import annotations

from collections.abc import Sequence

MOST_BYTES = 64  # of a token that is looked for


class Spelling:
    """The tokens of a vocabulary by their bytes.

    tokens: the bytes of each id; control tokens have none.
    """

    def __init__(self, tokens: Sequence[bytes]) -> None:
        self._ids: dict[bytes, int] = {}
        for token, data in enumerate(tokens):
            if data:
                self._ids.setdefault(data, token)
        self._with_text = frozenset(token for token, data in enumerate(tokens) if data)
        self._most = min(MOST_BYTES, max(map(len, self._ids), default=0))

    def count_with_text(self, token_ids: Sequence[int]) -> int:
        """Return how many of some tokens come before the first control token."""
        return next((at for at, token in enumerate(token_ids) if token not in self._with_text), len(token_ids))

    def spell(self, text: str, most: int) -> list[int]:
        """Return the first `most` tokens of a text, each as long as it can be; fewer if a part has no token.

        Tokenizers merge pairs in an order of their own, and mostly come to the same.
        """
        data = text[: most * self._most].encode()
        found: list[int] = []
        start = 0
        while start < len(data) and len(found) < most:
            for end in range(min(len(data), start + self._most), start, -1):
                if (token := self._ids.get(data[start:end])) is not None:
                    found.append(token)
                    start = end
                    break
            else:
                break
        return found
