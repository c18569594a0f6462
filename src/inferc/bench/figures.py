"""The metrics of a load: latency percentiles as clients saw them, throughput, and how many requests were good."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from inferc.bench.answers import UNFINISHED, Answer
from inferc.bench.endpoints import ServerFacts
from inferc.bench.load import Load

LATE_MS = 5.0  # lateness of the load generator that never matters
# Lateness in recording tokens, as a share of the median time between tokens, beyond which it distorts that time.
LATE_SHARE = 0.1
WHOLE_SHARE = 0.1  # share of the answers that may arrive whole, in one message, without a warning
# Lateness in sending, as a share of the mean time between two requests, beyond which the arrival pattern is not the one
# that was asked for.
LATE_SHARE_OF_GAP = 0.5


@dataclass(frozen=True)
class Percentiles:
    """The mean, percentiles and maximum of a set of times, in milliseconds."""

    mean: float
    p50: float
    p90: float
    p95: float
    p99: float
    max: float

    @staticmethod
    def of_ms(seconds: Sequence[float]) -> Percentiles:
        values = 1e3 * np.asarray(seconds)
        return Percentiles(float(values.mean()), *map(float, np.percentile(values, (50, 90, 95, 99, 100))))

    @staticmethod
    def maybe(seconds: Sequence[float]) -> Percentiles | None:
        return Percentiles.of_ms(seconds) if len(seconds) else None


@dataclass(frozen=True)
class Goals:
    """The latency objectives that decide whether a request is good; None means that any time is good.

    share: share of the requests that should be good.
    """

    ttft_ms: float | None = 500.0
    tbt_ms: float | None = 100.0
    share: float = 0.9


@dataclass(frozen=True)
class LoadOf:
    """The description of a load: its mean lengths, and either its request rate or its concurrency.

    speed: the factor by which a trace was replayed faster. The lengths are rounded means; 0 if they are not known.
    """

    input_len: int
    output_len: int
    rate: float | None = None
    speed: float | None = None
    concurrency: int | None = None


@dataclass(frozen=True)
class ServeResult:
    """The metrics of one load as its clients saw them.

    Latencies are those of the requests that succeeded, and None if there are none. ttft: from sending to the first
    message with tokens. itl: between two tokens; the tokens of one message share the gap before it equally. tpot: the
    mean time between tokens of one request. e2e: from sending to the end of the stream.

    goodput: the share of good requests among those that completed, failed or were refused. Requests that an interrupt
    ended count only as `unfinished`. The tokens of failed answers count as output.
    """

    output_tokens_per_s: float
    requests: int
    requests_per_s: float  # successful requests per second
    ttft_ms: Percentiles | None
    itl_ms: Percentiles | None
    e2e_ms: Percentiles | None
    input_len: int
    output_len: int
    concurrency: int | None
    tpot_ms: Percentiles | None
    # Tokens per second including prompts; None if the server did not report prompt tokens and prompts were sent as
    # text.
    total_tokens_per_s: float | None
    goodput: float | None
    goodput_per_s: float
    completed: int
    failed: dict[str, int]  # by status
    unfinished: int
    rate: float | None
    speed: float | None
    seconds: float
    prompt_tokens: int | None  # prompt tokens that the server reported for the successful requests
    cached_tokens: int | None
    short_answers: int  # answers with fewer tokens than the request asked for
    prompts: str  # the form in which prompts were sent: "token ids" or "text"
    tokens_counted: dict[str, int]  # number of requests, by how their tokens were counted
    lag_ms: Percentiles | None  # lateness of the load generator in sending requests
    loop_lag_ms: Percentiles | None  # lateness of the load generator in recording the arrival of tokens
    generator_cpu: float  # CPU cores that the load generator used on average
    warnings: list[str] = field(default_factory=list)


def figures(load: Load, what: LoadOf, goals: Goals, facts: ServerFacts) -> ServeResult:
    answers = load.answers
    ok = [each for each in answers if each.is_ok]
    ended = [each for each in answers if each.status != UNFINISHED]
    seconds = max(load.seconds, 1e-9)
    good = sum(each.is_good(goals.ttft_ms, goals.tbt_ms) for each in ended)
    output = sum(each.num_tokens for each in answers)
    told = [each.prompt_tokens for each in ok if each.prompt_tokens is not None]
    cached = [each.cached_tokens for each in ok if each.cached_tokens is not None]
    is_all_told = len(told) == len(ok)
    prompt_tokens = sum(told) if is_all_told else None
    if prompt_tokens is None and facts.prompts == "token ids":
        prompt_tokens = sum(each.input_len for each in ok)
    ttft = Percentiles.maybe([each.ttft for each in ok])
    itl = Percentiles.maybe([gap for each in ok for gap in each.gaps])
    lag, loop_lag = Percentiles.maybe(load.lags), Percentiles.maybe(load.ticks)
    failed = dict(Counter(each.status for each in ended if not each.is_ok).most_common())
    return ServeResult(
        output_tokens_per_s=output / seconds,
        requests=len(answers),
        requests_per_s=len(ok) / seconds,
        ttft_ms=ttft,
        itl_ms=itl,
        e2e_ms=Percentiles.maybe([each.whole for each in ok]),
        input_len=what.input_len,
        output_len=what.output_len,
        concurrency=what.concurrency,
        tpot_ms=Percentiles.maybe([each.tpot for each in ok if each.tpot is not None]),
        total_tokens_per_s=None if prompt_tokens is None else (output + prompt_tokens) / seconds,
        goodput=good / len(ended) if ended else None,
        goodput_per_s=good / seconds,
        completed=len(ok),
        failed=failed,
        unfinished=len(answers) - len(ended),
        rate=what.rate,
        speed=what.speed,
        seconds=load.seconds,
        prompt_tokens=sum(told) if is_all_told and ok else None,
        cached_tokens=sum(cached) if cached and len(cached) == len(ok) else None,
        short_answers=sum(each.num_tokens < each.output_len for each in ok),
        prompts=facts.prompts,
        tokens_counted=dict(Counter(str(each.counted_by) for each in ok)),
        lag_ms=lag,
        loop_lag_ms=loop_lag,
        generator_cpu=load.cpu,
        warnings=[*_late(what, ttft, itl, lag, loop_lag), *_warnings(load, ok, failed)],
    )


def _late(
    what: LoadOf,
    ttft: Percentiles | None,
    itl: Percentiles | None,
    lag: Percentiles | None,
    loop_lag: Percentiles | None,
) -> list[str]:
    """Return a warning for each measurement that the load generator's own lateness distorts."""
    found = []
    if lag is not None and what.rate is not None and lag.p99 > max(LATE_MS, LATE_SHARE_OF_GAP * 1e3 / what.rate):
        found.append(
            f"requests were sent up to {lag.max:.0f} ms late (P99 {lag.p99:.0f} ms): the load was not the one that was"
            " asked for; give the generator a machine of its own, or a lower rate"
        )
    measured = itl or ttft
    if loop_lag is not None and measured is not None and loop_lag.p99 > max(LATE_MS, LATE_SHARE * measured.p50):
        found.append(
            f"this process noted tokens up to {loop_lag.max:.0f} ms late (P99 {loop_lag.p99:.0f} ms): times between"
            " tokens are partly its own; give the generator a machine of its own"
        )
    return found


def _warnings(load: Load, ok: Sequence[Answer], failed: dict[str, int]) -> list[str]:
    found = []
    if load.is_interrupted:
        found.append("interrupted: these are the figures of what had ended")
    if failed:
        message = next(each.detail for each in load.answers if each.status == next(iter(failed)))
        found.append(f"{sum(failed.values())} requests failed, the first with {next(iter(failed))}: {message}")
    whole = sum(len(each.messages) == 1 and each.num_tokens > 1 for each in ok)
    if whole > WHOLE_SHARE * len(ok):
        found.append(
            f"{whole} of {len(ok)} answers came whole, in one message: their TTFT is that of all tokens, and nothing"
            " is known of the time between these; if they are no text, --logprobs has them sent"
        )
    guessed = Counter(each.counted_by for each in ok)
    if guessed["chunks"]:
        found.append("the server does not tell how many tokens there are: a chunk counts as one")
    if guessed["shared"]:
        found.append("the server tells only at the end how many tokens there were: they are shared out over the chunks")
    return found


@dataclass(frozen=True)
class Point:
    """The share of good requests that was measured at one rate."""

    rate: float
    share: float  # share of the requests that were good


def largest_good_rate(points: Sequence[Point], share: float) -> float | None:
    """Return the largest measured rate at which, and at all lower ones, at least `share` of the requests were good.

    Return None if there is no such rate. Nothing is interpolated. If a rate was measured several times, all
    measurements must reach `share`.
    """
    found = None
    for rate in sorted({each.rate for each in points}):
        if min(each.share for each in points if each.rate == rate) < share:
            break
        found = rate
    return found


def next_rate(points: Sequence[Point], share: float, first: float, precision: float = 0.1) -> float | None:
    """Return the rate to measure next in a search for the largest good rate; None once that is known.

    The largest good rate is known when the gap to the lowest bad rate is at most `precision`, relative to it. The
    search doubles the rate as long as all rates are good, halves it as long as none is, and then takes the geometric
    mean.
    """
    good = [each.rate for each in points if each.share >= share]
    bad = [each.rate for each in points if each.share < share]
    if not points:
        return first
    if not bad:
        return 2 * max(good)
    below = [each for each in good if each < min(bad)]
    if not below:
        return min(bad) / 2
    low, high = max(below), min(bad)
    return None if high <= low * (1 + precision) else float(np.sqrt(low * high))
