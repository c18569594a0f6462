"""The `inferc bench` commands, which measure speed on this machine."""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import typer

from inferc.cli.bench_serve import bench_serve
from inferc.cli.bench_tune import bench_tune
from inferc.cli.common import (
    Isa,
    Json,
    KVMemory,
    Out,
    OutOrModel,
    Pin,
    Threads,
    command,
    engine,
    engine_options,
    print_json,
    say,
)
from inferc.cli.progress import progress
from inferc.cli.workload_options import InputLen, OutputLen
from inferc.errors import ConfigError
from inferc.targets import DEFAULT_TARGET

bench_app = typer.Typer(
    help="Measure the speed of an artifact on this machine, or of a running server.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Concurrency = Annotated[int, typer.Option("--concurrency", metavar="N", help="Number of requests in flight at once.")]
Requests = Annotated[
    int | None,
    typer.Option("--requests", metavar="N", help="Total number of requests; by default 4 times --concurrency."),
]


@command(bench_app, "kernels")
def bench_kernels(
    out: Out,
    input_len: Annotated[
        int, typer.Option("--input-len", metavar="N", help="Number of tokens of the prefill step.")
    ] = 512,
    num_seqs: Annotated[
        int, typer.Option("--num-seqs", metavar="N", help="Batch size of a second decode step; 1 leaves it out.")
    ] = 8,
    threads: Threads = None,
    isa: Isa = "auto",
    pin: Pin = False,
    as_json: Json = False,
) -> None:
    """Show where the time of a step goes: the time of each kernel in a prefill step and in decode steps.

    There is one decode step of one sequence and one of --num-seqs sequences. Each row shows bytes and operations per
    second and how near the kernel is to the roofline: the time that its bytes take at memory bandwidth, or its
    operations at the peak of the instruction set, whichever is longer, as a share of the time that it took. Both limits
    are measured first. Bytes are those of weights, K and V; activations stay in the CPU caches.

    For the prefill step the matrix products follow, with the tiles that the compiler chose for the CPU caches, and
    their speed as a share of what the compiler's cost model expects: if it is far below one, the model does not fit
    this machine.
    """
    from inferc.config import EngineConfig, from_dict
    from inferc.runtime.artifact.load import load_artifact
    from inferc.runtime.measure.profile import measure_limits, profile_step
    from inferc.runtime.runners.cpu.runner import CpuRunner
    from inferc.system.resources import available_cores

    if input_len < 1 or num_seqs < 1:
        raise ConfigError(f"--input-len {input_len} and --num-seqs {num_seqs}: expected at least 1 of each")
    artifact = load_artifact(out, target=DEFAULT_TARGET)
    if len(artifact.ranks) > 1:
        raise ConfigError(
            f"{out} holds {len(artifact.ranks)} ranks; expected a whole artifact to profile: compile one without --tp,"
            " --pp and --ep"
        )
    artifact.verify_weights().wait()
    options = engine_options(threads, isa, num_seqs, max(16, input_len), pin=pin, prefix_cache=False)
    runner = CpuRunner(artifact, from_dict(EngineConfig, options))
    try:
        with progress("bench kernels"):
            limits = measure_limits(runner, threads or available_cores())
            steps = {
                "prefill": profile_step(runner, artifact, input_len, 0, limits=limits),
                "decode": profile_step(runner, artifact, 1, input_len, limits=limits),
            }
            if num_seqs > 1:
                steps[f"decode of {num_seqs}"] = profile_step(runner, artifact, 1, input_len, num_seqs, limits)
    finally:
        runner.close()
    if as_json:
        print_json(
            {"limits": dataclasses.asdict(limits), **{name: dataclasses.asdict(step) for name, step in steps.items()}}
        )
        return
    peaks = ", ".join(f"{dtype} {flops / 1e9:.0f} GFLOP/s" for dtype, flops in limits.flops_per_s.items())
    say(f"measured limits: memory {limits.bytes_per_s / 1e9:.1f} GB/s, {peaks}")
    for name, step in steps.items():
        tokens = f"{step.num_tokens} {'token' if step.num_tokens == 1 else 'tokens'} after {step.context_len}"
        say(f"\n{name}: {tokens}, {step.ms:.2f} ms, {_percent(step.of_limit)} of the limit, {step.isa}")
        say(f"  {'kernel':32} {'calls':>5} {'ms':>10} {'share':>7} {'GB/s':>7} {'GFLOP/s':>8} {'of limit':>9}")
        for row in step.kernels:
            rates = f"{_rate(row.gb_per_s):>7} {_rate(row.gflops_per_s):>8} {_percent(row.of_limit):>9}"
            say(f"  {row.kernel:32} {row.calls:5} {row.ms:10.3f} {row.share:7.1%} {rates}")
        if step.products:
            say("  products, as they are blocked, with what is fused to them")
            say(
                f"  {'outputs x k, bits':32} {'calls':>5} {'ms':>10} {'rows':>5} {'k bytes':>7} {'pairs':>5}"
                f" {'GFLOP/s':>8} {'of model':>8}"
            )
        for each in step.products:
            size = f"{each.n} x {each.k}, {8 * each.row_bytes} by {8 * each.weight_bytes:g}"
            cut = f"{each.rows_at_a_time:5} {each.k_bytes_at_a_time:7} {each.pairs_at_a_time:5}"
            rate = f"{_rate(each.gflops_per_s):>8} {_percent(each.of_expected):>8}"
            say(f"  {size:32} {each.calls:5} {each.ms:10.3f} {cut} {rate}")


def _rate(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


@command(bench_app, "latency")
def bench_latency(
    out: OutOrModel,
    input_len: InputLen = 512,
    output_len: OutputLen = 128,
    threads: Threads = None,
    isa: Isa = "auto",
    pin: Pin = False,
    as_json: Json = False,
) -> None:
    """Measure a single request: time to first token, prefill and decode speed, and shares of the machine's limits."""
    from inferc.runtime.artifact.load import load_artifact
    from inferc.runtime.artifact.model_folder import artifact_of
    from inferc.runtime.measure.bench import latency, model_cost
    from inferc.system.resources import available_cores

    options = engine_options(threads, isa, 1, max(512, input_len), pin=pin, prefix_cache=False)
    artifact = load_artifact(artifact_of(out))
    with engine(artifact, options) as client, progress("bench latency"):
        result = latency(client, model_cost(artifact), threads or available_cores(), input_len, output_len)
    _print_numbers(dataclasses.asdict(result), as_json)


@command(bench_app, "throughput")
def bench_throughput(
    out: OutOrModel,
    input_len: InputLen = 128,
    output_len: OutputLen = 128,
    concurrency: Concurrency = 8,
    requests: Requests = None,
    threads: Threads = None,
    isa: Isa = "auto",
    pin: Pin = False,
    kv_memory: KVMemory = "auto",
    as_json: Json = False,
) -> None:
    """Measure many requests at once: output tokens per second."""
    from inferc.runtime.artifact.load import load_artifact
    from inferc.runtime.artifact.model_folder import artifact_of
    from inferc.runtime.measure.bench import model_cost, throughput

    total = _num_requests(concurrency, requests)
    options = engine_options(threads, isa, concurrency, max(512, concurrency), kv_memory, pin, prefix_cache=False)
    artifact = load_artifact(artifact_of(out))
    with engine(artifact, options) as client, progress("bench throughput"):
        result = throughput(client, model_cost(artifact), input_len, output_len, concurrency, total)
    _print_numbers(dataclasses.asdict(result), as_json)


command(bench_app, "serve")(bench_serve)
command(bench_app, "tune")(bench_tune)


def _num_requests(concurrency: int, requests: int | None) -> int:
    total = 4 * concurrency if requests is None else requests
    if concurrency < 1 or total < 1:
        raise ConfigError(f"--concurrency {concurrency} and --requests {total}: expected at least 1 of each")
    return total


def _print_numbers(values: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print_json(values)
        return
    for name, value in values.items():
        say(f"{name:24} {_shown(value)}")


def _shown(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{key} {item:,.3f}" for key, item in value.items())
    if value is None:
        return "unknown"
    return f"{value:,.3f}" if isinstance(value, float) else f"{value:,}"
