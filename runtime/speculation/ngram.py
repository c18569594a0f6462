"""The drafter that repeats: it finds where the last tokens of a sequence occurred before, and drafts what followed.

It helps where answers quote: edits of code, summaries, tables, calls of tools. Source of the idea: Saxena 2023, "Prompt
Lookup Decoding". Earlier places are found as in a compressor (Ziv and Lempel 1977): each pair of tokens is chained to
the place where the same pair occurred before. That takes eight to sixteen bytes a token, where the states of a suffix
automaton take hundreds; of the places on a chain the one is taken whose tokens before agree the longest.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from itertools import pairwise

from inferc.runtime.scheduler.batch import Batch
from inferc.runtime.speculation.drafter import NOTHING, Drafter, Offer
from inferc.runtime.step.plan import I32
from inferc.runtime.step.sequence import Sequence as Seq

FIRST_BITS = 10  # of the hashes of a short sequence
MOST_PLACES = 32  # earlier places that are compared, the latest first
LONGEST = 16  # tokens that are compared at each
INDEXED_AT_ONCE = 4096  # tokens of a prompt that are indexed between two steps, in about two milliseconds
# The kinds of matches by their length in tokens, and the share of drafted tokens that the model is assumed to choose.
KINDS = ((2, 0.35), (3, 0.5), (5, 0.7), (9, 0.85))
PROMISING = 5  # tokens of a match for which it is worth to wait after drafts of late were in vain


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
        place, best, length = (self._before[end - 1] if end > 1 else -1), -1, 1
        for _ in range(MOST_PLACES):
            if place < 0:
                break
            # A longer match than the longest so far must agree where that one ends.
            if place >= length and length < len(recent) and tokens[place - length] == recent[length]:
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


class NgramDrafter(Drafter):
    """The drafter of what followed the last tokens where they occurred before, in the prompt or in the answer.

    most: the most tokens that are drafted at once.
    """

    def __init__(self, num_slots: int, most: int) -> None:
        self._most = most
        self._indices: list[tuple[Seq | None, PairIndex]] = [(None, PairIndex())] * num_slots
        self._places: dict[int, int] = {}  # by slot, where the match ends that was offered

    def offers(self, batch: Batch, slots: Sequence[int]) -> list[Offer]:
        """Return the continuation of the longest match of each sequence."""
        self._places.clear()
        for slot, (seq, _) in enumerate(self._indices):
            if seq is not None and batch.seqs[slot] is not seq:  # it ended
                self._indices[slot] = None, PairIndex()
        return [self._offer(batch, slot) for slot in slots]

    def _offer(self, batch: Batch, slot: int) -> Offer:
        place, length = self._match(batch, slot)
        if length < KINDS[0][0]:
            return NOTHING
        self._places[slot] = place
        kind = sum(length >= least for least, _ in KINDS) - 1
        return Offer(self._most, kind, KINDS[kind][1])

    def draft(self, batch: Batch, slots: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        """Return what followed each match; where it reaches the end of the sequence, it goes on from its beginning."""
        drafts = []
        for slot, count in zip(slots, counts, strict=True):
            start, end = self._places[slot] + 1, int(batch.num_known[slot])
            ids = batch.tokens[slot, start : min(end, start + count)].tolist()
            drafts.append((ids * -(-count // len(ids)))[:count])
        return drafts

    def is_promising(self, batch: Batch, slots: Sequence[int]) -> bool:
        """Return whether any sequence has a long match."""
        return any(self._match(batch, slot)[1] >= PROMISING for slot in slots)

    def _match(self, batch: Batch, slot: int) -> tuple[int, int]:
        seq, index = self._indices[slot]
        if seq is not batch.seqs[slot]:
            index = PairIndex(int(batch.num_known[slot]))
            self._indices[slot] = batch.seqs[slot], index
        tokens, end = batch.tokens[slot], int(batch.num_known[slot])
        index.extend(tokens, min(end, index.num_tokens + INDEXED_AT_ONCE))
        return index.longest_match(tokens, end) if index.num_tokens == end else (-1, 0)
