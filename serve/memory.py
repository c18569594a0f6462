"""A server's memory: garbage collections that nobody waits for, and what is free given back to the system."""

from __future__ import annotations

import asyncio
import ctypes
import gc
import time
from collections.abc import Callable

YOUNG_OBJECTS = 10_000  # that are made before the young ones are looked at
TIDY_SECONDS, COLLECT_AT_LAST_SECONDS = 30.0, 120.0


def spare_the_collector() -> None:
    """Keep Python's garbage collections short: a whole one looks at every object, and stops all streams for a tenth of a second
    where there are a thousand.

    What is there now stays for good, and is left out. Young objects are looked at as ever; whole collections are `tidy`'s.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 50, 1_000_000)


async def tidy(is_idle: Callable[[], bool]) -> None:
    """Collect all garbage when nobody waits, or it has been long, and give back what is free: every half minute, for ever."""
    last = time.monotonic()
    while True:
        await asyncio.sleep(TIDY_SECONDS)
        if is_idle() or time.monotonic() - last > COLLECT_AT_LAST_SECONDS:
            gc.collect()
            last = time.monotonic()
        await asyncio.to_thread(give_back)


def give_back() -> None:
    """Give memory that is free back to the system: tenths of a second where it is gigabytes, without the interpreter's lock.

    glibc keeps what is not at the end of one of its heaps, of which each thread has its own: hundreds of megabytes of a text of
    four million characters that was tokenized once, whose last small piece is in use. Other C libraries keep little.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))
