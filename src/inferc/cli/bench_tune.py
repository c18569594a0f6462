"""The `inferc bench tune` command, which finds the configuration of `inferc serve` with the best goodput."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from inferc.cli.common import Isa, Json, Out, print_json, say
from inferc.cli.progress import progress
from inferc.cli.workload_options import (
    Burstiness,
    BurstSize,
    InputLen,
    InputSpread,
    OutputLen,
    OutputSpread,
    Pattern,
    Prompts,
    Scale,
    Seed,
    Share,
    SharedPrefix,
    Tbt,
    Ttft,
    arrivals,
    check_counts,
    goals,
    workload,
)
from inferc.errors import ConfigError


def bench_tune(
    out: Out,
    ttft: Ttft = 500.0,
    tbt: Tbt = 100.0,
    share: Share = 0.9,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE.toml",
            help="Write the best configuration to a file for `inferc serve OUT --config FILE.toml`.",
        ),
    ] = None,
    minutes: Annotated[
        float,
        typer.Option(
            "--minutes",
            metavar="M",
            help="Total time: two fifths to measure step times and simulate, the rest to measure real servers.",
        ),
    ] = 15.0,
    measured: Annotated[
        int,
        typer.Option(
            "--measured", metavar="N", help="Number of candidates to measure on real servers, besides the default."
        ),
    ] = 3,
    policy: Annotated[
        list[str] | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="A scheduling policy to try besides fcfs; may be repeated; by default sjf. slo only has an effect if"
            " clients send ttft_ms and tbt_ms with each request, as this command then does.",
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds",
            metavar="S",
            help="How long each load sends requests; by default ten times the duration of an answer, if there is time.",
        ),
    ] = None,
    arrive: Pattern = "poisson",
    burstiness: Burstiness = 1.0,
    burst_size: BurstSize = 8,
    input_len: InputLen = 128,
    output_len: OutputLen = 128,
    input_spread: InputSpread = 0.0,
    output_spread: OutputSpread = 0.0,
    shared_prefix: SharedPrefix = 0,
    prompts: Prompts = None,
    trace: Annotated[
        Path | None,
        typer.Option(
            "--trace",
            metavar="FILE",
            help="Use the requests of a trace (see `inferc simulate`) in its own arrival pattern, faster and slower.",
        ),
    ] = None,
    scale: Scale = 1,
    seed: Seed = 0,
    isa: Isa = "auto",
    logprobs: Annotated[
        bool,
        typer.Option(
            "--logprobs",
            help="Ask for log probabilities; useful for models with random weights, see `inferc bench serve`.",
        ),
    ] = False,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Write a plot as .png, .svg or .pdf (needs inferc[plot])."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Find the configuration of `inferc serve` with the best goodput for a workload on this machine, and write it.

    The best configuration completes the most good requests per second, at a rate at which --share of the requests meet
    both objectives and answers keep up with arrivals. The times of engine steps are measured here first. Then the
    engine's own scheduler simulates the workload for a grid of candidates (max-num-seqs, max-num-batched-tokens,
    tbt-ms, then policies, threads and the prefix cache for the best two), which takes seconds each. The best few
    candidates that differ, and the default, are judged by the same loads on a real server. Rates are 10 % apart, and a
    winner must beat the default by as much, twice; otherwise the default is kept.

    The table shows the goodput of each candidate, simulated and measured, and how far the simulation was off. The
    simulation knows neither the server's own work nor that of the clients, which share the cores here, so it only ranks
    candidates. Do not use the machine for anything else meanwhile.
    """
    check_counts(minutes=minutes, seconds=seconds)
    if measured < 1:
        raise ConfigError(f"--measured {measured}: expected at least 1")
    if seed < 0:
        raise ConfigError(f"--seed {seed}: expected 0 or more")
    wanted = goals(ttft, tbt, share)
    if not ttft and not tbt:
        raise ConfigError("--ttft 0 and --tbt 0: any time is good, so no rate is too high; give at least one objective")
    load = workload(input_len, output_len, input_spread, output_spread, shared_prefix, prompts, trace, scale)
    coming = arrivals(arrive, burstiness, burst_size)
    if trace is not None and arrive != "poisson":
        raise ConfigError("--arrivals is for made-up requests; the trace's come when it says, only faster or slower")
    from inferc.bench.figures import Goals
    from inferc.bench.plot import check_plot
    from inferc.bench.session import Settings
    from inferc.bench.tune import Wish, tune
    from inferc.bench.tune_report import as_json as found_json
    from inferc.bench.tune_report import as_text, draw, write_config
    from inferc.runtime.scheduler.policies import parse_policy

    policies = tuple(dict.fromkeys(policy or ["sjf"]))
    for name in policies:
        parse_policy(name)
    if plot is not None:
        check_plot(plot)
    if output is not None and (output.suffix != ".toml" or not output.absolute().parent.is_dir()):
        raise ConfigError(f"-o {output}: expected a file named .toml in a folder that is there")
    target = Goals(**wanted)
    settings = Settings(load, arrivals=coming, seed=seed, goals=target)
    with progress("bench tune") as report:
        tuned = tune(Wish(out, settings, minutes, policies, measured, seconds, isa, logprobs), report)
    what = f"{out.absolute().name}: {_said(input_len, output_len, prompts, trace, arrive)}"
    if output is not None and tuned.winner is not None:
        write_config(output, tuned, target, what, isa)
    if plot is not None:
        draw(plot, what, tuned, target)
    if as_json:
        print_json(found_json(tuned, target))
    else:
        for line in as_text(tuned, target):
            say(line)
        if output is not None and tuned.winner is not None:
            say(f"written to {output}: inferc serve {out} --config {output}")
    return 0 if tuned.winner is not None else 1


def _said(input_len: int, output_len: int, prompts: Path | None, trace: Path | None, arrive: str) -> str:
    if trace is not None:
        return f"the trace {trace.name}"
    what = f"prompts of {prompts.name}" if prompts is not None else f"{input_len} tokens in and {output_len} out"
    return f"{what}, {arrive} arrivals"
