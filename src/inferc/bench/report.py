"""The report of a measurement: text for people, one JSON object, and a file with every request."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from inferc.bench.figures import Goals, Percentiles, ServeResult
from inferc.bench.session import Measured, Settings
from inferc.system.atomic_file import atomic_write

FORMAT = 1
ROWS = (
    ("TTFT", "ttft_ms", "to the first token"),
    ("ITL", "itl_ms", "between two tokens"),
    ("TPOT", "tpot_ms", "the mean of these of a request"),
    ("E2E", "e2e_ms", "to the end"),
)
NAMES = ("mean", "p50", "p90", "p95", "p99", "max")


def as_json(measured: Measured, settings: Settings) -> dict[str, Any]:
    """Return all loads under the key `loads`; the keys of a single load also appear at the top level."""
    loads = [dataclasses.asdict(each) for each in measured.results]
    by_speed = bool(settings.speeds)
    level = "largest_good_speed" if by_speed else "largest_good_rate"
    found: dict[str, Any] = {
        "loads": loads,
        "goals": dataclasses.asdict(settings.goals),
        "model": measured.facts.model,
        "notes": measured.facts.notes,
        "interrupted": measured.is_interrupted,
    }
    if settings.concurrency is None:
        found[level] = measured.largest_good(by_speed, settings.goals.share)
    return {**(loads[0] if len(loads) == 1 else {}), **found}


def save(path: Path, measured: Measured, settings: Settings, what: dict[str, Any]) -> None:
    """Write the whole result, with the times of each request, to a file that is written whole or not at all.

    what: a description of what was measured, merged into the JSON object.
    """
    found = as_json(measured, settings)
    for load, saved in zip(measured.loads, found["loads"], strict=True):
        saved["request_times"] = [each.row() for each in load.answers]
    with atomic_write(path) as partial:
        partial.write_text(json.dumps({"format": FORMAT, **what, **found}, default=str) + "\n")


def as_text(measured: Measured, settings: Settings) -> Iterator[str]:
    """Yield the lines of the report for people."""
    facts, results = measured.facts, measured.results
    if not results:
        yield "interrupted before anything was measured"
        return
    yield from (f"note: {note}" for note in facts.notes)
    if len(results) == 1:
        yield from _one(results[0], settings.goals)
    else:
        yield from _table(results)
    if len(results) > 1 and settings.concurrency is None:
        yield from _largest(measured, settings)
    for result in results:
        where = "" if len(results) == 1 else f"at {_rate(result)}: "
        yield from (f"warning: {where}{text}" for text in result.warnings)


def within(goals: Goals) -> str:
    parts = [f"{name} {value:g} ms" for name, value in (("TTFT", goals.ttft_ms), ("TPOT", goals.tbt_ms)) if value]
    return "within " + " and ".join(parts) if parts else "of any time"


def _one(result: ServeResult, goals: Goals) -> Iterator[str]:
    load = f"{result.concurrency} under way at once" if result.rate is None else f"{_rate(result)} requests/s"
    lengths = f"{result.input_len} tokens in and {result.output_len} out"
    if not result.input_len:
        lengths = f"texts, {result.output_len} tokens out"
    yield f"{load}, {lengths}: {result.requests} requests in {result.seconds:.1f} s, prompts as {result.prompts}"
    if result.prompt_tokens is not None:
        cached = f", {result.cached_tokens:,} of them cached" if result.cached_tokens is not None else ""
        yield f"prompt tokens as the server counts them: {result.prompt_tokens:,}{cached}"
    yield f"{'ms':6}" + "".join(f"{name:>10}" for name in NAMES)
    for name, field, meaning in ROWS:
        found: Percentiles | None = getattr(result, field)
        cells = "".join(f"{'' if found is None else _ms(getattr(found, each)):>10}" for each in NAMES)
        yield f"{name:6}{cells}  {meaning}"
    total = "" if result.total_tokens_per_s is None else f", {result.total_tokens_per_s:,.1f} with prompts"
    yield f"output {result.output_tokens_per_s:,.1f} tokens/s{total}; {result.requests_per_s:.3g} requests/s"
    if result.goodput is not None:
        yield f"goodput {result.goodput:.1%}, {result.goodput_per_s:.3g} requests/s {within(goals)}"
    others = [f"{count} {status}" for status, count in result.failed.items()]
    others += [f"{result.unfinished} unfinished"] * bool(result.unfinished)
    others += [f"{result.short_answers} shorter than asked for"] * bool(result.short_answers)
    if others:
        yield "of the requests: " + ", ".join(others)
    yield _generator(result)


def _generator(result: ServeResult) -> str:
    lag, loop = result.lag_ms, result.loop_lag_ms
    late = [
        f"{what} {_ms(each.p99)} ms late (P99)"
        for what, each in (("sent", lag), ("noted tokens", loop))
        if each is not None and (what != "sent" or result.rate is not None)
    ]
    return f"the generator itself {' and '.join([*late, ''])}took {result.generator_cpu:.2f} of a core"


def _table(results: Sequence[ServeResult]) -> Iterator[str]:
    heads = (
        f"{'requests/s':>10}",
        f"{'sent':>6}",
        f"{'failed':>7}",
        "  TTFT p50",
        "       p99",
        "   ITL p50",
        "       p99",
    )
    yield "".join((*heads, "  E2E p50", "  tokens/s", "  good", "   good/s"))
    for each in results:
        times = "".join(
            f"{'' if found is None else _ms(getattr(found, name)):>10}"
            for found in (each.ttft_ms, each.itl_ms)
            for name in ("p50", "p99")
        )
        whole = "" if each.e2e_ms is None else _ms(each.e2e_ms.p50)
        good = "" if each.goodput is None else f"{each.goodput:.0%}"
        counts = f"{_rate(each):>10}{each.requests:6}{sum(each.failed.values()):7}"
        yield f"{counts}{times}{whole:>9}{each.output_tokens_per_s:10.1f}{good:>6}{each.goodput_per_s:9.3g}"
    yield "times in ms"


def _largest(measured: Measured, settings: Settings) -> Iterator[str]:
    goals, by_speed = settings.goals, bool(settings.speeds)
    found = measured.largest_good(by_speed, goals.share)
    unit = "times the trace's speed" if by_speed else "requests/s"
    most = f"the largest load at which {goals.share:.0%} of the requests are {within(goals)}"
    if found is None:
        yield f"{most}: none of those that were measured"
        return
    points = measured.points(by_speed)
    is_last = found == max(each.rate for each in points)
    yield f"{most}: {found:.4g} {unit}" + (", the highest that was measured" if is_last else "")


def _rate(result: ServeResult) -> str:
    return "" if result.rate is None else f"{result.rate:.4g}"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
