"""The form in which long work reports how much of it is done."""

from __future__ import annotations

from collections.abc import Callable

Progress = Callable[[str, int, int], None]  # called with (stage, amount done, amount in total)


def silent(_stage: str, _done: int, _total: int) -> None:
    """Ignore the progress of work that nobody watches."""
