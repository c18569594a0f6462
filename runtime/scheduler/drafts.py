"""The drafted tokens of a schedule: which sequences get some, and what a step with drafts gives each sequence."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from inferc.config import MOST_DRAFTED
from inferc.runtime.kv_cache.manager import KVCacheManager
from inferc.runtime.scheduler.batch import Batch
from inferc.runtime.scheduler.branches import Branches
from inferc.runtime.scheduler.tree_rows import PlacedTree
from inferc.runtime.step.plan import I64, Copies, StepPlan, StepResult
from inferc.runtime.step.tree import Tree


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
    ) -> list[Tree]:
        """Return at most `room` tokens for each slot, and no more than `reserve` gave room to.

        num_tokens: those of the step without drafts.
        """

    def landed(self, slot: int, num_drafted: int, token_ids: list[int], num_accepted: int) -> None:
        """Note what a sequence got in a step, and how many of these tokens had been drafted."""


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

    def take_trees(self, slots: I64) -> Mapping[int, PlacedTree]:
        """Return the trees that were drafted for any of these slots, whose chains `take` tells of, and forget them."""
        return {}

    def drop(self, slot: int) -> None:
        """Forget what was drafted for a slot, which is not in the step any more, and what it would have copied."""

    def landed(self, slot: int, num_drafted: int, token_ids: list[int], num_accepted: int) -> None:
        """Note what a sequence got in a step, and how many of these tokens had been drafted."""

    def choose(self, slot: int, plan: StepPlan, rows: Sequence[int]) -> None:
        """Note which logits rows of a landed step gave a slot its tokens."""

    def end_step(self) -> None:
        """Give back what the landed step needed."""

    def begin(self) -> None:
        """Begin a schedule: count as computed what its step copies first."""

    @property
    def moving(self) -> list[int]:
        """The slots whose last tokens the step that is being scheduled copies first."""
        return []

    def take_moves(self) -> tuple[Copies, ...]:
        """Return the copies that the planned step makes first, by group; () if there are none."""
        return ()


class Drafts(NoDrafts):
    """The drafts of a schedule.

    A sequence may get drafts if it decodes, and blocks for them beyond one more for every running sequence.
    """

    def __init__(self, speculator: Speculator, batch: Batch, cache: KVCacheManager) -> None:
        self._speculator, self._batch, self._cache = speculator, batch, cache
        speculator.attach(cache)
        self._branches = Branches(batch, cache)
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
        added = 0
        for slot, tree in zip(slots.tolist(), drafts, strict=True):
            added += len(tree)
            ids = self._branches.place(slot, tree)
            known, count = int(batch.num_known[slot]), len(ids)
            batch.tokens[slot, known : known + count] = ids
            self._num_drafted[slot] = count
            num_new[slot] += count
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
        """Forget what was drafted for a slot, which is not in the step any more, and what it would have copied."""
        self._num_drafted[slot] = 0
        self._branches.drop(slot)

    def landed(self, slot: int, num_drafted: int, token_ids: list[int], num_accepted: int) -> None:
        """Note what a sequence got in a step, and how many of these tokens had been drafted."""
        self._speculator.landed(slot, num_drafted, token_ids, num_accepted)

    def take_trees(self, slots: I64) -> Mapping[int, PlacedTree]:
        """Return the trees that were drafted for any of these slots, whose chains `take` tells of, and forget them."""
        return self._branches.take(slots)

    def choose(self, slot: int, plan: StepPlan, rows: Sequence[int]) -> None:
        """Note which logits rows of a landed step gave a slot its tokens."""
        if plan.tree is not None:
            plan.tree.taken[slot] = plan.logits_rows[list(rows)].tolist()
            self._branches.choose(slot, plan, rows)

    def end_step(self) -> None:
        """Give back the blocks of the landed step's branches."""
        self._branches.landed()

    def begin(self) -> None:
        """Begin a schedule: count as computed what its step copies first."""
        self._branches.begin()

    @property
    def moving(self) -> list[int]:
        """The slots whose last tokens the step that is being scheduled copies first."""
        return self._branches.moving

    def take_moves(self) -> tuple[Copies, ...]:
        """Return the copies that the planned step makes first, by group; () if there are none."""
        return self._branches.take_moves()


def slots_left(batch: Batch, slots: I64) -> I64:
    """Return how many tokens each sequence can take before its last one, which is sampled."""
    left: I64 = batch.max_total[slots] - batch.num_known[slots] - 1
    return left


@dataclass(frozen=True)
class Taken:
    """The rows of a step that give one sequence its tokens.

    rows: those of the tokens.
    ids: the drafted tokens that the model chose as well, and the one that it chose behind them; up to an end token, or
    to a row that could choose none, which then is the first of a later step.
    is_failed: the first row could choose none.
    """

    slot: int
    rows: list[int]
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
        ids, drafted = result.token_ids[rows].tolist(), plan.token_ids[plan.logits_rows[rows]].tolist()
        parents = range(-1, count) if plan.tree is None else (plan.tree.parents[rows] - first).tolist()
        seq = batch.seqs[slot]
        assert seq is not None
        kept: list[int] = []
        num_accepted, at = 0, 0
        chosen: int | None = 0
        while chosen is not None and not failed[first + chosen]:
            at, token = chosen, ids[chosen]
            kept.append(at)
            behind = (row for row in range(at + 1, count + 1) if parents[row] == at and drafted[row] == token)
            chosen = next(behind, None)
            num_accepted += chosen is not None
            if token in seq.stop_ids:
                break
        own = [ids[at] for at in kept]
        found.append(Taken(slot, [first + at for at in kept], count, num_accepted, own, bool(failed[first])))
        first += count + 1
    return found
