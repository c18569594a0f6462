"""The `inferc top` command, which shows a live view of a running server from its metrics."""

from __future__ import annotations

import math
import os
import select
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any

import typer

from inferc.cli.common import Json, print_json
from inferc.errors import ConfigError, InfercError

if TYPE_CHECKING:
    from rich.console import RenderableType

    from inferc.client.scrape import Change, Page

EndpointArgument = Annotated[
    str, typer.Argument(metavar="ENDPOINT", help="The server's HTTP address: 127.0.0.1:8000 or https://HOST:PORT.")
]
ApiKey = Annotated[
    str | None,
    typer.Option("--api-key", metavar="KEY", envvar="INFERC_API_KEY", help="API key, if the server requires one."),
]
Ca = Annotated[
    str | None,
    typer.Option("--ca", metavar="FILE", help="PEM file of trusted CA certificates for TLS; by default the system's."),
]
BARS = " ▁▂▃▄▅▆▇█"
HISTORY = 60


def top(
    endpoint: EndpointArgument,
    interval: Annotated[float, typer.Option("--interval", metavar="S", help="Seconds between two updates.")] = 1.0,
    count: Annotated[
        int, typer.Option("--count", metavar="N", help="Stop after N updates; 0 continues until q or Ctrl-C.")
    ] = 0,
    api_key: ApiKey = None,
    ca: Ca = None,
    as_json: Json = False,
) -> None:
    """Watch a running server: latencies, throughput, queue, KV cache use, device use and batch size.

    With --json it prints one object: the last update, with all --count of them under "looks".
    """
    if not 0.05 <= interval <= 3600:
        raise ConfigError(f"--interval {interval:g}: expected 0.05 to 3600 seconds")
    if count < 0 or (as_json and not count):
        count = max(count, 1)
    from inferc.client.scrape import Endpoint, Page

    where = Endpoint.parse(endpoint, api_key, ca)
    before = Page.fetch(where)
    if as_json:
        looks: list[dict[str, Any]] = []
        for _ in range(count):
            time.sleep(interval)
            after = Page.fetch(where)
            looks.append(asdict(Look.between(before, after)))
            before = after
        print_json({**looks[-1], "looks": looks})
        return
    from rich.console import Console
    from rich.live import Live

    history: dict[tuple[str, str], deque[float]] = {}
    console = Console()
    done, look, problem = 0, None, ""
    with (
        Live(console=console, auto_refresh=False, screen=console.is_terminal and not count) as live,
        _keys() as is_left,
    ):
        while not count or done < count:
            if is_left(interval):
                return
            try:
                after = Page.fetch(where)
            except InfercError as error:  # the server may come back
                problem = str(error)
            else:
                look, before, problem = Look.between(before, after), after, ""
            if look is not None:
                live.update(_screen(str(where), look, history, problem), refresh=True)
            done += 1


@contextmanager
def _keys() -> Iterator[Callable[[float], bool]]:
    """Yield a function that waits some seconds, and returns True at once if q is pressed.

    If standard input is not a terminal, the function only waits.
    """
    if not sys.stdin.isatty():

        def wait(seconds: float) -> bool:
            time.sleep(seconds)
            return False

        yield wait
        return
    import termios
    import tty

    def pressed(seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while select.select([sys.stdin], [], [], max(0.0, deadline - time.monotonic()))[0]:
            keys = os.read(sys.stdin.fileno(), 64)
            if not keys or b"q" in keys.lower():
                return True
        return False

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield pressed
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)


@dataclass(frozen=True)
class Quantiles:
    """The quantiles of a latency in milliseconds; None where no request has shown it between the two pages."""

    p50: float | None
    p90: float | None
    p99: float | None

    @staticmethod
    def of(change: Change, name: str) -> Quantiles:
        """Return the quantiles of a histogram of seconds."""
        return Quantiles(
            p50=_ms(change.quantile(name, 0.5)),
            p90=_ms(change.quantile(name, 0.9)),
            p99=_ms(change.quantile(name, 0.99)),
        )


@dataclass(frozen=True)
class ModelLook:
    """The values of one model to show; its rates are of the time between two metrics pages."""

    model: str
    state: str
    requests_per_s: float | None
    output_tokens_per_s: float | None
    prompt_tokens_per_s: float | None
    ttft_ms: Quantiles
    tbt_ms: Quantiles
    goodput: float | None
    running: int
    waiting: int
    places: int
    open: int
    kv_usage: float | None
    cache_hits: float | None
    device_busy: float | None
    batch_fill: float | None
    preemptions_per_s: float | None
    refused_per_s: float | None
    restarts: int

    @staticmethod
    def of(change: Change) -> ModelLook:
        """Compute the values of the model whose change this is."""
        from inferc.client.scrape import rounded

        return ModelLook(
            model=change.model,
            state=change.state,
            requests_per_s=rounded(change.rate("inferc_requests_total")),
            output_tokens_per_s=rounded(change.rate("inferc_output_tokens_total")),
            prompt_tokens_per_s=rounded(change.rate("inferc_prompt_tokens_total")),
            ttft_ms=Quantiles.of(change, "inferc_time_to_first_token_seconds"),
            tbt_ms=Quantiles.of(change, "inferc_time_between_tokens_seconds"),
            goodput=rounded(change.share("inferc_requests_good_total", "inferc_requests_judged_total")),
            running=int(change.now("inferc_sequences_running")),
            waiting=int(change.now("inferc_sequences_waiting")),
            places=int(change.now("inferc_sequences_max")),
            open=int(change.now("inferc_requests_open")),
            kv_usage=rounded(change.now("inferc_kv_usage_ratio")),
            cache_hits=rounded(
                change.share("inferc_prefix_cache_hit_tokens_total", "inferc_prefix_cache_queried_tokens_total")
            ),
            device_busy=rounded(change.busy),
            batch_fill=rounded(change.batch_fill),
            preemptions_per_s=rounded(change.rate("inferc_preemptions_total")),
            refused_per_s=rounded(change.rate("inferc_requests_refused_total")),
            restarts=int(change.now("inferc_engine_restarts_total")),
        )


@dataclass(frozen=True)
class Look:
    """The values of one update; its fields, and the order of these, are the keys of the command's JSON."""

    seconds: float
    event_loop_lag_ms: float | None
    models: list[ModelLook]

    @staticmethod
    def between(before: Page, after: Page) -> Look:
        """Compute the values to show from two metrics pages: the rates are of the time between them."""
        from inferc.client.scrape import Change

        return Look(
            seconds=round(after.at - before.at, 3),
            event_loop_lag_ms=_ms(after.sum("inferc_event_loop_lag_seconds")),
            models=[ModelLook.of(Change(before, after, name)) for name in after.models],
        )


def _ms(seconds: float) -> float | None:
    return None if math.isnan(seconds) else round(1e3 * seconds, 3)


# ----------------------------------------------------------------------------------------------------- screen


def _screen(where: str, look: Look, history: dict[tuple[str, str], deque[float]], problem: str) -> RenderableType:
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    head = Text.assemble(
        ("inferc top", "bold"),
        f"  {where}  {time.strftime('%H:%M:%S')}  server late by {_text(look.event_loop_lag_ms, ' ms')}",
    )
    parts: list[Any] = [Text(problem, "bold red") if problem else head]
    for model in look.models:
        table = Table.grid(padding=(0, 2))
        style = "green" if model.state == "serving" else "bold red"
        title = Text.assemble(("\n" + model.model, "bold"), "  ", (model.state, style))
        if model.restarts:
            title.append(f"  engine started again {model.restarts} times", "yellow")
        parts.append(title)
        rows = (
            ("tokens out", model.output_tokens_per_s, f"{_text(model.output_tokens_per_s)} /s", None),
            ("tokens in", model.prompt_tokens_per_s, f"{_text(model.prompt_tokens_per_s)} /s", None),
            ("requests", model.requests_per_s, f"{_text(model.requests_per_s)} /s", None),
            ("TTFT p90", model.ttft_ms.p90, _three(model.ttft_ms), 500.0),
            ("between tokens p90", model.tbt_ms.p90, _three(model.tbt_ms), 100.0),
            (
                "sequences",
                float(model.running + model.waiting),
                f"{model.running} running of {model.places}, {model.waiting} waiting",
                None,
            ),
        )
        for name, value, text, limit in rows:
            line = _spark(history, (model.model, name), value)
            is_high = limit is not None and value is not None and value > limit
            table.add_row(name, Text(text, "bold red" if is_high else ""), Text(line, "cyan"))
        for name, share, is_bad in (
            ("KV cache", model.kv_usage, lambda share: share > 0.9),
            ("device busy", model.device_busy, lambda share: False),
            ("batch filled", model.batch_fill, lambda share: False),
            ("prefix cache hits", model.cache_hits, lambda share: False),
            ("goodput", model.goodput, lambda share: share < 0.9),
        ):
            colour = "red" if share is not None and is_bad(share) else "blue"
            table.add_row(name, _percent(share), Text(_bar(share), colour))
        if model.preemptions_per_s or model.refused_per_s:
            table.add_row(
                "trouble",
                Text(
                    f"{_text(model.preemptions_per_s)} preempted /s, {_text(model.refused_per_s)} refused /s",
                    "yellow",
                ),
            )
        parts.append(table)
    if not look.models:
        parts.append(Text("no model is loaded", "yellow"))
    return Group(*parts)


def _spark(history: dict[tuple[str, str], deque[float]], key: tuple[str, str], value: float | None) -> str:
    """Add a value to the history of a row and return the last 60 values as text bars, scaled to the highest one."""
    line = history.setdefault(key, deque(maxlen=HISTORY))
    line.append(value or 0.0)
    most = max(line) or 1.0
    return "".join(BARS[round(each / most * (len(BARS) - 1))] for each in line)


def _bar(share: float | None, width: int = 24) -> str:
    filled = round((share or 0.0) * width)
    return "█" * min(filled, width) + "·" * (width - min(filled, width))


def _percent(share: float | None) -> str:
    return "–" if share is None else f"{100 * share:.0f} %"


def _three(values: Quantiles) -> str:
    return f"{_text(values.p50)} / {_text(values.p90)} / {_text(values.p99)} ms (p50 / p90 / p99)"


def _text(value: float | None, unit: str = "") -> str:
    if value is None:
        return "–"
    return f"{value:.0f}{unit}" if abs(value) >= 100 else f"{value:.3g}{unit}"
