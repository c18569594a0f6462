"""The counters and histograms of a model's requests, kept on the event loop at the cost of a few additions per token.

The names under which they are exported are in metrics_page.py; the engine's own counters are in EngineStats.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from inferc.runtime.measure.histogram import Histogram

# Histogram bounds in seconds. LATENCY_BOUNDS: for the time to first token and for whole requests, a millisecond to ten
# minutes. TOKEN_BOUNDS: for the time between tokens, a millisecond to five seconds.
# fmt: off
LATENCY_BOUNDS = (
    0.001, 0.0025, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 7.5,
    10.0, 20.0, 40.0, 80.0, 160.0, 640.0,
)
TOKEN_BOUNDS = (
    0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.025, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
    0.75, 1.0, 2.5, 5.0,
)
# fmt: on
LENGTH_BOUNDS = tuple(float(2**power) for power in range(18))
# How a request ended. "stop": by an end token or a stop string. "length": at its length limit. "error": by a fault.
# "aborted": by Abort. "left": its client disconnected. "refused": it never started, for want of room, time or rights.
# "invalid": it never started, because the request itself was wrong.
Outcome = Literal["stop", "length", "error", "aborted", "left", "refused", "invalid"]
OUTCOMES: tuple[Outcome, ...] = ("stop", "length", "error", "aborted", "left", "refused", "invalid")


@dataclass(frozen=True)
class Objectives:
    """The latency objectives that a request must meet to count as good, unless it states its own; None: none."""

    ttft_ms: float | None = 500.0
    tbt_ms: float | None = 100.0


@dataclass(frozen=True)
class Ended:
    """A request that is over, as the metrics count it; times are on the monotonic clock.

    first_at, last_at and output_tokens have one entry for each of the request's outputs.
    """

    outcome: Outcome
    opened_at: float  # when the request came to the server
    prompt_tokens: int
    cached_tokens: int
    first_at: Sequence[float]  # time of an output's first token; nan if it had none
    last_at: Sequence[float]
    output_tokens: Sequence[int]
    queue_seconds: float | None = None  # from its arrival at the engine until its admission
    ttft_ms: float | None = None  # the request's own objective for the time to first token
    tbt_ms: float | None = None  # the request's own objective for the time between tokens
    refusal: str = ""  # code of the refusal's reason, if the refusal has not been counted yet
    prepare_seconds: float = 0.0  # from its arrival at the server until it was handed to the engine


@dataclass
class ModelMetrics:
    """The metrics of one model since it was loaded."""

    objectives: Objectives = field(default_factory=Objectives)
    outcomes: Counter[Outcome] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)  # refused requests by the code of the reason
    num_good: int = 0  # requests that ended by themselves and met their objectives; a part of `num_counted`
    prompt_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    last_at: float = 0.0  # when the last request ended, in seconds since 1970
    ttft: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    tbt: Histogram = field(default_factory=lambda: Histogram(TOKEN_BOUNDS))
    e2e: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))  # requests that ended by themselves
    failed: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    prepare: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    queue: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    prefill: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    decode: Histogram = field(default_factory=lambda: Histogram(LATENCY_BOUNDS))
    prompt_lengths: Histogram = field(default_factory=lambda: Histogram(LENGTH_BOUNDS))
    output_lengths: Histogram = field(default_factory=lambda: Histogram(LENGTH_BOUNDS))

    @property
    def num_counted(self) -> int:
        """The number of requests that count for goodput, each of which was good or not.

        Not among them are invalid requests, and those that were aborted or whose client left.
        """
        return sum(self.outcomes[each] for each in ("stop", "length", "error", "refused"))

    def refused(self, code: str) -> None:
        """Count a request that was refused, under `code`, which names the reason."""
        self.outcomes["refused"] += 1
        self.refusals[code] += 1

    def ended(self, request: Ended) -> None:
        now = time.monotonic()
        self.last_at = time.time()
        self.outcomes[request.outcome] += 1
        if request.refusal:
            self.refusals[request.refusal] += 1
        self.prompt_tokens += request.prompt_tokens
        self.cached_tokens += request.cached_tokens
        self.output_tokens += sum(request.output_tokens)
        first = request.first_at[0]
        if not math.isnan(first):
            queued = request.queue_seconds or 0.0
            self.prepare.observe(request.prepare_seconds)
            self.queue.observe(queued)
            self.prefill.observe(max(0.0, first - request.opened_at - request.prepare_seconds - queued))
        if request.outcome == "error":
            self.failed.observe(now - request.opened_at)
        if request.outcome not in ("stop", "length"):
            return
        self.e2e.observe(now - request.opened_at)
        self.prompt_lengths.observe(request.prompt_tokens)
        for index, count in enumerate(request.output_tokens):
            self.output_lengths.observe(count)
            if count:
                self.decode.observe(request.last_at[index] - request.first_at[index])
        self.num_good += self._is_good(request)

    def _is_good(self, request: Ended) -> bool:
        ttft_ms = request.ttft_ms if request.ttft_ms is not None else self.objectives.ttft_ms
        tbt_ms = request.tbt_ms if request.tbt_ms is not None else self.objectives.tbt_ms
        for first, last, count in zip(request.first_at, request.last_at, request.output_tokens, strict=True):
            if ttft_ms is not None and not first - request.opened_at <= ttft_ms / 1e3:
                return False
            if tbt_ms is not None and count > 1 and (last - first) / (count - 1) > tbt_ms / 1e3:
                return False
        return True
