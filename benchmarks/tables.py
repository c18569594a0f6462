"""The output helpers of benchmarks: tables in Markdown, and plots."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Grid = list[list[str]]  # the first row is the header
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
PALE = "#d5dbe3"  # colour of capacity that is not used


def markdown(grid: Grid) -> str:
    head, *rows = grid
    return "\n".join([_line(head), "|" + "---|" * len(head), *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


@contextmanager
def picture(
    path: Path, title: str, size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any
) -> Iterator[Any]:
    """Yield the axes [rows, columns] of a plot, and write it to the file `path` at the end.

    options: options of matplotlib's `subplots`.
    """
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)
    try:
        yield axes
        for axis in axes.flat:
            axis.spines[["top", "right"]].set_visible(False)
        figure.suptitle(title, fontsize=10)
        figure.savefig(path, dpi=150)
    finally:
        plt.close(figure)
