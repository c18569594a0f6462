"""Who computes how many tokens in the next step.

One idea: a sequence has `num_tokens` and `num_computed_tokens`, and a step hands out the difference until the token
budget is spent. First come, first served: running sequences before waiting ones, decodes before prefills, and whoever
came last is preempted first, so the oldest sequence always advances and none starves.

`schedule` may run before the step in flight has landed: it counts one token for each sequence that samples there.
`update` lands a step. A sequence that leaves while a step in flight still writes to its slot and blocks keeps them
until that step has landed; if it turned out to have ended, the token sampled there is dropped.

Where the prefix cache is on, a sequence begins behind the blocks that are found by their hashes. A block can be found as
soon as a step that fills it is scheduled: steps run one after the other, and in a step each layer stores the K and V of
all its tokens before any is read.

A prompt's blocks are taken as it is admitted, but in the KV groups that give blocks back only those of the next chunk:
a chunk then takes what there is room for. Sequences never wait for one another in a circle: the oldest gets the blocks
of all the others if it needs them, and alone every sequence fits that the engine accepts.
"""

from __future__ import annotations

import itertools
from collections import deque
from dataclasses import dataclass, replace

import numpy as np

from inferc.errors import ConfigError
from inferc.kv_pools import CacheGroup, CacheLimits
from inferc.runtime.batch import Batch
from inferc.runtime.kv_cache import KVCacheManager, extend_hashes
from inferc.runtime.sequence import Output, Sequence, Status
from inferc.runtime.step import I64, StepPlan, StepResult


@dataclass(frozen=True)
class SchedulerConfig:
    """Sizes in tokens, sequences and blocks. `num_blocks` is of each of `groups` and includes the reserved block 0."""

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: tuple[int, ...]
    block_size: int
    groups: tuple[CacheGroup, ...]
    chunked_prefill: bool = True
    prefix_cache: bool = False

    def __post_init__(self) -> None:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is less than max_num_seqs {self.max_num_seqs};"
                " raise it, so that every sequence can decode in every step"
            )
        if not self.chunked_prefill and self.max_num_batched_tokens < self.max_model_len:
            raise ConfigError(
                f"without chunked prefill max_num_batched_tokens {self.max_num_batched_tokens} must be at least"
                f" max_model_len {self.max_model_len}; raise it, or turn chunked prefill on"
            )
        if min(self.num_blocks) < 2:
            raise ConfigError(f"the KV cache has {min(self.num_blocks)} blocks; it needs 2 or more, raise --kv-memory")

    @property
    def limits(self) -> CacheLimits:
        return CacheLimits(self.block_size, self.max_model_len, self.max_num_seqs, self.max_num_batched_tokens)


class Scheduler:
    """Owns `waiting`, the running batch and the token budget."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.waiting: deque[Sequence] = deque()  # by arrival, and all later than the running ones
        self.batch = Batch(config.max_num_seqs)
        self.cache = KVCacheManager(config.groups, config.num_blocks, config.limits, config.chunked_prefill)
        self.joined: list[Sequence] = []  # got their slot in the last `schedule`
        self.hold = False  # admit nobody
        self.num_preemptions = 0
        self.num_prompt_tokens = self.num_cached_tokens = 0  # of sequences let in, and of these found in the cache
        self._no_room: tuple[Sequence | None, int] = (None, 0)  # who found none, and the cache's `num_gains` then
        self._in_flight: deque[tuple[int, StepPlan]] = deque()
        self._leaving: deque[tuple[int, Sequence]] = deque()  # left; their slots are free after that step
        self._step = self._landed = 0
        self._num_new: I64 = np.zeros(config.max_num_seqs, np.int64)
        self._budget = 0

    @property
    def num_running(self) -> int:
        return len(self.batch.order)

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or len(self.batch.order) or self._in_flight)

    def add(self, seq: Sequence) -> None:
        self.waiting.append(seq)

    def abort(self, seq: Sequence) -> None:
        """End a sequence now. Its blocks are free at once, or when the step in flight that uses them lands."""
        if seq.status is Status.RUNNING:
            self._finish(seq)
        elif seq.status is Status.WAITING:
            self.waiting.remove(seq)
            seq.status = Status.FINISHED

    # -------------------------------------------------------------------------------------------- schedule

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can be computed before the step in flight lands."""
        self.joined = []
        self._budget = self.config.max_num_batched_tokens
        self._num_new.fill(0)
        preemptions = self.num_preemptions
        if self.cache.gives_back:
            self._give_back()
        self._schedule_decodes()
        self._schedule_prefills()
        if self.num_preemptions == preemptions and not self.hold:
            self._admit()
        slots = self.batch.order
        num_new = self._num_new[slots]
        if np.count_nonzero(num_new) < len(slots):
            slots, num_new = slots[num_new > 0], num_new[num_new > 0]
        if not len(slots):
            return None
        self._step += 1
        plan = self.batch.plan(slots, num_new, self.cache, self._step)
        self._in_flight.append((self._step, plan))
        return plan

    def _give_back(self) -> None:
        """Free the blocks that left every window; a step of 64 sequences has a handful of them."""
        slots = self.batch.order
        computed = self.batch.num_computed[slots]
        has_unseen = computed >= self.cache.next_unseen[slots]
        if np.count_nonzero(has_unseen):
            for slot, position in zip(slots[has_unseen].tolist(), computed[has_unseen].tolist(), strict=True):
                self.cache.give_back(slot, position)

    def _schedule_decodes(self) -> None:
        batch, slots = self.batch, self.batch.order
        length = batch.num_tokens[slots]
        # At max_total the last token is being sampled already: nothing is left to compute.
        is_decode = (length - batch.num_computed[slots] == 1) & (length < batch.max_total[slots])
        self._num_new[slots] = is_decode
        self._budget -= int(np.count_nonzero(is_decode))
        crossing = is_decode & (length > self.cache.num_grown[slots] * self.cache.block_size)
        if np.count_nonzero(crossing):
            for slot in slots[crossing].tolist():
                if self._num_new[slot]:  # not preempted by an older one meanwhile
                    # The last token, which the new block is for, is the only one that may not be known here.
                    self._publish(slot, int(self.batch.num_tokens[slot]) - 1)
                    self._grow_or_preempt(slot)

    def _grow_or_preempt(self, slot: int) -> None:
        """One more block for a decoding sequence, at the cost of the last that came, be it itself."""
        while not self.cache.grow(slot, int(self.batch.num_tokens[slot])):
            if self._are_blocks_coming():  # sit this step out
                self._budget += 1
                self._num_new[slot] = 0
                return
            victim = int(self.batch.order[-1])
            self._preempt(victim)
            if victim == slot:
                return

    def _are_blocks_coming(self) -> bool:
        """Whether sequences that left hold blocks until the step in flight lands."""
        return any(self.cache.num_grown[seq.slot] for _, seq in self._leaving)

    def _schedule_prefills(self) -> None:
        """Go on with prompts of which a part is computed. One that gets less than it could leaves no block to others."""
        batch, slots = self.batch, self.batch.order
        missing = batch.num_tokens[slots] - batch.num_computed[slots]
        if not np.count_nonzero(missing > 1):
            return
        for i in np.flatnonzero(missing > 1).tolist():
            slot, wanted = int(slots[i]), min(int(missing[i]), self._budget)
            seq = batch.seqs[slot]
            if seq is None or seq.status is not Status.RUNNING:  # preempted by an older one meanwhile
                continue
            count = self._extend_or_preempt(slot, wanted) if wanted else 0
            self._num_new[slot] = count
            self._budget -= count
            if count:
                self._publish(slot, int(batch.num_computed[slot]) + count)

    def _extend_or_preempt(self, slot: int, wanted: int) -> int:
        """Blocks for the next tokens of a prompt, at the cost of those that came later if there is room for none.

        Returns how many tokens have room: 0 where older sequences hold all blocks, or such as have just left. Alone it
        gives up its own to the text that is scored and holds the rest: each would wait for the other.
        """
        start = int(self.batch.num_computed[slot])
        while not (count := self.cache.extend(slot, start, wanted)):
            victim = int(self.batch.order[-1])
            if self._are_blocks_coming() or (victim == slot and self.num_running > 1):
                return 0
            self._preempt(victim)
            if victim == slot:
                return 0
        return count

    def _admit(self) -> None:
        """Let waiting sequences in, in order, while there are slots, blocks for their whole prompt, and budget."""
        batch, cache = self.batch, self.cache
        while self.waiting and self._budget and batch.free_slots:
            seq = self.waiting[0]
            if seq.slot is not None or self._no_room == (seq, cache.num_gains):
                return
            length, found = len(seq.token_ids), self._find(seq)
            start = len(found) * cache.block_size
            if length - start > self._budget and not self.config.chunked_prefill:
                return
            # With a spare block for each running sequence, or it would be preempted as soon as they grow.
            if not cache.fits(length, batch.order, found):
                self._no_room = (seq, cache.num_gains)
                return
            self.waiting.popleft()
            slot = batch.join(seq, start)
            seq.status = Status.RUNNING
            cache.adopt(slot, found)
            count = cache.extend(slot, start, min(length - start, self._budget), whole=length)
            assert count, "an admitted sequence has blocks"
            self.joined.append(seq)
            self._num_new[slot] = count
            self._budget -= count
            self._publish(slot, start + count)
            if not seq.num_preemptions:
                seq.num_cached = start
                self.num_prompt_tokens += length
                self.num_cached_tokens += start

    def _find(self, seq: Sequence) -> list[bytes]:
        """The hashes of its first blocks that are in the cache; one token at least is left to compute."""
        if not self.config.prefix_cache:
            return []
        extend_hashes(seq.hashes, seq.root, seq.token_ids, self.cache.block_size)
        most = (len(seq.token_ids) - 1) // self.cache.block_size
        return seq.hashes[: self.cache.find(seq.hashes[:most])]

    def _publish(self, slot: int, num_tokens: int) -> None:
        """Let the full blocks of a slot's first tokens be found, which are known and computed, or are in this step."""
        count = num_tokens // self.cache.block_size
        if not self.config.prefix_cache or count <= self.cache.num_published[slot]:
            return
        seq = self.batch.seqs[slot]
        assert seq is not None
        extend_hashes(seq.hashes, seq.root, seq.token_ids, self.cache.block_size)
        self.cache.publish(slot, seq.hashes[:count])

    def _preempt(self, slot: int) -> None:
        """Back to the head of the queue, to be computed again."""
        seq = self.batch.seqs[slot]
        assert seq is not None
        self._budget += int(self._num_new[slot])
        self._num_new[slot] = 0
        self.num_preemptions += 1
        seq.num_preemptions += 1
        seq.status = Status.WAITING
        self.waiting.appendleft(seq)
        self._vacate(seq)

    def _finish(self, seq: Sequence) -> None:
        seq.status = Status.FINISHED
        self._vacate(seq)

    def _vacate(self, seq: Sequence) -> None:
        """Take a running sequence out of the batch; its slot is free as soon as no step in flight uses it."""
        assert seq.slot is not None
        self._publish(seq.slot, min(int(self.batch.num_computed[seq.slot]), len(seq.token_ids)))
        self.batch.leave(seq.slot)
        self._no_room = (None, 0)  # its spare block is not kept for it any more, even if it frees none
        last_step = int(self.batch.last_step[seq.slot])
        if last_step > self._landed:
            self._leaving.append((last_step, seq))
        else:
            self._free_slot(seq)

    def _free_slot(self, seq: Sequence) -> None:
        assert seq.slot is not None
        self.cache.release(seq.slot)
        self.batch.free(seq.slot)
        seq.slot = None

    # ---------------------------------------------------------------------------------------------- update

    def update(self, plan: StepPlan, result: StepResult) -> list[Output]:
        """Land the oldest step in flight: its tokens are appended, sequences that end by them leave."""
        step, oldest = self._in_flight.popleft()
        assert oldest is plan, "steps land in the order they were scheduled"
        self._landed = step
        outputs = self._append(plan.sample.seq_slots.astype(np.int64), result, step)
        if self._leaving:
            still: deque[tuple[int, Sequence]] = deque()
            for last_step, seq in self._leaving:
                if last_step > step:
                    still.append((last_step, seq))
                elif seq.slot is not None:
                    self._free_slot(seq)
            self._leaving = still
        return outputs

    def _append(self, slots: I64, result: StepResult, step: int) -> list[Output]:
        batch, ids = self.batch, result.token_ids
        batch.last_id[slots] = ids
        batch.num_known[slots] += 1
        batch.late[slots] &= batch.last_step[slots] > step
        stopped = (batch.stop_ids[:, slots] == ids).any(axis=0)
        ended = stopped | (batch.num_known[slots] >= batch.max_total[slots])
        if result.failed is not None:
            ended |= result.failed
        outputs, seqs, finished = [], batch.seqs, Status.FINISHED
        logprobs = result.logprobs or itertools.repeat(None)
        is_first = batch.num_known[slots] - batch.prompt_len[slots] == 1
        firsts = is_first.tolist() if np.count_nonzero(is_first) else itertools.repeat(False)
        rows = zip(slots.tolist(), ids.tolist(), ended.tolist(), logprobs, firsts, strict=False)
        for row, (slot, token, is_end, logprob, first) in enumerate(rows):
            seq = seqs[slot]
            assert seq is not None, "a slot stays its sequence's own until its last step lands"
            if seq.status is finished:  # it ended while this step was in flight: the token is dropped
                continue
            if result.failed is not None and result.failed[row]:
                outputs.append(Output(seq.request_id, seq.index, [], "error"))
                self._end(seq)
                continue
            seq.token_ids.append(token)
            output = Output(seq.request_id, seq.index, [token])
            outputs.append(output)
            if logprob is not None:
                output.logprobs = [logprob if seq.params.logprobs else replace(logprob, top=())]
            if first:
                output.num_cached = seq.num_cached
            if is_end:
                output.finish_reason = "stop" if stopped[row] else "length"
                self._end(seq)
        return outputs

    def _end(self, seq: Sequence) -> None:
        if seq.status is Status.RUNNING:
            self._finish(seq)
        else:  # preempted while this step was in flight
            self.waiting.remove(seq)
            seq.status = Status.FINISHED

    # ---------------------------------------------------------------------------------------------- others

    def reserve(self, num_tokens: int) -> int | None:
        """A slot for a text outside of the schedule (scoring), or None if there is no room for it now.

        It gets blocks for `num_tokens` in the groups that keep them; `cache.extend` gets it those of each chunk.
        """
        if not self.batch.free_slots or not self.cache.fits(num_tokens, beside=self.batch.order[:0]):
            return None
        slot = self.batch.free_slots.pop()
        grown = self.cache.grow(slot, 0, whole=num_tokens)
        assert grown, "it fits"
        return slot

    def unreserve(self, slot: int) -> None:
        self.cache.release(slot)
        self.batch.free(slot)

    def check_integrity(self) -> None:
        """The cache's invariants, and: blocks belong to running, leaving or reserved slots only.

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
                assert begin * size <= group.first_key(computed), "a block was given back that is still seen"
