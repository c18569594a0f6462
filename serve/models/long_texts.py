"""Threads of their own for slow work on texts, and the bounds on the length of a text.

Nothing else waits behind these threads, least of all the supervision of an engine.
"""

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

# The most characters that are tokenized at once, which takes some seconds of one core. It is more than a prompt of most
# models can have, so that a client can count the tokens of a text before it cuts the text.
MAX_CHARACTERS = 4 << 20
CHARACTERS_OF_TOKEN = 8  # raises the bound above for a model whose context has more than MAX_CHARACTERS / 8 tokens
MAX_WAITING = 1024  # texts that wait for their turn: as many as a model may have sequences
_POOL = ThreadPoolExecutor(max(2, os.cpu_count() or 1), "inferc-text")


async def in_text_thread(make: Callable[[], Result]) -> Result:
    """Run `make` on a thread for texts, and return its result or raise its error."""
    return await asyncio.get_running_loop().run_in_executor(_POOL, copy_context().run, make)


class Turns:
    """A thread that does one kind of work, one call at a time, so that nothing else waits behind it."""

    def __init__(self, what: str, max_waiting: int = MAX_WAITING) -> None:
        """Start a thread for the work named `what`, in words that complete "others wait for" in a client's message."""
        self._what = what
        self._pool = ThreadPoolExecutor(1, "inferc-turns")
        self._num_waiting, self._max_waiting = 0, max_waiting

    async def run(self, make: Callable[[], Result]) -> Result:
        """Run `make` on the thread, and return its result or raise its error.

        A caller that is cancelled gives up its turn. Raises QueueFull if too many wait already.
        """
        if self._num_waiting >= self._max_waiting:
            raise QueueFull(f"{self._num_waiting} others wait for {self._what}; come back later")
        self._num_waiting += 1
        try:
            return await asyncio.get_running_loop().run_in_executor(self._pool, copy_context().run, make)
        finally:
            self._num_waiting -= 1


# Texts that are not prompts are tokenized one after another: a text of 4 Mi characters takes gigabytes meanwhile.
BY_TURNS = Turns("their texts to be turned into tokens or back")


def check_characters(count: int, max_model_len: int) -> None:
    """Raise RequestError for a text that is too long to be tokenized at once."""
    limit = max(MAX_CHARACTERS, CHARACTERS_OF_TOKEN * max_model_len)
    if count > limit:
        raise RequestError(f"the text has {count} characters; at most {limit} are tokenized at once, send parts")


def num_characters(value: Any) -> int:
    """Return how many characters all strings in a JSON value have together, the names of object fields included."""
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
