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
        self._most = min(MOST_BYTES, max(map(len, self._ids), default=0))

    def spell(self, text: bytes) -> list[int]:
        """Return the tokens of a text, each as long as it can be; only the first ones if a part has no token.

        Tokenizers merge pairs in an order of their own, and mostly come to the same.
        """
        found, start = [], 0
        while start < len(text):
            for end in range(min(len(text), start + self._most), start, -1):
                if (token := self._ids.get(text[start:end])) is not None:
                    found.append(token)
                    start = end
                    break
            else:
                break
        return found
