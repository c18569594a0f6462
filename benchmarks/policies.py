"""Simulate each scheduling policy over two workloads; each policy should win the column it is made for.

python benchmarks/policies.py [--trace FILE] [--cost FILE] [--out FILE.json] [--plot FILE.png]

`mixed`: three kinds of requests, distinguished by the beginning of their prompts: 60 % chat turns with short answers,
15 % summaries (long prompts, short answers) and 25 % essays (short prompts, long answers), with Poisson arrivals.
`conversation`: the Mooncake trace given by --trace, lengths and times divided by 8, with a KV cache for a twentieth of
the blocks of its prompts. Both run at --load times the capacity of the engine, with 16 concurrent sequences.

Goodput counts requests whose first token came within three times what the longest prompt takes alone, and whose mean
time between tokens is within --tbt-ms. A job is short if its prompt and its answer are below the median. Capacity is
the rate at which first come, first served completes requests that all arrive at once. The table is only about time:
fairness between clients and priorities are covered by tests.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np

from inferc.kv_groups import CacheGroup
from inferc.runtime.scheduler.config import SchedulerConfig
from inferc.runtime.simulate.calibrate import SHIPPED, CostFile, read_cost
from inferc.runtime.simulate.report import plot, summarize
from inferc.runtime.simulate.simulate import Playback, Replica, play
from inferc.runtime.simulate.trace import Trace, TraceRequest, read_trace
from inferc.runtime.step.cost import StepWork

POLICIES = ("fcfs", "sjf", "mlq", "lpm", "slo", "static", "window:500ms")
BLOCK_TOKENS, NUM_SEQS = 16, 16
KINDS = {  # (share of requests, mean prompt tokens, mean answer tokens)
    "chat": (0.60, 120, 25),
    "summary": (0.15, 600, 40),
    "essay": (0.25, 60, 400),
}


def mixed(count: int, seed: int = 0) -> Trace:
    """Return a trace of requests that arrive at one per second on average; `Trace.faster` scales it to another load."""
    rng = np.random.default_rng(seed)
    names = list(KINDS)
    requests, at = [], 0.0
    for i in range(count):
        at += float(rng.exponential())
        kind = int(rng.choice(len(names), p=[KINDS[name][0] for name in names]))
        _, prompt_mean, output_mean = KINDS[names[kind]]
        prompt_len = BLOCK_TOKENS + int(prompt_mean * rng.lognormal(-0.08, 0.4))
        output_len = max(1, int(output_mean * rng.lognormal(-0.08, 0.4)))
        blocks = (kind, *(10**6 + 1000 * i + j for j in range(-(-prompt_len // BLOCK_TOKENS) - 1)))
        requests.append(TraceRequest(at, prompt_len, output_len, blocks))
    return Trace(tuple(requests), BLOCK_TOKENS)


def config_of(prices: CostFile, trace: Trace, policy: str, kv_tokens: int | None) -> SchedulerConfig:
    longest = max(each.prompt_len for each in trace.requests) + trace.longest_output
    num_blocks = prices.num_blocks if kv_tokens is None else 1 + -(-max(kv_tokens, longest) // prices.block_size)
    return SchedulerConfig(
        NUM_SEQS,
        prices.max_num_batched_tokens,
        longest + 1,
        (num_blocks,),
        prices.block_size,
        (CacheGroup(prices.kv_bytes_per_token),),
        prefix_cache=True,
        policy=policy,
    )


def run(
    prices: CostFile, trace: Trace, policy: str, kv_tokens: int | None, objectives: tuple[float | None, float | None]
) -> Playback:
    replica = Replica.simulated(config_of(prices, trace, policy, kv_tokens), prices.vocab_size, prices.cost)
    return play([replica], trace, objectives)


def capacity(prices: CostFile, trace: Trace, kv_tokens: int | None) -> float:
    """Return the requests per second that first come, first served completes when all arrive at once."""
    burst = tuple(dataclasses.replace(each, arrival=0.0) for each in trace.requests)
    played = run(prices, dataclasses.replace(trace, requests=burst), "fcfs", kv_tokens, (None, None))
    return len(trace.requests) / played.seconds


def ttft_objective(prices: CostFile, trace: Trace) -> float:
    """Return the TTFT objective in milliseconds: three times the prefill time of the longest prompt."""
    work = max(each.prompt_len for each in trace.requests) * prices.prices["tokens"]
    return round(3000 * work, -2)


def workload(
    prices: CostFile, name: str, trace: Trace, kv_tokens: int | None, load: float, tbt_ms: float
) -> tuple[dict[str, Any], dict[str, Playback]]:
    """Simulate all policies on one trace, at `load` times the capacity."""
    requests_per_s = load * capacity(prices, trace, kv_tokens)
    trace = trace.faster(requests_per_s * trace.seconds / len(trace.requests))
    asked = (ttft_objective(prices, trace), tbt_ms)
    rows, runs = [], {}
    for policy in POLICIES:
        played = runs[policy] = run(prices, trace, policy, kv_tokens, asked)
        summary = summarize(policy, 1.0, played, *asked)
        row = {**dataclasses.asdict(summary), "short_latency_p99": short_latency_p99(played, trace)}
        rows.append(row)
        print(
            f"  {policy:13} latency mean {summary.latency_mean / 1000:7.2f} s, P99 of short jobs"
            f" {row['short_latency_p99'] / 1000:7.2f} s, TTFT P99 {summary.ttft_p99 / 1000:7.2f} s, goodput"
            f" {summary.goodput:6.1%}, hits {summary.hit_rate:6.1%}, refused {summary.refused}, lengths off by"
            f" {summary.length_error:.2f} (mean: {summary.length_error_of_mean:.2f}), preempted"
            f" {summary.preemptions_per_1000:.1f}/1000"
        )
    return {
        "workload": name,
        "requests_per_s": requests_per_s,
        "ttft_ms": asked[0],
        "tbt_ms": tbt_ms,
        "rows": rows,
    }, runs


def short_latency_p99(played: Playback, trace: Trace) -> float:
    """Return the P99 latency in milliseconds of requests with prompt and answer both below the trace's medians."""
    names = ("prompt_len", "output_len")
    prompt, output = (float(np.median([getattr(each, name) for each in trace.requests])) for name in names)
    short = [
        each.latency
        for each in played.times
        if each.first is not None and each.request.prompt_len <= prompt and each.request.output_len <= output
    ]
    return 1000 * float(np.percentile(short, 99))


def objectives(prices: CostFile, count: int) -> dict[str, Any]:
    """Simulate goodput on `mixed` at several loads and TBT objectives, which are multiples of a full step's time."""
    trace = mixed(count)
    length = np.mean([each.prompt_len + each.output_len / 2 for each in trace.requests])
    step_ms = 1000 * prices.cost.seconds(StepWork(NUM_SEQS, NUM_SEQS, NUM_SEQS * float(length)))
    most, ttft_ms = capacity(prices, trace, None), ttft_objective(prices, trace)
    rows = []
    for load in (0.9, 1.2, 1.6):
        loaded = trace.faster(load * most * trace.seconds / count)
        for steps in (1.2, 1.5, 2.0, 4.0):
            both = ttft_ms, steps * step_ms
            row: dict[str, Any] = {"load": load, "tbt_steps": steps}
            for policy in ("mlq", "slo"):
                summary = summarize(policy, 1.0, run(prices, loaded, policy, None, both), *both)
                row[policy] = {"goodput": summary.goodput, "refused": summary.refused}
            rows.append(row)
            print(
                f"  load {load}, tokens {steps} steps apart: mlq {row['mlq']['goodput']:.1%}, slo"
                f" {row['slo']['goodput']:.1%}"
            )
    return {"step_ms": step_ms, "ttft_ms": ttft_ms, "requests_per_s": most, "rows": rows}


def preemptions(prices: CostFile) -> list[dict[str, Any]]:
    """Simulate first come, first served in little KV memory, with admission by current use or by predicted use."""
    trace, rows = mixed(1500).faster(2.0), []
    for kv_tokens in (4000, 6000, 12000):
        for overcommit in (True, False):
            config = config_of(prices, trace, "fcfs", kv_tokens)
            config = dataclasses.replace(config, overcommit=overcommit, max_num_seqs=64)
            played = play([Replica.simulated(config, prices.vocab_size, prices.cost)], trace)
            usage = played.samples[100:-1, 3]  # the KV cache is full by then
            row = {
                "kv_tokens": kv_tokens,
                "overcommit": overcommit,
                "preemptions_per_1000": 1000 * played.num_preemptions / len(trace.requests),
                "kv_usage_mean": float(usage.mean()),
                "kv_usage_p90": float(np.percentile(usage, 90)),
                "seconds": played.seconds,
            }
            rows.append(row)
            print("  " + ", ".join(f"{key} {value:.3g}" for key, value in row.items()))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trace", type=Path)
    parser.add_argument("--cost", type=Path, default=SHIPPED)
    parser.add_argument("--requests", type=int, default=600)
    parser.add_argument("--load", type=float, default=1.2)
    parser.add_argument("--tbt-ms", type=float, default=300.0)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--plot", type=Path, help="write a plot of the first workload to this file")
    options = parser.parse_args()
    prices = read_cost(options.cost)
    traces: list[tuple[str, Trace, int | None]] = [("mixed", mixed(options.requests), None)]
    if options.trace is not None:
        trace = read_trace(options.trace).scaled(8).first(options.requests)
        blocks = len({block for each in trace.requests for block in each.blocks})
        traces.append(("conversation", trace, blocks * trace.block_tokens // 20))
    results = []
    for name, trace, kv_tokens in traces:
        print(f"{name}: {len(trace.requests)} requests, {prices.model} on {prices.machine}")
        result, runs = workload(prices, name, trace, kv_tokens, options.load, options.tbt_ms)
        results.append(result)
        if options.plot is not None and len(results) == 1:
            kept = {policy: played for policy, played in runs.items() if not policy.startswith("window")}
            summaries = [
                summarize(policy, 1.0, played, result["ttft_ms"], options.tbt_ms) for policy, played in kept.items()
            ]
            title = f"{name}, {result['requests_per_s']:.2f} requests/s: {prices.model} on {prices.machine}, simulated"
            plot(options.plot, title, kept, summaries)
    print("preemptions:")
    preempted = preemptions(prices)
    print("objectives:")
    by_objective = objectives(prices, options.requests)
    if options.out is not None:
        options.out.write_text(
            json.dumps(
                {
                    "model": prices.model,
                    "machine": prices.machine,
                    "workloads": results,
                    "preemptions": preempted,
                    "objectives": by_objective,
                },
                indent=1,
            )
            + "\n"
        )


if __name__ == "__main__":
    main()
