"""The tables and the plot of the results of `make bench`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from tables import COLORS, Grid, markdown, picture

from inferc.system.resources import available_cores


def show(result: dict[str, Any], cases: Sequence[str], console: Console) -> None:
    for title, grid in grids(result, cases):
        table = Table(title=title)
        for index, name in enumerate(grid[0]):
            table.add_column(name, justify="left" if index < 2 else "right")
        for row in grid[1:]:
            table.add_row(*row)
        console.print(table)


def write_markdown(result: dict[str, Any], cases: Sequence[str], path: Path) -> None:
    """Write the tables of `show` as Markdown, one below the other."""
    lines = []
    for title, grid in grids(result, cases):
        lines += [title[0].upper() + title[1:], "", markdown(grid), ""]
    path.write_text("\n".join(lines), encoding="utf-8")


def grids(result: dict[str, Any], cases: Sequence[str]) -> list[tuple[str, Grid]]:
    read = f"memory read at {result['read_gb_per_s']:.1f} GB/s"
    found = [(f"{result['shape']}: tokens/s, medians; {read}", speeds(result["rows"], cases))]
    if any("same_bits" in row or "any" in row for row in result["ratios"]):
        found.append(("inferc over the best peer", over_peers(result["ratios"])))
    return [*found, ("targets", targets(result["targets"]))]


def speeds(rows: Sequence[dict[str, Any]], cases: Sequence[str]) -> Grid:
    grid = [["engine", "format", *cases, "of the decode limit", "load s", "RSS GB"]]
    for row in rows:
        if "error" in row:
            grid.append([row["engine"], row["format"], "failed", *[""] * (len(cases) + 2)])
            continue
        own = [f"{row['cases'][case]['median']:.1f}" for case in cases]
        share = f"{row['of_decode_limit']:.0%}" if "of_decode_limit" in row else ""
        rest = [f"{row['load_seconds']:.1f}", f"{row['peak_rss_gb']:.2f}"]
        grid.append([row["engine"], row["format"], *own, share, *rest])
    return grid


def over_peers(rows: Sequence[dict[str, Any]]) -> Grid:
    grid = [["format", "case", "of the same width", "ratio", "of any precision", "ratio"]]
    for row in rows:
        pairs = [row.get(name) for name in ("same_bits", "any")]
        cells = [text for one in pairs for text in ((one["peer"], f"{one['ratio']:.2f}") if one else ("", ""))]
        grid.append([row["format"], row["case"], *cells])
    return grid


def targets(rows: Sequence[dict[str, Any]]) -> Grid:
    grid = [["work", "format", "found", "asked for", ""]]
    for row in rows:
        asked = f"at {'most' if row['most'] else 'least'} {row['asked']:g}"
        grid.append(
            [row["work"], row["format"], f"{row['found']:.2f} {row['of']}", asked, "met" if row["met"] else "short"]
        )
    return grid


def draw(result: dict[str, Any], cases: Sequence[str], path: Path) -> None:
    """Draw bars for each case, one per row, scaled to the best of the case."""
    rows = [row for row in result["rows"] if "cases" in row]
    if not rows:
        return
    title = f"{result['shape']}, tokens/s on {available_cores()} cores (blue: 16 bits, orange: 8, green: 4)"
    size = (3.2 * len(cases), 0.32 * len(rows) + 1.6)
    with picture(path, title, size, columns=len(cases), sharey=True) as axes:
        _draw_cases(result, rows, cases, axes[0])


def _draw_cases(result: dict[str, Any], rows: list[dict[str, Any]], cases: Sequence[str], axes: Any) -> None:
    colors = dict(zip((16, 8, 4), COLORS, strict=False))
    for axis, case in zip(axes, cases, strict=True):
        values = [row["cases"][case]["median"] for row in rows]
        bars = axis.barh(range(len(rows)), values, color=[colors[row["bits"]] for row in rows])
        for bar, row in zip(bars, rows, strict=True):
            bar.set_alpha(1.0 if row["engine"] == "inferc" else 0.5)
        limits = [row["decode_limit"] for row in rows] if case == "decode" else []
        for place, value in enumerate(values):
            end = max(value, limits[place]) if limits else value  # right of the limit mark, not under it
            text = f"{value:.0f}" if value >= 100 else f"{value:.1f}"
            axis.annotate(text, (end, place), (4, 0), textcoords="offset points", va="center", fontsize=7)
        if limits:
            axis.plot(limits, range(len(rows)), "k|", markersize=9, label="the memory's limit")
            axis.legend(fontsize=7, loc="lower right")
        axis.set_title(case.replace("_", " "), fontsize=9)
        axis.set_xlim(0, 1.25 * max(values + limits))
        axis.tick_params(labelsize=7)
    axes[0].set_yticks(range(len(rows)), [f"{row['engine']} {row['format']}" for row in rows])
    axes[0].invert_yaxis()
