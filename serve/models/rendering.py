"""Conversations of one model become text on a thread of their own: a template that takes long delays that model's alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from inferc.errors import RequestError
from inferc.serve.errors import EngineUnavailable, QueueFull
from inferc.serve.models.async_engine import UNLOAD, Leaving

MAX_WAITING = 1024  # conversations of one model, as many as it has sequences
MAX_SECONDS = 10.0  # for the turn of a conversation to come and to end; one takes half of that at most

Result = TypeVar("Result")


class Rendering:
    """The conversations of a model, one at a time."""

    def __init__(self, max_waiting: int = MAX_WAITING, max_seconds: float = MAX_SECONDS) -> None:
        self._pool = ThreadPoolExecutor(1, "inferc-template")
        self._num_waiting, self._max_waiting, self._max_seconds = 0, max_waiting, max_seconds
        self._leaving: Leaving | None = None  # why it is closed

    async def run(self, make: Callable[[], Result]) -> Result:
        """What `make` makes, on the thread. Raises QueueFull where others take too long, EngineUnavailable once it is closed, and what
        `make` raises."""
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
                    f"the conversation waited {self._max_seconds:g} s for the model's chat template, which takes long over others;"
                    " come back later"
                )
            if self._leaving is not None and (made.cancelled() or isinstance(made.exception(), RequestError)):
                # Its turn does not come, or the template's process was ended under it.
                raise EngineUnavailable(self._leaving.late)
            return made.result()
        finally:
            turn.cancel()
            made.cancel()
            self._num_waiting -= 1

    def close(self, leaving: Leaving = UNLOAD) -> None:
        """Begin nothing more; who waits, and who is at it, is told why."""
        self._leaving = leaving
        self._pool.shutdown(wait=False, cancel_futures=True)
