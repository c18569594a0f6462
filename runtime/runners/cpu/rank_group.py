"""The runner of all ranks of a partitioned artifact in one process, with the interface of a single runner.

Each rank has a runner, threads, and its part of the weights and of the KV cache. Tensor-parallel and expert-parallel
ranks exchange data in memory, and pipeline stages hand hidden rows on. On a machine with one memory this is no faster
than a whole artifact: it serves to certify and try out a partitioned artifact before its ranks run on their machines.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from threading import BrokenBarrierError
from typing import Any

import numpy as np

from inferc.config import ResolvedEngineConfig
from inferc.errors import InfercError
from inferc.ir.rendezvous import Rendezvous
from inferc.runtime.artifact.load import Artifact, group_key
from inferc.runtime.runners.api import Observer
from inferc.runtime.runners.cpu.collectives import Collectives, LocalGroup
from inferc.runtime.runners.cpu.runner import CpuRunner
from inferc.runtime.step.plan import F32, I32, StepPlan, StepResult


@dataclasses.dataclass
class _Rank:
    runner: CpuRunner
    groups: list[int]  # the indices of the whole artifact's KV groups that this rank holds, in the rank's own order

    def plan(self, plan: StepPlan) -> StepPlan:
        slots = tuple(plan.slot_mapping[group] for group in self.groups)
        tables = tuple(plan.block_tables[group] for group in self.groups)
        copies = tuple(plan.copies[group] for group in self.groups) if plan.copies else ()
        return replace(plan, slot_mapping=slots, block_tables=tables, copies=copies)


class RankGroup:
    """A runner whose steps run within `wait`, in the caller's thread and those of the ranks.

    config: for the whole artifact. The ranks of a stage share its threads; its block counts hold for every rank.
    """

    def __init__(self, artifact: Artifact, config: ResolvedEngineConfig) -> None:
        keys = [group_key(group) for group in artifact.whole_kv_groups]
        num_stages = 1 + max(rank.entry.pp_stage for rank in artifact.ranks)
        self._stages: list[list[_Rank]] = []
        self._rendezvous: list[Rendezvous] = []
        self._queue: deque[StepPlan] = deque()
        self._last_ids = np.zeros(config.max_num_seqs, np.int32)
        self._pool = ThreadPoolExecutor(max(1, len(artifact.ranks)), "inferc-rank")
        try:
            for stage in range(num_stages):
                self._open_stage([rank for rank in artifact.ranks if rank.entry.pp_stage == stage], keys, config)
        except Exception:
            self.close()
            raise

    def _open_stage(self, ranks: list[Artifact], keys: list[tuple[Any, ...]], config: ResolvedEngineConfig) -> None:
        rendezvous = Rendezvous(len(ranks))
        made: list[_Rank] = []
        self._rendezvous.append(rendezvous)
        self._stages.append(made)
        for index, rank in enumerate(ranks):
            groups = [keys.index(group_key(group)) for group in rank.kv_groups]
            blocks = tuple(config.num_blocks[group] for group in groups)
            threads = max(1, config.num_threads // len(ranks))
            settings = replace(config, num_threads=threads, num_blocks=blocks)
            runner = CpuRunner(rank, settings, first_core=index * threads)
            made.append(_Rank(runner, groups))
            if len(ranks) > 1:
                name = "ep" if rank.config.ep > 1 else "tp"
                runner.set_collective(Collectives({name: LocalGroup(index, rendezvous)}))

    @property
    def isa(self) -> str:
        return self._stages[0][0].runner.isa

    @property
    def name(self) -> str:
        """The name of what computes the steps, for people."""
        return f"cpu kernels ({self.isa}, {sum(map(len, self._stages))} ranks)"

    def watch_logits(self, sink: Callable[[F32], None] | None) -> None:
        """Pass `sink` the float32 logits [rows, vocab_size] of every step that scores; None stops it."""
        self._stages[-1][0].runner.watch_logits(sink)

    def submit(self, plan: StepPlan) -> None:
        for stage in self._stages:
            stage[0].runner.limits.check(stage[0].plan(plan))
        self._queue.append(plan)

    def wait(self) -> StepResult:
        plan = self._with_ids(self._queue.popleft())
        result = self._run(self._stages, plan)
        if result.error is None:
            self._last_ids[plan.sample.seq_slots] = result.token_ids
        return result

    def score(self, plan: StepPlan, target_ids: I32) -> tuple[F32, I32]:
        plan = self._with_ids(plan)
        before = self._run(self._stages[:-1], plan)
        if before.error is not None:
            raise InfercError(before.error)

        def score(rank: _Rank) -> tuple[F32, I32]:
            return rank.runner.score(rank.plan(plan), target_ids, before.hidden)

        scores = [self._pool.submit(score, rank) for rank in self._stages[-1]]
        errors = [str(error) for error in (each.exception() for each in scores) if error is not None]
        if errors:
            raise InfercError(_cause(errors))
        return scores[0].result()

    def _run(self, stages: Sequence[list[_Rank]], plan: StepPlan) -> StepResult:
        """Return the result of the last of `stages`, or the error of the rank that failed."""
        result = StepResult(np.zeros(0, np.int32))
        for rendezvous in self._rendezvous:
            rendezvous.reset()
        for stage in stages:
            for rank in stage:
                rank.runner.submit(rank.plan(plan), result.hidden)
            results = [rank.runner.wait() for rank in stage]
            errors = [each.error for each in results if each.error is not None]
            result = replace(results[0], error=_cause(errors) if errors else None)
            if errors:
                break
        return result

    def reset_slot(self, slot: int, prompt_ids: I32 | None, output_ids: I32 | None = None) -> None:
        for rank in self._stages[-1]:
            rank.runner.reset_slot(slot, prompt_ids, output_ids)

    def set_observer(self, observer: Observer | None) -> None:
        """Set the observer of the last stage's first rank, like `CpuRunner.set_observer`."""
        self._stages[-1][0].runner.set_observer(observer)

    def close(self) -> None:
        for stage in self._stages:
            for rank in stage:
                rank.runner.close()
        self._pool.shutdown()

    def _with_ids(self, plan: StepPlan) -> StepPlan:
        """Return the plan completed with the late ids, which only the last stage's runners know.

        Late ids are those that were sampled after the plan was made.
        """
        token_ids = plan.token_ids.copy()
        token_ids[plan.pending_rows] = self._last_ids[plan.pending_slots]
        none = np.zeros(0, np.int32)
        return replace(plan, token_ids=token_ids, pending_rows=none, pending_slots=none)


def _cause(errors: Sequence[str]) -> str:
    """Return the first error that is not a mere consequence of another rank's failure."""
    return next((each for each in errors if BrokenBarrierError.__name__ not in each), errors[0])
