"""A text of letters, for tests of what the server does with tokens."""

from __future__ import annotations

from inferc.runtime.text.tokenizer import Text


class Letters(Text):
    """Token n is the n-th letter; no tokenizer needed."""

    def __init__(self) -> None:
        self.special_ids = frozenset()
        self._kind, self.strips_first_space = "byte_level", False

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])
