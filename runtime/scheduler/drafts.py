"""The drafted tokens of a schedule: which sequences get some, and what a step with drafts gives each sequence."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from inferc.config import MOST_DRAFTED
from inferc.runtime.kv_cache.manager import KVCacheManager
from inferc.runtime.scheduler.batch import Batch
from inferc.runtime.step.plan import I64, StepPlan, StepResult


class Speculator(Protocol):
    """A source of drafted tokens; inferc.runtime.speculation has it."""

    def wants_ids(self, batch: Batch) -> bool:
        """Return whether the next step is to be scheduled when all tokens before it are known."""

    def attach(self, cache: KVCacheManager) -> None:
        """Use the KV cache of the engine."""

    def draft(
        self,
        batch: Batch,
        slots: Sequence[int],
        room: Sequence[int],
        num_tokens: int,
        reserve: Callable[[int, int], int],
    ) -> list[list[int]]:
        """Return at most `room` tokens for each slot, and no more than `reserve` gave room to.

        num_tokens: those of the step without drafts.
        """

    def landed(self, slot: int, num_drafted: int, num_accepted: int) -> None:
        """Note how many of a sequence's drafted tokens were chosen."""


class NoDrafts:
    """The drafts of a schedule without speculation."""

    def wants_ids(self) -> bool:
        """Return whether a step is to be scheduled only when the one before it has landed."""
        return False

    def schedule(self, num_new: I64, budget: int) -> int:
        """Draft tokens for decoding sequences, add them to `num_new` by slot, and return how many were added."""
        return 0

    def take(self, slots: I64) -> I64 | None:
        """Return how many tokens were drafted for each of these slots, or None, and forget it."""
        return None

    def drop(self, slot: int) -> None:
        """Forget what was drafted for a slot, which is not in the step any more."""

    def landed(self, slot: int, num_drafted: int, num_accepted: int) -> None:
        """Note how many of a sequence's drafted tokens were chosen."""


class Drafts(NoDrafts):
    """The drafts of a schedule.

    A sequence may get drafts if it decodes, and blocks for them beyond one more for every running sequence.
    """

    def __init__(self, speculator: Speculator, batch: Batch, cache: KVCacheManager) -> None:
        self._speculator, self._batch, self._cache = speculator, batch, cache
        speculator.attach(cache)
        self._num_drafted: I64 = np.zeros(len(batch.seqs), np.int64)
        self._has_any, self._budget = False, 0

    def wants_ids(self) -> bool:
        """Return whether a step is to be scheduled only when the one before it has landed."""
        return self._speculator.wants_ids(self._batch)

    def schedule(self, num_new: I64, budget: int) -> int:
        """Draft tokens for decoding sequences, add them to `num_new` by slot, and return how many were added."""
        batch, slots = self._batch, self._batch.order
        slots = slots[num_new[slots] == 1]
        # No token may be in flight; the row behind the last draft samples a token, too.
        slots = slots[(batch.num_known[slots] == batch.num_tokens[slots]) & (slots_left(batch, slots) > 0)]
        slots = slots[batch.num_known[slots] > batch.prompt_len[slots]]
        if budget <= 0 or not len(slots):
            return 0
        room = np.minimum(slots_left(batch, slots), min(budget, MOST_DRAFTED)).tolist()
        num_tokens = int(np.count_nonzero(num_new[batch.order]))
        self._budget = budget
        drafts = self._speculator.draft(batch, slots.tolist(), room, num_tokens, self._reserve)
        for slot, ids in zip(slots.tolist(), drafts, strict=True):
            known, count = int(batch.num_known[slot]), len(ids)
            batch.tokens[slot, known : known + count] = ids
            self._num_drafted[slot] = count
            num_new[slot] += count
        added = sum(map(len, drafts))
        self._has_any = added > 0
        return added

    def _reserve(self, slot: int, count: int) -> int:
        """Take blocks for drafted tokens, and return for how many there is room."""
        count = self._room(slot, min(count, self._budget))
        self._budget -= count
        return count

    def _room(self, slot: int, count: int) -> int:
        size, cache, known = self._cache.block_size, self._cache, int(self._batch.num_known[slot])
        spare = max(0, min(cache.num_free) - len(self._batch.order))  # blocks beside one for each running sequence
        count = min(count, (int(cache.num_grown[slot]) + spare) * size - known)
        return cache.extend(slot, known - 1, count + 1) - 1 if count > 0 else 0

    def take(self, slots: I64) -> I64 | None:
        """Return how many tokens were drafted for each of these slots, or None, and forget it."""
        if not self._has_any:
            return None
        found = self._num_drafted[slots]
        self._num_drafted[:], self._has_any = 0, False
        return found if found.any() else None

    def drop(self, slot: int) -> None:
        """Forget what was drafted for a slot, which is not in the step any more."""
        self._num_drafted[slot] = 0

    def landed(self, slot: int, num_drafted: int, num_accepted: int) -> None:
        """Note how many of a sequence's drafted tokens were chosen."""
        self._speculator.landed(slot, num_drafted, num_accepted)


def slots_left(batch: Batch, slots: I64) -> I64:
    """Return how many tokens each sequence can take before its last one, which is sampled."""
    left: I64 = batch.max_total[slots] - batch.num_known[slots] - 1
    return left


@dataclass(frozen=True)
class Taken:
    """The rows of a step that give one sequence its tokens.

    ids: the drafted tokens that the model chose as well, and the one that it chose behind them; up to an end token, or
    to a row that could choose none, which then is the first of a later step.
    is_failed: the first row could choose none.
    """

    slot: int
    first_row: int
    num_drafted: int
    num_accepted: int
    ids: list[int]
    is_failed: bool


def taken(plan: StepPlan, result: StepResult, batch: Batch) -> list[Taken]:
    """Return what each sampled sequence of a step gets."""
    found, first = [], 0
    failed = np.zeros(len(result.token_ids), np.bool_) if result.failed is None else result.failed
    for count in plan.num_drafted.tolist():
        slot, rows = int(plan.sample.seq_slots[first]), slice(first, first + count + 1)
        ids, drafted = result.token_ids[rows].tolist(), plan.token_ids[plan.logits_rows[rows]][1:].tolist()
        seq = batch.seqs[slot]
        assert seq is not None
        kept: list[int] = []
        for at, token in enumerate(ids):
            if failed[first + at]:
                break
            kept.append(token)
            if token in seq.stop_ids or (at < count and token != drafted[at]):
                break
        num_accepted = sum(token == draft for token, draft in zip(kept, drafted, strict=False))
        found.append(Taken(slot, first, count, num_accepted, kept, bool(failed[first])))
        first += count + 1
    return found
