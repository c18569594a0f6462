"""The `inferc bench serve` command, which puts load on a server and measures what its clients see."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inferc.cli.common import INTERRUPTED, Isa, Json, Pin, Threads, print_json, say
from inferc.cli.progress import progress
from inferc.cli.top import ApiKey, Ca
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
    TraceFile,
    Ttft,
    arrivals,
    check_counts,
    goals,
    positive_numbers,
    workload,
)
from inferc.errors import ConfigError

if TYPE_CHECKING:
    from inferc.bench.endpoints import Target

DEFAULT_CONCURRENCY = 8


def bench_serve(
    where: Annotated[
        str,
        typer.Argument(
            metavar="OUT|URL|HOST:PORT",
            help="The server: an artifact, for which a server is started; http(s)://HOST:PORT of any server with"
            " OpenAI's interface; or HOST:PORT of inferc's gRPC interface.",
        ),
    ],
    rate: Annotated[
        str | None,
        typer.Option(
            "--rate",
            metavar="R[,R2,…]",
            help="Open loop: send R requests per second, whether or not earlier ones have been answered. Several rates"
            " are measured one after the other.",
        ),
    ] = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            "--concurrency",
            metavar="N",
            help="Closed loop, without --rate and --trace: keep N requests in flight; by default 8.",
        ),
    ] = None,
    requests: Annotated[
        int | None,
        typer.Option(
            "--requests",
            metavar="N",
            help="Requests per load; by default 100, all of a --trace, or 4 times --concurrency.",
        ),
    ] = None,
    seconds: Annotated[
        float | None,
        typer.Option(
            "--seconds", metavar="S", help="Stop sending requests after S seconds of a load; wait for their answers."
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
    trace: TraceFile = None,
    scale: Scale = 1,
    speed: Annotated[
        str | None, typer.Option("--speed", metavar="X[,X2,…]", help="Replay the trace at X times its own rate.")
    ] = None,
    ttft: Ttft = 500.0,
    tbt: Tbt = 100.0,
    share: Share = 0.9,
    find: Annotated[
        bool,
        typer.Option(
            "--find",
            help="Search for the largest rate (or speed) at which --share of the requests are good, to within 10 %:"
            " double or halve the rate, then bisect.",
        ),
    ] = False,
    warmup: Annotated[
        int | None,
        typer.Option(
            "--warmup",
            metavar="N",
            help="Warm-up requests of two tokens before the first load; by default as many as --concurrency, or 4.",
        ),
    ] = None,
    seed: Seed = 0,
    endpoint: Annotated[
        str | None,
        typer.Option(
            "--endpoint",
            metavar="grpc|completions|chat",
            help="Interface to use: by default grpc for OUT and HOST:PORT, completions for a URL.",
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option("--model", metavar="NAME", help="Which of the server's models to use; by default its first one."),
    ] = None,
    api_key: ApiKey = None,
    ca: Ca = None,
    vocab_size: Annotated[
        int | None,
        typer.Option(
            "--vocab-size",
            metavar="N",
            help="Random prompts use token ids below N; by default the vocabulary size that the server reports, or"
            " 10000.",
        ),
    ] = None,
    ignore_eos: Annotated[
        bool,
        typer.Option(
            "--ignore-eos/--no-ignore-eos",
            help="Ask for answers of exactly the requested length, if the server supports that.",
        ),
    ] = True,
    temperature: Annotated[
        float,
        typer.Option(
            "--temperature",
            metavar="T",
            help="Sampling temperature; 0 is greedy.",
        ),
    ] = 0.0,
    logprobs: Annotated[
        bool,
        typer.Option(
            "--logprobs",
            help="Ask for log probabilities. They cost some time, but a token without text, as a model with random"
            " weights often makes, is then sent at once and not together with the next text.",
        ),
    ] = False,
    timeout: Annotated[
        float, typer.Option("--timeout", metavar="S", help="A request that takes longer counts as failed.")
    ] = 600.0,
    config: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="FILE.toml",
            help="Configuration of the server that is started for OUT, see `inferc serve --config`.",
        ),
    ] = None,
    threads: Threads = None,
    isa: Isa = "auto",
    pin: Pin = False,
    max_num_seqs: Annotated[
        int | None,
        typer.Option(
            "--max-num-seqs",
            metavar="N",
            help="For the server that is started for OUT: largest number of sequences that run at once.",
        ),
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-num-batched-tokens",
            metavar="N",
            help="For the server that is started for OUT: most tokens that one step computes.",
        ),
    ] = None,
    kv_memory: Annotated[
        str | None,
        typer.Option(
            "--kv-memory", metavar="BYTES", help="For the server that is started for OUT: size of its KV cache."
        ),
    ] = None,
    prefix_cache: Annotated[
        bool | None,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            show_default=False,
            help="For the server that is started for OUT: whether it has a prefix cache.",
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(
            "--policy",
            metavar="NAME",
            help="For the server that is started for OUT: its scheduling policy, see `inferc serve`.",
        ),
    ] = None,
    tbt_ms: Annotated[
        float | None,
        typer.Option(
            "--tbt-ms",
            metavar="MS",
            help="For the server that is started for OUT: target time between tokens, see `inferc serve`.",
        ),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE.json",
            help="Write the whole result to a file, with the times of each request.",
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option("--plot", metavar="FILE", help="Write a plot as .png, .svg or .pdf (needs inferc[plot])."),
    ] = None,
    as_json: Json = False,
) -> int:
    """Put load on a server and report what its clients see: TTFT, ITL, TPOT, latency, throughput and goodput.

    Open loop (--rate, --trace): requests arrive as they would from many users, even while the server falls behind; this
    shows how much load the server can take. Closed loop (--concurrency): each of N clients sends its next request when
    it has its answer.

    With several rates, the table shows goodput by rate, and the largest rate at which --share of the requests are good.
    Let a load last several times as long as an answer takes; otherwise a queue has no time to grow.

    Requests that fail or are refused (429, 503, RESOURCE_EXHAUSTED) are counted by status, and none of them is good.
    Prompts are random token ids if the server takes them, otherwise words. TTFT is measured from the sending of a
    request. The load generator reports how late it was itself, and warns if that distorts the results. Ctrl-C ends the
    load and shows the results so far.
    """
    check_counts(requests=requests, seconds=seconds, concurrency=concurrency, timeout=timeout, vocab_size=vocab_size)
    if warmup is not None and warmup < 0:
        raise ConfigError(f"--warmup {warmup}: expected 0 or more")
    if not 0 <= temperature < math.inf:
        raise ConfigError(f"--temperature {temperature:g}: expected a number, 0 or more")
    if seed < 0:
        raise ConfigError(f"--seed {seed}: expected 0 or more")
    rates, speeds = positive_numbers("--rate", rate), positive_numbers("--speed", speed)
    if speeds and (trace is None or rates):
        raise ConfigError("--speed is for --trace FILE without --rate")
    is_open = bool(rates) or trace is not None
    if concurrency is not None and is_open:
        raise ConfigError("--concurrency is a closed loop, --rate and --trace an open one; leave one out")
    wanted = goals(ttft, tbt, share)
    load = workload(input_len, output_len, input_spread, output_spread, shared_prefix, prompts, trace, scale)
    coming = arrivals(arrive, burstiness, burst_size)
    from inferc.bench.figures import Goals
    from inferc.bench.plot import check_plot, draw
    from inferc.bench.report import as_json as found_json
    from inferc.bench.report import as_text, save
    from inferc.bench.session import Settings, measure

    if plot is not None:
        check_plot(plot)
    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigError(f"-o {output}: there is no folder {output.parent}")
    settings = Settings(
        load,
        rates,
        speeds or ((1.0,) if is_open and not rates else ()),
        None if is_open else concurrency or DEFAULT_CONCURRENCY,
        coming,
        requests,
        seconds,
        warmup,
        seed,
        Goals(**wanted),
        find,
    )
    flags = {
        "--config": config,
        "--threads": threads,
        "--isa": None if isa == "auto" else isa,
        "--pin": pin or None,
        "--max-num-seqs": max_num_seqs,
        "--max-num-batched-tokens": max_num_batched_tokens,
        "--kv-memory": kv_memory,
        "--prefix-cache": prefix_cache,
        "--policy": policy,
        "--tbt-ms": tbt_ms,
    }
    rest: dict[str, Any] = {"model": model, "api_key": api_key, "ca": ca and Path(ca), "vocab_size": vocab_size}
    rest |= {"ignore_eos": ignore_eos, "temperature": temperature, "logprobs": logprobs, "timeout": timeout}
    with (
        target_of(where, endpoint, flags, settings.concurrency, **rest) as target,
        progress("bench serve") as report,
    ):
        measured = measure(target, settings, report)
    title = f"{measured.facts.model or where} over {target.kind}"
    if output is not None:
        save(output, measured, settings, {"where": where, "endpoint": target.kind})
    if plot is not None and measured.results:
        draw(plot, title, measured, settings)
    if as_json:
        print_json(found_json(measured, settings))
    else:
        for line in as_text(measured, settings):
            say(line)
    return INTERRUPTED if measured.is_interrupted else 0


@contextmanager
def target_of(
    where: str, endpoint: str | None, flags: dict[str, Any], concurrency: int | None = None, **rest: Any
) -> Iterator[Target]:
    """Yield the server that `where` names, and start one if `where` is an artifact.

    flags: options of the server that is started. rest: fields of Target. Raises ConfigError for options that do not
    apply.
    """
    from inferc.bench.endpoints import KINDS, Target
    from inferc.bench.own_server import server_options, serving
    from inferc.runtime.artifact.load import load_artifact

    kind = next((each for each in KINDS if each == endpoint), None)
    if kind is None and endpoint is not None:
        raise ConfigError(f"--endpoint {endpoint}: expected one of {', '.join(KINDS)}")
    running = None if Path(where).exists() else Target.address_of(where, kind)
    said = [name for name, value in flags.items() if value is not None]
    if running is not None:
        if said:
            raise ConfigError(f"{said[0]} is for the server that an artifact gets, and {where} runs already")
        yield Target(*running, **rest)
        return
    for name in ("api_key", "ca"):
        if rest.get(name):
            raise ConfigError(f"--{name.replace('_', '-')} is for a server that runs already; {where} is an artifact")
    load_artifact(Path(where))  # reports a broken artifact before a process is started
    kind = kind or "grpc"
    rest["api_key"] = None
    with serving(Path(where), server_options(flags, concurrency)) as addresses:
        yield Target(kind, addresses.grpc if kind == "grpc" else f"http://{addresses.http}/v1", **rest)
