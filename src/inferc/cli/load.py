"""What `inferc bench serve` and `inferc bench tune` share: the options that say what load is put on a server."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inferc.errors import ConfigError

if TYPE_CHECKING:
    from inferc.bench.workload import Arrivals, Workload

InputLen = Annotated[int, typer.Option("--input-len", metavar="N", help="Tokens in a prompt.")]
OutputLen = Annotated[int, typer.Option("--output-len", metavar="N", help="New tokens of a request.")]
InputSpread = Annotated[
    float,
    typer.Option(
        "--input-spread",
        metavar="F",
        help="Prompts of different lengths: uniform from (1-F) to (1+F) times --input-len; 0: all alike.",
    ),
]
OutputSpread = Annotated[float, typer.Option("--output-spread", metavar="F", help="The same of --output-len.")]
SharedPrefix = Annotated[
    int,
    typer.Option("--shared-prefix", metavar="N", help="Of the prompt's tokens so many are the same in all: a system prompt."),
]  # fmt: skip
Prompts = Annotated[
    Path | None,
    typer.Option(
        "--prompts",
        metavar="FILE.jsonl",
        help='Real texts, over and over in an order by --seed: {"prompt": TEXT} or {"messages": [...]} a line, and if'
        " wanted max_tokens, else --output-len.",
    ),
]
TraceFile = Annotated[
    Path | None,
    typer.Option(
        "--trace",
        metavar="FILE",
        help="Replay a trace, as `inferc simulate` takes it: lengths, arrivals, and equal blocks of the prompts for equal"
        " hash_ids. With --rate its requests come by --arrivals instead.",
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
        help="How requests come at a rate: independently; with gaps of a gamma distribution (--burstiness); evenly; or in"
        " groups of --burst-size at once, the groups by Poisson.",
    ),
]
Burstiness = Annotated[
    float,
    typer.Option("--burstiness", metavar="X", help="The shape of gamma: 1 is Poisson, less is burstier, more evener."),
]
BurstSize = Annotated[int, typer.Option("--burst-size", metavar="N", help="Requests of a burst.")]
Ttft = Annotated[
    float,
    typer.Option(
        "--ttft",
        metavar="MS",
        help="A request is good if it ended well, its first token came within this, and the others within --tbt of one"
        " another on average: as the server's own metrics count, but from the client's side. 0: any time.",
    ),
]
Tbt = Annotated[
    float, typer.Option("--tbt", metavar="MS", help="The mean time between a good request's tokens. 0: any.")
]
Share = Annotated[
    float, typer.Option("--share", metavar="F", help="Of the requests that shall be good, for the largest good rate.")
]
Seed = Annotated[
    int,
    typer.Option(
        "--seed",
        metavar="N",
        help="Of arrivals, lengths and prompts; a server that saw the same ones has them in its prefix cache.",
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
    """What the options ask for. Raises ConfigError."""
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
    """Raises ConfigError."""
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
    """The fields of Goals. Raises ConfigError."""
    for name, value in (("--ttft", ttft), ("--tbt", tbt)):
        if not 0 <= value < math.inf:
            raise ConfigError(f"{name} {value:g}: expected a number of milliseconds, 0 or more")
    if not 0 < share <= 1:
        raise ConfigError(f"--share {share:g}: expected a number above 0, at most 1")
    return {"ttft_ms": ttft or None, "tbt_ms": tbt or None, "share": share}


def positive_numbers(name: str, text: str | None) -> tuple[float, ...]:
    """Numbers above 0 with commas between. Raises ConfigError."""
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
    """Raises ConfigError for what is given and not above 0, by the option's name."""
    for name, value in counts.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"--{name.replace('_', '-')} {value:g}: expected more than 0")
