"""The scheduler, which decides how many tokens of which sequences the next step computes.

One idea: a sequence has `num_tokens` and `num_computed_tokens`, and a step hands out the difference until the token
budget is spent: to running sequences before waiting ones, to decodes before prefills. The policy decides the order
among them (policies.py; `waiting` adds fairness between clients). The sequence that ranks last is preempted first, so
the first always advances. No sequence is admitted whose blocks are predicted to be missing later on.

`schedule` may run before the step in flight has landed: it counts one token for each sequence that samples there.
`update` lands a step. A sequence that leaves while a step in flight still writes to its slot and blocks keeps them
until that step has landed; if it turned out to have ended, the token sampled there is dropped.

With the prefix cache (prefix_cache.py) a sequence begins behind the blocks that are found by their hashes.

With an offload tier (runtime/offload) a preempted sequence's blocks may be copied there before they are reused, and a
sequence longer than the arena keeps its oldest blocks there while it runs. A sequence that waits for blocks of an
earlier run is in no queue.

A prompt's blocks are taken at admission, except in the KV groups that give blocks back, which take those of the next
chunk only: a chunk is as long as there is room. Sequences never wait for one another in a circle: the first gets the
blocks of all others if it needs them, and every sequence that the engine accepts fits if it is alone.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable

import numpy as np

from inferc.runtime.kv_cache.events import CacheEvents
from inferc.runtime.kv_cache.manager import KVCacheManager
from inferc.runtime.offload.manager import BlockMover, OffloadManager
from inferc.runtime.scheduler.admission import AdmissionPolicy, TimedAdmission
from inferc.runtime.scheduler.batch import Batch
from inferc.runtime.scheduler.config import SchedulerConfig
from inferc.runtime.scheduler.drafts import Drafts, NoDrafts, Speculator
from inferc.runtime.scheduler.landing import Landing
from inferc.runtime.scheduler.offload import NoOffload, Offload
from inferc.runtime.scheduler.policies import parse_policy
from inferc.runtime.scheduler.prefix_cache import PrefixCache
from inferc.runtime.scheduler.slo_admission import SloAdmission
from inferc.runtime.scheduler.waiting_queue import WaitingQueue
from inferc.runtime.step.forecast import Caution, Forecast
from inferc.runtime.step.plan import I64, StepPlan, StepResult, joined
from inferc.runtime.step.sequence import Sequence, Status, StepOutputs

SAMPLED_COST = 2.0  # the cost of a sampled token for a client, relative to a prompt token
NUM_RERANKED = 32
# The interval at which copies between the tiers of the cache are checked while no step can be made.
MOVE_SECONDS = 0.0005


class Scheduler:
    """The scheduler of one engine, which owns the waiting queue, the running batch and the token budget."""

    def __init__(
        self,
        config: SchedulerConfig,
        clock: Callable[[], float] = time.monotonic,
        mover: BlockMover | None = None,
        speculator: Speculator | None = None,
    ) -> None:
        """Create a scheduler; `mover` is that of the offload tier, if `config.num_offloaded` says that there is one."""
        self.config = config
        self.clock = clock
        self.policy = parse_policy(config.policy)
        self.forecast = Forecast(config.max_num_batched_tokens)
        # whether steps are observed
        self.foresees = self.policy.foresees or config.tbt_ms is not None or mover is not None
        self.waiting = WaitingQueue()
        self.refused: list[tuple[Sequence, str]] = []  # sequences that the policy ended, with the reason
        self.wake_at: float | None = None  # when waiting sequences may begin, if only time keeps them
        self.batch = Batch(config.max_num_seqs, config.max_model_len, config.keep_logprobs)
        self.cache = KVCacheManager(
            config.groups,
            config.num_blocks,
            config.limits,
            config.chunked_prefill,
            config.num_offloaded,
            config.offload_in_place,
        )
        self.events = CacheEvents(self.cache) if config.kv_events else None
        self.prefixes = PrefixCache(self.cache, self.batch, config, self.events)
        self.drafts = NoDrafts() if speculator is None else Drafts(speculator, self.batch, self.cache)
        self.offload = NoOffload()
        if mover is not None:
            manager = OffloadManager(self.cache, mover, self.forecast, clock)
            self.offload = Offload(manager, mover, self.cache, self.batch, self.prefixes, config)
        self._landing = Landing(
            self.batch, self.cache, self.prefixes, self.drafts, self.forecast, self._begun, self._end, self._charge
        )
        self._admission = AdmissionPolicy()
        if self.policy.refuses:
            self._admission = SloAdmission(self.batch, self.forecast, config)
        elif config.tbt_ms is not None:
            self._admission = TimedAdmission(self.batch, self.forecast, config)
        self.joined: list[Sequence] = []  # the sequences that got a slot in the last `schedule`
        self.hold = False  # whether no sequence may be admitted
        self.num_preemptions = 0
        self._caution = Caution()
        self.num_prompt_tokens = self.num_cached_tokens = 0  # of admitted sequences; the latter were in the cache
        # the sequence that found no room, with `num_gains` of the cache at that time
        self._no_room: tuple[Sequence | None, int] = (None, 0)
        self._in_flight: deque[tuple[int, StepPlan]] = deque()
        self._leaving: deque[tuple[int, Sequence]] = deque()  # left; each slot becomes free after that step
        self._step = self._landed = 0
        self._num_new: I64 = np.zeros(config.max_num_seqs, np.int64)
        self._budget = 0
        # The number of sequences that are still to join the static batch that is being formed.
        self._quota = 0

    @property
    def num_running(self) -> int:
        return len(self.batch.order)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.has_begun or self.offload.num_waiting)

    @property
    def has_begun(self) -> bool:
        """True if any sequence runs or a step is in flight."""
        return bool(len(self.batch.order) or self._in_flight)

    def add(self, seq: Sequence) -> None:
        seq.client = self.waiting.open(seq.params.client)
        seq.arrived = self.clock()
        if not self.offload.keeps_waiting(seq):
            self._queue(seq)

    def _queue(self, seq: Sequence) -> None:
        seq.level = self.policy.level(seq)
        if self.policy.foresees:
            seq.num_found = len(self.prefixes.find(seq)) * self.cache.block_size
            seq.predicted = self.forecast.total_tokens(seq)
        seq.rank = self.policy.rank(seq, self.forecast, seq.num_found)
        self.waiting.add(seq)

    def waits_for_ids(self) -> bool:
        """Return whether the next step is to be scheduled only when the one before it has landed.

        It is so while a sequence's rules depend on its last token, and while tokens are to be drafted.
        """
        wants_ids = self.drafts.wants_ids()
        return wants_ids or self.batch.has_rules

    def objection(self, seq: Sequence) -> str | None:
        """Return why no schedule can meet a sequence's objectives, or None; it is called before `add`."""
        if not self._admission.looks:
            return None
        return self._admission.objection(seq, len(self.prefixes.find(seq)) * self.cache.block_size)

    def abort(self, seq: Sequence) -> None:
        """End a sequence now; its blocks are free at once, or when the step in flight that uses them lands."""
        if seq.status is Status.RUNNING:
            self._finish(seq)
        elif seq.status is Status.WAITING:
            self._drop(seq)

    # -------------------------------------------------------------------------------------------- schedule

    def schedule(self) -> StepPlan | None:
        """Return the next step, or None if nothing can be computed before the step in flight lands."""
        self._begin_step()
        self._order_by_policy()
        preemptions = self.num_preemptions
        self._schedule_decodes()
        if not self._in_flight:
            most = min(self._budget, self._admission.most_drafted(self._num_new))
            self._budget -= self.drafts.schedule(self._num_new, most)
        self._budget = self._admission.limit(self._budget, self._num_new)
        self._schedule_prefills()
        if self.num_preemptions == preemptions and not self.hold:
            self._admit()
        return self._plan()

    def _begin_step(self) -> None:
        """Reset what was handed out, and free the blocks that can be freed by now."""
        self.joined = []
        self.wake_at = None
        self._budget = self.config.max_num_batched_tokens
        self._num_new.fill(0)
        self.drafts.begin()
        self.prefixes.step = self._step + 1
        for seq in self.offload.look(self._step, self._landed):
            self._queue(seq)
        if self.cache.frees_blocks:
            self._free_outside_windows()

    def _free_outside_windows(self) -> None:
        """Free the blocks that left every window; a step of 64 sequences has a handful of them."""
        slots = self.batch.order
        computed = self.batch.num_computed[slots]
        has_unseen = computed >= self.cache.next_unseen[slots]
        if np.count_nonzero(has_unseen):
            for slot, position in zip(slots[has_unseen].tolist(), computed[has_unseen].tolist(), strict=True):
                self.cache.free_outside_window(slot, position)

    def _order_by_policy(self) -> None:
        """Refuse sequences, demote sequences and make room, as the policy says."""
        is_pressed = self._leave_out() if self._admission.looks else True
        if self.policy.demotes:
            self._demote()
        if self.policy.preempts and not self.hold and is_pressed:
            self._make_room()

    def _plan(self) -> StepPlan | None:
        """Make a step of the tokens that were handed out, or return None if there are none."""
        slots = self.batch.order
        num_new = self._num_new[slots]
        if np.count_nonzero(num_new) < len(slots):
            slots, num_new = slots[num_new > 0], num_new[num_new > 0]
        if not len(slots):
            if self.offload.is_busy:
                self.wake_at = self.clock() + MOVE_SECONDS
            return None
        self._step += 1
        drafted = self.drafts.take(slots)
        if self.waiting.num_clients > 1:
            samples = self.batch.num_computed[slots] + num_new >= self.batch.num_tokens[slots]
            self.waiting.charge(self.batch.clients[slots], np.where(samples, SAMPLED_COST, 0.0))
        placed = {} if drafted is None else self.drafts.take_trees(slots)
        plan = self.batch.plan(slots, num_new, self.cache, self._step, drafted, placed)
        moved = self.drafts.moving
        plan.loads, plan.copies = self.cache.take_loads(), joined(self.drafts.take_moves(), self.prefixes.take_copies())
        for slot in moved:
            self.prefixes.cache_full_blocks(slot, int(self.batch.num_known[slot]) - 1)
        self._in_flight.append((self._step, plan))
        return plan

    def _demote(self) -> None:
        """Rank sequences that have used up their level behind those that have not."""
        batch = self.batch
        slots = batch.order[(batch.num_known - batch.prompt_len >= batch.changes_at)[batch.order]]
        for slot in slots.tolist():
            seq = batch.seqs[slot]
            assert seq is not None
            batch.sync(slot)
            seq.rank = self.policy.rank(seq, self.forecast, seq.num_found)
            batch.changes_at[slot] = self.policy.changes_at(seq)
        if len(slots):
            batch.sort()
            # The demoted sequences may give way to a waiting one now.
            self._no_room = (None, 0)

    def _make_room(self) -> None:
        """Preempt the last running sequences that give way to the first waiting one, until it has room.

        It runs before anything is scheduled, because cached blocks hold what the step will compute. Blocks that a
        step in flight uses become free when it has landed, so one sequence is preempted at a time.
        """
        batch = self.batch
        while self.waiting and self.num_running and not self._leaving:
            seq = self.waiting.head()
            victim = self.policy.last_to_give_way(batch.last_first(), seq)
            if victim is None or victim.slot is None or not self.waiting.precedes(seq, victim):
                return
            if batch.free_slots and self._admission.has_time(seq) and self._has_room(seq, self.prefixes.find(seq)):
                return
            self._preempt(victim.slot)

    def _schedule_decodes(self) -> None:
        batch, slots = self.batch, self.batch.order
        length = batch.num_tokens[slots]
        # At max_total the last token is being sampled already: nothing is left to compute.
        is_decode = (length - batch.num_computed[slots] == 1) & (length < batch.max_total[slots])
        self._num_new[slots] = is_decode
        self._budget -= int(np.count_nonzero(is_decode))
        crossing = is_decode & (length > self.cache.num_grown[slots] * self.cache.block_size)
        if np.count_nonzero(crossing):
            slots = slots[crossing]
            if self.config.prefix_cache:
                moving = self.drafts.moving  # their last tokens are not there yet
                self.prefixes.cache_last(slots[~np.isin(slots, moving)] if moving else slots)
            if not self.cache.grow_all(slots):
                for slot in slots.tolist():
                    if self._num_new[slot]:  # not preempted meanwhile for an earlier sequence
                        self._grow_or_preempt(slot)

    def _grow_or_preempt(self, slot: int) -> None:
        """Give a decoding sequence one more block, at the cost of the last sequence, which may be itself."""
        while not self.cache.grow(slot, int(self.batch.num_tokens[slot])):
            if self._are_blocks_coming() or self.offload.makes_room(slot, self._step):  # skip this step
                self._budget += 1
                self._num_new[slot] = 0
                return
            if self._make_way(slot) == slot:
                return

    def _make_way(self, slot: int) -> int:
        """Preempt the last running sequence (maybe `slot`'s), or end one too long for the arena; return its slot."""
        victim = int(self.batch.order[-1])
        seq = self.batch.seqs[victim]
        assert seq is not None
        if victim != slot or not self.offload.must_end(int(self.batch.num_tokens[victim])):
            self._caution.after_preemption()
            self._preempt(victim)
            return victim
        self._num_new[slot] = 0
        self._finish(seq)
        self.refused.append((seq, "it is longer than --kv-memory holds, and the files of --kv-disk take no more"))
        return slot

    def _are_blocks_coming(self) -> bool:
        """Return whether sequences that left hold blocks until the step in flight lands, or blocks are being copied."""
        return self.offload.are_blocks_coming or any(self.cache.num_grown[seq.slot] for _, seq in self._leaving)

    def _schedule_prefills(self) -> None:
        """Continue the prompts that are partly computed; an incomplete one leaves no block to those behind it."""
        batch, slots = self.batch, self.batch.order
        missing = batch.num_tokens[slots] - batch.num_computed[slots]
        if not np.count_nonzero(missing > 1):
            return
        for i in np.flatnonzero(missing > 1).tolist():
            slot, wanted = int(slots[i]), min(int(missing[i]), self._budget)
            seq = batch.seqs[slot]
            if seq is None or seq.status is not Status.RUNNING:  # preempted meanwhile for an earlier one
                continue
            count = self._extend_or_preempt(slot, wanted) if wanted else 0
            self._num_new[slot] = count
            self._budget -= count
            if count:
                self.prefixes.cache_full_blocks(slot, int(batch.num_computed[slot]) + count)

    def _extend_or_preempt(self, slot: int, wanted: int) -> int:
        """Take blocks for the next tokens of a prompt, at the cost of later sequences if there is room for no token.

        Returns how many tokens have room; 0 if earlier sequences, or some that have just left, hold all blocks. A
        sequence that is alone gives up its own blocks to a scored text that holds the others: otherwise each would wait
        for the other.
        """
        start = int(self.batch.num_computed[slot])
        while not (count := self.cache.extend(slot, start, wanted)):
            victim = int(self.batch.order[-1])
            if self._are_blocks_coming() or (victim == slot and self.num_running > 1):
                return 0
            if self.offload.makes_room(slot, self._step):
                return 0
            if self._make_way(slot) == slot:
                return 0
        return count

    def _admit(self) -> None:
        """Admit waiting sequences in order while there are slots, blocks for their whole prompt, and budget."""
        if not self.waiting or self._budget <= 0 or not self._may_begin():
            return
        if self.policy.reranks and self.batch.free_slots:
            self._rerank()
        while self.waiting and self._budget and (self._quota or self.policy.window is None):
            seq = self.waiting.head()
            if (self.has_begun and self._no_room == (seq, self.cache.num_gains)) or not self._admit_one(seq):
                return

    def _may_begin(self) -> bool:
        """Return whether sequences may be admitted now; a static batch begins only when the one before it is done."""
        window = self.policy.window
        if window is None or self._quota:
            return True
        if self.has_begun:
            return False
        begin = min(seq.arrived for seq in self.waiting.front(1)) + window
        if len(self.waiting) < self.config.max_num_seqs and self.clock() < begin:
            self.wake_at = begin
            return False
        self._quota = min(len(self.waiting), self.config.max_num_seqs)
        return True

    def _admit_one(self, seq: Sequence) -> bool:
        batch, cache = self.batch, self.cache
        if not self._admission.has_time(seq):
            self._quota = 0
            return False
        length, there = len(seq.token_ids), self.prefixes.find(seq)
        found = self._that_fit(seq, there)
        # If found blocks are left out to save room, no part of the next one is copied.
        partial = self.prefixes.find_partial(seq, len(found)) if len(found) == len(there) else None
        start = len(found) * cache.block_size + (partial[1] if partial is not None else 0)
        if seq.slot is not None or (length - start > self._budget and not self.config.chunked_prefill):
            return False
        if not (batch.free_slots and self._has_room(seq, found)):
            self._no_room = (seq, cache.num_gains)
            self._quota = 0
            return False
        self.waiting.remove(seq)
        seq.num_found = start
        slot = batch.join(seq, start)
        seq.status = Status.RUNNING
        batch.predicted[slot] = self.forecast.total_tokens(seq)
        batch.changes_at[slot] = self.policy.changes_at(seq)
        cache.attach_cached(slot, found, seq.params.cache_priority)
        self.offload.admitted(seq, len(found))
        whole = 0 if cache.offloads(length) else length
        count = cache.extend(slot, start, min(length - start, self._budget), whole)
        assert count, "an admitted sequence has blocks"
        if partial is not None:
            self.prefixes.copy(partial[0], slot, len(found), partial[1])
        self.joined.append(seq)
        self._num_new[slot] = count
        self._budget -= count
        self._quota = max(0, self._quota - 1)
        self.prefixes.cache_full_blocks(slot, start + count)
        if not seq.num_preemptions:
            self._caution.after_admission()
            seq.num_cached, seq.admitted_at = start, self.clock()
            self.num_prompt_tokens += length
            self.num_cached_tokens += start
            self.waiting.served[seq.client] += length - start
        return True

    def _that_fit(self, seq: Sequence, found: list[bytes]) -> list[bytes]:
        """Return the cached first blocks that a sequence takes: fewer if they fill the arena and none can make room."""
        while found and not self.has_begun and not self._are_blocks_coming() and not self._has_room(seq, found):
            found = found[: len(found) // 2]
        return found

    def _has_room(self, seq: Sequence, found: list[bytes]) -> bool:
        """Return whether there are blocks for a sequence, now and as far as can be predicted.

        Now means with a spare block for each running sequence, or it would be preempted as soon as they grow.
        """
        batch, cache, slots, length = self.batch, self.cache, self.batch.order, len(seq.token_ids)
        if not cache.fits(length, slots, found):
            return False
        if not len(slots) or self.config.overcommit:
            return True
        known, most = batch.num_known[slots], batch.max_total[slots]
        totals = batch.predicted[slots]
        # A sequence that is longer than predicted is expected to double its output.
        totals = np.where(totals > known, totals, np.minimum(most, 2 * known - batch.prompt_len[slots] + 1))
        total = self.forecast.total_tokens(seq)
        num_found, error = (
            cache.num_in_arena(found) * cache.block_size,
            self._caution.value * self.forecast.lengths.error,
        )
        return cache.fits_later(length, total, num_found, slots, totals, batch.num_found[slots], error)

    def _leave_out(self) -> bool:
        """Refuse sequences that cannot be in time, give up objectives, and return whether any must give way."""
        if not self.waiting or self.hold:
            return False
        found = self._admission.look(self.waiting, self.clock())
        for seq in found.refused:
            self._drop(seq)
            self.refused.append((seq, "there is no time for its first token, or for those of requests beside it"))
        for seq in found.lost:
            self._give_up(seq)
        return found.any_late

    def _give_up(self, seq: Sequence) -> None:
        """Ignore a sequence's objectives from now on; if it waits, its rank stays until it is queued again."""
        seq.is_lost = True
        if seq.status is Status.RUNNING and seq.slot is not None:
            self.batch.tbt[seq.slot], self.batch.changes_at[seq.slot] = np.inf, 0

    def _rerank(self) -> None:
        """Rank the first waiting sequences again, because the cached part of them has changed."""
        for seq in self.waiting.front(NUM_RERANKED):
            self.waiting.remove(seq)
            self._queue(seq)

    def _preempt(self, slot: int) -> None:
        """Move a running sequence back to the waiting queue, to be computed again."""
        seq = self.batch.seqs[slot]
        assert seq is not None
        self._budget += int(self._num_new[slot])
        self._num_new[slot] = 0
        self.drafts.drop(slot)
        self.num_preemptions += 1
        seq.num_preemptions += 1
        self.offload.before_preemption(slot, self._step)
        seq.status = Status.WAITING
        self._vacate(seq)
        self._queue(seq)

    def _finish(self, seq: Sequence) -> None:
        seq.status = Status.FINISHED
        self.waiting.close(seq.client)
        self._vacate(seq)

    def _drop(self, seq: Sequence) -> None:
        """End a waiting sequence."""
        if not self.offload.abandon(seq):
            self.waiting.remove(seq)
        self.waiting.close(seq.client)
        seq.status = Status.FINISHED

    def _vacate(self, seq: Sequence) -> None:
        """Remove a running sequence from the batch; its slot is free as soon as no step in flight uses it."""
        assert seq.slot is not None
        self.drafts.drop(seq.slot)
        self.prefixes.cache_known(seq.slot)
        self.batch.leave(seq.slot)
        self._no_room = (None, 0)  # its spare block is released even if it frees no others
        last_step = int(self.batch.last_step[seq.slot])
        if last_step > self._landed:
            self._leaving.append((last_step, seq))
        else:
            self._free_slot(seq)

    def _free_slot(self, seq: Sequence) -> None:
        assert seq.slot is not None
        self.unreserve(seq.slot)
        seq.slot = None

    # ---------------------------------------------------------------------------------------------- update

    def update(self, plan: StepPlan, result: StepResult) -> StepOutputs:
        """Land the oldest step in flight: append its tokens, and remove the sequences that end with them."""
        step, oldest = self._in_flight.popleft()
        assert oldest is plan, "steps land in the order they were scheduled"
        self._landed = step
        if plan.scored is not None:
            self.cache.forgetting.add_scores(plan.scored)
        outputs = self._landing.land(plan, result)
        if self._leaving:
            still: deque[tuple[int, Sequence]] = deque()
            for last_step, seq in self._leaving:
                if last_step > step:
                    still.append((last_step, seq))
                elif seq.slot is not None:
                    self._free_slot(seq)
            self._leaving = still
        return outputs

    def _begun(self, seq: Sequence) -> None:
        """Note that a sequence got its first token."""
        seq.first_at = self.clock()
        if seq.slot is not None:
            self.batch.first_at[seq.slot] = seq.first_at
        if self._admission.is_lost(seq):
            self._give_up(seq)

    def _charge(self, seq: Sequence, num_tokens: int) -> None:
        """Charge a client for tokens that a step gave it beside the one that it was charged for."""
        self.waiting.charge(np.array([seq.client]), np.array([SAMPLED_COST * num_tokens]))

    def _end(self, seq: Sequence) -> None:
        """End a sequence that got its last token."""
        if seq.status is Status.RUNNING:
            self._finish(seq)
        else:  # the sequence was preempted while this step was in flight
            self._drop(seq)

    # ---------------------------------------------------------------------------------------------- others

    def reserve(self, num_tokens: int, found: list[bytes]) -> int | None:
        """Reserve a slot for a text outside of the schedule (scoring), or return None if there is no room for it now.

        It gets the cached blocks `found`, and blocks for `num_tokens` in the groups that keep them; `cache.extend` gets
        it the blocks of each chunk.
        """
        if not self.batch.free_slots or not self.cache.fits(num_tokens, self.batch.order[:0], found):
            return None
        slot = self.batch.free_slots.pop()
        self.cache.attach_cached(slot, found)
        grown = self.cache.grow(slot, 0, whole=num_tokens)
        assert grown, "it fits"
        return slot

    def unreserve(self, slot: int) -> None:
        self.cache.release(slot)
        self.batch.free(slot)
        self._no_room = (None, 0)

    def check_integrity(self) -> None:
        """Assert the cache's invariants, and that blocks belong to running, leaving or reserved slots only.

        A running sequence has all blocks that its next query sees, up to what is computed.
        """
        self.cache.check_integrity()
        free = np.array(self.batch.free_slots, np.int64)
        assert not self.cache.ends[:, free].any(), "a free slot holds blocks"
        assert len(set(self.batch.free_slots)) == len(free), "a slot is free twice"
        size = self.cache.block_size
        for slot in self.batch.order.tolist():
            computed = int(self.batch.num_computed[slot])
            assert self.cache.num_grown[slot] * size >= computed, "computed tokens have no block"
            for group, begin in zip(self.cache.groups, self.cache.begins[:, slot].tolist(), strict=True):
                assert begin * size <= group.spec.first_key(computed), "a block was given back that is still seen"
