"""Conversations of one model become text on a thread of their own: a template that takes long delays that model's alone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from inferc.serve.streams import QueueFull

MAX_WAITING = 1024  # conversations of one model, as many as it has sequences
MAX_SECONDS = 10.0  # for the turn of a conversation to come and to end; one takes half of that at most

Result = TypeVar("Result")


class Rendering:
    """The conversations of a model, one at a time."""

    def __init__(self, max_waiting: int = MAX_WAITING, max_seconds: float = MAX_SECONDS) -> None:
        self._pool = ThreadPoolExecutor(1, "inferc-template")
        self._num_waiting, self._max_waiting, self._max_seconds = 0, max_waiting, max_seconds

    async def run(self, make: Callable[[], Result]) -> Result:
        """What `make` makes, on the thread. Raises QueueFull where others take too long, and what `make` raises."""
        if self._num_waiting >= self._max_waiting:
            raise QueueFull(f"{self._num_waiting} conversations wait for the model's chat template; come back later")
        self._num_waiting += 1
        try:
            made = asyncio.get_running_loop().run_in_executor(self._pool, make)
            return await asyncio.wait_for(made, self._max_seconds)
        except asyncio.TimeoutError:
            raise QueueFull(
                f"the conversation waited {self._max_seconds:g} s for the model's chat template, which takes long over others;"
                " come back later"
            ) from None
        finally:
            self._num_waiting -= 1

    def close(self) -> None:
        """Begin nothing more."""
        self._pool.shutdown(wait=False, cancel_futures=True)
