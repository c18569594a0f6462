"""Token ids to text as they come: no half of a character is shown."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Protocol

WINDOW = 16  # ids that may be held back while the text ends in half a character, if decoding is not by bytes


class Decoder(Protocol):
    """The part of a tokenizer that turns ids into text (Text)."""

    @property
    def special_ids(self) -> Collection[int]: ...

    @property
    def is_by_bytes(self) -> bool: ...

    @property
    def strips_first_space(self) -> bool: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...


class Detokenizer:
    """An incremental detokenizer: the pieces that it returns add up to the text of all ids.

    at_start: the ids begin a text, so a sentencepiece model's first space is dropped; after a prompt it is kept. marks:
    what is written for some ids, special or not; half a character before one is left out.
    """

    def __init__(
        self,
        text: Decoder,
        skip_special_tokens: bool = True,
        at_start: bool = False,
        marks: Mapping[int, str] | None = None,
    ) -> None:
        self._text = text
        self._marks = marks or {}
        self._is_by_bytes = text.is_by_bytes
        self._skip = text.special_ids if skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._strip = at_start and text.strips_first_space
        # For a decoder that is not by bytes: the ids of the last piece, followed by the ids held back.
        self._window: list[int] = []
        self._shown = 0

    def push(self, token_ids: Iterable[int]) -> str:
        ids = [token for token in token_ids if token not in self._skip or token in self._marks]
        if not self._marks or self._marks.keys().isdisjoint(ids):
            return self._push(ids)
        pieces, start = [], 0
        for at, token in enumerate(ids):
            if token in self._marks:
                pieces += [self._push(ids[start:at]), self._finish_at_mark(), self._marks[token]]
                start = at + 1
        return "".join((*pieces, self._push(ids[start:])))

    def _finish_at_mark(self) -> str:
        """Return what was held back before a mark, without half a character."""
        if self._is_by_bytes:
            self._utf8.reset()
            return ""
        return self._push_window([], final=True).rstrip("\ufffd")

    def _push(self, ids: list[int]) -> str:
        if not self._is_by_bytes:
            return self._push_window(ids)
        piece = self._utf8.decode(b"".join(map(self._text.token_bytes, ids)))
        if self._strip and piece:
            self._strip = False
            piece = piece.removeprefix(" ")
        return piece

    def finish(self) -> str:
        """Return what was held back; half a character becomes U+FFFD."""
        return self._utf8.decode(b"", final=True) if self._is_by_bytes else self._push_window([], final=True)

    def _push_window(self, ids: list[int], final: bool = False) -> str:
        """Return the text that `ids` add after the previous piece, which determines the spaces between them."""
        self._window += ids
        shown = self._text.decode(self._window[: self._shown], skip_special_tokens=False)
        whole = self._text.decode(self._window, skip_special_tokens=False)
        held = len(self._window) - self._shown
        if not held or (whole.endswith("\ufffd") and not final and held < WINDOW):
            return ""
        del self._window[: self._shown]
        self._shown = len(self._window)
        return whole[len(shown) :]
