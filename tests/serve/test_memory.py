"""A server's memory: what is free goes back to the system, also where a small piece behind it is in use."""

import asyncio
import ctypes
import gc
import subprocess
import sys
import weakref

import pytest

from inferc.serve import memory

FREED_BUT_KEPT = """
import psutil
from inferc.serve.memory import give_back

# Each too large for Python's own allocator and too small for a mapping of its own, and one behind them all that stays.
blocks = [bytes(4000) for _ in range(50_000)]
last = bytes(4000)
full = psutil.Process().memory_info().rss
blocks.clear()
freed = psutil.Process().memory_info().rss
give_back()
print(full, freed, psutil.Process().memory_info().rss)
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "malloc_trim"), reason="needs glibc")
def test_what_is_free_goes_back_to_the_system() -> None:
    said = subprocess.run([sys.executable, "-c", FREED_BUT_KEPT], capture_output=True, text=True, check=True).stdout
    full, freed, given_back = map(int, said.split())
    assert full - freed < 50e6, "the C library keeps it: there is something to give back"
    assert freed - given_back > 150e6


class Knot:
    """An object that only a garbage collection finds."""

    def __init__(self) -> None:
        self.itself = self


@pytest.mark.parametrize("is_idle", [True, False])
def test_garbage_is_collected_where_nobody_waits(is_idle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    given_back: list[bool] = []
    monkeypatch.setattr(memory, "TIDY_SECONDS", 0)

    async def run() -> None:
        tidied = asyncio.Event()

        def give_back() -> None:
            given_back.append(knot() is None)
            loop.call_soon_threadsafe(tidied.set)

        loop = asyncio.get_running_loop()
        monkeypatch.setattr(memory, "give_back", give_back)
        task = asyncio.create_task(memory.tidy(lambda: is_idle))
        await tidied.wait()
        task.cancel()

    gc.disable()
    try:
        knot = weakref.ref(Knot())
        asyncio.run(run())
    finally:
        gc.enable()
    assert given_back[0] == is_idle
