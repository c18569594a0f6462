"""How a benchmark shows what it found: tables in Markdown, and pictures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

Grid = list[list[str]]  # the first row is the head
COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b279a2")
PALE = "#d5dbe3"  # of what is there and not used


def markdown(grid: Grid) -> str:
    head, *rows = grid
    return "\n".join([_line(head), "|" + "---|" * len(head), *map(_line, rows)])


def _line(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


@contextmanager
def picture(
    path: Path, title: str, size: tuple[float, float], rows: int = 1, columns: int = 1, **options: Any
) -> Iterator[Any]:
    """The axes [rows, columns] of a picture, written to the file `path` in the end. options: as of `subplots`."""
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
