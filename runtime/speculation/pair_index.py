"""The index of the places where pairs of tokens occurred before, and the longest match on one of its chains.

Earlier places are found as in a compressor (Ziv and Lempel 1977): each pair of tokens is chained to the place where the
same pair occurred before. That takes eight to sixteen bytes a token, where the states of a suffix automaton take
hundreds; of the places on a chain the one is taken whose tokens before agree the longest.
"""

from __future__ import annotations

from array import array
from itertools import pairwise

from inferc.runtime.step.plan import I32

FIRST_BITS = 10  # of the hashes of a short sequence
MOST_PLACES = 32  # earlier places that are compared, the latest first
LONGEST = 16  # tokens that are compared at each


class PairIndex:
    """The places of all pairs of tokens of one growing sequence, chained by a hash of the pair.

    num_tokens: how long it is now; it may get half as long again before all of it is indexed anew.
    """

    def __init__(self, num_tokens: int = 0) -> None:
        self._bits = max(FIRST_BITS, (num_tokens * 3 // 2).bit_length())
        self._last = array("i", [-1]) * (1 << self._bits)  # by hash, the last place of the second token of such a pair
        self._before = array("i")  # by place, the place before it of the same hash; -1: none

    @property
    def num_tokens(self) -> int:
        """The number of tokens that are indexed."""
        return len(self._before)

    def extend(self, tokens: I32, end: int) -> None:
        """Index the tokens [num_tokens, end) of the sequence."""
        start = len(self._before)
        if start >= end:
            return
        if end > 1 << self._bits:  # chains stay short while there are as many hashes as tokens
            while end > 1 << self._bits:
                self._bits += 1
            self._last, self._before, start = array("i", [-1]) * (1 << self._bits), array("i"), 0
        ids = tokens[max(0, start - 1) : end].tolist()
        last, before, shift = self._last, self._before, 32 - self._bits
        if start == 0:
            before.append(-1)
            start = 1
        for place, (first, second) in enumerate(pairwise(ids), start):
            name = _hash(first, second, shift)
            before.append(last[name])
            last[name] = place

    def longest_match(self, tokens: I32, end: int) -> tuple[int, int]:
        """Return where the longest match of the tokens before `end` ends, and its length; (-1, 0) if there is none.

        All tokens are indexed. Of matches of one length it is the latest. A match of LONGEST tokens is not looked at
        further.
        """
        recent = tokens[max(0, end - LONGEST) : end].tolist()[::-1]
        return self._longest(tokens, self._before[end - 1] if end > 1 else -1, recent)

    def find(self, tokens: I32, recent: list[int]) -> tuple[int, int]:
        """Return where the longest match of another sequence's last tokens ends, and its length, as `longest_match`.

        recent: at least two of them, the last one first. A place that a negative number follows is no match: there a
        text ends.
        """
        return self._longest(tokens, self._last[_hash(recent[1], recent[0], 32 - self._bits)], recent)

    def _longest(self, tokens: I32, place: int, recent: list[int]) -> tuple[int, int]:
        """Return the longest match of tokens on the chain that begins at a place."""
        best, length = -1, 1
        for _ in range(MOST_PLACES):
            if place < 0:
                break
            # A longer match than the longest so far must agree where that one ends.
            if place >= length and length < len(recent) and tokens[place - length] == recent[length]:
                if tokens[place + 1] < 0:  # nothing followed
                    place = self._before[place]
                    continue
                there = tokens[max(0, place + 1 - len(recent)) : place + 1].tolist()[::-1]
                count = next((at for at, token in enumerate(there) if token != recent[at]), len(there))
                if count > length:
                    best, length = place, count
                    if count == LONGEST:
                        break
            place = self._before[place]
        return (best, length) if best >= 0 else (-1, 0)


def _hash(first: int, second: int, shift: int) -> int:
    """Return a hash of two tokens of 32 - shift bits. Source: Knuth, TAOCP volume 3, section 6.4."""
    return ((first * 0x9E3779B1 ^ second * 0x85EBCA77) & 0xFFFFFFFF) >> shift
