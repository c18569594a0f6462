"""The diagnosis of a slow server, by its metrics and by the round-trip time to it.

The causes are checked in this order: memory pressure, batch configuration, cache misses, network. The first that is
found explains those after it: sequences that wait for blocks fill the queue, and a long queue is no reason to blame the
cache.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from inferc.client.scrape import Change, Page, rounded

MAX_LAG_SECONDS = 0.1  # the longest lag of the server's event loop that counts as healthy
Cause = Literal["memory", "batch", "cache", "network", "device", "engine"]
TTFT, QUEUE, PREFILL = (
    "inferc_time_to_first_token_seconds",
    "inferc_request_queue_seconds",
    "inferc_request_prefill_seconds",
)
TBT = "inferc_time_between_tokens_seconds"


@dataclass(frozen=True)
class Objectives:
    """The limits above which a server counts as slow."""

    ttft_ms: float = 500.0
    tbt_ms: float = 100.0
    rtt_ms: float = 50.0  # the round-trip time to the server


@dataclass(frozen=True)
class Finding:
    """A cause that was checked, with the evidence seen and, where it is the cause, the advice what to do."""

    cause: Cause
    title: str
    is_found: bool
    evidence: tuple[str, ...]
    advice: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """The diagnosis of one model.

    symptoms: empty for a model that is well. findings: in the order in which the causes were checked.
    """

    model: str
    symptoms: tuple[str, ...]
    findings: tuple[Finding, ...] = ()
    numbers: dict[str, float | None] = field(default_factory=dict)

    @property
    def cause(self) -> Finding | None:
        """The first cause that was found."""
        return next((finding for finding in self.findings if finding.is_found), None)


def diagnose(pages: Sequence[Page], model: str, round_trips: Sequence[float], objectives: Objectives) -> Diagnosis:
    """Diagnose a model from several pages of metrics and measured round trips.

    pages: in order of time; round_trips: the seconds of requests that do nothing, nan where one failed.
    """
    whole = Change(pages[0], pages[-1], model)
    gauges = _Gauges.of(pages, model)
    rtt = _median([each for each in round_trips if not math.isnan(each)])
    failed = sum(math.isnan(each) for each in round_trips)
    symptoms = _symptoms(whole, pages, objectives)
    if rtt > objectives.rtt_ms / 1e3 or failed:
        symptoms.append(
            f"the way to the server and back takes {_ms(rtt)}" + (f", {failed} tries failed" if failed else "")
        )
    # Each page has the worst lag of one second. A single stall does not explain what is slow all the time.
    lag = _median([page.sum("inferc_event_loop_lag_seconds") for page in pages])
    if lag > MAX_LAG_SECONDS:
        symptoms.append(f"the server's own event loop comes late, by {_ms(lag)} in most seconds")
    findings = (
        _state(whole),
        _memory(whole, gauges),
        _batch(whole, gauges, objectives),
        _cache(whole, pages),
        _network(whole, lag, rtt, failed, len(round_trips), objectives),
        _device(whole),
    )
    numbers = {
        "ttft_p90_ms": rounded(1e3 * whole.quantile(TTFT, 0.9)),
        "tbt_p90_ms": rounded(1e3 * whole.quantile(TBT, 0.9)),
        "output_tokens_per_s": rounded(whole.rate("inferc_output_tokens_total")),
        "kv_usage": rounded(gauges.kv_usage),
        "waiting": rounded(gauges.waiting),
        "rtt_ms": rounded(1e3 * rtt),
    }
    return Diagnosis(model, tuple(symptoms), findings if symptoms else (), numbers)


@dataclass(frozen=True)
class _Gauges:
    """The means of a model's gauges over the pages."""

    running: float
    waiting: float
    places: float
    kv_usage: float

    @staticmethod
    def of(pages: Sequence[Page], model: str) -> _Gauges:
        def mean(name: str) -> float:
            return sum(page.sum(name, model_name=model) for page in pages) / len(pages)

        names = (
            "inferc_sequences_running",
            "inferc_sequences_waiting",
            "inferc_sequences_max",
            "inferc_kv_usage_ratio",
        )
        return _Gauges(*(mean(name) for name in names))


def _symptoms(whole: Change, pages: Sequence[Page], objectives: Objectives) -> list[str]:
    found = []
    ttft, tbt = whole.quantile(TTFT, 0.9), whole.quantile(TBT, 0.9)
    if ttft > objectives.ttft_ms / 1e3:
        found.append(f"time to first token: p90 is {_ms(ttft)}, more than {objectives.ttft_ms:g} ms")
    waits = all(page.sum("inferc_sequences_waiting", model_name=whole.model) >= 1 for page in pages)
    if waits and math.isnan(ttft) and whole.seconds > objectives.ttft_ms / 1e3:
        found.append(f"time to first token: sequences wait, and none has had one within {whole.seconds:.1f} s")
    if tbt > objectives.tbt_ms / 1e3:
        found.append(f"time between tokens: p90 is {_ms(tbt)}, more than {objectives.tbt_ms:g} ms")
    tokens, busy = "inferc_output_tokens_total", "inferc_device_busy_seconds_total"
    steps_before = pages[0].sum("inferc_steps_total", model_name=whole.model)
    before = _ratio(pages[0].sum(tokens, model_name=whole.model), pages[0].sum(busy, model_name=whole.model))
    now = _ratio(whole.gain(tokens), whole.gain(busy))
    if steps_before > 100 and whole.gain(busy) > 0.2 * whole.seconds and now < 0.5 * before:
        found.append(f"throughput: {now:.0f} tokens per busy second, {before:.0f} before")
    is_open = all(page.sum("inferc_requests_open", model_name=whole.model) > 0 for page in pages)
    if is_open and not whole.gain(tokens):
        found.append(f"requests are open, and no token came within {whole.seconds:.0f} s")
    if whole.state not in ("serving", "asleep"):
        found.append(f"the model is {whole.state}")
    return found


def _state(whole: Change) -> Finding:
    restarts = int(whole.gain("inferc_engine_restarts_total"))
    is_found = whole.state not in ("serving", "asleep") or restarts > 0
    evidence = (f"the model is {whole.state}", f"{restarts} restarts of its engine meanwhile")
    return Finding("engine", "the engine itself", is_found, evidence, "The server's log says what the engine died of.")


def _memory(whole: Change, gauges: _Gauges) -> Finding:
    """Check for memory pressure.

    The KV cache is full, sequences are preempted, or they wait though the batch has places.
    """
    # If no request has ended between the pages, count the running sequences instead.
    requests = whole.gain("inferc_requests_total") or max(1.0, gauges.running)
    preempted = whole.gain("inferc_preemptions_total") / requests
    waits_for_blocks = gauges.waiting >= 1 and gauges.running < 0.9 * gauges.places and gauges.kv_usage > 0.5
    evidence = [
        f"KV cache {100 * gauges.kv_usage:.0f} % in use",
        f"{gauges.waiting:.1f} sequences wait while {gauges.running:.1f} of {gauges.places:.0f} places are taken",
        f"{preempted:.2f} preemptions a request",
    ]
    return Finding(
        "memory",
        "memory pressure",
        gauges.kv_usage > 0.9 or preempted > 0.1 or waits_for_blocks,
        tuple(evidence),
        "Sequences wait for blocks of the KV cache: raise --kv-memory, compile with --kv-dtype int8,"
        " shorten what is asked for (--max-output-tokens), or add --kv-disk.",
    )


def _batch(whole: Change, gauges: _Gauges, objectives: Objectives) -> Finding:
    """Check the batch configuration: the batch has no place for waiting sequences, or long steps delay tokens."""
    queue, ttft = whole.mean(QUEUE), whole.mean(TTFT)
    is_full = gauges.waiting >= 1 and gauges.running >= 0.9 * gauges.places
    tokens = whole.mean("inferc_step_tokens")
    chunks_hold_up = whole.quantile(TBT, 0.9) > objectives.tbt_ms / 1e3 and tokens > 4 * max(1.0, gauges.running)
    evidence = [
        f"{gauges.running:.1f} of {gauges.places:.0f} places are taken, {gauges.waiting:.1f} sequences wait",
        f"of {_ms(ttft)} to the first token {_ms(queue)} are queue",
        f"{tokens:.0f} tokens a step",
    ]
    if is_full:
        advice = (
            "The batch has no place for those that wait: raise --max-num-seqs if the device is not at its limit"
            " (inferc bench throughput tells), else add a server; --max-queue-seconds refuses what would wait too long."
        )
    else:
        advice = (
            "Chunks of prompts make steps long: lower --max-num-batched-tokens,"
            " or set --tbt-ms so that they are cut by time."
        )
    return Finding("batch", "batch configuration", is_full or chunks_hold_up, tuple(evidence), advice)


def _cache(whole: Change, pages: Sequence[Page]) -> Finding:
    """Check for cache misses: prompts are computed that used to be found in the prefix cache."""
    hits, queried = "inferc_prefix_cache_hit_tokens_total", "inferc_prefix_cache_queried_tokens_total"
    first = pages[0]
    before = _ratio(first.sum(hits, model_name=whole.model), first.sum(queried, model_name=whole.model))
    now = _ratio(whole.gain(hits), whole.gain(queried))
    prefill, ttft = whole.mean(PREFILL), whole.mean(TTFT)
    evicted = whole.gain("inferc_prefix_cache_evicted_blocks_total")
    is_prefill = prefill > 0.5 * ttft
    is_lower = before > 0.2 and now < 0.6 * before
    evidence = [
        f"{_percent(now)} of prompt tokens were found in the prefix cache, {_percent(before)} before",
        f"of {_ms(ttft)} to the first token {_ms(prefill)} are prefill",
        f"{evicted:.0f} blocks were evicted meanwhile",
    ]
    return Finding(
        "cache",
        "cache misses",
        whole.gain(queried) > 0 and is_prefill and (is_lower or (evicted > 0 and now < 0.2)),
        tuple(evidence),
        "Prompts are computed again that were cached once: give the cache room (--kv-memory, --kv-disk),"
        " send requests that begin alike to the same server, and pin what all share with cache_priority.",
    )


def _network(whole: Change, lag: float, rtt: float, failed: int, tries: int, objectives: Objectives) -> Finding:
    """Check the network: the server is quick but the way to it is slow, or its event loop is late."""
    evidence = [
        f"a request that does nothing takes {_ms(rtt)} there and back; {failed} of {tries} failed",
        f"the server's event loop was late by {_ms(lag)} in most seconds",
        f"time to first token on the server: p90 {_ms(whole.quantile(TTFT, 0.9))}",
    ]
    slow = rtt > objectives.rtt_ms / 1e3 or failed > 0
    if slow and not rtt <= 2 * lag:  # also true if rtt is nan because all tries failed
        advice = (
            "The server answers at once, and the way to it is slow or loses packets: look at the network and proxies."
        )
    else:
        advice = (
            "The server's own process comes late: it has too many streams for one core, or something takes its core."
        )
    return Finding("network", "network", slow or lag > MAX_LAG_SECONDS, tuple(evidence), advice)


def _device(whole: Change) -> Finding:
    """Report the device as the cause if no other was found: its steps are slow by themselves."""
    step = _ratio(whole.gain("inferc_device_busy_seconds_total"), whole.gain("inferc_steps_total"))
    evidence = [
        f"the device is busy {100 * whole.busy:.0f} % of the time, a step takes {_ms(step)}",
        f"the batch is {_percent(whole.batch_fill)} full",
        f"steps take {_percent(whole.now('inferc_prediction_error_ratio'))} more or less than foreseen",
    ]
    advice = (
        "Steps are long by themselves: something else uses the cores or the GPU, or the machine is at its limit;"
        " compare with inferc bench latency, and see inferc bench kernels."
    )
    return Finding("device", "the device", True, tuple(evidence), advice)


def _median(values: Sequence[float]) -> float:
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else math.nan


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole > 0 else 0.0


def _percent(value: float) -> str:
    return "–" if math.isnan(value) else f"{100 * value:.0f} %"


def _ms(seconds: float) -> str:
    return "–" if math.isnan(seconds) else f"{1e3 * seconds:.3g} ms" if seconds < 1 else f"{seconds:.1f} s"
