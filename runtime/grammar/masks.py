"""The masks of each step's sequences that are held to a grammar, made by a thread while the step runs."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import thread_time

import numpy as np

from inferc.arena import mask_words
from inferc.runtime.grammar.backend import Matcher
from inferc.runtime.step.plan import I32, I64, U32, StepPlan

log = logging.getLogger(__name__)

CANNOT = "slot %d: its mask cannot be made"
# The time of the thread that makes masks, for one mask. An ambiguous form can take longer with each token, and so hold
# up all sequences.
MOST_SECONDS = 0.5
ALL = np.uint32(0xFFFFFFFF)


@dataclass(eq=False)
class Constraint:
    """A sequence's place in its grammar.

    num_handed: how many tokens of its output the masks that were planned so far follow; the engine's thread has it.
    accepted: the tokens that the matcher has accepted; the masks' thread has them.
    """

    matcher: Matcher
    num_handed: int = 0
    accepted: list[int] = field(default_factory=list)

    def count_fitting(self, token_ids: Sequence[int]) -> int:
        """Return how many of some tokens the grammar has behind what was accepted; the place stays as it is."""
        count = 0
        while count < len(token_ids) and self.matcher.accept(token_ids[count]):
            count += 1
        if count:
            self.matcher.rollback(count)
        return count

    def go_to(self, start: int, token_ids: Sequence[int]) -> bool:
        """Go to where the output's tokens from `start` on are these, and return whether the grammar has them.

        Tokens that were accepted and are not among them are taken back: a step that they came from did not count.
        """
        count = start
        for token in token_ids:
            if count == len(self.accepted) or self.accepted[count] != token:
                break
            count += 1
        if count < len(self.accepted):
            self.matcher.rollback(len(self.accepted) - count)
            del self.accepted[count:]
        for token in token_ids[count - start :]:
            if not self.matcher.accept(token):
                return False
            self.accepted.append(token)
        return True


@dataclass(frozen=True)
class _Row:
    """A sequence whose masks are made: its tokens from `start` on, the last of which may still be being sampled.

    ways: of each mask, the tokens that were drafted behind them on the way to it. rows: where the masks go.
    """

    slot: int
    constraint: Constraint
    start: int
    token_ids: list[int]
    is_pending: bool
    ways: list[list[int]]
    rows: list[int]


class FixedMasks:
    """The masks of a step that are made before it; see StepMasks.

    places: of each row the place in its grammar, or None for a row that may choose any token.
    """

    def __init__(self, places: Sequence[Constraint | None], vocab_size: int) -> None:
        held = [row for row, place in enumerate(places) if place is not None]
        self.bits: U32 = np.zeros((max(1, len(held)), mask_words(vocab_size)), np.uint32)
        self.mask_rows: I32 = np.full(len(places), -1, np.int32)
        for at, row in enumerate(held):
            place = places[row]
            assert place is not None, "it is held"
            place.matcher.fill(self.bits, at)
            self.mask_rows[row] = at

    def begin(self, last_ids: I32) -> None:
        """Do nothing: the masks are made."""

    def wait(self) -> None:
        """Do nothing: the masks are made."""


class _StepMasks:
    """The masks of one step; see StepMasks."""

    def __init__(self, owner: MaskMaker, mask_rows: I32, rows: list[_Row]) -> None:
        self._owner, self.mask_rows, self._rows = owner, mask_rows, rows
        self._lock, self._begun, self._made = threading.Lock(), False, threading.Event()

    @property
    def bits(self) -> U32:
        return self._owner.bits

    def begin(self, last_ids: I32) -> None:
        with self._lock:
            if self._begun:
                return
            self._begun = True
        late = last_ids[[row.slot for row in self._rows]].tolist()
        self._owner.put(lambda: self._make(late))

    def wait(self) -> None:
        self._made.wait()

    def _make(self, late: list[int]) -> None:
        try:
            left = [
                row
                for row, last in zip(self._rows, late, strict=True)
                if self._reach(row, [*row.token_ids, last] if row.is_pending else row.token_ids)
            ]
            self._fill_last(left)
        finally:
            self._made.set()

    def _reach(self, row: _Row, token_ids: list[int]) -> bool:
        """Go to the place of a row's last mask, fill those before, and return whether the last is to be filled."""
        bits, constraint = self._owner.bits, row.constraint
        try:
            for way, at in zip(row.ways, row.rows, strict=True):
                begun = thread_time()
                fits = constraint.go_to(row.start, token_ids + way)
                if self._is_late(row, begun):
                    break
                if not fits:
                    log.error("slot %d: the grammar does not have the tokens that its own masks allowed", row.slot)
                    bits[at] = 0
                elif constraint.matcher.is_ended:  # by a token that the host has not seen yet: the row does not count
                    bits[at] = ALL
                elif at == row.rows[-1]:
                    return True
                else:
                    constraint.matcher.fill(bits, at)
                    if self._is_late(row, begun):
                        break
        except Exception:  # the row fails, and no other
            log.exception(CANNOT, row.slot)
            bits[row.rows] = 0
        return False

    def _is_late(self, row: _Row, begun: float) -> bool:
        """Return whether a mask that was begun then took too long, and let its row fail if so."""
        if thread_time() - begun <= MOST_SECONDS:
            return False
        log.error("slot %d: its form takes more than %g s a step", row.slot, MOST_SECONDS)
        self._owner.bits[row.rows] = 0
        return True

    def _fill_last(self, rows: list[_Row]) -> None:
        """Fill the last mask of some rows: in one call, or one by one if that fails, or took long in the step before.

        Which of them takes too long is known only one by one.
        """
        if not rows:
            return
        owner, bits, matchers = self._owner, self._owner.bits, [row.constraint.matcher for row in rows]
        if not owner.is_slow:
            begun = thread_time()
            try:
                matchers[0].fill_rows(matchers, bits, [row.rows[-1] for row in rows])
                owner.is_slow = thread_time() - begun > MOST_SECONDS
                return
            except Exception:
                log.debug("the masks of %d rows are made one by one", len(rows), exc_info=True)
        owner.is_slow = False
        for row, matcher in zip(rows, matchers, strict=True):
            begun = thread_time()
            try:
                matcher.fill(bits, row.rows[-1])
                owner.is_slow |= self._is_late(row, begun)
            except Exception:
                log.exception(CANNOT, row.slot)
                bits[row.rows] = 0


class MaskMaker:
    """The masks of sequences by slot, and the thread that makes them, which starts with the first.

    A row of `bits` is written between two samplings that read it. The first row of a slot is that of its number; those
    of drafted tokens come behind the slots', and are there only in steps that no other step is in flight with.
    """

    def __init__(self, num_slots: int, vocab_size: int) -> None:
        self._num_slots, self._vocab_size = num_slots, vocab_size
        self._bits: U32 | None = None
        self._num_rows = num_slots
        self.is_slow = False  # the masks of a step took long; the masks' thread has it
        self._at: dict[int, Constraint] = {}  # by slot
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    @property
    def bits(self) -> U32:
        if self._bits is None:
            self._bits = np.zeros((self._num_rows, mask_words(self._vocab_size)), np.uint32)
        return self._bits

    def assign(self, slot: int, constraint: Constraint | None) -> None:
        """Note which sequence has a slot from the next step on; None: one that may choose any token."""
        self._at.pop(slot, None)
        if constraint is not None:
            constraint.num_handed = 0
            self._at[slot] = constraint

    def mask(self, plan: StepPlan, tokens: I32, prompt_len: I64, num_known: I64) -> None:
        """Give a plan the masks of its rows, if any of its sequences is held to a grammar.

        tokens [slots, length]: the ids of each slot's sequence; prompt_len, num_known [slots]: of how many tokens its
        prompt is, and how many are known on the host.
        """
        all_slots = plan.sample.seq_slots.tolist()
        if not any(slot in self._at for slot in all_slots):
            return
        counters = plan.sample.counters.tolist()
        mask_rows = np.full(len(all_slots), -1, np.int32)
        found, at, spare = [], 0, self._num_slots
        for num_drafted in plan.num_drafted.tolist() or [0] * len(all_slots):
            slot, count, end = all_slots[at], counters[at], at + num_drafted + 1
            if (constraint := self._at.get(slot)) is not None:
                first = int(prompt_len[slot])
                start, known = constraint.num_handed, min(int(num_known[slot]) - first, count)
                ids = tokens[slot, first + start : first + known].tolist()
                ways = plan.drafts_of(at, num_drafted + 1) if num_drafted else [[]]
                rows = [slot, *range(spare, spare + num_drafted)]
                spare += num_drafted
                found.append(_Row(slot, constraint, start, ids, known < count, ways, rows))
                mask_rows[at:end] = rows
                constraint.num_handed = count
            at = end
        if spare > self._num_rows:
            self._num_rows, self._bits = 2 * spare, None
        plan.masks = _StepMasks(self, mask_rows, found)

    def at(self, slot: int, tokens: I32, prompt_len: int, num_known: int) -> Constraint | None:
        """Return the place of a slot's sequence behind all that is known of it; None if it may choose any token.

        No step may be in flight.
        """
        constraint = self._at.get(slot)
        if constraint is not None:
            known = tokens[prompt_len + constraint.num_handed : num_known].tolist()
            constraint.go_to(constraint.num_handed, known)
        return constraint

    def put(self, job: Callable[[], None]) -> None:
        """Queue a job of the thread."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="inferc-masks", daemon=True)
            self._thread.start()
        self._jobs.put(job)

    def close(self) -> None:
        """End the thread after the jobs that are queued."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            job()
