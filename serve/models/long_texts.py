"""What takes long over texts, on threads behind which nothing else waits, least of all what watches over an engine; and how long one
may be."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from typing import Any, TypeVar

from inferc.errors import RequestError
from inferc.serve.errors import QueueFull

Result = TypeVar("Result")

# Longer than any prompt of most models, so that texts can be counted before they are cut; some seconds of one core.
MAX_CHARACTERS = 4 << 20
CHARACTERS_OF_TOKEN = 8  # a prompt of a model that takes more than a million tokens may be longer
MAX_WAITING = 1024  # texts, as many as a model has sequences
_POOL = ThreadPoolExecutor(max(2, os.cpu_count() or 1), "inferc-text")


async def in_text_thread(make: Callable[[], Result]) -> Result:
    """What `make` makes, and raises, on one of these threads."""
    return await asyncio.get_running_loop().run_in_executor(_POOL, copy_context().run, make)


class Turns:
    """A thread for one kind of work, one piece at a time, behind which nothing else waits."""

    def __init__(self, what: str, max_waiting: int = MAX_WAITING) -> None:
        """what: others wait for, in words for clients."""
        self._what = what
        self._pool = ThreadPoolExecutor(1, "inferc-turns")
        self._num_waiting, self._max_waiting = 0, max_waiting

    async def run(self, make: Callable[[], Result]) -> Result:
        """What `make` makes, and raises, on the thread. Who is cancelled gives up the turn. Raises QueueFull where too many wait."""
        if self._num_waiting >= self._max_waiting:
            raise QueueFull(f"{self._num_waiting} others wait for {self._what}; come back later")
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, copy_context().run, make)
        finally:
            self._num_waiting -= 1


# What is no prompt: a text of 4 Mi characters takes gigabytes while it is tokenized.
BY_TURNS = Turns("their texts to be turned into tokens or back")


def check_characters(count: int, max_model_len: int) -> None:
    """Raise RequestError for a text that is too long to be tokenized at once."""
    limit = max(MAX_CHARACTERS, CHARACTERS_OF_TOKEN * max_model_len)
    if count > limit:
        raise RequestError(f"the text has {count} characters; at most {limit} are tokenized at once, send parts")


def num_characters(value: Any) -> int:
    """How many characters all texts in a value of JSON have together, names of its objects included."""
    count, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str):
            count += len(each)
        elif isinstance(each, Mapping):
            waiting += [*each, *each.values()]
        elif isinstance(each, (list, tuple)):
            waiting += each
    return count
