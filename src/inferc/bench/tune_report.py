"""The report of `inferc bench tune`: a table, one JSON object, a configuration file for `inferc serve`, and a plot."""

from __future__ import annotations

import dataclasses
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from inferc.bench.figures import Goals
from inferc.bench.plot import BLUE, GREY, ORANGE, saved_figure
from inferc.bench.report import within
from inferc.bench.tune import Tuned
from inferc.bench.verify import Row
from inferc.system.atomic_file import atomic_write

MOST_SHOWN = 12  # largest number of candidates in the table that were only simulated
NOT_SIMULATED = "what the server and its clients take of the cores, text and the network are in no simulation"


def as_text(tuned: Tuned, goals: Goals) -> Iterator[str]:
    """Yield the lines of the report for people."""
    default = tuned.default
    measured = [row for row in tuned.rows if row.is_measured]
    yield (
        f"good requests/s, where at least {goals.share:.0%} are {within(goals)}; loads of {tuned.seconds:.3g} s;"
        f" {tuned.machine}"
    )
    yield (
        f"default: max-num-seqs {default.max_num_seqs}, max-num-batched-tokens {default.max_num_batched_tokens},"
        f" policy {default.policy}"
    )
    width = max(len(row.candidate.said(default)) for row in tuned.rows[: len(measured) + MOST_SHOWN])
    yield f"{'candidate':{width}}  simulated  measured      off   TTFT p50       p99   TPOT p50       p99"
    for row in tuned.rows[: len(measured) + MOST_SHOWN]:
        name = f"{row.candidate.said(default):{width}}"
        yield f"{name}{_rate(row.simulated):>11}" + (_measured(row) if row.is_measured else f"{'-':>10}")
    if len(tuned.rows) > len(measured) + MOST_SHOWN:
        yield f"and {len(tuned.rows) - len(measured) - MOST_SHOWN} more that were only simulated, none of them higher"
    yield _ties(tuned)
    yield from _errors(tuned)
    yield from (f"note: {note}" for note in tuned.notes)
    yield from _warnings(tuned)
    yield _verdict(tuned)


def _warnings(tuned: Tuned) -> Iterator[str]:
    """Yield one line for each kind of warning; `--json` lists the warnings load by load."""
    loads = [load for row in tuned.rows for load in row.loads.values()]
    texts = [text for load in loads for text in load.warnings]
    found = Counter(map(_kind, texts))
    for kind, count in found.items():
        example = next(text for text in texts if _kind(text) == kind)
        yield f"warning: in {count} of {len(loads)} loads, for example: {example}"


def _kind(warning: str) -> str:
    """Return the first three words of a warning that are not numbers, which identify its kind."""
    return " ".join([word for word in warning.split() if not word.isdigit()][:3])


def _measured(row: Row) -> str:
    off = "" if not row.measured or not row.simulated else f"{row.measured / row.simulated - 1:+.0%}"
    load = row.loads.get(row.measured_rung) if row.measured_rung is not None else None
    times = "".join(
        f"{'' if found is None else f'{getattr(found, name):,.0f}':>10}"
        for found in ((load.ttft_ms, load.tpot_ms) if load is not None else ())
        for name in ("p50", "p99")
    )
    return f"{_rate(row.measured):>10}{off:>9}{times}"


def _rate(value: float | None) -> str:
    return "none" if value is None else f"{value:.3g}"


def _ties(tuned: Tuned) -> str:
    own = tuned.rows[0]
    same = sum(row.does_as(own) for row in tuned.rows[1:])
    return (
        f"{len(tuned.rows)} candidates were simulated, of which {same} do as the default does: the simulation cannot"
        f" tell them apart, so they were not measured; {NOT_SIMULATED}"
    )


def _errors(tuned: Tuned) -> Iterator[str]:
    errors = tuned.errors
    if errors:
        mean = sum(map(abs, errors)) / len(errors)
        yield (
            f"measured rates are {mean:.0%} off the simulated ones on average ({min(errors):+.0%} to"
            f" {max(errors):+.0%}); predicted steps were off by {tuned.price_error:.0%}"
        )
        order = [row.measured or 0.0 for row in tuned.rows if row.is_measured]
        if sorted(order[1:], reverse=True) != order[1:]:
            yield "the simulation does not rank the candidates as they were measured: the measured order counts"


def _verdict(tuned: Tuned) -> str:
    winner, own = tuned.winner, tuned.rows[0]
    if winner is None:
        return "no configuration that was measured keeps the objectives at any rate that was tried; nothing is written"
    if winner is own:
        return f"the default is the best: {_rate(own.measured)} good requests/s"
    again = (
        f"; once more, both at that rate, {_rate(winner.again.good)} and {_rate(own.again.good)}"
        if winner.again and own.again
        else ""
    )
    return (
        f"the best: {winner.candidate.said(tuned.default)}, {_rate(winner.measured)} good requests/s, and by default"
        f" {_rate(own.measured)}{again}"
    )


def as_json(tuned: Tuned, goals: Goals) -> dict[str, Any]:
    winner = tuned.winner
    errors = tuned.errors
    return {
        "winner": None if winner is None else _json(winner, tuned),
        "is_default_best": winner is tuned.rows[0],
        "default": dataclasses.asdict(tuned.default),
        "candidates": [_json(row, tuned) for row in tuned.rows],
        "goals": dataclasses.asdict(goals),
        "seconds": tuned.seconds,
        "machine": tuned.machine,
        "simulation_error": sum(map(abs, errors)) / len(errors) if errors else None,
        "step_price_error": tuned.price_error,
        "notes": tuned.notes,
    }


def _json(row: Row, tuned: Tuned) -> dict[str, Any]:
    return {
        "options": dataclasses.asdict(row.candidate),
        "changes": row.candidate.changes(tuned.default),
        "simulated": row.simulated,
        "measured": row.measured,
        "again": None if row.again is None else dataclasses.asdict(row.again),
        "loads": [dataclasses.asdict(load) for load in row.loads.values()],
    }


def write_config(path: Path, tuned: Tuned, goals: Goals, what: str, isa: str = "auto") -> None:
    """Write the winner as a configuration file for `inferc serve --config`; the file is written whole or not at all.

    what: the model and the workload in one line, for the comment at the top.
    """
    assert tuned.winner is not None
    winner, own = tuned.winner, tuned.rows[0]
    rates = f"{_rate(winner.measured)} good requests/s, where at least {goals.share:.0%} are {within(goals)}"
    default = "the default" if winner is own else f"by default {_rate(own.measured)}"
    what, machine = " ".join(what.split()), " ".join(tuned.machine.split())
    flags = {name.removeprefix("--"): value for name, value in winner.candidate.flags().items() if value is not None}
    options = [f"{name} = {json.dumps(value)}" for name, value in flags.items()]
    if isa != "auto":
        options.append(f"isa = {json.dumps(isa)}")
    lines = [
        f"# For {what}, on {machine}: {rates} ({default}), as inferc bench tune measured.",
        *options,
        "# The objectives, for the server's own count of goodput; 0: any time is good.",
        f"goodput-ttft-ms = {goals.ttft_ms or 0:g}",
        f"goodput-tbt-ms = {goals.tbt_ms or 0:g}",
    ]
    if winner.candidate.policy == "slo":
        lines.insert(1, "# The policy knows only objectives that requests name: clients send ttft_ms and tbt_ms.")
    with atomic_write(path) as partial:
        partial.write_text("\n".join(lines) + "\n", encoding="utf-8")


def draw(path: Path, title: str, tuned: Tuned, goals: Goals) -> None:
    """Plot the simulated and measured rates, and the share of good requests by rate, of each measured candidate."""
    measured = [row for row in tuned.rows if row.is_measured]
    with saved_figure(path, title, rows=1, columns=2, size=(12, 2.6 + 0.55 * max(4, len(measured)))) as axes:
        left, right = axes
        places = range(len(measured))
        left.barh(
            [at - 0.19 for at in places], [row.simulated or 0 for row in measured], 0.36, color=GREY, label="simulated"
        )
        left.barh(
            [at + 0.19 for at in places], [row.measured or 0 for row in measured], 0.36, color=BLUE, label="measured"
        )
        left.set_yticks(list(places), [_broken(row.candidate.said(tuned.default)) for row in measured], fontsize=8)
        left.invert_yaxis()
        left.set(title=f"Goodput: {goals.share:.0%} {within(goals)}", xlabel="good requests / s")
        for row in measured:
            points = sorted((load.rate or 0.0, 100 * (load.goodput or 0.0)) for load in row.loads.values())
            is_winner = row is tuned.winner
            right.plot(
                *zip(*points, strict=True),
                marker="o",
                markersize=4,
                linewidth=2.4 if is_winner else 1.2,
                label=row.candidate.said(tuned.default) + (" (the best)" if is_winner else ""),
            )
        right.axhline(100 * goals.share, color=ORANGE, linestyle="--", linewidth=1, label=f"{goals.share:.0%}")
        right.set(title="Good requests, measured", xlabel="requests / s sent", ylabel="%", ylim=(0, 103))


def _broken(text: str) -> str:
    """Break a label into several lines of about 34 characters, for the axis of a plot."""
    parts, lines = text.split(", "), [""]
    for part in parts:
        if len(lines[-1]) + len(part) > 34 and lines[-1]:
            lines.append("")
        lines[-1] += (", " if lines[-1] else "") + part
    return "\n".join(lines)
