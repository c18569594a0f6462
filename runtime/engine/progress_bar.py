"""The progress bar of a call of `inferc.LLM`, on standard error."""

from __future__ import annotations

from typing import final


@final
class ProgressBar:
    """A progress bar over requests, if it is wanted."""

    def __init__(self, total: int, is_wanted: bool) -> None:
        self._bar = None
        if is_wanted:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("generate", total=total)

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.advance(self._task)

    def __enter__(self) -> ProgressBar:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()
