"""Bad words: sequences of tokens that may not come, the last token of which is banned behind the others."""

from __future__ import annotations

from collections.abc import Sequence

from inferc.runtime.step.plan import I32


class BadWords:
    """The bad words of a request that have several tokens.

    A word may begin in the prompt. Source: transformers' NoBadWordsLogitsProcessor.
    """

    def __init__(self, words: Sequence[Sequence[int]]) -> None:
        self._longest = max(map(len, words)) - 1
        # By the token before the last: what else is before it, in reverse order, and the last.
        self._ends: dict[int, list[tuple[list[int], int]]] = {}
        for *before, end in dict.fromkeys(map(tuple, words)):
            self._ends.setdefault(before[-1], []).append((before[-2::-1], end))

    def banned(self, token_ids: I32) -> list[int]:
        """Return the ids that may not follow these."""
        if not len(token_ids) or (ends := self._ends.get(int(token_ids[-1]))) is None:
            return []
        before = token_ids[-2 : -self._longest - 1 : -1].tolist()
        return [end for wanted, end in ends if before[: len(wanted)] == wanted]
