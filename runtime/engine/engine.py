"""The engine core: schedules a step, runs it and updates the sequences; it knows token ids only.

One step is in flight while the next is scheduled (a pipeline of depth one), so the device does not wait for the host.
"""

from __future__ import annotations

import logging
import secrets
import time
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Ids
from dataclasses import dataclass, replace
from itertools import chain
from typing import TypeAlias

import numpy as np

from inferc.errors import InfercError, ObjectiveError, RequestError
from inferc.runtime.adapters.store import AdapterStore, find_adapter
from inferc.runtime.engine.request_checks import check_choices, check_sampling
from inferc.runtime.engine.scoring import Pooling, Score, Scorer
from inferc.runtime.engine.stats import STEP_TOKENS, EngineStats
from inferc.runtime.grammar.grammars import Grammars
from inferc.runtime.kv_cache.events import KvBatch, batch_now
from inferc.runtime.kv_cache.hashing import root_hash
from inferc.runtime.offload.manager import BlockMover
from inferc.runtime.record.recorder import Recorder
from inferc.runtime.record.tapped import TapCollector
from inferc.runtime.record.watcher import Watcher
from inferc.runtime.runners.api import Runner
from inferc.runtime.scheduler.config import SchedulerConfig
from inferc.runtime.scheduler.scheduler import Scheduler
from inferc.runtime.speculation.speculation import Speculation
from inferc.runtime.step.cost import StepWork
from inferc.runtime.step.plan import F32, Logprobs, StepPlan
from inferc.runtime.step.prompt_limits import check_ids, check_length
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.sequence import Output, Sequence, StepOutputs, sequence_seed

log = logging.getLogger(__name__)

COMPILE_SECONDS = 0.05  # how long a step waits for a grammar if there is nothing else to do
STORE_SECONDS = 5.0  # the time after the last step to store blocks for the next run

Outputs: TypeAlias = StepOutputs | list[Output]  # the outputs of a step, to be iterated once


class HalfAdded(Exception):
    """The error raised if the scheduler failed while it took a request.

    What of the request is left in the scheduler is not known, so the engine cannot go on.
    """


@dataclass(frozen=True)
class ModelLimits:
    """The properties of the model that the engine must know."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    pooling: Pooling | None = None  # how texts are embedded, if the model and its runner can
    cache_identity: tuple[str, str] = ("", "")  # (hash of the model, dtype of K and V), see `root_hash`


class Engine:
    """An engine that takes requests and returns tokens; it is not thread-safe: one thread calls it (see loop.py).

    pipeline: False waits for every step before it schedules the next.
    before_first_output: called once, and may raise (the check of the weights).
    clock: the scheduler's clock, in seconds.
    mover: that of the KV cache's offload tier, if there is one.
    recorder: records every request that begins.
    taps: keep the values of requests that ask for it.
    idle_work: does a piece of work that is better done while no request is there; returns False after the last piece.
    grammars: hold answers to the form that a request asks for.
    speculation: drafts tokens; the runner must be able to compute them.
    adapters: the LoRA adapters that requests may name.
    takes_processors: the runner lets functions of a request change its logits.
    """

    def __init__(
        self,
        runner: Runner,
        model: ModelLimits,
        config: SchedulerConfig,
        pipeline: bool = True,
        before_first_output: Callable[[], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
        mover: BlockMover | None = None,
        recorder: Recorder | None = None,
        taps: TapCollector | None = None,
        idle_work: Callable[[], bool] | None = None,
        grammars: Grammars | None = None,
        speculation: Speculation | None = None,
        adapters: AdapterStore | None = None,
        takes_processors: bool = False,
    ) -> None:
        self.runner = runner
        self.adapters = adapters
        self._takes_processors = takes_processors
        self._row_errors: dict[str, str] = {}  # why rows of the last step failed, by request
        self._idle_work = idle_work
        self.taps = taps
        self.grammars = grammars or Grammars(None, config.max_num_seqs, model.vocab_size)
        feed = None if speculation is None else speculation.watcher
        self._watchers: tuple[Watcher, ...] = tuple(each for each in (recorder, taps, feed) if each is not None)
        self._before_first_output = before_first_output
        self.model = model
        self.scheduler = Scheduler(config, clock, mover, speculation)
        self.speculation = speculation
        if speculation is not None:
            speculation.hold_to(self.grammars, self.scheduler.batch)
        self._is_whole = True  # whether all steps so far have ended as they should
        self._clock = clock
        self._landed_at = 0.0
        self._submitted_at: deque[float] = deque()  # when the steps in flight were submitted
        self._depth = 1 if pipeline else 0
        self._in_flight: deque[StepPlan] = deque()
        self._num_landed = 0
        self._requests: dict[str, list[Sequence]] = {}
        self._refused: list[tuple[str, str]] = []
        self._scorer = Scorer(self.scheduler, model.pooling)
        self._arrival = 0
        self._stats = EngineStats(num_blocks=list(config.num_blocks), block_size=config.block_size)

    # -------------------------------------------------------------------------------------------- requests

    def add_request(self, request_id: str, prompt_token_ids: Ids[int], params: SamplingParams, name: str = "") -> None:
        """Queue a request: `params.n` sequences of one prompt.

        name: the caller's own name for the request.

        Raises RequestError for a prompt or a parameter that this model cannot take, and ObjectiveError if the request
        cannot be served in the time that it asks for. After any other error except HalfAdded, `abort` removes all that
        is left of it.
        """
        if request_id in self._requests or self.grammars.is_parked(request_id):
            raise RequestError(f"request id {request_id!r} is in use; give every request its own")
        prompt = list(prompt_token_ids)
        self._check_prompt(prompt, 1)
        check_sampling(params, self.model.vocab_size, self._takes_processors)
        # The last token's K and V are never read, so a sequence may have one token more than the cache holds.
        longest = min(self.model.max_model_len, self.scheduler.cache.max_tokens + 1)
        wanted = self.model.max_model_len if params.max_tokens is None else len(prompt) + params.max_tokens
        if params.max_tokens is not None and longest < min(wanted, self.model.max_model_len):
            raise RequestError(
                f"the prompt's {len(prompt)} tokens and max_tokens {params.max_tokens} do not fit the whole KV cache,"
                f" which holds {self.scheduler.cache.max_tokens}; lower max_tokens, or raise --kv-memory"
            )
        eos = () if params.ignore_eos else self.model.eos_token_ids
        ends = frozenset((*eos, *params.stop_token_ids))
        check_choices(params, ends, self.model.vocab_size)
        if params.structured_outputs is not None:
            self.grammars.check(bool(self.model.eos_token_ids), params.structured_outputs.label)
        if params.tap and self.taps is None:
            raise RequestError("tap: this engine keeps no values; start it with --tap NAME, or leave it out")
        for each in self._watchers:
            each.check(len(prompt), min(longest, wanted), params)
        seed = secrets.randbits(64) if params.seed is None else params.seed
        seqs = self._sequences(request_id, prompt, params, seed, min(longest, wanted), ends)
        if (objection := self.scheduler.objection(seqs[0])) is not None:
            self._stats.num_refused += 1
            raise ObjectiveError(objection)
        if params.structured_outputs is None:
            self._begin(seqs, name, seed)
        else:
            self.grammars.park(seqs, lambda held: self._begin(held, name, seed))

    def _begin(self, seqs: list[Sequence], name: str, seed: int) -> None:
        request_id = seqs[0].request_id
        try:
            for seq in seqs:
                self.scheduler.add(seq)
        except Exception as error:
            raise HalfAdded(f"request {request_id} is half in the scheduler") from error
        self._requests[request_id] = seqs
        self._stats.prompt_tokens += seqs[0].prompt_len
        for each in self._watchers:
            each.begin(name, seed, seqs)

    def _sequences(
        self,
        request_id: str,
        prompt: list[int],
        params: SamplingParams,
        seed: int,
        max_total: int,
        ends: frozenset[int],
    ) -> list[Sequence]:
        """Make the sequences of a request; they share the hashes of their prompt's blocks."""
        root, adapter = self._root(params.adapter, params.cache_salt)
        prompt_hashes: list[bytes] = []
        seqs = []
        for index in range(params.n):
            seq = Sequence(
                request_id,
                index,
                self._arrival,
                len(prompt),
                prompt.copy(),
                params,
                sequence_seed(seed, index),
                max_total,
                ends,
                root=root,
                prompt_hashes=prompt_hashes,
                adapter=adapter,
            )
            self._arrival += 1
            seqs.append(seq)
        return seqs

    def _root(self, adapter: str, cache_salt: str) -> tuple[bytes, int]:
        """Return the hash before the first block of a sequence, and the number of its adapter."""
        digest, number = find_adapter(self.adapters, adapter)
        return root_hash(*self.model.cache_identity, digest, cache_salt), number

    def release_adapters(self) -> None:
        """Free the adapters that were unloaded and that no open request has any more."""
        if self.adapters is not None and self.adapters.has_leaving:
            self.adapters.release(self.adapters_in_use())

    def adapters_in_use(self) -> set[int]:
        """The numbers of the adapters of open requests."""
        seqs = chain(chain.from_iterable(self._requests.values()), self.grammars.parked)
        return {seq.adapter for seq in seqs} | self._scorer.adapters

    def abort(self, request_id: str, index: int | None = None, cause: str = "abort") -> None:
        """End a request, or one sequence of it; no output follows.

        Unknown ids are ignored, because the request may have just ended.
        cause: the cause that a recording states.
        """
        if self.grammars.abort(request_id, index):
            return
        for seq in self._requests.get(request_id, [])[:]:
            if index is None or seq.index == index:
                self.scheduler.abort(seq)
                if index is not None and seq.params.stop:  # ended by a stop string, like other ends
                    self.scheduler.forecast.lengths.learn(seq)
                    cause = "stop_string"
                self._forget(seq, "abort", cause)
        self._scorer.abort(request_id)

    def score(
        self,
        request_id: str,
        token_ids: Ids[int],
        num_top: int = 0,
        cache_salt: str = "",
        first: int = 1,
        adapter: str = "",
    ) -> None:
        """Queue the scoring of a text; `take_scores` returns it when it is done.

        num_top: how many of the most likely tokens to return for each position, at most MAX_LOGPROBS.
        cache_salt: sequences with the same salt can find its blocks afterwards.
        first: the first token to score; what is cached of the tokens before it is not computed again.
        adapter: the name of the LoRA adapter with which it is scored.

        Raises RequestError like `add_request`.
        """
        ids = list(token_ids)
        self._check_prompt(ids, 0)
        if len(ids) < 2:
            raise RequestError("scoring needs 2 tokens or more, since the first has nothing before it")
        if not 1 <= first < len(ids):
            raise RequestError(f"first is {first}; of a text of {len(ids)} tokens, 1 to {len(ids) - 1} can be scored")
        root, number = self._root(adapter, cache_salt)
        self._scorer.add(request_id, ids, num_top, root, cache_salt, first, number, adapter)

    def embed(self, request_id: str, token_ids: Ids[int]) -> None:
        """Queue a text to embed; `take_embedded` returns its vector when it is done.

        Raises RequestError like `add_request`, and for a model that makes no vectors.
        """
        if self.model.pooling is None:
            raise RequestError("this model makes no vectors of texts: it was not made for it")
        ids = list(token_ids)
        self._check_prompt(ids, 0)
        self._scorer.add_to_embed(request_id, ids)

    @property
    def request_ids(self) -> list[str]:
        """The ids of the requests that have not ended."""
        return [*self._requests, *self.grammars.parked_ids]

    @property
    def open_requests(self) -> Iterable[list[Sequence]]:
        """The sequences of each request that have not ended."""
        return self._requests.values()

    def take_scores(self) -> list[tuple[str, Score]]:
        """Return the scores that were finished since the last call, with their request ids."""
        return self._scorer.take()

    def take_score_rows(self) -> list[tuple[str, list[Logprobs]]]:
        """Return the rows so far of texts that are still being scored, if `num_top` asked for rows.

        The Scores of these texts will lack the rows that were returned.
        """
        return self._scorer.take_rows()

    def take_embedded(self) -> list[tuple[str, F32]]:
        """Return the vectors that were made since the last call, with their request ids."""
        return self._scorer.take_embedded()

    def take_refused(self) -> list[tuple[str, str]]:
        """Return the requests refused by the scheduler since the last call, and why; none of their tokens were out."""
        refused, self._refused = self._refused, []
        return refused

    def take_row_errors(self) -> dict[str, str]:
        """Return why rows of the steps since the last call failed, by request, where that is known."""
        found, self._row_errors = self._row_errors, {}
        return found

    @property
    def collects_kv_events(self) -> bool:
        return self.scheduler.events is not None

    def take_kv_events(self) -> KvBatch | None:
        """Return what the prefix cache stored and removed since the last call, or None.

        None means that nothing changed, or that the events are not collected. Events are kept until they are taken, so
        a caller that turned them on has to take them.
        """
        events = self.scheduler.events.take() if self.scheduler.events is not None else None
        return batch_now(events) if events else None

    def _end_refused(self) -> None:
        """End all sequences of the requests of which the scheduler has refused one."""
        for seq, reason in self.scheduler.refused:
            self._refused.append((seq.request_id, reason))
            self._stats.num_refused += 1
            self.abort(seq.request_id, cause="refused")
        self.scheduler.refused.clear()

    def _check_prompt(self, prompt: list[int], room: int) -> None:
        if not prompt:
            raise RequestError("the prompt is empty; give at least one token")
        check_ids("prompt", prompt, self.model.vocab_size)
        held = self.scheduler.cache.max_tokens if room else self.scheduler.cache.max_tokens_at_once
        check_length(len(prompt), self.model.max_model_len, room)
        if len(prompt) > held:
            raise RequestError(
                f"the prompt has {len(prompt)} tokens, and the whole KV cache holds {held};"
                " shorten it, or raise --kv-memory"
            )

    def _forget(self, seq: Sequence, reason: str, recorded: str | None = None) -> None:
        seqs = self._requests[seq.request_id]
        seqs.remove(seq)
        if not seqs:
            del self._requests[seq.request_id]
        self._stats.finished[reason] = self._stats.finished.get(reason, 0) + 1
        self.grammars.forget(seq)
        for each in self._watchers:
            each.end(seq, recorded or reason)

    # ------------------------------------------------------------------------------------------------ step

    @property
    def has_work(self) -> bool:
        """True if a step has anything to do, which may be to store unreferenced blocks in the offload tier."""
        return self._is_computing or self.grammars.has_parked or self.scheduler.offload.is_busy

    @property
    def _is_computing(self) -> bool:
        return bool(self._in_flight or self._scorer.has_work or self.scheduler.has_work)

    @property
    def idle_seconds(self) -> float | None:
        """The time for which a step would find nothing to do unless a request comes; None if it has something to do."""
        if self.grammars.has_parked and not self._is_computing and not self.scheduler.offload.is_busy:
            return self.grammars.idle_seconds
        if self._in_flight or self._scorer.has_work or self.scheduler.wake_at is None:
            return None
        return max(0.0, self.scheduler.wake_at - self._clock())

    def use_idle_time(self) -> bool:
        """Do a piece of work that is better done while idle, in milliseconds; return False if nothing is left."""
        if self._idle_work is not None and not self._idle_work():
            self._idle_work = None
        return self._idle_work is not None

    def step(self) -> Outputs:
        """Schedule and submit one step, land the one before it, and return the outputs of that one.

        Raises InfercError if the runner failed; the engine cannot go on then.
        """
        self._is_whole = False
        if self.grammars.has_parked:
            self.grammars.begin_ready(0.0 if self._is_computing else COMPILE_SECONDS)
        outputs = self._score() if self._scorer.has_work else []
        landed: Outputs = []
        if self._in_flight and (len(self._in_flight[-1].num_drafted) or self.scheduler.waits_for_ids()):
            landed = self._land()
        plan = self._schedule()
        if plan is not None:
            self._submit(plan)
            if landed and self.speculation is not None:
                self.speculation.observe_waiting(self._submitted_at[-1] - self._landed_at)
        if not landed and self._in_flight and (plan is None or len(self._in_flight) > self._depth):
            landed = self._land()
        self._is_whole = True
        return [*outputs, *landed] if outputs else landed

    def _score(self) -> list[Output]:
        """Compute a chunk of a scored text between two steps, and return the outputs of the steps in flight."""
        outputs: list[Output] = []
        while self._in_flight:
            outputs += self._land()
        self._open_gate()
        self._scorer.step(self.runner)
        return outputs

    def _schedule(self) -> StepPlan | None:
        started = time.perf_counter()
        plan = self.scheduler.schedule()
        # Before the step lands that other sequences of these requests may be in.
        if self.scheduler.refused:
            self._end_refused()
        self._stats.schedule_seconds += time.perf_counter() - started
        return plan

    def _submit(self, plan: StepPlan) -> None:
        stats, started = self._stats, time.perf_counter()
        for seq in self.scheduler.joined:
            self._reset_slot(seq)
        self.grammars.mask(plan, self.scheduler.batch)
        self.scheduler.offload.read_ahead(plan)
        for each in self._watchers:
            each.submitted(plan, self.scheduler.batch.seqs)
        self.runner.submit(plan)
        self._in_flight.append(plan)
        self._submitted_at.append(self._clock())
        stats.num_steps += 1
        stats.scheduled_tokens += plan.num_tokens
        stats.step_seqs += plan.num_seqs - plan.num_branches
        stats.step_tokens[bisect_left(STEP_TOKENS, plan.num_tokens)] += 1
        stats.submit_seconds += time.perf_counter() - started

    def _reset_slot(self, seq: Sequence) -> None:
        assert seq.slot is not None
        self.grammars.assign(seq)
        params = seq.params
        if params.repetition_penalty == 1.0 and not params.presence_penalty and not params.frequency_penalty:
            self.runner.reset_slot(seq.slot, None)
        else:
            ids = np.array(seq.token_ids, np.int32)
            self.runner.reset_slot(seq.slot, ids[: seq.prompt_len], ids[seq.prompt_len :])

    def _land(self) -> StepOutputs:
        stats, started = self._stats, time.perf_counter()
        plan = self._in_flight.popleft()
        result = self.runner.wait()
        self._open_gate()
        landed = time.perf_counter()
        stats.wait_seconds += landed - started
        if result.error is not None:
            raise InfercError(f"the step failed: {result.error}")
        seconds = self._observe(plan)
        for each in self._watchers:
            each.landed(plan, result)
        if plan.processed is not None:
            for row, why in plan.processed.errors.items():
                if (of_row := self.scheduler.batch.seqs[plan.sample.seq_slots[row]]) is not None:
                    self._row_errors[of_row.request_id] = why
        outputs = self.scheduler.update(plan, result)
        self._num_landed += 1
        outputs.step, outputs.step_seconds = self._num_landed, seconds
        stats.output_tokens += outputs.num_tokens
        for each in self._watchers:
            each.updated(outputs)
        for output in outputs.ends:
            seqs = self._requests[output.request_id]
            self._forget(next(seq for seq in seqs if seq.index == output.index), output.finish_reason or "")
        stats.update_seconds += time.perf_counter() - landed
        return outputs

    def _observe(self, plan: StepPlan) -> float:
        """Learn what steps cost, and return how long this one took, in seconds.

        It began when it was submitted, or when the one before it was done.
        """
        now, begun = self._clock(), max(self._submitted_at.popleft(), self._landed_at)
        self._landed_at = now
        self._stats.busy_seconds += now - begun
        if self.speculation is not None and len(plan.logits_rows) == plan.num_tokens and not plan.loads:
            self.speculation.observe(plan.num_tokens, now - begun)
        # Loading blocks makes steps longer, and no price covers it.
        if self.scheduler.foresees and not any(each.loads for each in (plan, *self._in_flight)):
            num_new = np.diff(plan.query_start_loc).astype(np.int64)
            self.scheduler.forecast.observe(StepWork.of(plan.seq_lens.astype(np.int64), num_new), now - begun)
        return now - begun

    def _open_gate(self) -> None:
        if self._before_first_output is not None:
            self._before_first_output()
            self._before_first_output = None

    # ------------------------------------------------------------------------------------------------ others

    def stats(self) -> EngineStats:
        """Return the present counters and gauges."""
        scheduler = self.scheduler
        self._stats.num_waiting, self._stats.num_running = len(scheduler.waiting), scheduler.num_running
        waiting = (seq.request_id for seq in scheduler.waiting)
        waiting_ids = (*waiting, *self.grammars.parked_ids, *self._scorer.waiting_ids)
        self._stats.waiting_ids = list(dict.fromkeys(waiting_ids))
        self._stats.num_waiting += self.grammars.num_parked
        self._stats.kv_usage, self._stats.num_preemptions = scheduler.cache.usage, scheduler.num_preemptions
        self._stats.num_freed_outside_window, self._stats.num_evicted = (
            scheduler.cache.num_freed_outside_window,
            scheduler.cache.num_evicted,
        )
        if (manager := scheduler.offload.manager) is not None:
            self._stats.num_stored, self._stats.num_damaged = manager.num_stored, manager.num_damaged
            self._stats.num_swapped, self._stats.num_spilled = manager.num_swapped, manager.num_spilled
            self._stats.num_loaded, self._stats.offload_usage = scheduler.cache.num_loaded, manager.usage
            self._stats.num_waiting += manager.num_fetching
            self._stats.waiting_ids += manager.fetching_ids
        if self.speculation is not None:
            drafted = self.speculation.stats
            self._stats.num_drafts, self._stats.num_drafted = drafted.num_drafts, drafted.num_drafted
            self._stats.num_accepted = drafted.num_accepted
        forecast = scheduler.forecast
        self._stats.length_error, self._stats.cost_error = forecast.lengths.error, forecast.cost.error
        self._stats.length_error_of_mean = forecast.lengths.error_of_mean
        self._stats.admitted_tokens = scheduler.num_prompt_tokens
        self._stats.cached_tokens = scheduler.num_cached_tokens
        return replace(self._stats, finished=self._stats.finished.copy(), step_tokens=self._stats.step_tokens.copy())

    def close(self) -> None:
        """Store blocks that the next run may want, for some seconds at most, and release everything.

        Recordings and taps treat requests that have not ended as aborted.
        """
        try:
            for request_id in self.request_ids if self._watchers else ():
                self.abort(request_id)
            for each in self._watchers:
                each.close()
        finally:
            if self._is_whole and self.scheduler.offload.outlives_engine:
                self._store_all()
            try:
                self.scheduler.offload.close()  # before the runner, whose memory it may be reading
            finally:
                self.runner.close()
                self.grammars.close()
                if self.speculation is not None:
                    self.speculation.close()

    def _store_all(self) -> None:
        """End all requests, and copy the blocks of all sequences to the offload tier."""
        offload, end = self.scheduler.offload, time.monotonic() + STORE_SECONDS
        for request_id in self.request_ids:
            self.abort(request_id)
        try:
            while self._in_flight:
                self._land()
        except InfercError:  # the failed step has not computed its blocks
            return
        while self.scheduler.schedule() is None and offload.is_busy and time.monotonic() < end:
            time.sleep(0.001)
        if offload.is_busy:
            log.warning("the KV cache was not stored whole within %g s", STORE_SECONDS)
