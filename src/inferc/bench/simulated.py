"""The simulation of candidates for `inferc bench tune`: the engine's scheduler and cache with measured step times."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from inferc.bench.candidates import (
    BUDGETS,
    SEQS,
    STEP,
    Candidate,
    Outcome,
    best_rung,
    borne,
    highest_good,
    next_rung,
)
from inferc.bench.figures import Goals
from inferc.bench.session import Settings
from inferc.bench.workload import Lengths, Replayed, Texts
from inferc.errors import InfercError
from inferc.kv_groups import CacheGroup
from inferc.runtime.artifact.load import Artifact
from inferc.runtime.engine.load import load_engine
from inferc.runtime.scheduler.config import SchedulerConfig
from inferc.runtime.scheduler.policies import parse_policy
from inferc.runtime.simulate.calibrate import CostFile, measure_cost
from inferc.runtime.simulate.simulate import Playback, Replica, play
from inferc.runtime.simulate.trace import Trace
from inferc.runtime.step.cost import MIN_STEPS
from inferc.runtime.text.tokenizer import Text

ALONE = 0.05  # mean number of requests in flight below which a request practically has the engine for itself
LEAST_REQUESTS = 10  # smallest number of requests of a load
LEAST_ALONE = 100  # number of requests simulated to see whether requests that run alone are good
MOST_ANSWERS = 10  # length of a load, in durations of one answer, beyond which it need not be longer
MOST_TRIES = 3  # attempts to measure step times, each twice as long as the one before


def measure_prices(
    artifact: Artifact, threads: int | None, isa: str, seconds: float, progress: Callable[[float], None]
) -> CostFile:
    """Measure the cost of engine steps on this machine, up to the largest step that a candidate asks for.

    Raises InfercError if too few steps run in the time.
    """
    engine = load_engine(
        artifact,
        num_threads="auto" if threads is None else threads,
        isa=isa,
        max_num_seqs=max(SEQS),
        max_num_batched_tokens=max(BUDGETS),
    )
    try:
        for _ in range(MOST_TRIES):
            found = measure_cost(engine, artifact.path.name, seconds, artifact.kv_bytes_per_token, progress)
            if found.num_steps >= 2 * MIN_STEPS:
                return found
            seconds *= 2
    finally:
        engine.close()
    raise InfercError(
        f"only {found.num_steps} steps ran in {seconds / 2:.0f} s, too few to know their price; raise --minutes"
    )


def input_lens(workload: Texts, artifact: Artifact) -> list[int]:
    """Return the number of tokens of each prompt of a text workload."""
    text = Text(artifact.tokenizer)
    return [len(text.encode(each) if isinstance(each, str) else text.encode_chat(each)) for each in workload.prompts]


@dataclass
class Simulator:
    """A simulator of a workload on candidates, at the rates of one ladder: `base` * STEP ** rung.

    prices: step costs, by the number of threads.
    seconds: how long a load sends requests (at least LEAST_REQUESTS of them); None means ten times the duration of a
    request that has the engine for itself.
    lens: prompt lengths of a text workload.
    """

    settings: Settings  # the rates in it are empty; each simulated load sets its own
    prices: dict[int | None, CostFile]
    lens: Sequence[int] = ()
    seconds: float | None = None
    outcomes: dict[Candidate, dict[int, Outcome]] = field(default_factory=dict)

    @property
    def goals(self) -> Goals:
        return self.settings.goals

    def rate(self, rung: int) -> float:
        return self.base * STEP**rung

    @cached_property
    def alone_seconds(self) -> float:
        """The mean duration, in seconds, of a request that has the engine for itself."""
        played = self._play(self._any, 1e-6, LEAST_REQUESTS)
        return float(np.mean([each.latency for each in played.times]))

    @cached_property
    def base(self) -> float:
        return 1 / self.alone_seconds

    @property
    def _any(self) -> Candidate:
        return Candidate(max(SEQS), max(BUDGETS))

    def alone(self) -> tuple[float, float, float]:
        """Simulate requests that run alone; return the share of good ones and the medians of TTFT and TPOT in ms."""
        played = self._play(self._any, ALONE / self.alone_seconds, LEAST_ALONE)
        ttft, gaps = (np.median([getattr(each, name) for each in played.times]) for name in ("ttft", "mean_gap"))
        return self._share(played), 1e3 * float(ttft), 1e3 * float(gaps)

    def outcome(self, candidate: Candidate, rung: int) -> Outcome:
        known = self.outcomes.setdefault(candidate, {})
        if rung not in known:
            rate = self.rate(rung)
            played = self._play(candidate, rate)
            share, answers = self._share(played), len(played.times) / max(played.seconds, 1e-9)
            known[rung] = Outcome(rate, answers, share * answers, share)
        return known[rung]

    def answer_seconds(self, candidate: Candidate, rung: int) -> float:
        """Return the mean duration of a request at a rung, in seconds."""
        played = self._play(candidate, self.rate(rung))
        return float(np.mean([each.latency for each in played.times if each.num_tokens]))

    def find(self, candidate: Candidate, first: int) -> int | None:
        """Return the highest rung that a candidate sustains; None if not even requests that run alone are good."""
        share = self.goals.share
        known: dict[int, Outcome] = {}
        while (rung := next_rung(borne(known, share), first)) is not None:
            if self.is_below_the_ladder(rung):
                break
            known[rung] = self.outcome(candidate, rung)
        return highest_good(borne(known, share))

    def good(self, candidate: Candidate) -> float | None:
        """Return the good requests per second at the best simulated rate; None if no rate is sustained."""
        known = self.outcomes.get(candidate, {})
        rung = best_rung(known, self.goals.share)
        return None if rung is None else known[rung].good

    def is_below_the_ladder(self, rung: int) -> bool:
        """Return whether requests run alone at this rung, so that a lower rate changes nothing."""
        return self.rate(rung) * self.alone_seconds < ALONE / STEP

    def settings_at(self, rate: float) -> Settings:
        """Return the settings of a load at one rate."""
        seconds = self.seconds if self.seconds is not None else MOST_ANSWERS * self.alone_seconds
        return self._settings(rate, max(LEAST_REQUESTS, math.ceil(rate * seconds)))

    def _settings(self, rate: float, requests: int) -> Settings:
        workload = self.settings.workload
        if isinstance(workload, Replayed):
            requests = min(requests, len(workload.trace.requests))
            return replace(self.settings, requests=requests, speeds=(rate / workload.rate_of(requests),))
        return replace(self.settings, requests=requests, rates=(rate,))

    def _trace(self, settings: Settings) -> Trace:
        workload = self.settings.workload
        if isinstance(workload, Replayed):
            return workload.as_trace(settings.times(settings.speeds[0]))
        times = settings.times(settings.rates[0])
        if isinstance(workload, Lengths):
            return workload.as_trace(times, settings.seed)
        return workload.as_trace(times, settings.seed, self.lens)

    @property
    def longest_output(self) -> int:
        return self._trace(self.settings_at(self.base)).longest_output

    def _play(self, candidate: Candidate, rate: float, requests: int | None = None) -> Playback:
        prices = self.prices[candidate.threads]
        replica = Replica.simulated(_config(prices, candidate), prices.vocab_size, prices.cost)
        settings = self.settings_at(rate) if requests is None else self._settings(rate, requests)
        return play([replica], self._trace(settings), self.objectives(candidate))

    def objectives(self, candidate: Candidate) -> tuple[float | None, float | None]:
        """Return the TTFT and TBT objectives of each request; only a policy that refuses requests uses them."""
        goals = self.goals
        return (goals.ttft_ms, goals.tbt_ms) if parse_policy(candidate.policy).refuses else (None, None)

    def _share(self, played: Playback) -> float:
        ttft, tbt = ((np.inf if goal is None else goal) / 1e3 for goal in (self.goals.ttft_ms, self.goals.tbt_ms))
        return float(np.mean([each.is_good(ttft, tbt) for each in played.times]))


def _config(prices: CostFile, candidate: Candidate) -> SchedulerConfig:
    # The KV cache of a server: blocks for all sequences at full length, but at most as many as the measured engine had.
    room = 1 + candidate.max_num_seqs * -(-prices.max_model_len // prices.block_size)
    return SchedulerConfig(
        max_num_seqs=candidate.max_num_seqs,
        max_num_batched_tokens=candidate.max_num_batched_tokens,
        max_model_len=prices.max_model_len,
        num_blocks=(min(room, prices.num_blocks),),
        block_size=prices.block_size,
        groups=(CacheGroup(prices.kv_bytes_per_token),),
        prefix_cache=candidate.prefix_cache,
        policy=candidate.policy,
        tbt_ms=candidate.tbt_ms,
    )
