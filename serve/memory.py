"""The server's memory housekeeping: garbage collection when it is idle, and free memory returned to the system."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

from inferc.system.memory import give_back

YOUNG_OBJECTS = 10_000  # allocations before a collection of the youngest generation
TIDY_SECONDS, COLLECT_AT_LAST_SECONDS = 30.0, 120.0


def spare_the_collector() -> None:
    """Keep Python's automatic garbage collections short.

    A full collection looks at every object, and stops all streams for a tenth of a second if there are a thousand. So
    the objects that exist now are frozen, which excludes them from collections. Young objects are collected as usual;
    full collections are left to `tidy`.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(YOUNG_OBJECTS, 50, 1_000_000)


async def tidy(is_idle: Callable[[], bool]) -> None:
    """Collect garbage and return free memory every TIDY_SECONDS, for ever.

    A full collection is done only while the server is idle, or if the last was longer than COLLECT_AT_LAST_SECONDS ago.
    """
    last = time.monotonic()
    while True:
        await asyncio.sleep(TIDY_SECONDS)
        if is_idle() or time.monotonic() - last > COLLECT_AT_LAST_SECONDS:
            gc.collect()
            last = time.monotonic()
        await asyncio.to_thread(give_back)
