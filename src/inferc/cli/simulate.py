"""The `inferc simulate` command, which predicts latencies for a trace by policy, load and number of replicas."""

from __future__ import annotations

import math
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from inferc.cli.common import Json, engine_options, print_json, say
from inferc.cli.progress import progress
from inferc.errors import ConfigError

if TYPE_CHECKING:
    from inferc.runtime.scheduler.config import SchedulerConfig
    from inferc.runtime.simulate.calibrate import CostFile
    from inferc.runtime.simulate.report import Summary
    from inferc.runtime.simulate.simulate import Playback
    from inferc.runtime.simulate.trace import Trace

MAX_REPLICAS = 1024


def simulate(
    trace: Annotated[
        Path,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="The trace: one JSON object per line with timestamp (ms), input_length, output_length, hash_ids (one"
            " id per 512 tokens of the prompt), and optionally client and priority.",
        ),
    ],
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy", metavar="NAME", help="Scheduling policy, see `inferc serve`; may be repeated; by default fcfs."
        ),
    ] = None,
    artifact: Annotated[
        Path | None,
        typer.Option("--engine", metavar="OUT", help="First measure the step times of this artifact on this machine."),
    ] = None,
    seconds: Annotated[
        float, typer.Option("--seconds", metavar="S", help="How long --engine measures step times.")
    ] = 20.0,
    cost: Annotated[
        Path | None,
        typer.Option(
            "--cost",
            metavar="FILE",
            help="Step times that --save-cost wrote. Without --engine and --cost: those of a 0.6B model in int8 on two"
            " cores.",
        ),
    ] = None,
    save_cost: Annotated[
        Path | None, typer.Option("--save-cost", metavar="FILE", help="Write the step times that --engine measured.")
    ] = None,
    replicas: Annotated[
        int,
        typer.Option(
            "--replicas", metavar="N", help="Number of engines; each request goes to the one with the least work."
        ),
    ] = 1,
    scale: Annotated[
        int,
        typer.Option(
            "--scale",
            metavar="N",
            help="Divide the trace's lengths and times by N (a divisor of 512), for a small machine.",
        ),
    ] = 1,
    speed: Annotated[
        list[float] | None,
        typer.Option("--speed", metavar="X", help="Send requests at X times the trace's rate; may be repeated."),
    ] = None,
    requests: Annotated[
        int | None, typer.Option("--requests", metavar="N", help="Use only the trace's first N requests.")
    ] = None,
    ttft_ms: Annotated[
        float | None,
        typer.Option(
            "--ttft-ms",
            metavar="MS",
            help="Objective for the time to first token of each request, for goodput and the policy slo.",
        ),
    ] = None,
    tbt_ms: Annotated[
        float | None,
        typer.Option(
            "--tbt-ms",
            metavar="MS",
            help="Objective for the mean time between tokens of each request; steps are also kept as short as this.",
        ),
    ] = None,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            "--max-num-seqs", metavar="N", help="Largest number of sequences that run at once in each engine."
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-num-batched-tokens", metavar="N", help="Token budget: the most tokens that one step computes."
        ),
    ] = None,
    kv_tokens: Annotated[
        int | None, typer.Option("--kv-tokens", metavar="N", help="Size of each engine's KV cache, in tokens.")
    ] = None,
    prefix_cache: Annotated[
        bool,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="Reuse the KV cache of earlier prompts for prompts that begin with the same tokens.",
        ),
    ] = True,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Write a plot as .png, .svg or .pdf (needs inferc[plot])."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a trace of requests through the real scheduler and cache, with simulated steps of measured duration.

    It shows time to first token (TTFT), time between tokens (TBT), goodput and cache hits for each policy and load.
    Answers have the length that the trace gives, which the scheduler does not know beforehand.
    """
    if artifact is not None and cost is not None:
        raise ConfigError("--engine and --cost are both given: steps are measured, or read from a file; leave one out")
    if not 0.0 < seconds < math.inf:
        raise ConfigError(f"--seconds {seconds:g}: expected a number above 0")
    if save_cost is not None and artifact is None:
        raise ConfigError("--save-cost keeps what --engine measures; give --engine OUT")
    _check_numbers(replicas, requests, kv_tokens, speed or [])
    from inferc.runtime.scheduler.policies import parse_policy
    from inferc.runtime.simulate.report import check_plot
    from inferc.runtime.simulate.trace import read_trace

    policies = list(dict.fromkeys(policy or ["fcfs"]))
    for name in policies:
        parse_policy(name)
    if plot is not None:
        check_plot(plot)
    found = read_trace(trace).scaled(scale)
    found = found if requests is None else found.first(requests)
    prices = _cost_file(artifact, cost, seconds, max_num_seqs, max_num_batched_tokens)
    if save_cost is not None:
        prices.save(save_cost)

    def configure(name: str) -> SchedulerConfig:
        return _config(prices, found, name, max_num_seqs, max_num_batched_tokens, kv_tokens, prefix_cache, tbt_ms)

    summaries: list[Summary] = []
    runs: dict[str, Playback] = {}
    speeds = list(dict.fromkeys(speed or [1.0]))
    for name in policies:
        config = configure(name)
        for factor in speeds:
            summary, played = _play(found.faster(factor), config, prices, replicas, (ttft_ms, tbt_ms), factor)
            summaries.append(summary)
            runs[name] = played
    bounds = _bounds(found, configure("fcfs"), replicas)
    if plot is not None:
        from inferc.runtime.simulate.report import plot as draw

        draw(
            plot,
            f"{trace.name}{f', 1/{scale}' if scale > 1 else ''}: {prices.model} on {prices.machine}",
            runs,
            summaries,
        )
    if as_json:
        from inferc.runtime.simulate.report import as_json as rows

        facts = {"model": prices.model, "machine": prices.machine, "cost_error": prices.error, "prices": prices.prices}
        print_json(
            {"rows": rows(summaries), "cost": facts, "requests": len(found.requests), "scale": scale, **asdict(bounds)}
        )
        return
    _show(summaries, prices, found, bounds, scale, replicas)


def _check_numbers(replicas: int, requests: int | None, kv_tokens: int | None, speeds: list[float]) -> None:
    if not 1 <= replicas <= MAX_REPLICAS:
        raise ConfigError(f"--replicas {replicas}: expected 1 to {MAX_REPLICAS}")
    for name, count in (("--requests", requests), ("--kv-tokens", kv_tokens)):
        if count is not None and count < 1:
            raise ConfigError(f"{name} {count}: expected at least 1")
    for speed in speeds:
        if not 0.0 < speed < math.inf:
            raise ConfigError(f"--speed {speed:g}: expected a number above 0")


def _cost_file(
    artifact: Path | None, cost: Path | None, seconds: float, max_num_seqs: int | None, budget: int | None
) -> CostFile:
    from inferc.runtime.simulate.calibrate import SHIPPED, measure_cost, read_cost

    if artifact is None:
        return read_cost(cost or SHIPPED)
    from inferc.runtime.artifact.load import load_artifact
    from inferc.runtime.engine.load import load_engine

    found = load_artifact(artifact)
    options = engine_options(None, "auto", max_num_seqs or 64, budget)
    made = load_engine(found, **options)
    try:
        with progress("measuring steps") as report:
            return measure_cost(
                made,
                artifact.name,
                seconds,
                kv_bytes_per_token=found.kv_bytes_per_token,
                progress=lambda share: report("measuring steps", int(100 * share), 100),
            )
    finally:
        made.close()


def _config(
    prices: CostFile,
    trace: Trace,
    policy: str,
    max_num_seqs: int | None,
    budget: int | None,
    kv_tokens: int | None,
    prefix_cache: bool,
    tbt_ms: float | None,
) -> SchedulerConfig:
    from inferc.kv_groups import CacheGroup
    from inferc.runtime.scheduler.config import SchedulerConfig

    num_blocks = prices.num_blocks if kv_tokens is None else 1 + -(-kv_tokens // prices.block_size)
    longest = max(each.prompt_len for each in trace.requests) + trace.longest_output
    if longest > (num_blocks - 1) * prices.block_size:
        raise ConfigError(
            f"the trace's longest sequence may have {longest} tokens, and the KV cache holds"
            f" {(num_blocks - 1) * prices.block_size}; raise --kv-tokens, or shorten the trace by --scale"
        )
    seqs = max_num_seqs or prices.max_num_seqs
    return SchedulerConfig(
        max_num_seqs=seqs,
        max_num_batched_tokens=budget or max(seqs, prices.max_num_batched_tokens),
        max_model_len=longest + 1,
        num_blocks=(num_blocks,),
        block_size=prices.block_size,
        groups=(CacheGroup(prices.kv_bytes_per_token),),
        prefix_cache=prefix_cache,
        policy=policy,
        tbt_ms=tbt_ms,
    )


def _play(
    trace: Trace,
    config: SchedulerConfig,
    prices: CostFile,
    replicas: int,
    objectives: tuple[float | None, float | None],
    speed: float,
) -> tuple[Summary, Playback]:
    from inferc.runtime.simulate.report import summarize
    from inferc.runtime.simulate.simulate import Replica, play

    engines = [Replica.simulated(config, prices.vocab_size, prices.cost) for _ in range(replicas)]
    name = f"{config.policy}, {speed:g} x"
    with progress(name) as report:
        played = play(engines, trace, objectives, lambda count: report(name, count, len(trace.requests)))
    return summarize(config.policy, speed, played, *objectives), played


@dataclass(frozen=True)
class HitBounds:
    """The upper bounds of the prefix cache hit rate: with unlimited memory, and with the memory of the replicas."""

    ideal_hit_rate: float
    ideal_hit_rate_of_capacity: float


def _bounds(trace: Trace, config: SchedulerConfig, replicas: int) -> HitBounds:
    capacity = (config.num_blocks[0] - 1) * config.block_size * replicas // trace.block_tokens
    return HitBounds(trace.hit_rate(), trace.hit_rate(capacity))


def _show(
    summaries: list[Summary], prices: CostFile, trace: Trace, bounds: HitBounds, scale: int, replicas: int
) -> None:
    from rich.console import Console
    from rich.table import Table

    tokens = sum(each.prompt_len for each in trace.requests), sum(each.output_len for each in trace.requests)
    say(
        f"{len(trace.requests)} requests in {trace.seconds:.0f} s"
        + (f" (lengths and times divided by {scale})" if scale > 1 else "")
        + f", {tokens[0]} tokens of prompts, {tokens[1]} of answers; {replicas} x {prices.model} on {prices.machine}"
    )
    say(
        f"prompt tokens that a cache could find: {bounds.ideal_hit_rate:.1%}, with this memory"
        f" {bounds.ideal_hit_rate_of_capacity:.1%}; predicted steps are off by {prices.error:.1%} on average"
    )
    table = Table(box=None, pad_edge=False)
    heads = ("policy", "rate", "TTFT ms mean", "P50", "P99", "TBT ms P50", "P99", "latency s mean", "P99")
    for head in (*heads, "tokens/s", "goodput", "hits", "refused", "preempted/1000"):
        table.add_column(head, justify="left" if head == "policy" else "right")
    for each in summaries:
        table.add_row(
            each.policy,
            f"{each.speed:g}",
            _number(each.ttft_mean),
            _number(each.ttft_p50),
            _number(each.ttft_p99),
            _number(each.tbt_p50),
            _number(each.tbt_p99),
            _number(each.latency_mean / 1000),
            _number(each.latency_p99 / 1000),
            _number(each.output_tokens_per_s),
            f"{each.goodput:.1%}",
            f"{each.hit_rate:.1%}",
            str(each.refused),
            f"{each.preemptions_per_1000:.1f}",
        )
    width = None if sys.stdout.isatty() else 200
    console = Console(width=width)
    with console.capture() as captured:
        console.print(table)
    say(captured.get(), end="")


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"
