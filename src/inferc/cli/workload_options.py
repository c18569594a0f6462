"""The workload options that `inferc bench serve` and `inferc bench tune` share, and the checks of their values."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inferc.errors import ConfigError

if TYPE_CHECKING:
    from inferc.bench.workload import Arrivals, Workload

InputLen = Annotated[int, typer.Option("--input-len", metavar="N", help="Number of tokens of each prompt.")]
OutputLen = Annotated[int, typer.Option("--output-len", metavar="N", help="Number of new tokens of each request.")]
InputSpread = Annotated[
    float,
    typer.Option(
        "--input-spread",
        metavar="F",
        help="Vary prompt lengths uniformly from (1-F) to (1+F) times --input-len; 0: all the same.",
    ),
]
OutputSpread = Annotated[
    float,
    typer.Option(
        "--output-spread",
        metavar="F",
        help="Vary output lengths uniformly from (1-F) to (1+F) times --output-len; 0: all the same.",
    ),
]
SharedPrefix = Annotated[
    int,
    typer.Option(
        "--shared-prefix",
        metavar="N",
        help="Number of tokens that are the same at the start of all prompts, like a system prompt.",
    ),
]
Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE.jsonl",
        help='Real prompts, repeated in an order that --seed sets. Each line is {"prompt": TEXT} or {"messages": [...]}'
        " with an optional max_tokens, by default --output-len.",
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Replay a trace (see `inferc simulate`): its lengths, its arrival times, and equal prompt blocks for equal"
        " hash_ids. With --rate the requests arrive by --arrivals instead.",
    ),
]
Scale = Annotated[
    int,
    typer.Option("--scale", metavar="N", help="Divide the trace's lengths and times by N (a divisor of 512)."),
]
Pattern = Annotated[
    str,
    typer.Option(
        "--arrivals",
        metavar="poisson|gamma|constant|burst",
        help="Arrival process of the requests: poisson (independent), gamma (gaps from a gamma distribution with shape"
        " --burstiness), constant (evenly spaced), burst (groups of --burst-size at once, the groups by Poisson).",
    ),
]
Burstiness = Annotated[
    float,
    typer.Option(
        "--burstiness",
        metavar="X",
        help="Shape of the gamma distribution: 1 is Poisson, less is burstier, more is more even.",
    ),
]
BurstSize = Annotated[int, typer.Option("--burst-size", metavar="N", help="Number of requests in a burst.")]
Ttft = Annotated[
    float,
    typer.Option(
        "--ttft",
        metavar="MS",
        help="Objective for the time to first token. A request is good if it succeeds, its first token comes within"
        " this time, and the mean time between its tokens is within --tbt. The server's metrics use the same rule; here"
        " the times are those that the client sees. 0: any time is good.",
    ),
]
Tbt = Annotated[
    float,
    typer.Option(
        "--tbt",
        metavar="MS",
        help="Objective for the mean time between the tokens of a good request. 0: any time is good.",
    ),
]
Share = Annotated[
    float,
    typer.Option("--share", metavar="F", help="Share of the requests that must be good for a rate to count as good."),
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed",
        metavar="N",
        help="Seed of arrivals, lengths and prompts. A server that has seen the same prompts may have them in its"
        " prefix cache, so change the seed between runs.",
    ),
]


def workload(
    input_len: int,
    output_len: int,
    input_spread: float,
    output_spread: float,
    shared_prefix: int,
    prompts: Path | None,
    trace: Path | None,
    scale: int,
) -> Workload:
    """Build the workload that the options describe. Raises ConfigError for invalid or conflicting options."""
    from inferc.bench.workload import Lengths, read_texts, read_workload

    if input_len < 1 or output_len < 1:
        raise ConfigError(f"--input-len {input_len} and --output-len {output_len}: expected at least 1 of each")
    if prompts is not None and trace is not None:
        raise ConfigError("--prompts and --trace are both given; leave one out")
    if trace is not None:
        return read_workload(trace, scale)
    if scale != 1:
        raise ConfigError("--scale is for --trace FILE")
    if prompts is not None:
        return read_texts(prompts, output_len)
    return Lengths(input_len, output_len, input_spread, output_spread, shared_prefix)


def arrivals(pattern: str, burstiness: float, burst_size: int) -> Arrivals:
    """Build the arrival process that the options describe. Raises ConfigError for invalid values."""
    from inferc.bench.workload import PATTERNS, Arrivals

    known = next((each for each in PATTERNS if each == pattern), None)
    if known is None:
        raise ConfigError(f"--arrivals {pattern}: expected one of {', '.join(PATTERNS)}")
    if not 0 < burstiness < math.inf:
        raise ConfigError(f"--burstiness {burstiness:g}: expected a number above 0")
    if burst_size < 1:
        raise ConfigError(f"--burst-size {burst_size}: expected at least 1")
    return Arrivals(known, burstiness, burst_size)


def goals(ttft: float, tbt: float, share: float) -> dict[str, Any]:
    """Return the fields of Goals for the objectives. Raises ConfigError for invalid values."""
    for name, value in (("--ttft", ttft), ("--tbt", tbt)):
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name} {value:g}: expected a number of milliseconds, 0 or more")
    if not 0 < share <= 1:
        raise ConfigError(f"--share {share:g}: expected a number above 0, at most 1")
    return {"ttft_ms": ttft or None, "tbt_ms": tbt or None, "share": share}


def positive_numbers(name: str, text: str | None) -> tuple[float, ...]:
    """Parse numbers above 0 that are separated by commas. Raises ConfigError for any other text."""
    if text is None:
        return ()
    found = []
    for part in text.split(","):
        try:
            value = float(part)
        except ValueError:
            value = math.nan
        if not 0 < value < math.inf:
            raise ConfigError(f"{name} {text}: expected numbers above 0 with commas between, found {part!r:.40}")
        found.append(value)
    return tuple(dict.fromkeys(found))


def check_counts(**counts: float | None) -> None:
    """Raise ConfigError, which names the option, for each value that is given and not above 0."""
    for name, value in counts.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: expected more than 0")
