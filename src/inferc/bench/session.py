"""The measurement session: it puts one load after the other on a server and collects the metrics of each."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field, replace

import numpy as np

from inferc.bench.connect import connect
from inferc.bench.endpoints import Endpoint, ServerFacts, Target, check_lengths
from inferc.bench.figures import Goals, LoadOf, Point, ServeResult, figures, largest_good_rate, next_rate
from inferc.bench.load import Interrupt, Load, run_load, warm_up
from inferc.bench.workload import Arrivals, Plan, Prompt, Replayed, Texts, Workload
from inferc.errors import ConfigError
from inferc.runtime.step.plan import F64
from inferc.system.progress import Progress

DEFAULT_REQUESTS = 100
MOST_KEPT = 100_000  # number of requests planned for a closed loop that only a time limit ends
MOST_SEARCHED = 16  # largest number of loads in a search
ALONE = 0.1  # mean number of requests in flight below which a request practically has the server for itself


@dataclass(frozen=True)
class Settings:
    """The settings of a measurement; exactly one of rates, speeds and concurrency sets how much load there is.

    speeds: factors by which the arrivals of a trace are replayed faster.
    find: continue between and beyond the given rates until the largest good rate is known to within 10 %.
    requests, seconds: whichever limit is reached first ends a load.
    """

    workload: Workload
    rates: tuple[float, ...] = ()
    speeds: tuple[float, ...] = ()
    concurrency: int | None = None
    arrivals: Arrivals = field(default_factory=Arrivals)
    requests: int | None = None
    seconds: float | None = None
    warmup: int | None = None
    seed: int = 0
    goals: Goals = field(default_factory=Goals)
    find: bool = False
    first_turn: int = 1  # number of the first load; loads with different numbers have different prompts

    def __post_init__(self) -> None:
        if self.find and self.concurrency is not None:
            raise ConfigError("--find looks for a request rate; give --rate or --trace to begin with, no --concurrency")

    def times(self, level: float | None) -> F64:
        """Return the arrival times of a load in seconds; the pattern is the same at every rate.

        level: the request rate, or the speed of a trace; None for a closed loop.
        """
        workload, count = self.workload, self.requests
        if isinstance(workload, Replayed):
            count = min(count or len(workload.trace.requests), len(workload.trace.requests))
            if self.speeds:
                assert level is not None
                return workload.times(level, count, self.seconds)
        if level is None:
            assert self.concurrency is not None
            return np.zeros(count or (4 * self.concurrency if self.seconds is None else MOST_KEPT))
        if count is None and self.seconds is None:
            count = DEFAULT_REQUESTS
        return self.arrivals.times(level, count, self.seconds, np.random.default_rng((self.seed, 3)))

    def load_of(self, level: float | None, times: F64, plan: Plan) -> LoadOf:
        inputs, outputs = (
            round(float(np.mean([getattr(each, name) for each in plan.requests]))) if plan.requests else 0
            for name in ("input_len", "output_len")
        )
        what = LoadOf(inputs, outputs, concurrency=self.concurrency)
        if level is None:
            return what
        if self.speeds:
            mean = (len(times) - 1) / float(times[-1]) if len(times) > 1 and times[-1] > 0 else 0.0
            return replace(what, rate=mean, speed=level)
        return replace(what, rate=level)


@dataclass
class Measured:
    """The raw loads and the metrics of a measurement, in the order in which the loads ran."""

    facts: ServerFacts
    loads: list[Load] = field(default_factory=list)
    results: list[ServeResult] = field(default_factory=list)
    is_interrupted: bool = False

    def points(self, by_speed: bool) -> list[Point]:
        found = []
        for each in self.results:
            level = each.speed if by_speed else each.rate
            if level is not None and each.goodput is not None and not each.unfinished:
                found.append(Point(level, each.goodput))
        return found

    def largest_good(self, by_speed: bool, share: float) -> float | None:
        return largest_good_rate(self.points(by_speed), share)


def measure(target: Target, settings: Settings, progress: Progress) -> Measured:
    """Warm a server up and put each load on it; an interrupt ends the measurement with the results so far."""
    return asyncio.run(_measure(target, settings, progress))


async def _measure(target: Target, settings: Settings, progress: Progress) -> Measured:
    workload = settings.workload
    probe: Prompt | None = workload.prompts[0] if isinstance(workload, Texts) else None
    if target.kind == "completions" and isinstance(workload, Texts) and workload.has_chats:
        raise ConfigError("--prompts has chats, which need --endpoint chat")
    endpoint = await connect(target, probe)
    interrupt = Interrupt()
    try:
        with interrupt.listening():
            measured = Measured(endpoint.facts)
            await _loads(endpoint, settings, interrupt, measured, progress)
            measured.is_interrupted = interrupt.is_set
            return measured
    finally:
        await endpoint.close()


async def _loads(
    endpoint: Endpoint, settings: Settings, interrupt: Interrupt, measured: Measured, progress: Progress
) -> None:
    levels: list[float | None] = [*settings.rates, *settings.speeds] or [None]
    turn = settings.first_turn - 1
    while levels and not interrupt.is_set:
        level = levels.pop(0)
        turn += 1
        times = settings.times(level)
        plan = settings.workload.plan(times, endpoint.facts.vocab_size, settings.seed, turn)
        if not plan.requests:
            raise ConfigError("no request comes in this time; raise --seconds or --rate")
        check_lengths(endpoint.facts, plan.longest.input_len, plan.longest.output_len)
        if turn == settings.first_turn:
            progress("warming up", 0, 1)
            count = settings.warmup if settings.warmup is not None else settings.concurrency or 4
            await warm_up(endpoint, plan, count, settings.seed, interrupt)
            if interrupt.is_set:
                return
        await _one(endpoint, settings, interrupt, measured, progress, level, times, plan)
        if settings.find and not levels and len(measured.results) < MOST_SEARCHED:
            levels += _following(measured, settings)


def _following(measured: Measured, settings: Settings) -> list[float]:
    """Return the next level of a search in a list, which is empty when the search is over."""
    points, last = measured.points(bool(settings.speeds)), measured.results[-1]
    if not points:
        return []
    alone = last.rate is not None and last.e2e_ms is not None and last.rate * last.e2e_ms.mean / 1e3 < ALONE
    if alone and points[-1].share < settings.goals.share:
        return []  # even requests that practically have the server for themselves are not good
    following = next_rate(points, settings.goals.share, points[-1].rate)
    return [] if following is None else [following]


async def _one(
    endpoint: Endpoint,
    settings: Settings,
    interrupt: Interrupt,
    measured: Measured,
    progress: Progress,
    level: float | None,
    times: F64,
    plan: Plan,
) -> None:
    what = settings.load_of(level, times, plan)
    stage = f"{what.concurrency} at once" if level is None else f"{what.rate:.4g} requests/s"
    is_open_ended = level is None and settings.requests is None and settings.seconds is not None

    def report(done: int, total: int) -> None:
        progress(stage, done, 1 if is_open_ended else total)

    report(0, len(plan.requests))
    seconds = settings.seconds
    load = await run_load(
        endpoint, plan, interrupt, None if level is not None else settings.concurrency, seconds, report
    )
    measured.loads.append(load)
    measured.results.append(figures(load, what, settings.goals, endpoint.facts))
