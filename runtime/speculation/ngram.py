"""The drafter that repeats: it finds where the last tokens of a sequence occurred before, and drafts what followed.

It helps where answers quote: edits of code, summaries, tables, calls of tools. Source of the idea: Saxena 2023, "Prompt
Lookup Decoding". If asked, it also looks into the answers of earlier requests whose prompts begin alike.
"""

from __future__ import annotations

from collections.abc import Sequence

from inferc.runtime.scheduler.batch import Batch
from inferc.runtime.speculation.drafter import NOTHING, Drafter, Offer
from inferc.runtime.speculation.pair_index import LONGEST, PairIndex
from inferc.runtime.speculation.shared_texts import SharedTexts, key_of
from inferc.runtime.step.plan import I32
from inferc.runtime.step.sequence import Sequence as Seq
from inferc.runtime.step.sequence import Status

INDEXED_AT_ONCE = 4096  # tokens of a prompt that are indexed between two steps, in about two milliseconds
# The kinds of matches by their length in tokens, and the share of drafted tokens that the model is assumed to choose.
KINDS = ((2, 0.35), (3, 0.5), (5, 0.7), (9, 0.85))
OF_OTHERS = len(KINDS)  # is added to the kind of a match in another request's answer
PROMISING = 5  # tokens of a match for which it is worth to wait after drafts of late were in vain


class NgramDrafter(Drafter):
    """The drafter of what followed the last tokens where they occurred before, in the prompt or in the answer.

    most: the most tokens that are drafted at once. is_shared: a longer match is looked for in the answers of earlier
    requests, too.
    """

    def __init__(self, num_slots: int, most: int, is_shared: bool = False) -> None:
        self._most = most
        self._indices: list[tuple[Seq | None, PairIndex]] = [(None, PairIndex())] * num_slots
        self._places: dict[int, int] = {}  # by slot, where the match ends that was offered
        self._others: dict[int, I32] = {}  # by slot, what was offered of another request's answer
        self._shared = SharedTexts() if is_shared else None
        self._running: list[Seq | None] = [None] * num_slots  # the sequences whose answers will be shared

    def watch(self, batch: Batch) -> None:
        """Keep the answers that have ended, if they are shared."""
        if self._shared is None:
            return
        for slot, (seq, now) in enumerate(zip(self._running, batch.seqs, strict=True)):
            if seq is not now:
                if seq is not None and seq.status is Status.FINISHED:
                    self._shared.add(seq)
                self._running[slot] = now

    def offers(self, batch: Batch, slots: Sequence[int]) -> list[Offer]:
        """Return the continuation of the longest match of each sequence."""
        self._places.clear()
        self._others.clear()
        for slot, (seq, _) in enumerate(self._indices):
            if seq is not None and batch.seqs[slot] is not seq:  # it ended
                self._indices[slot] = None, PairIndex()
        return [self._offer(batch, slot) for slot in slots]

    def _offer(self, batch: Batch, slot: int) -> Offer:
        place, length = self._match(batch, slot)
        other = self._match_of_others(batch, slot, length)
        if other is not None:
            self._others[slot], length = other
        elif length < KINDS[0][0]:
            return NOTHING
        else:
            self._places[slot] = place
        kind = sum(length >= least for least, _ in KINDS) - 1
        expected = KINDS[kind][1]
        return Offer(self._most, kind, expected) if other is None else Offer(len(other[0]), kind + OF_OTHERS, expected)

    def draft(self, batch: Batch, slots: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        """Return what followed each match; where it reaches the end of the sequence, it goes on from its beginning."""
        drafts = []
        for slot, count in zip(slots, counts, strict=True):
            if (other := self._others.get(slot)) is not None:
                drafts.append(other[:count].tolist())
                continue
            start, end = self._places[slot] + 1, int(batch.num_known[slot])
            ids = batch.tokens[slot, start : min(end, start + count)].tolist()
            drafts.append((ids * -(-count // len(ids)))[:count])
        return drafts

    def is_promising(self, batch: Batch, slots: Sequence[int]) -> bool:
        """Return whether any sequence has a long match."""
        for slot in slots:
            length = self._match(batch, slot)[1]
            if length >= PROMISING or self._match_of_others(batch, slot, PROMISING - 1) is not None:
                return True
        return False

    def _match_of_others(self, batch: Batch, slot: int, longer_than: int) -> tuple[I32, int] | None:
        """Return what followed a longer match in an earlier request's answer, and its length."""
        seq = batch.seqs[slot]
        if self._shared is None or seq is None or longer_than >= LONGEST:
            return None
        end = int(batch.num_known[slot])
        recent = batch.tokens[slot, max(0, end - LONGEST) : end].tolist()[::-1]
        return self._shared.find(key_of(seq), recent, max(longer_than, KINDS[0][0] - 1), self._most)

    def _match(self, batch: Batch, slot: int) -> tuple[int, int]:
        seq, index = self._indices[slot]
        if seq is not batch.seqs[slot]:
            index = PairIndex(int(batch.num_known[slot]))
            self._indices[slot] = batch.seqs[slot], index
        tokens, end = batch.tokens[slot], int(batch.num_known[slot])
        index.extend(tokens, min(end, index.num_tokens + INDEXED_AT_ONCE))
        return index.longest_match(tokens, end) if index.num_tokens == end else (-1, 0)
