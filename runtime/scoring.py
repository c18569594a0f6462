"""Log probabilities of given texts, computed in chunks between the engine's steps."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np

from inferc.errors import InfercError
from inferc.runtime.scheduler import Scheduler
from inferc.runtime.step import F32, I32, Logprobs, SampleRows, StepPlan, StepResult, TokenLists


@dataclass(frozen=True)
class Score:
    """Log probability of each token after the first, given those before it, and the token that was most likely there.

    rows: the same with ranks and the most likely tokens, where `num_top` asked for some.
    """

    logprobs: list[float]
    argmax: list[int]
    rows: list[Logprobs] = field(default_factory=list)


@dataclass
class _Job:
    request_id: str
    token_ids: list[int]
    num_top: int
    slot: int | None = None  # with blocks for all tokens in the KV groups that keep them
    logprobs: list[float] = field(default_factory=list)
    argmax: list[int] = field(default_factory=list)
    rows: list[Logprobs] = field(default_factory=list)


class ScoreRunner(Protocol):
    """The part of a runner that scores."""

    def score(self, plan: StepPlan, target_ids: I32) -> tuple[F32, I32]: ...

    def submit(self, plan: StepPlan) -> None: ...

    def wait(self) -> StepResult: ...

    def reset_slot(self, slot: int, prompt_ids: I32 | None, output_ids: I32 | None = None) -> None: ...


class Scorer:
    """A queue of texts to score. The first gets a slot and blocks beside the running sequences."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._jobs: deque[_Job] = deque()
        self._scored: list[tuple[str, Score]] = []

    @property
    def has_work(self) -> bool:
        return bool(self._jobs)

    def add(self, request_id: str, token_ids: list[int], num_top: int = 0) -> None:
        self._jobs.append(_Job(request_id, token_ids, num_top))

    def abort(self, request_id: str) -> None:
        for job in [job for job in self._jobs if job.request_id == request_id]:
            self._jobs.remove(job)
            self._release(job)

    def take(self) -> list[tuple[str, Score]]:
        """What was scored since the last call, with the request ids."""
        scored, self._scored = self._scored, []
        return scored

    def step(self, runner: ScoreRunner) -> None:
        """Score one chunk of the first text, of as many tokens as a step and the cache have room for. No step is in flight."""
        job = self._jobs[0]
        if job.slot is None:
            job.slot = self._scheduler.reserve(len(job.token_ids))
            self._scheduler.hold = job.slot is None  # let nobody in before it
            if job.slot is None:
                return
            runner.reset_slot(job.slot, None)  # the slot's last sequence may have had penalties
        start, last = len(job.logprobs), len(job.token_ids) - 1
        wanted = min(self._scheduler.config.max_num_batched_tokens, last - start)
        count = self._scheduler.cache.extend(job.slot, start, wanted)
        self._scheduler.hold = not count
        if not count:  # running sequences have all blocks; one of them will give some back, or end
            return
        targets = np.array(job.token_ids[start + 1 : start + count + 1], np.int32)
        plan = self._plan(job.slot, job.token_ids, start, count)
        if job.num_top:
            rows = _with_top(runner, plan, targets, job.num_top)
            job.rows += rows
            job.logprobs += [row.logprob for row in rows]
            job.argmax += [row.top[0][0] for row in rows]
        else:
            logprobs, argmax = runner.score(plan, targets)
            job.logprobs += logprobs.tolist()
            job.argmax += argmax.tolist()
        if plan.counted is not None:
            self._scheduler.cache.add_masses(plan.counted)
        if len(job.logprobs) == last:
            self._jobs.popleft()
            self._release(job)
            self._scored.append((job.request_id, Score(job.logprobs, job.argmax, job.rows)))

    def _plan(self, slot: int, token_ids: list[int], start: int, count: int) -> StepPlan:
        """The step of one sequence's tokens [start, start + count), all of them logits rows."""
        cache = self._scheduler.cache
        positions = np.arange(start, start + count, dtype=np.int64)
        block = positions // cache.block_size
        slots = np.array([slot])
        forgotten = cache.num_forgotten(slots) if cache.evicts else np.zeros(1, np.int64)
        seen = start + count - int(forgotten[0])
        starts, max_blocks = np.array([0, count], np.int32), cache.blocks_for(seen)
        return StepPlan(
            token_ids=np.array(token_ids[start : start + count], np.int32),
            positions=positions,
            query_start_loc=starts,
            seq_lens=np.array([seen], np.int32),
            seq_slots=np.array([slot], np.int32),
            logits_rows=np.arange(count, dtype=np.int32),
            slot_mapping=tuple(positions + (table[slot, block] - block) * cache.block_size for table in cache.tables),
            block_tables=cache.tables_without(slots, forgotten, max_blocks)
            if cache.evicts
            else tuple(table[slot : slot + 1].copy() for table in cache.tables),
            sample=SampleRows.greedy(np.full(count, slot, np.int32)),
            counted=cache.count(slots, positions[:1], positions[-1:] + 1, starts, max_blocks),
        )

    def _release(self, job: _Job) -> None:
        self._scheduler.hold = False
        if job.slot is not None:
            self._scheduler.unreserve(job.slot)


def _with_top(runner: ScoreRunner, plan: StepPlan, targets: I32, num_top: int) -> list[Logprobs]:
    """Sample rows that allow nothing but their target, whose log probabilities are of the logits as they were."""
    count = len(targets)
    sample = replace(
        plan.sample,
        num_logprobs=np.full(count, num_top, np.int32),
        allowed=TokenLists(np.arange(count + 1, dtype=np.int32), targets),
    )
    runner.submit(replace(plan, sample=sample))
    result = runner.wait()
    if result.error is not None:
        raise InfercError(f"the step failed: {result.error}")
    rows = [row for row in result.logprobs or () if row is not None]
    assert len(rows) == count, "every row asked for its log probabilities"
    return rows
