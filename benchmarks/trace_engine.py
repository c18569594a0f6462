"""Replay a conversation trace to measure the gains of prefix cache, chunked prefill and continuous batching.

    python benchmarks/trace_engine.py [--trace FILE] [--scale 16] [--requests 500] [--load 0.7] [--turns 3]
        [--out FOLDER] [--quick]

The first requests of the Mooncake conversation trace, with prompts, answers and times divided by --scale, are sent to a
Llama with random weights on this machine. They arrive with the trace's pauses, at --load times the rate that the engine
serves when all arrive at once; and then all at once, for throughput. The variants are the engine as it is, without its
prefix cache, without chunked prefill (a step then takes whole prompts, up to the longest possible), and with static
batches; each is loaded again and they run in turn. Ratios are within one turn, and medians count.

The hit rate of the prefix cache is shown beside that of an ideal cache of the same size, which has every prompt as soon
as it arrives and holds only prompts (least recently used blocks go first), beside that of an unlimited cache, and
beside the simulated hit rates of the same scheduler and cache in other sizes. Throughput is shown beside limits: for
the prefix cache, by the tokens it leaves to compute; for continuous batching, by the lengths (trace_limits.py), at the
step and token costs of the same run, and as if only the number of steps counted. The files trace_engine.json and
trace_engine.png go into the folder --out, and the tables are printed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from burst import Request, generate
from conversation import find_trace
from measured import ROOT, save
from own_model import Llama
from rich.console import Console
from rich.progress import Progress
from tables import markdown
from trace_limits import Lengths, distinct_tokens, hit_rates, longest_asked, over_static
from trace_report import draw, tables

from inferc.cost.machine import measure_read
from inferc.errors import ConfigError
from inferc.runtime.artifact.load import Artifact, load_artifact
from inferc.runtime.engine.engine import Engine
from inferc.runtime.engine.load import load_engine
from inferc.runtime.simulate.report import summarize
from inferc.runtime.simulate.simulate import Playback, Replica, play
from inferc.runtime.simulate.trace import Trace, read_trace
from inferc.system.resources import available_cores

MODEL, QUICK_MODEL = Llama(384, 1024, 4, 6, 2), Llama(128, 256, 2, 2, 1)
TOKEN_BUDGET = 512
AT_ONCE = 1e9  # speed-up of the trace at which all requests arrive practically at once
FIGURES = ("ttft_mean", "ttft_p50", "ttft_p99", "tbt_p50", "tbt_p99", "output_tokens_per_s", "hit_rate")
PERCENTILES = np.linspace(0, 100, 101)


@dataclass(frozen=True)
class Variant:
    name: str
    policy: str = "fcfs"
    prefix_cache: bool = True
    chunked_prefill: bool = True


WHOLE, UNCACHED = Variant("the engine as it is"), Variant("without prefix cache", prefix_cache=False)
UNCHUNKED, STATIC = Variant("without chunked prefill", chunked_prefill=False), Variant("static batches", "static")
VARIANTS = (WHOLE, UNCACHED, UNCHUNKED, STATIC)
PARTS = (("prefix cache", UNCACHED), ("chunked prefill", UNCHUNKED), ("continuous batching", STATIC))


@dataclass(frozen=True)
class Sizes:
    max_num_seqs: int
    kv_tokens: int


@dataclass
class Found:
    """The measurements of a variant at one load: one value per turn, and the times of all requests in ms."""

    figures: list[dict[str, float]] = field(default_factory=list)
    ttft: list[float] = field(default_factory=list)
    tbt: list[float] = field(default_factory=list)

    def add(self, played: Playback) -> None:
        summary = summarize("", 1.0, played, None, None)
        self.figures.append({name: getattr(summary, name) for name in FIGURES})
        self.ttft += [1000 * each.ttft for each in played.times]
        self.tbt += [1000 * gap for each in played.times for gap in each.gaps]

    def median(self, name: str) -> float:
        return statistics.median(each[name] for each in self.figures)

    def over(self, other: Found, name: str) -> float:
        """Return the median over turns of the ratio to another variant's value."""
        pairs = zip(self.figures, other.figures, strict=True)
        return statistics.median(own[name] / theirs[name] for own, theirs in pairs)


def run(artifact: Artifact, variant: Variant, trace: Trace, sizes: Sizes) -> tuple[Playback, Engine]:
    """Replay the trace on a new engine; return the playback and the closed engine, which has learned its step costs."""
    engine = load_engine(
        artifact,
        chunked_prefill=variant.chunked_prefill,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=TOKEN_BUDGET if variant.chunked_prefill else artifact.max_model_len,
        kv_memory_bytes=(sizes.kv_tokens + artifact.block_size) * artifact.kv_bytes_per_token,
        policy=variant.policy,
        prefix_cache=variant.prefix_cache,
    )
    try:
        generate(engine, [Request([1] * 40, 4)])  # brings the weights into memory and checks them
        engine.scheduler.foresees = True  # makes the scheduler observe the cost of its steps
        return play([Replica.real(engine, time.perf_counter, time.sleep)], trace), engine
    finally:
        engine.close()


def measure(
    artifact: Artifact, trace: Trace, sizes: Sizes, load: float, turns: int, show: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Measure all variants at both loads, in turn; `show` is called after each run."""
    burst = trace.faster(AT_ONCE)
    warm, engine = run(artifact, WHOLE, burst, sizes)
    show()
    coming = trace.faster(load * trace.seconds / warm.seconds)
    coming_found, burst_found = ({each.name: Found() for each in VARIANTS} for _ in range(2))
    limits, reads = [], []
    for turn in range(turns):
        reads.append(measure_read(available_cores()) / 1e9)
        for variant in VARIANTS if turn % 2 else reversed(VARIANTS):
            coming_found[variant.name].add(run(artifact, variant, coming, sizes)[0])
            show()
            played, ran = run(artifact, variant, burst, sizes)
            burst_found[variant.name].add(played)
            show()
            if variant is WHOLE:
                engine = ran
                cost, lengths = ran.scheduler.forecast.cost, lengths_of(played)
                limits.append(over_static(lengths, sizes.max_num_seqs, TOKEN_BUDGET, cost))
    config, cost = engine.scheduler.config, engine.scheduler.forecast.cost
    whole = burst_found[WHOLE.name]
    return {
        "seconds": coming.seconds,
        "read_gb_per_s": reads,
        "variants": [of_variant(name, coming_found[name], burst_found[name]) for name in coming_found],
        "ratios": [
            {
                "what": what,
                **{name: coming_found[WHOLE.name].over(coming_found[without.name], name) for name in FIGURES[:-1]},
                "at_once": whole.over(burst_found[without.name], "output_tokens_per_s"),
            }
            for what, without in PARTS
        ],
        "limits": {
            "prefix cache": computed(trace, 0.0) / computed(trace, whole.median("hit_rate")),
            "continuous batching": statistics.median(each[1] for each in limits),
            "continuous batching, by steps": statistics.median(each[0] for each in limits),
        },
        "hits": {
            "kv_tokens": sizes.kv_tokens,
            "distinct_tokens": distinct_tokens(trace),
            "measured": coming_found[WHOLE.name].median("hit_rate"),
            "measured_at_once": whole.median("hit_rate"),
            "ideal": trace.hit_rate(sizes.kv_tokens // trace.block_tokens),
            "ideal_without_end": trace.hit_rate(),
            "by_size": hit_rates(coming, config, engine.model.vocab_size, cost),
        },
    }


def of_variant(name: str, coming: Found, burst: Found) -> dict[str, Any]:
    """Return the row of a variant: medians, all turns, and the distributions as percentiles."""
    return {
        "name": name,
        **{figure: coming.median(figure) for figure in FIGURES},
        "at_once": burst.median("output_tokens_per_s"),
        "turns": coming.figures,
        "turns_at_once": burst.figures,
        "ttft_percentiles": np.percentile(coming.ttft, PERCENTILES).tolist(),
        "tbt_percentiles": np.percentile(coming.tbt, PERCENTILES).tolist(),
    }


def lengths_of(played: Playback) -> list[Lengths]:
    """Return the tokens to compute of each request, as if the prefix cache held the same share of each prompt."""
    share = 1 - played.cached_tokens / played.prompt_tokens
    requests = [each.request for each in played.times]
    return [Lengths(share * each.prompt_len, each.prompt_len, each.output_len) for each in requests]


def computed(trace: Trace, hit_rate: float) -> float:
    """Return the number of tokens to compute; the last token of an answer is never computed."""
    return sum((1 - hit_rate) * each.prompt_len + each.output_len - 1 for each in trace.requests)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--trace", type=Path, help="trace (default: the first *conversation*.jsonl in data/, out/, ../*/data/)"
    )
    parser.add_argument("--scale", type=int, default=16, help="divisor of lengths and times")
    parser.add_argument("--requests", type=int, default=500)
    parser.add_argument("--load", type=float, default=0.7, help="share of the rate that the engine can serve")
    parser.add_argument("--max-num-seqs", type=int, default=16)
    parser.add_argument(
        "--kv-share", type=float, default=0.5, help="share of the trace's distinct blocks that the cache holds"
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--work", type=Path, default=ROOT / "out/bench", help="folder where models are kept")
    parser.add_argument("--out", type=Path, help="folder for the results (benchmarks/results; with --quick, --work)")
    parser.add_argument("--quick", action="store_true", help="try it out with a small model and few requests")
    options = parser.parse_args()
    if min(options.turns, options.requests - 1, options.max_num_seqs) < 1 or min(options.load, options.kv_share) <= 0:
        parser.error("expected at least one turn, two requests, one sequence, and a load and a share above 0")
    try:
        trace = read_trace(find_trace(options.trace)).scaled(options.scale)
    except ConfigError as error:
        sys.exit(f"trace_engine: {error}")
    out = options.out or (options.work if options.quick else ROOT / "benchmarks/results")
    for folder in (options.work, out):
        folder.mkdir(parents=True, exist_ok=True)
    model, count, turns = (QUICK_MODEL, 30, 1) if options.quick else (MODEL, options.requests, options.turns)
    trace = trace.first(count)
    max_model_len = -(-(longest_asked(trace) + 1) // 1024) * 1024
    console = Console(stderr=True)
    with console.status("compiling"):
        artifact = load_artifact(model.compiled("bfloat16", options.work, max_model_len))
    kv_tokens = max(int(options.kv_share * distinct_tokens(trace)), longest_asked(trace))
    sizes = Sizes(options.max_num_seqs, -(-kv_tokens // artifact.block_size) * artifact.block_size)
    with Progress(console=console) as progress:
        task = progress.add_task("playing", total=1 + 2 * turns * len(VARIANTS))
        found = measure(artifact, trace, sizes, options.load, turns, lambda: progress.advance(task))
    result = {
        **model.facts(max_model_len),
        "threads": available_cores(),
        "scale": options.scale,
        "load": options.load,
        "max_num_seqs": sizes.max_num_seqs,
        "token_budget": TOKEN_BUDGET,
        "requests": len(trace.requests),
        "mean_prompt": statistics.mean(each.prompt_len for each in trace.requests),
        "mean_output": statistics.mean(each.output_len for each in trace.requests),
        **found,
    }
    save(result, out / "trace_engine.json")
    draw(result, out / "trace_engine.png")
    print("\n\n".join(map(markdown, tables(result))))


if __name__ == "__main__":
    main()
