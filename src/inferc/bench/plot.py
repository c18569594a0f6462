"""The plots of a measurement: latency distributions of a single load, or latency and goodput by rate of several."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from inferc.bench.answers import UNFINISHED, num_under_way
from inferc.bench.figures import Goals, ServeResult
from inferc.bench.load import Load
from inferc.bench.report import within
from inferc.bench.session import Measured, Settings
from inferc.runtime.simulate.report import check_plot
from inferc.system.atomic_file import atomic_write

__all__ = ["check_plot", "draw", "saved_figure"]

BLUE, ORANGE, GREEN, RED, GREY = "#3465a4", "#e07b00", "#3a8a3a", "#c03030", "#888888"
BANDS = ((5, 95, 0.18), (25, 75, 0.30))
MOST_INSTANTS = 400


@contextmanager
def saved_figure(path: Path, title: str, rows: int, columns: int, size: tuple[float, float]) -> Iterator[list[Any]]:
    """Yield axes to draw on, then save the figure as PNG, SVG or PDF; the file is written whole or not at all.

    `check_plot` raises beforehand the errors that saving would raise.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, found = plt.subplots(rows, columns, figsize=size, layout="constrained", squeeze=False)
    figure.suptitle(title, fontsize=12)
    axes = list(found.flat)
    try:
        yield axes
        for ax in axes:
            ax.spines[["top", "right"]].set_visible(False)
            ax.grid(alpha=0.25)
            ax.set_axisbelow(True)
            if ax.get_legend_handles_labels()[1]:
                ax.legend(fontsize=8, framealpha=0.8, edgecolor="none")
        with atomic_write(path) as partial:
            figure.savefig(partial, dpi=140)
    finally:
        plt.close(figure)


def draw(path: Path, title: str, measured: Measured, settings: Settings) -> None:
    """Plot a measurement of one load or of several loads into the file `path`."""
    last = measured.results[-1]
    lengths = f"{last.input_len} tokens in, " if last.input_len else ""
    by_rate = [(load, result) for load, result in zip(measured.loads, measured.results, strict=True) if result.rate]
    with saved_figure(path, f"{title}: {lengths}{last.output_len} out", 2, 2, (11, 7.5)) as axes:
        if len(by_rate) > 1:
            by_rate.sort(key=lambda pair: pair[1].rate or 0.0)
            _draw_sweep(axes, [load for load, _ in by_rate], [result for _, result in by_rate], measured, settings)
        else:
            _draw_one(axes, measured.loads[0], measured.results[0], settings.goals)


def _draw_sweep(
    axes: Any, loads: Sequence[Load], results: Sequence[ServeResult], measured: Measured, settings: Settings
) -> None:
    first, second, third, fourth = axes
    goals = settings.goals
    rates = [each.rate or 0.0 for each in results]
    ttft = [[1e3 * each.ttft for each in load.answers if each.is_ok] for load in loads]
    itl = [[1e3 * gap for each in load.answers if each.is_ok for gap in each.gaps] for load in loads]
    _bands(first, rates, ttft, "Time to first token", goals.ttft_ms)
    _bands(second, rates, itl, "Time between tokens", goals.tbt_ms)
    third.plot(rates, rates, color=GREY, linestyle=":", label="all requests good")
    third.plot(
        rates, [each.requests_per_s for each in results], color=BLUE, marker="o", markersize=4, label="completed"
    )
    third.plot(rates, [each.goodput_per_s for each in results], color=GREEN, marker="o", markersize=4, label="good")
    third.set(title=f"Goodput: {within(goals)}", xlabel="requests / s sent", ylabel="requests / s", ylim=(0, None))
    shares = [100 * (each.goodput or 0.0) for each in results]
    fourth.plot(rates, shares, color=GREEN, marker="o", markersize=4, label="good")
    lost = [100 * sum(each.failed.values()) / max(1, each.requests) for each in results]
    if any(lost):
        fourth.plot(rates, lost, color=RED, marker="x", markersize=5, label="failed or refused")
    fourth.axhline(100 * goals.share, color=GREY, linestyle="--", linewidth=1, label=f"{goals.share:.0%}")
    fourth.set(title="Share of requests", xlabel="requests / s sent", ylabel="%", ylim=(0, 103))
    largest = measured.largest_good(bool(settings.speeds), goals.share)
    best = [each.rate for each in results if (each.speed if settings.speeds else each.rate) == largest and each.rate]
    if largest is not None and best:
        for ax in (third, fourth):
            ax.axvline(best[0], color=ORANGE, linewidth=1.2, label=f"largest good rate measured, {best[0]:.3g}")


def _bands(ax: Any, rates: Sequence[float], values: Sequence[Sequence[float]], title: str, goal: float | None) -> None:
    """Draw the distribution at each rate: the median, bands that hold 50 % and 90 % of it, and the 99th percentile."""
    there = [(rate, np.maximum(each, 1e-3)) for rate, each in zip(rates, values, strict=True) if len(each)]
    if there:
        places = [rate for rate, _ in there]

        def line(q: float) -> list[float]:
            return [float(np.percentile(each, q)) for _, each in there]

        for low, high, alpha in BANDS:
            label = f"{low} to {high} %"
            ax.fill_between(places, line(low), line(high), color=BLUE, alpha=alpha, linewidth=0, label=label)
        ax.plot(places, line(50), color=BLUE, marker="o", markersize=4, label="median")
        ax.plot(places, line(99), color=ORANGE, marker="o", markersize=4, label="P99")
    if goal is not None:
        ax.axhline(goal, color=RED, linestyle="--", linewidth=1, label=f"objective, {goal:g} ms")
    ax.set(title=title, xlabel="requests / s sent", ylabel="ms", yscale="log")
    _plain_numbers(ax.yaxis)


def _draw_one(axes: Any, load: Load, result: ServeResult, goals: Goals) -> None:
    first, second, third, fourth = axes
    ok = [each for each in load.answers if each.is_ok]
    total = len([each for each in load.answers if each.status != UNFINISHED])
    _shares(first, [1e3 * each.ttft for each in ok], total, "Time to first token", "requests", goals.ttft_ms)
    gaps = [1e3 * gap for each in ok for gap in each.gaps]
    _shares(second, gaps, len(gaps), "Time between tokens", "tokens", None)
    tpot = [1e3 * each.tpot for each in ok if each.tpot is not None]
    _shares(second, tpot, len(tpot), "Time between tokens", "requests, by their mean", goals.tbt_ms, GREEN)
    good = [each for each in ok if each.is_good(goals.ttft_ms, goals.tbt_ms)]
    for chosen, color, label in (
        (good, GREEN, f"good: {len(good)}"),
        ([each for each in ok if each not in good], ORANGE, f"not {within(goals)}: {len(ok) - len(good)}"),
    ):
        if chosen:
            third.scatter([each.sent for each in chosen], [1e3 * each.ttft for each in chosen], 14, color, label=label)
    lost = [each.sent for each in load.answers if not each.is_ok and each.status != UNFINISHED]
    if lost:
        third.scatter(lost, [0.0] * len(lost), 22, RED, marker="x", label=f"failed or refused: {len(lost)}")
    third.set(title="Each request", xlabel="s, when it was sent", ylabel="ms to the first token", ylim=(0, None))
    instants = np.linspace(0, max(result.seconds, 1e-3), min(MOST_INSTANTS, 20 + 4 * len(load.answers)))
    fourth.step(instants, [num_under_way(load.answers, when) for when in instants.tolist()], color=BLUE, where="post")
    fourth.set(title="Requests under way", xlabel="s", ylabel="requests", ylim=(0, None))


def _shares(
    ax: Any, values: Sequence[float], total: int, title: str, what: str, goal: float | None, color: str = BLUE
) -> None:
    """Draw the cumulative distribution of `values` as shares of `total`; entries without a value never count."""
    if values:
        ordered = np.sort(np.maximum(values, 1e-3))
        ax.plot(ordered, 100 * np.arange(1, len(ordered) + 1) / total, color=color, label=what)
    if goal is not None:
        ax.axvline(goal, color=RED, linestyle="--", linewidth=1, label=f"objective, {goal:g} ms")
    ax.set(title=title, xlabel="ms, at most", ylabel="%", ylim=(0, 103), xscale="log")
    _plain_numbers(ax.xaxis)


def _plain_numbers(axis: Any) -> None:
    """Label a logarithmic axis with plain numbers (20, 50, 100) in place of powers of ten."""
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.set_major_formatter(StrMethodFormatter("{x:g}"))
    axis.set_minor_formatter(NullFormatter())
