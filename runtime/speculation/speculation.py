"""The speculation of one engine: when to wait for tokens, how many to draft, and what became of them.

Every token that an answer gets is the one that its model chooses, at that place, with the random number of that place:
a drafted token decides only whether the next one can be computed in the same step. So answers are the same with any
drafter and with none, greedy or sampled, and their distribution is the model's own. This is simpler than rejection
sampling (Leviathan et al. 2023, arXiv:2211.17192), which keeps the distribution but not the tokens.

A step is usually scheduled while the one before it still samples. A draft continues tokens that are known, so with
speculation a step is scheduled after the one before it has landed. If nothing is gained, that stops for a while.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from inferc.runtime.grammar.grammars import Grammars
from inferc.runtime.kv_cache.manager import KVCacheManager
from inferc.runtime.record.watcher import Watcher
from inferc.runtime.scheduler.batch import Batch
from inferc.runtime.speculation.drafter import Drafter
from inferc.runtime.speculation.guesses import RankedTree, Trust, choose_tree
from inferc.runtime.speculation.lengths import Acceptance, can_pay, choose_counts
from inferc.runtime.speculation.step_times import StepTimes
from inferc.runtime.step.plan import StepPlan, StepResult
from inferc.runtime.step.sequence import Sequence as Seq
from inferc.runtime.step.sequence import StepOutputs
from inferc.runtime.step.tree import Tree

log = logging.getLogger(__name__)

PATIENCE = 8  # steps without a draft after which steps do not wait for one
LEAST_REST, MOST_REST = 16, 256  # steps for which they do not
GOOD = 0.9  # the share of right drafts that a sequence may have that was not tried yet
WAITING_LEARNING = 0.1  # the weight of the newest step in how long steps wait to be scheduled

Fit = Callable[[int, list[int]], int]
"""A function that returns how many of some drafted tokens of a slot's sequence its grammar has."""


Reserve = Callable[[int, int], int]
"""A function that takes blocks for a slot's drafted tokens, and returns for how many there is room."""


@dataclass
class SpeculationStats:
    """The tokens that were drafted, and how many of them the model chose."""

    num_drafted: int = 0
    num_accepted: int = 0
    num_drafts: int = 0


class _Feed(Watcher):
    """The watcher that shows steps to a drafter which reads them, and stops when that fails."""

    def __init__(self, owner: Speculation) -> None:
        self._owner = owner

    def submitted(self, plan: StepPlan, seqs: Sequence[Seq | None]) -> None:
        if not self._owner.is_broken:
            self._owner.attempt(lambda: self._owner.drafter.submitted(plan, seqs))

    def landed(self, plan: StepPlan, result: StepResult) -> None:
        if not self._owner.is_broken:
            self._owner.attempt(lambda: self._owner.drafter.landed(plan, result))

    def updated(self, outputs: StepOutputs) -> None:
        if not self._owner.is_broken:
            self._owner.attempt(self._owner.drafter.updated)


class Speculation:
    """The speculation for the running sequences of an engine; see the module."""

    def __init__(self, drafter: Drafter, num_slots: int, vocab_size: int = 1 << 31) -> None:
        """Draft by a drafter for sequences of `num_slots` slots, whose model has `vocab_size` tokens."""
        self._vocab_size = vocab_size
        self.is_broken = False
        self.stats = SpeculationStats()
        self.fit: Fit = lambda _, ids: len(ids)
        self.times = StepTimes()
        self.drafter = drafter
        self.watcher: Watcher | None = _Feed(self) if drafter.reads_steps else None
        self._acceptance = Acceptance(num_slots)
        self._owners: list[object] = [None] * num_slots
        self._kinds: dict[int, int] = {}  # by slot, the kind of what was drafted
        self._trees: dict[int, RankedTree] = {}  # by slot, what was drafted
        self._trust = Trust()
        self._waiting = 0.0  # seconds from the landing of a step to the start of the next
        self._drafting = 0.0  # seconds of it in which tokens were drafted
        self._num_vain = 0  # steps in a row that waited, and for which nothing was drafted
        self._rest, self._next_rest = 0, LEAST_REST
        self._newest = -1  # the arrival of the latest sequence that was looked at

    def hold_to(self, grammars: Grammars, batch: Batch) -> None:
        """Cut drafts off where a grammar does not have them, and draft what a grammar forces."""
        self.fit = lambda slot, ids: grammars.fit(batch, slot, ids)
        self.drafter.hold_to(grammars, batch)

    def attach(self, cache: KVCacheManager) -> None:
        """Use the KV cache of the engine."""
        self.drafter.attach(cache)

    def close(self) -> None:
        """Release what the drafter holds."""
        self.drafter.close()

    def wants_ids(self, batch: Batch) -> bool:
        """Return whether the next step is to be scheduled when all tokens before it are known."""
        if self.is_broken or not len(batch.order):
            return False
        self.attempt(lambda: self.drafter.watch(batch))
        if not self.drafter.may_draft(batch):
            return False
        if self._rest <= 0:
            return True
        self._rest -= 1
        decoding = batch.decoding().tolist()
        is_called = self._rest > 0 and (self._has_newcomer(batch) or self.drafter.is_promising(batch, decoding))
        if self._rest and not is_called:
            return False
        # A short trial, unless there is a reason to hope.
        self._rest, self._num_vain = 0, PATIENCE // 2 if is_called else PATIENCE - 2
        return True

    def _has_newcomer(self, batch: Batch) -> bool:
        """Return whether a sequence came that was not there before, and drafts could pay beside the others."""
        arrivals = [seq.arrival for slot in batch.order.tolist() if (seq := batch.seqs[slot]) is not None]
        newest, before = max(arrivals, default=0), self._newest
        self._newest = max(newest, before)
        return newest > before and self._can_pay(len(arrivals))

    def _can_pay(self, num_tokens: int) -> bool:
        """Return whether drafts pay if all sequences of a step have good ones."""
        return can_pay(GOOD, num_tokens, self.times.times, *self._costs)

    @property
    def _costs(self) -> tuple[float, float]:
        """The time that a step with drafts waits, and that of a token more of the longest, in units of steps' times."""
        unit = self.times.seconds_per_unit
        return self._waiting / unit, self.drafter.depth_seconds / unit

    def draft(
        self, batch: Batch, slots: Sequence[int], room: Sequence[int], num_tokens: int, reserve: Reserve
    ) -> list[Tree]:
        """Return the tokens to draft for each of some decoding sequences, whose tokens are all known.

        room: how many tokens each can take. num_tokens: the tokens of the step without drafts. reserve: takes blocks
        for a draft.
        """
        begun = time.perf_counter()
        arrivals = (seq.arrival for slot in slots if (seq := batch.seqs[slot]) is not None)
        self._newest = max(self._newest, *arrivals, -1)
        drafts: list[Tree] = []
        self.attempt(lambda: drafts.extend(self._draft(batch, slots, room, num_tokens, reserve)))
        drafts = drafts or [Tree() for _ in slots]
        self._drafting = time.perf_counter() - begun
        return drafts

    def attempt(self, work: Callable[[], None]) -> None:
        """Do work of the drafter; if it fails, nothing is drafted any more."""
        try:
            work()
        except Exception:  # answers do without drafts
            log.exception("tokens cannot be drafted any more; answers go on without")
            self.is_broken = True

    def _draft(
        self, batch: Batch, slots: Sequence[int], room: Sequence[int], num_tokens: int, reserve: Reserve
    ) -> list[Tree]:
        drafts = [Tree() for _ in slots]
        if self.is_broken or not self.drafter.may_draft(batch):
            return drafts
        if not self._can_pay(num_tokens):  # so none is looked for
            self._note(False)
            return drafts
        offers = self.drafter.offers(batch, slots)
        for slot in slots:
            if self._owners[slot] is not batch.seqs[slot]:
                self._owners[slot] = batch.seqs[slot]
                self._acceptance.begin(slot)
        most = [min(offer.most, count) for offer, count in zip(offers, room, strict=True)]
        rates = [self._acceptance.rate(slot, offer) for slot, offer in zip(slots, offers, strict=True)]
        beside = [self._acceptance.beside(offer) for offer in offers]
        wanted = choose_counts(most, rates, num_tokens, self.times.times, *self._costs, beside)
        for slot, want, each in zip(slots, wanted, most, strict=True):
            if each and not want.count:
                self._acceptance.relent(slot)
        counts = [reserve(slot, want.count) if want.count else 0 for slot, want in zip(slots, wanted, strict=True)]
        chosen = [at for at, count in enumerate(counts) if count]
        if chosen:
            depths = [min(counts[at], wanted[at].depth) for at in chosen]
            having = [slots[at] for at in chosen]
            found = self.drafter.guess(batch, having, depths)
            for at, guesses in zip(chosen, found, strict=True):
                slot, kind = slots[at], offers[at].kind
                ranked = choose_tree(guesses, counts[at], kind, self._trust)
                drafts[at] = self._fitting(batch, slot, ranked.tree)
                self._kinds[slot], self._trees[slot] = kind, ranked.within(drafts[at])
        self._note(any(drafts))
        return drafts

    def _fitting(self, batch: Batch, slot: int, tree: Tree) -> Tree:
        """Return the drafted tokens that do not end the sequence, and that its rules and its grammar allow."""
        return tree.cut(lambda ids: self._num_fitting(batch, slot, ids))

    def _num_fitting(self, batch: Batch, slot: int, ids: list[int]) -> int:
        """Return how many of some tokens, each behind the one before it, can be drafted."""
        seq = batch.seqs[slot]
        assert seq is not None
        for count, token in enumerate(ids):
            if token in seq.stop_ids or token >= self._vocab_size:
                ids = ids[:count]
                break
        ids = ids[: batch.num_allowed(slot, ids)]
        return self.fit(slot, ids) if ids else 0

    def _note(self, has_drafted: bool) -> None:
        if has_drafted:
            self._num_vain = 0
            return
        self._num_vain += 1
        if self._num_vain >= PATIENCE:
            self._rest, self._num_vain = self._next_rest, 0
            self._next_rest = min(MOST_REST, 2 * self._next_rest)

    def landed(self, slot: int, num_drafted: int, token_ids: list[int], num_accepted: int) -> None:
        """Note what a sequence got in a step, and how many of these tokens had been drafted."""
        self.stats.num_drafts += 1
        self.stats.num_drafted += num_drafted
        self.stats.num_accepted += num_accepted
        ranked, kind = self._trees.pop(slot, None), self._kinds[slot]
        if ranked is None or not any(ranked.ranks):
            self._acceptance.learn(slot, kind, num_drafted, num_accepted)
        elif num_drafted == len(ranked.tree):  # there were blocks for all of it
            self._learn(slot, kind, ranked, token_ids)
        if num_accepted:
            self._next_rest = max(LEAST_REST, self._next_rest // 2)

    def _learn(self, slot: int, kind: int, ranked: RankedTree, token_ids: list[int]) -> None:
        """Learn from the tokens of a sequence for whose places several were drafted."""
        reached = [-1]
        for token in token_ids:
            if (node := ranked.tree.child(reached[-1], token)) is None:
                break
            reached.append(node)
        self._trust.learn(kind, ranked, reached)
        on_chain = [node for node in reached[1:] if not ranked.ranks[node]]
        self._acceptance.learn(slot, kind, ranked.ranks.count(0), len(on_chain))
        for parent in reached:
            tried = {ranked.ranks[node]: node for node, own in enumerate(ranked.tree.parents) if own == parent}
            if 0 in tried and tried[0] not in reached:
                right = next((rank for rank, node in tried.items() if node in reached), None)
                self._acceptance.learn_beside(kind, [rank for rank in tried if rank], right)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn how long a step of decoding sequences took."""
        self.times.observe(num_tokens, seconds)

    def observe_waiting(self, seconds: float) -> None:
        """Learn how long it took from the landing of a step to the start of the next, drafting aside."""
        self._waiting += WAITING_LEARNING * (max(0.0, seconds - self._drafting) - self._waiting)
        self._drafting = 0.0
