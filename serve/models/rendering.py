"""The rendering of a model's conversations by its chat template, on a thread of its own.

A template that takes long delays only the conversations of its own model.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from inferc.errors import RequestError
from inferc.serve.errors import EngineUnavailable, QueueFull
from inferc.serve.models.async_engine import UNLOAD, Leaving

MAX_WAITING = 1024  # conversations of one model that wait: as many as it may have sequences
MAX_SECONDS = 10.0  # time limit for waiting and rendering together; one rendering takes half of that at most

Result = TypeVar("Result")


class Rendering:
    """A thread that renders the conversations of a model, one at a time."""

    def __init__(self, max_waiting: int = MAX_WAITING, max_seconds: float = MAX_SECONDS) -> None:
        self._pool = ThreadPoolExecutor(1, "inferc-template")
        self._num_waiting, self._max_waiting, self._max_seconds = 0, max_waiting, max_seconds
        self._leaving: Leaving | None = None  # the reason, once closed

    async def run(self, make: Callable[[], Result]) -> Result:
        """Run `make` on the thread, and return its result or raise its error.

        Raises QueueFull if other conversations take too long, and EngineUnavailable once this is closed.
        """
        if self._leaving is not None:
            raise EngineUnavailable(self._leaving.late)
        if self._num_waiting >= self._max_waiting:
            raise QueueFull(f"{self._num_waiting} conversations wait for the model's chat template; come back later")
        self._num_waiting += 1
        turn = self._pool.submit(make)
        made = asyncio.wrap_future(turn)
        try:
            await asyncio.wait((made,), timeout=self._max_seconds)
            if not made.done():
                raise QueueFull(
                    f"the conversation waited {self._max_seconds:g} s for the model's chat template, which takes long"
                    " over others; come back later"
                )
            if self._leaving is not None and (made.cancelled() or isinstance(made.exception(), RequestError)):
                # The conversation's turn does not come, or the template's process was ended while it ran.
                raise EngineUnavailable(self._leaving.late)
            return made.result()
        finally:
            turn.cancel()
            made.cancel()
            self._num_waiting -= 1

    def close(self, leaving: Leaving = UNLOAD) -> None:
        """Render nothing more; conversations that wait or are being rendered fail with the reason."""
        self._leaving = leaving
        self._pool.shutdown(wait=False, cancel_futures=True)
