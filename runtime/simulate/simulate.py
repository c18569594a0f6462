"""The playback of a trace to engines: real ones, or simulated ones whose steps take as long as a cost model predicts.

Scheduler, cache and engine are the ones that serve; only the runner and the clock are replaced. So the effect of a
policy, a limit or more memory on TTFT, TBT and goodput is known within seconds, on any machine.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from inferc.errors import ObjectiveError
from inferc.runtime.engine.engine import Engine, ModelLimits
from inferc.runtime.runners.api import Runner
from inferc.runtime.scheduler.config import SchedulerConfig
from inferc.runtime.simulate.trace import Prompts, Trace, TraceRequest
from inferc.runtime.step.cost import StepCost, StepWork
from inferc.runtime.step.plan import F32, F64, I32, I64, StepPlan, StepResult
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.sequence import Sequence as RunningSequence

END = 0  # the token id that ends an output; prompts do not contain it
FILLER = 1  # the token id that is sampled while an output continues
MAX_SAMPLES = 2000  # the most samples of the engines' state over time


class VirtualClock:
    """A clock that stands still unless it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class CostRunner:
    """A runner whose steps take the time that a cost model predicts, on a virtual clock; it samples FILLER."""

    def __init__(self, cost: StepCost, clock: VirtualClock) -> None:
        self._cost, self._clock = cost, clock
        self._queue: deque[tuple[float, int]] = deque()  # (when a step is done, the number of rows that it samples)
        self._free_at = 0.0

    def submit(self, plan: StepPlan) -> None:
        num_new = np.diff(plan.query_start_loc).astype(np.int64)
        seconds = self._cost.seconds(StepWork.of(plan.seq_lens.astype(np.int64), num_new))
        self._free_at = max(self._clock.now, self._free_at) + seconds
        self._queue.append((self._free_at, len(plan.logits_rows)))

    def wait(self) -> StepResult:
        done_at, rows = self._queue.popleft()
        self._clock.now = max(self._clock.now, done_at)
        return StepResult(np.full(rows, FILLER, np.int32))

    def reset_slot(self, slot: int, prompt_ids: I32 | None, output_ids: I32 | None = None) -> None:
        del slot, prompt_ids, output_ids

    def score(self, plan: StepPlan, target_ids: I32) -> tuple[F32, I32]:
        raise NotImplementedError("a trace has no texts to score")

    def close(self) -> None:
        self._queue.clear()


class EndingRunner:
    """A runner that wraps another, and ends every output at the length that the trace gives.

    No other part of the engine knows that length; it has to be predicted, as in production.
    """

    def __init__(self, runner: Runner, slots: int) -> None:
        self.runner = runner
        self.lengths: dict[str, int] = {}  # the output length by request
        self.sequences: Sequence[RunningSequence | None] = ()  # the scheduler's sequences by slot
        self._length_of: I64 = np.zeros(slots, np.int64)
        self._plans: deque[StepPlan] = deque()

    def submit(self, plan: StepPlan) -> None:
        self._plans.append(plan)
        self.runner.submit(plan)

    def wait(self) -> StepResult:
        sample, result = self._plans.popleft().sample, self.runner.wait()
        if result.error is not None:
            return result
        ids = np.where(result.token_ids == END, FILLER, result.token_ids)
        ids[sample.counters.astype(np.int64) + 1 >= self._length_of[sample.seq_slots]] = END
        return StepResult(ids.astype(np.int32), result.logprobs, result.failed)

    def reset_slot(self, slot: int, prompt_ids: I32 | None, output_ids: I32 | None = None) -> None:
        seq = self.sequences[slot]
        assert seq is not None
        self._length_of[slot] = self.lengths[seq.request_id]
        self.runner.reset_slot(slot, prompt_ids, output_ids)

    def score(self, plan: StepPlan, target_ids: I32) -> tuple[F32, I32]:
        return self.runner.score(plan, target_ids)

    def close(self) -> None:
        self.runner.close()


@dataclass
class Replica:
    """An engine that plays a trace, with its clock and its way to let time pass."""

    engine: Engine
    clock: Callable[[], float]
    sleep: Callable[[float], None]
    runner: EndingRunner

    @staticmethod
    def simulated(config: SchedulerConfig, vocab_size: int, cost: StepCost) -> Replica:
        """Return an engine whose steps take as long as `cost` says, and whose forecast already knows that cost."""
        clock = VirtualClock()
        runner = EndingRunner(CostRunner(cost, clock), config.max_num_seqs)
        engine = Engine(runner, ModelLimits(vocab_size, config.max_model_len), config, clock=clock)
        engine.scheduler.forecast.cost = cost
        runner.sequences = engine.scheduler.batch.seqs
        return Replica(engine, clock, clock.sleep, runner)

    @staticmethod
    def real(engine: Engine, clock: Callable[[], float], sleep: Callable[[float], None]) -> Replica:
        """Return an engine with its own runner, whose output lengths are given by the trace from now on."""
        runner = EndingRunner(engine.runner, engine.scheduler.config.max_num_seqs)
        runner.sequences = engine.scheduler.batch.seqs
        engine.runner = runner
        return Replica(engine, clock, sleep, runner)

    @property
    def num_open(self) -> int:
        """The number of prompt and output tokens of all waiting and running requests."""
        return sum(len(seq.token_ids) for seqs in self.engine.open_requests for seq in seqs)


@dataclass
class RequestTimes:
    """The times of one request, in seconds. gaps: between its tokens. refused: it could not be served in time."""

    request: TraceRequest
    arrival: float  # time on the replica's clock
    first: float | None = None
    last: float = 0.0
    num_tokens: int = 0
    gaps: list[float] = field(default_factory=list)
    refused: bool = False

    @property
    def ttft(self) -> float:
        assert self.first is not None
        return self.first - self.arrival

    @property
    def latency(self) -> float:
        return self.last - self.arrival

    @property
    def mean_gap(self) -> float:
        return sum(self.gaps) / len(self.gaps) if self.gaps else 0.0

    def is_good(self, ttft: float, tbt: float) -> bool:
        """Return whether TTFT is at most `ttft` and the mean gap between tokens at most `tbt`, in seconds."""
        return self.first is not None and not self.refused and self.ttft <= ttft and self.mean_gap <= tbt


@dataclass
class Playback:
    """The result of playing a trace.

    times: the requests in the order of the trace; samples: over time, the columns seconds, running sequences, waiting
    sequences and the used share of the KV cache.
    """

    times: list[RequestTimes]
    samples: F64  # [samples, 4], for all replicas together
    prompt_tokens: int
    cached_tokens: int
    num_preemptions: int
    num_steps: int
    length_error: float
    length_error_of_mean: float
    seconds: float  # from the first arrival to the last token


def play(
    replicas: Sequence[Replica],
    trace: Trace,
    objectives: tuple[float | None, float | None] = (None, None),
    progress: Callable[[int], None] | None = None,
) -> Playback:
    """Play a trace until the last answer, sending each request to the engine with the least open work.

    objectives: the TTFT and TBT in milliseconds that every request asks for. progress: called with the number of
    requests that have arrived.
    """
    prompts = Prompts(trace, replicas[0].engine.model.vocab_size)
    start = max(replica.clock() for replica in replicas)
    times: list[RequestTimes] = []
    samples: list[tuple[float, float, float, float]] = []
    every = max(1, len(trace.requests) // MAX_SAMPLES)
    before = [replica.engine.stats() for replica in replicas]
    for number, request in enumerate(trace.requests):
        for replica in replicas:
            _advance(replica, start + request.arrival, times)
        if number % every == 0:
            samples.append(_state(replicas, request.arrival))
        replica = min(replicas, key=lambda each: each.num_open)
        times.append(RequestTimes(request, start + request.arrival))
        _add(replica, number, request, prompts, trace.longest_output, objectives, times)
        if progress is not None:
            progress(number + 1)
    for replica in replicas:
        _advance(replica, None, times)
    end = max([each.last for each in times if each.num_tokens], default=start)
    samples.append(_state(replicas, end - start))
    stats = [replica.engine.stats() for replica in replicas]

    def grown(name: str) -> int:
        return int(sum(getattr(now, name) - getattr(then, name) for now, then in zip(stats, before, strict=True)))

    return Playback(
        times,
        np.array(samples),
        grown("admitted_tokens"),
        grown("cached_tokens"),
        grown("num_preemptions"),
        grown("num_steps"),
        length_error=stats[0].length_error,
        length_error_of_mean=stats[0].length_error_of_mean,
        seconds=end - start,
    )


def _add(
    replica: Replica,
    number: int,
    request: TraceRequest,
    prompts: Prompts,
    longest: int,
    objectives: tuple[float | None, float | None],
    times: list[RequestTimes],
) -> None:
    name = str(number)
    replica.runner.lengths[name] = request.output_len
    params = SamplingParams(
        temperature=0.0,
        max_tokens=longest,  # like a client's limit, which says little about the output's length
        ignore_eos=True,
        stop_token_ids=(END,),
        client=request.client,
        priority=request.priority,
        ttft_ms=objectives[0],
        tbt_ms=objectives[1],
    )
    try:
        replica.engine.add_request(name, prompts.of(request), params)
    except ObjectiveError:
        times[number].refused = True


def _advance(replica: Replica, until: float | None, times: list[RequestTimes]) -> None:
    """Let an engine work until a time, or until it is done."""
    engine, clock = replica.engine, replica.clock
    while True:
        left = np.inf if until is None else until - clock()
        if left <= 0 or (until is None and not engine.has_work):
            return
        idle = engine.idle_seconds if engine.has_work else left
        if idle:
            replica.sleep(min(idle, left))
            continue
        outputs, now = engine.step(), clock()
        for output in outputs:
            entry = times[int(output.request_id)]
            if entry.first is None:
                entry.first = now
            else:
                entry.gaps.append(now - entry.last)
            entry.last = now
            entry.num_tokens += 1
        for name, _ in engine.take_refused():
            times[int(name)].refused = True


def _state(replicas: Sequence[Replica], seconds: float) -> tuple[float, float, float, float]:
    schedulers = [replica.engine.scheduler for replica in replicas]
    running = sum(scheduler.num_running for scheduler in schedulers)
    waiting = sum(len(scheduler.waiting) for scheduler in schedulers)
    return seconds, running, waiting, sum(scheduler.cache.usage for scheduler in schedulers) / len(schedulers)
