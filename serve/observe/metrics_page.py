"""The Prometheus metrics of a server: their names, what each means, and how its values are computed.

METRICS is the only list: the /metrics page is made from it; its documentation and deploy/ are compared with it.
"""

from __future__ import annotations

import asyncio
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal, TypeAlias

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.exposition import choose_encoder

from inferc.errors import InfercError
from inferc.runtime.engine.stats import STEP_TOKENS, EngineStats
from inferc.runtime.measure.histogram import Histogram
from inferc.serve.models.metrics import OUTCOMES, Outcome
from inferc.serve.models.models import Models
from inferc.serve.models.served_model import ServedModel
from inferc.serve.models.tasks import gather
from inferc.system import resources

SCRAPE_SECONDS = 0.5  # time limit for the engines' counters; for an engine that is late, the last known ones are used
STATES = ("serving", "starting", "asleep", "draining", "damaged", "dead")

Labels: TypeAlias = tuple[str, ...]
Numbers: TypeAlias = Iterable[tuple[Labels, float]]


@dataclass(frozen=True)
class MetricSource:
    """A model, and the counters of its engine."""

    model: ServedModel
    stats: EngineStats


@dataclass(frozen=True)
class MetricSpec:
    """A metric of the /metrics page.

    labels: its labels beside model_name.
    numbers or histogram: a function that returns its values for one model.
    vllm: the name of the same metric in vLLM, if there is one. to_vllm: its labels in vLLM.
    vllm_numbers: a function that returns the values as vLLM counts them, if they differ.
    """

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    help: str
    numbers: Callable[[MetricSource], Numbers] | None = None
    histogram: Callable[[MetricSource], Histogram] | None = None
    labels: Labels = ()
    vllm: str | None = None
    to_vllm: Labels | None = None
    vllm_numbers: Callable[[MetricSource], Numbers] | None = None


def _one(value: Callable[[MetricSource], float]) -> Callable[[MetricSource], Numbers]:
    return lambda known: [((), value(known))]


def _step_tokens(known: MetricSource) -> Histogram:
    histogram = Histogram(STEP_TOKENS)
    histogram.counts = list(known.stats.step_tokens)
    histogram.sum = float(known.stats.scheduled_tokens)
    return histogram


def _step_parts(known: MetricSource) -> Numbers:
    stats = known.stats
    parts = {
        "schedule": stats.schedule_seconds,
        "submit": stats.submit_seconds,
        "wait": stats.wait_seconds,
        "update": stats.update_seconds,
    }
    return [((part,), seconds) for part, seconds in parts.items()]


def _sizes(known: MetricSource) -> Numbers:
    blocks = known.stats.num_blocks[0] if known.stats.num_blocks else 0
    return [((str(known.stats.block_size), str(blocks)), 1.0)]


def _finished(known: MetricSource) -> Numbers:
    """Count the finished requests by reason as vLLM does, which leaves out requests that never started."""
    counts = known.model.engine.metrics.outcomes
    reasons: dict[str, tuple[Outcome, ...]] = {
        "stop": ("stop",),
        "length": ("length",),
        "abort": ("aborted", "left"),
        "error": ("error",),
    }
    return [((reason,), float(sum(counts[each] for each in outcomes))) for reason, outcomes in reasons.items()]


METRICS: tuple[MetricSpec, ...] = (
    MetricSpec(
        "inferc_time_to_first_token_seconds",
        "histogram",
        "Time from a request's arrival at the server to its first token.",
        histogram=lambda known: known.model.engine.metrics.ttft,
        vllm="time_to_first_token_seconds",
    ),
    MetricSpec(
        "inferc_time_between_tokens_seconds",
        "histogram",
        "Time between a token and the one before it.",
        histogram=lambda known: known.model.engine.metrics.tbt,
        vllm="inter_token_latency_seconds",
    ),
    MetricSpec(
        "inferc_request_seconds",
        "histogram",
        "Time from a request's arrival at the server to its end; only requests that were answered.",
        histogram=lambda known: known.model.engine.metrics.e2e,
        vllm="e2e_request_latency_seconds",
    ),
    MetricSpec(
        "inferc_request_prepare_seconds",
        "histogram",
        "Time from a request's arrival at the server until the engine gets it: reading its body, tokenizing"
        " and, if asked for, scoring its prompt.",
        histogram=lambda known: known.model.engine.metrics.prepare,
    ),
    MetricSpec(
        "inferc_request_queue_seconds",
        "histogram",
        "Time from a request's arrival at the engine until it is admitted to the batch.",
        histogram=lambda known: known.model.engine.metrics.queue,
        vllm="request_queue_time_seconds",
    ),
    MetricSpec(
        "inferc_request_prefill_seconds",
        "histogram",
        "Time from a request's admission to its first token.",
        histogram=lambda known: known.model.engine.metrics.prefill,
        vllm="request_prefill_time_seconds",
    ),
    MetricSpec(
        "inferc_request_decode_seconds",
        "histogram",
        "Time from a request's first token to its last.",
        histogram=lambda known: known.model.engine.metrics.decode,
        vllm="request_decode_time_seconds",
    ),
    MetricSpec(
        "inferc_request_prompt_tokens",
        "histogram",
        "Number of prompt tokens of a request that was answered.",
        histogram=lambda known: known.model.engine.metrics.prompt_lengths,
        vllm="request_prompt_tokens",
    ),
    MetricSpec(
        "inferc_request_output_tokens",
        "histogram",
        "Number of output tokens of a sequence.",
        histogram=lambda known: known.model.engine.metrics.output_lengths,
        vllm="request_generation_tokens",
    ),
    MetricSpec(
        "inferc_requests_total",
        "counter",
        "Requests that ended, by outcome: stop (an end token or stop string), length (their limit), error (a"
        " fault), aborted (by Abort), left (the client left); refused (no room, time or rights) and invalid"
        " ones never began.",
        lambda known: [((each,), float(known.model.engine.metrics.outcomes[each])) for each in OUTCOMES],
        labels=("outcome",),
        vllm="request_success_total",
        to_vllm=("finished_reason",),
        vllm_numbers=_finished,
    ),
    MetricSpec(
        "inferc_requests_refused_total",
        "counter",
        "Requests that were refused before they began, by cause: queue_full, queue_time, rate_limit, objective,"
        " unavailable.",
        lambda known: [((code,), float(count)) for code, count in sorted(known.model.engine.metrics.refusals.items())],
        labels=("reason",),
    ),
    MetricSpec(
        "inferc_requests_judged_total",
        "counter",
        "Requests that count for goodput: answered, failed or refused. Requests that were invalid or aborted, or whose"
        " client left, do not count.",
        _one(lambda known: known.model.engine.metrics.num_counted),
    ),
    MetricSpec(
        "inferc_requests_good_total",
        "counter",
        "Requests that count for goodput and met their objectives, or the server's if they had none of their own.",
        _one(lambda known: known.model.engine.metrics.num_good),
    ),
    MetricSpec(
        "inferc_prompt_tokens_total",
        "counter",
        "Prompt tokens of all requests since the engine started.",
        _one(lambda known: known.stats.prompt_tokens),
        vllm="prompt_tokens_total",
    ),
    MetricSpec(
        "inferc_output_tokens_total",
        "counter",
        "Tokens generated since the engine started, those in no answer included: behind a stop string, or of a request"
        " that was aborted.",
        _one(lambda known: known.stats.output_tokens),
        vllm="generation_tokens_total",
    ),
    MetricSpec(
        "inferc_sequences_running",
        "gauge",
        "Sequences in the batch.",
        _one(lambda known: known.stats.num_running),
        vllm="num_requests_running",
    ),
    MetricSpec(
        "inferc_sequences_waiting",
        "gauge",
        "Sequences that wait for admission to the batch.",
        _one(lambda known: known.stats.num_waiting),
        vllm="num_requests_waiting",
    ),
    MetricSpec(
        "inferc_sequences_max",
        "gauge",
        "Most sequences that the batch can have.",
        _one(lambda known: known.model.info.max_num_seqs),
    ),
    MetricSpec(
        "inferc_requests_open",
        "gauge",
        "Requests whose streams are open.",
        _one(lambda known: known.model.engine.num_requests),
    ),
    MetricSpec(
        "inferc_kv_usage_ratio",
        "gauge",
        "Share of the KV cache's blocks that are in use, in the fullest KV group.",
        _one(lambda known: known.stats.kv_usage),
        vllm="kv_cache_usage_perc",
    ),
    MetricSpec(
        "inferc_kv_disk_usage_ratio",
        "gauge",
        "Share of the blocks on the disk (--kv-disk) that are in use.",
        _one(lambda known: known.stats.offload_usage),
    ),
    MetricSpec(
        "inferc_preemptions_total",
        "counter",
        "Running sequences that were preempted: their blocks went to others, and they start again.",
        _one(lambda known: known.stats.num_preemptions),
        vllm="num_preemptions_total",
    ),
    MetricSpec(
        "inferc_drafts_total",
        "counter",
        "Drafts of one token or more (--speculate), each for a sequence in a step.",
        _one(lambda known: known.stats.num_drafts),
        vllm="spec_decode_num_drafts_total",
    ),
    MetricSpec(
        "inferc_drafted_tokens_total",
        "counter",
        "Tokens that were drafted.",
        _one(lambda known: known.stats.num_drafted),
        vllm="spec_decode_num_draft_tokens_total",
    ),
    MetricSpec(
        "inferc_drafted_tokens_accepted_total",
        "counter",
        "Drafted tokens that the model chose as well; each saved a step.",
        _one(lambda known: known.stats.num_accepted),
        vllm="spec_decode_num_accepted_tokens_total",
    ),
    MetricSpec(
        "inferc_prefix_cache_queried_tokens_total",
        "counter",
        "Prompt tokens of admitted sequences, which are looked up in the prefix cache.",
        _one(lambda known: known.stats.admitted_tokens),
        vllm="prefix_cache_queries_total",
    ),
    MetricSpec(
        "inferc_prefix_cache_hit_tokens_total",
        "counter",
        "Prompt tokens of admitted sequences that were found in the prefix cache.",
        _one(lambda known: known.stats.cached_tokens),
        vllm="prefix_cache_hits_total",
    ),
    MetricSpec(
        "inferc_prefix_cache_evicted_blocks_total",
        "counter",
        "Blocks that were evicted from the prefix cache.",
        _one(lambda known: known.stats.num_evicted),
    ),
    MetricSpec("inferc_steps_total", "counter", "Steps of the engine.", _one(lambda known: known.stats.num_steps)),
    MetricSpec(
        "inferc_step_tokens",
        "histogram",
        "Number of tokens in a step.",
        histogram=_step_tokens,
        vllm="iteration_tokens_total",
    ),
    MetricSpec(
        "inferc_step_sequences_total",
        "counter",
        "Sequences summed over all steps; divided by steps and by inferc_sequences_max, it is how full the batch is.",
        _one(lambda known: known.stats.step_seqs),
    ),
    MetricSpec(
        "inferc_step_seconds_total",
        "counter",
        "Time that the engine's thread spent on steps, by part: planning them, handing them over, waiting for"
        " them, using their results.",
        _step_parts,
        labels=("part",),
    ),
    MetricSpec(
        "inferc_device_busy_seconds_total",
        "counter",
        "Time in which a step was running; its rate is the share of time that the device is busy.",
        _one(lambda known: known.stats.busy_seconds),
    ),
    MetricSpec(
        "inferc_engine_restarts_total",
        "counter",
        "How often the engine died or hung and was started again.",
        _one(lambda known: known.model.supervisor.num_restarts),
    ),
    MetricSpec(
        "inferc_model_swaps_total",
        "counter",
        "How often the model was put to sleep so that another could be awake (--max-awake).",
        _one(lambda known: known.model.supervisor.num_swaps),
    ),
    MetricSpec(
        "inferc_model_state",
        "gauge",
        "1 for the state that the model is in, 0 for the others.",
        lambda known: [((state,), float(known.model.state == state)) for state in STATES],
        labels=("state",),
    ),
    MetricSpec(
        "inferc_cache_info",
        "gauge",
        "Tokens of a block, and blocks of the first KV group, as labels.",
        _sizes,
        labels=("block_size", "num_blocks"),
        vllm="cache_config_info",
        to_vllm=("block_size", "num_gpu_blocks"),
    ),
    MetricSpec(
        "inferc_prediction_error_ratio",
        "gauge",
        "Mean relative error of the predicted seconds of steps.",
        _one(lambda known: known.stats.cost_error),
    ),
)
# Metrics of the server as a whole, which have no label model_name.
RESPONSES = "inferc_http_responses_total"
CALLS = "inferc_grpc_calls_total"
LAG = "inferc_event_loop_lag_seconds"
CPU_BUSY, CPUS = "inferc_host_cpu_busy_seconds_total", "inferc_host_cpus"
MEMORY_FREE, MEMORY = "inferc_host_memory_available_bytes", "inferc_host_memory_bytes"
SERVER_METRICS: tuple[tuple[str, str, str, Labels], ...] = (
    (RESPONSES, "counter", "HTTP responses, by path and status.", ("path", "status")),
    (CALLS, "counter", "gRPC calls that ended, by method and code.", ("method", "code")),
    (LAG, "gauge", "How late the server's event loop came to what was due, at worst within a second of late.", ()),
    (CPU_BUSY, "counter", "Seconds that the machine's processors were busy, with all programs, summed over them.", ()),
    (CPUS, "gauge", "Processors of the machine.", ()),
    (MEMORY_FREE, "gauge", "Memory that can be taken without swapping, within the container's limit.", ()),
    (MEMORY, "gauge", "Memory of the machine, or the container's limit.", ()),
)
# What the machine is asked for, for each of its metrics.
HOST: Mapping[str, Callable[[], float]] = {
    CPU_BUSY: resources.busy_cpu_seconds,
    CPUS: lambda: float(os.cpu_count() or 1),
    MEMORY_FREE: resources.available_memory_bytes,
    MEMORY: resources.total_memory_bytes,
}


class MetricsPage:
    """The /metrics page; with compat "vllm", metrics that vLLM has too are also there under vLLM's names."""

    def __init__(self, models: Models, compat: Literal["none", "vllm"] = "none") -> None:
        self.responses: Counter[Labels] = Counter()
        self.calls: Counter[Labels] = Counter()
        self.lag_seconds = 0.0
        self._models, self._compat = models, compat
        self._last: dict[str, EngineStats] = {}
        self._known: list[MetricSource] = []
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    async def render(self, accept: str = "") -> tuple[bytes, str]:
        """Return the page and its content type, chosen by the client's Accept header."""
        models = self._models.served
        await gather(self._refresh(model) for model in models)
        self._known = [MetricSource(model, self._last.get(model.name, EngineStats())) for model in models]
        try:
            encode, content_type = choose_encoder(accept)
        except (ValueError, TypeError):  # the header names an invalid version
            encode, content_type = choose_encoder("")
        return encode(self._registry), content_type

    async def _refresh(self, model: ServedModel) -> None:
        try:
            async with asyncio.timeout(SCRAPE_SECONDS):
                self._last[model.name] = await model.engine.stats()
        except (InfercError, TimeoutError):
            if model.state == "asleep":
                self._last.pop(model.name, None)

    def collect(self) -> Iterator[Metric]:
        """Yield all metrics; prometheus_client calls this method of its collector interface."""
        for shown in METRICS:
            yield self._family(shown, shown.name, ("model_name", *shown.labels), shown.numbers)
            if self._compat == "vllm" and shown.vllm is not None:
                labels = shown.labels if shown.to_vllm is None else shown.to_vllm
                numbers = shown.vllm_numbers or shown.numbers
                yield self._family(shown, f"vllm:{shown.vllm}", ("model_name", *labels), numbers)
        counts: dict[str, Counter[Labels]] = {RESPONSES: self.responses, CALLS: self.calls}
        for name, _, text, names in SERVER_METRICS:
            if name == LAG:
                yield GaugeMetricFamily(name, text, value=self.lag_seconds)
                continue
            if name in HOST:
                of_host = CounterMetricFamily if name == CPU_BUSY else GaugeMetricFamily
                yield of_host(name, text, value=HOST[name]())
                continue
            family = CounterMetricFamily(name, text, labels=names)
            for values, count in sorted(counts[name].items()):
                family.add_metric(values, count)
            yield family

    def _family(
        self, shown: MetricSpec, name: str, labels: Labels, numbers: Callable[[MetricSource], Numbers] | None
    ) -> Metric:
        if shown.histogram is not None:
            histograms = HistogramMetricFamily(name, shown.help, labels=labels)
            for known in self._known:
                histograms.add_metric([known.model.name], *_buckets(shown.histogram(known)))
            return histograms
        assert numbers is not None, "a metric has numbers or a histogram"
        kind: type[CounterMetricFamily | GaugeMetricFamily]
        kind = CounterMetricFamily if shown.kind == "counter" else GaugeMetricFamily
        family = kind(name, shown.help, labels=labels)
        for known in self._known:
            for values, number in numbers(known):
                family.add_metric([known.model.name, *values], number)
        return family


def _buckets(histogram: Histogram) -> tuple[list[tuple[str, float]], float]:
    """Return the cumulative counts by upper bound, and the sum."""
    total, buckets = 0, []
    for bound, count in zip((*map(str, map(float, histogram.bounds)), "+Inf"), histogram.counts, strict=True):
        total += count
        buckets.append((bound, float(total)))
    return buckets, histogram.sum


def documentation() -> str:
    """Return the table of docs/metrics.md."""
    rows = ["| name | kind | labels | what | `--metrics-compat=vllm` |", "| --- | --- | --- | --- | --- |"]
    for shown in METRICS:
        labels = ", ".join(("model_name", *shown.labels))
        alias = "" if shown.vllm is None else f"`vllm:{shown.vllm}`"
        rows.append(f"| `{shown.name}` | {shown.kind} | {labels} | {shown.help} | {alias} |")
    for name, kind, text, names in SERVER_METRICS:
        rows.append(f"| `{name}` | {kind} | {', '.join(names)} | {text} | |")
    return "\n".join(rows) + "\n"
