"""The benchmark of an artifact on this machine: latency of one request alone, and throughput of many at once.

Prompts are random token ids from a fixed seed. Decoding is greedy and ends only by length.
"""

from __future__ import annotations

import math
import queue
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from inferc.cost.machine import cpuinfo, measure_read, peak_flops
from inferc.errors import RequestError
from inferc.kv_groups import CacheGroup, cache_groups
from inferc.manifest_types import Node, StoredWeight
from inferc.runtime.artifact.load import Artifact
from inferc.runtime.engine.loop import EngineClient, Event, Failed
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.sequence import Output

REPEATS = 3


@dataclass(frozen=True)
class ModelCost:
    """The cost of a token according to the artifact's own figures."""

    dtype: str
    vocab_size: int
    max_model_len: int
    weights_bytes: int  # bytes that each step reads once, however many tokens it has
    kv_groups: tuple[CacheGroup, ...]
    num_parameters: int  # the number of weights that a token is multiplied with

    def kv_bytes(self, context: int) -> int:
        """Return the bytes of K and V that a decode step of one sequence reads at position `context`."""
        groups = self.kv_groups
        return sum(group.bytes_per_token * (context + 1 - group.first_key(context)) for group in groups)


def model_cost(artifact: Artifact) -> ModelCost:
    """Compute the cost from the lowered graphs of all ranks.

    An embedding lookup is free, and only routed experts count.
    """
    ep = artifact.config.ep
    used = [used_by_token(rank.program.program.nodes, rank.weights, ep) for rank in artifact.ranks]
    return ModelCost(
        dtype=artifact.config.dtype,
        vocab_size=artifact.vocab_size,
        max_model_len=artifact.max_model_len,
        weights_bytes=int(sum(num_bytes for num_bytes, _ in used)),
        kv_groups=cache_groups(artifact.whole_kv_groups),
        num_parameters=int(sum(count for _, count in used)),
    )


def used_by_token(nodes: Sequence[Node], stored: Sequence[StoredWeight], ep: int = 1) -> tuple[float, float]:
    """Return the bytes and the elements of one rank's weights that a token uses; experts count by the routed share.

    nodes: of the rank's lowered graph; ep: the number of ranks that share the experts.
    """
    weight_of = {node.id: node.target for node in nodes if node.op == "get_attr"}
    weights = {weight.name: weight for weight in stored}
    top_k = next((node.args[2] for node in nodes if node.target == "inferc.moe_routing"), 0) / ep
    share = dict.fromkeys(weights, 0.0)
    for node in nodes:
        if node.op != "call_function" or node.target in ("aten.embedding", "inferc.embedding_int8"):
            continue
        for arg in node.args:
            name = weight_of.get(arg.get("node", "")) if isinstance(arg, dict) else None
            if name is not None:
                share[name] = top_k / weights[name].shape[0] if node.target == "inferc.moe_experts" else 1.0
    num_bytes = sum(share[name] * weight.num_bytes for name, weight in weights.items())
    return num_bytes, sum(share[name] * math.prod(weight.shape) for name, weight in weights.items())


@dataclass(frozen=True)
class Latency:
    """The medians of one request alone.

    mbu: the bytes that a decode step must read (weights, and K and V of half the output) per time, as a share of the
    measured `read_gb_per_s`. mfu: two operations per weight and prompt token, as a share of `peak_gflops`, which is
    computed from the clock rate and the vector width.
    """

    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    ttft_ms: float
    itl_ms: float
    mbu: float
    mfu: float | None
    input_len: int
    output_len: int
    read_gb_per_s: float
    peak_gflops: float | None


@dataclass(frozen=True)
class Throughput:
    output_tokens_per_s: float
    requests: int
    requests_per_s: float
    ttft_ms: float
    itl_ms: float
    input_len: int
    output_len: int
    concurrency: int


@dataclass
class _Run:
    """The times of one request, in seconds."""

    start: float
    arrivals: list[float]

    @property
    def ttft(self) -> float:
        return self.arrivals[0] - self.start


def latency(client: EngineClient, cost: ModelCost, num_threads: int, input_len: int, output_len: int) -> Latency:
    """Run one request at a time: the first run warms up, and the medians of the next three are returned."""
    _check_lengths(cost, input_len, output_len)
    runs = [_run_all(client, cost, input_len, output_len, 1, 1, seed)[0] for seed in range(REPEATS + 1)][1:]
    ttft = statistics.median(run.ttft for run in runs)
    itl = statistics.median((run.arrivals[-1] - run.arrivals[0]) / (len(run.arrivals) - 1) for run in runs)
    read = measure_read(num_threads)
    peak = peak_flops(num_threads, cost.dtype, cpuinfo())
    step_bytes = cost.weights_bytes + cost.kv_bytes(input_len + output_len // 2)
    return Latency(
        prefill_tokens_per_s=input_len / ttft,
        decode_tokens_per_s=1 / itl,
        ttft_ms=1e3 * ttft,
        itl_ms=1e3 * itl,
        mbu=step_bytes / itl / read,
        mfu=None if peak is None else 2 * cost.num_parameters * input_len / ttft / peak,
        input_len=input_len,
        output_len=output_len,
        read_gb_per_s=read / 1e9,
        peak_gflops=None if peak is None else peak / 1e9,
    )


def throughput(
    client: EngineClient, cost: ModelCost, input_len: int, output_len: int, concurrency: int, requests: int
) -> Throughput:
    """Run `requests` requests, `concurrency` of them at any time."""
    _check_lengths(cost, input_len, output_len)
    _run_all(client, cost, input_len, 2, concurrency, concurrency, seed=0)
    start = time.perf_counter()
    runs = _run_all(client, cost, input_len, output_len, concurrency, requests, seed=1)
    seconds = time.perf_counter() - start
    gaps = [later - earlier for run in runs for earlier, later in zip(run.arrivals, run.arrivals[1:], strict=False)]
    return Throughput(
        output_tokens_per_s=sum(len(run.arrivals) for run in runs) / seconds,
        requests=len(runs),
        requests_per_s=len(runs) / seconds,
        ttft_ms=1e3 * statistics.median(run.ttft for run in runs),
        itl_ms=1e3 * statistics.median(gaps),
        input_len=input_len,
        output_len=output_len,
        concurrency=concurrency,
    )


def _check_lengths(cost: ModelCost, input_len: int, output_len: int) -> None:
    if input_len < 1 or output_len < 2:
        raise RequestError(f"input_len {input_len} and output_len {output_len}: expected at least 1 and 2")
    if input_len + output_len > cost.max_model_len:
        raise RequestError(
            f"input_len {input_len} and output_len {output_len} make {input_len + output_len} tokens,"
            f" and the model takes {cost.max_model_len}; lower one"
        )


def _run_all(
    client: EngineClient, cost: ModelCost, input_len: int, output_len: int, concurrency: int, requests: int, seed: int
) -> list[_Run]:
    """Run `requests` requests, `concurrency` at a time, and return their times in the order of their start."""
    random = np.random.default_rng(seed)
    params = SamplingParams(temperature=0.0, max_tokens=output_len, ignore_eos=True)
    events: queue.SimpleQueue[tuple[float, _Run, Event]] = queue.SimpleQueue()
    runs: list[_Run] = []

    def start_one() -> None:
        prompt = random.integers(0, cost.vocab_size, input_len).tolist()
        run = _Run(time.perf_counter(), [])
        runs.append(run)
        client.add(prompt, params, lambda event: events.put((time.perf_counter(), run, event)))

    for _ in range(min(concurrency, requests)):
        start_one()
    done = 0
    while done < requests:
        arrival, run, event = events.get()
        if isinstance(event, Failed):
            raise event.error
        assert isinstance(event, Output), event
        run.arrivals.extend([arrival] * len(event.token_ids))
        if event.finish_reason is not None:
            done += 1
            if len(runs) < requests:
                start_one()
    return runs
