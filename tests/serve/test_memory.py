"""A server's memory: garbage is collected where nobody waits for it."""

import asyncio
import gc
import weakref

import pytest

from inferc.serve import memory


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
