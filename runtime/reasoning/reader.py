"""The reasoning of an answer, read as its text comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, TypeAlias

# Where a prompt leaves the answer: within reasoning, before it if there is any, or behind it.
State: TypeAlias = Literal["begun", "may_begin", "over"]
Parts: TypeAlias = tuple[str, str]  # of the reasoning, and of the text behind it

MAX_SPACES = 256  # before a marker that are held back, and left out


class ReasoningReader:
    """The reader of one answer: its reasoning stands before its text, between two markers.

    Spaces and line breaks beside the markers are left out; of those behind the end `trail` alone if that is given, as
    where a form begins behind it. shown: what the text has for a marker that ends no reasoning.
    """

    def __init__(
        self,
        opening: str,
        closing: str,
        state: State,
        trail: str | None = None,
        shown: Mapping[str, str] | None = None,
    ) -> None:
        self._opening, self._closing, self._trail, self._shown = opening, closing, trail, shown or {}
        self._left = ""  # what may belong to what comes next
        steps: dict[State, Callable[[], Parts | None]] = {
            "begun": self._begin_thoughts,
            "may_begin": self._read_begin,
            "over": self._read_text,
        }
        self._read = steps[state]

    @property
    def is_over(self) -> bool:
        """True once no more reasoning can come."""
        return self._read in (self._read_behind, self._read_text)

    def push(self, text: str) -> Parts:
        """Return what became certain with the next text."""
        self._left += text
        return self._all()

    def finish(self, is_cut: bool = False) -> Parts:
        """Return what was held back when the answer ended; is_cut: by its length, so that a piece of a marker is none.

        A piece of a marker that the model itself ended with is text.
        """
        left, self._left = self._left, ""
        if self._read == self._read_behind:
            return "", ""
        held = "" if is_cut else left.rstrip() if self._read != self._read_begin else left
        return ("", held) if self._read in (self._read_begin, self._read_text) else (held, "")

    def _all(self) -> Parts:
        reasoning, said = [], []
        while (found := self._read()) is not None:
            reasoning.append(found[0])
            said.append(found[1])
        return self._spelled("".join(reasoning)), self._spelled("".join(said))

    def _spelled(self, text: str) -> str:
        for mark, shown in self._shown.items():
            text = text.replace(mark, shown)
        return text

    # Each step returns parts, and is followed by another, or None if it needs more text.

    def _read_begin(self) -> Parts | None:
        begun = self._left.lstrip()
        if len(self._left) - len(begun) > MAX_SPACES:
            self._read = self._read_text
        elif begun.startswith(self._opening):
            self._left, self._read = begun[len(self._opening) :], self._begin_thoughts
        elif not self._opening.startswith(begun):
            self._read = self._read_text
        else:
            return None
        return "", ""

    def _begin_thoughts(self) -> Parts | None:
        self._left = self._left.lstrip()
        if not self._left:
            return None
        self._read = self._read_thoughts
        return "", ""

    def _read_thoughts(self) -> Parts | None:
        thoughts, is_there, rest = self._left.partition(self._closing)
        if is_there:
            self._left, self._read = rest, self._read_behind
            return thoughts[: _end(thoughts)], ""
        sure = self._left[: _end(self._left[: len(self._left) - _common(self._left, self._closing)])]
        self._left = self._left[len(sure) :]
        return (sure, "") if sure else None

    def _read_behind(self) -> Parts | None:
        if self._trail is None:
            self._left = self._left.lstrip()
        elif self._left.startswith(self._trail):
            self._left = self._left[len(self._trail) :]
        elif self._trail.startswith(self._left):
            return None
        if self._trail is None and not self._left:
            return None
        self._read = self._read_text
        return "", ""

    def _read_text(self) -> Parts | None:
        text, self._left = self._left, ""
        return ("", text) if text else None


def _end(thoughts: str) -> int:
    """Return where thoughts end, without the spaces and line breaks at their end that are held back."""
    return max(len(thoughts.rstrip()), len(thoughts) - MAX_SPACES)


def _common(text: str, beginning: str) -> int:
    """Return how many characters at the end of a text may begin `beginning`."""
    return next((n for n in range(min(len(text), len(beginning) - 1), 0, -1) if text.endswith(beginning[:n])), 0)


class ReasoningCount:
    """The number of tokens of an answer's reasoning, without those of its markers, however the answer comes in parts.

    opening, closing: the bytes of the markers. spelled: returns a token's. `count` is that number, `num_before` that of
    all tokens before the text behind the reasoning, and `is_over` whether it stays.
    """

    def __init__(self, opening: bytes, closing: bytes, state: State, spelled: Callable[[int], bytes]) -> None:
        self._opening, self._closing, self._spelled, self._state = opening, closing, spelled, state
        self._written = b""  # at the beginning, or of the last tokens
        self._lengths: deque[int] = deque()  # of the tokens that `_written` has
        self._num_read = 0
        self.count = self.num_before = 0

    @property
    def is_over(self) -> bool:
        return self._state == "over"

    def push(self, token_ids: Sequence[int]) -> None:
        for token in token_ids:
            if self._state == "over":
                return
            self._num_read += 1
            data = self._spelled(token)
            self._written += data
            if self._state == "may_begin":
                begun = self._written.lstrip()
                if begun.startswith(self._opening):
                    self._state, self._written, self.num_before = "begun", b"", self._num_read
                elif not self._opening.startswith(begun):
                    self._state = "over"
                continue
            self.count += 1
            self.num_before = self._num_read
            self._lengths.append(len(data))
            if (at := self._written.find(self._closing)) >= 0:
                self._state = "over"
                self.count -= self._tokens_behind(at)
            while self._lengths and len(self._written) - self._lengths[0] >= len(self._closing):
                self._written = self._written[self._lengths.popleft() :]

    def _tokens_behind(self, at: int) -> int:
        """Return how many of the last tokens begin at `at` or behind it."""
        start, count = len(self._written), 0
        for length in reversed(self._lengths):
            start -= length
            if start < at or (start == at and not length):
                break
            count += 1
        return count
