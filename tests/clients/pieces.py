"""Answers that come in several pieces: what a busy machine has not sent yet, a server merges into one."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

TRIES = 20
Answer = TypeVar("Answer")


def in_pieces(ask: Callable[[], Answer], num_pieces: Callable[[Answer], int], least: int = 3) -> Answer:
    """Return the first of some equal answers that came in so many pieces at least, or the last one, which has fewer."""
    for _ in range(TRIES):
        found = ask()
        if num_pieces(found) >= least:
            break
    return found
