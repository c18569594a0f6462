"""The progress of long commands on standard error: a bar on a terminal, a line for each stage elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TextIO

from inferc.system import env
from inferc.system.progress import Progress, silent

FIRST = 2.0  # seconds without a line: what a quick command does is not worth one
APART = 1.0  # seconds between the lines of two stages
EVERY = 10.0  # seconds between two lines of one stage


@contextmanager
def progress(what: str) -> Iterator[Progress]:
    """Show how far a command is, and yield the function that is told.

    INFERC_PROGRESS says how: `bar`, `lines` or `none`; by default a bar on a terminal, else lines.
    """
    how = env.progress() or ("bar" if sys.stderr.isatty() else "lines")
    if how == "bar":
        with _bar(what) as report:
            yield report
    else:
        yield silent if how == "none" else LineProgress(sys.stderr)


@contextmanager
def _bar(what: str) -> Iterator[Progress]:
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task(what, total=None)

        def report(stage: str, done: int, total: int) -> None:
            # A stage with a single part has no measurable progress: the bar then only shows activity.
            bars.update(task, description=stage, completed=done, total=total if total > 1 else None)

        yield report


class LineProgress:
    """A writer of a line when a stage begins, and of one now and then while it goes on, with the time it still needs.

    Stages that come and go at once have none, and the first seconds of a command neither.
    """

    def __init__(self, stream: TextIO, clock: Callable[[], float] = time.monotonic) -> None:
        self._stream, self._clock = stream, clock
        self._start = self._stage_start = self._last = clock()
        self._stage = ""

    def __call__(self, stage: str, done: int, total: int) -> None:
        """Tell that `done` of `total` parts of a stage are done (a system.progress.Progress)."""
        now = self._clock()
        if stage != self._stage:
            self._stage, self._stage_start = stage, now
            if now - self._start >= FIRST and now - self._last >= APART:
                self._write(now, stage)
        elif now - self._last >= EVERY:
            share = done / total if total > 1 else 0.0
            spent = now - self._stage_start
            left = f": {share:.0%}, about {spent * (1 - share) / share:.0f} s more" if 0 < share < 1 else ""
            self._write(now, stage + left)

    def _write(self, now: float, line: str) -> None:
        self._last = now
        print(f"inferc: {now - self._start:4.0f} s  {line}", file=self._stream, flush=True)
