"""An event loop whose clock moves on by itself, so that tests of timers take no time and depend on no machine."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, TypeVar

import pytest

Result = TypeVar("Result")

MAX_SECONDS = 100_000.0
"""A test that has come so far waits for what never happens."""


def run(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine to its end on virtual time, which `time.monotonic` shows too meanwhile."""
    with asyncio.Runner(loop_factory=VirtualTimeLoop) as runner, pytest.MonkeyPatch.context() as patch:
        patch.setattr(time, "monotonic", runner.get_loop().time)
        return runner.run(work)


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """An event loop that goes to its next timer at once when nothing else is left to do.

    A thread of an executor that works is waited for; one that stands at a closed `Gate` is not.
    """

    def __init__(self) -> None:
        super().__init__()
        self._now = 1000.0  # 0 is what code takes for "never"
        self._num_working = 0  # threads of executors that do not stand at a gate
        self._lock = threading.Lock()
        self._look = self._selector.select  # type: ignore[attr-defined]
        self._selector.select = self._select  # type: ignore[attr-defined]
        self._threads = ThreadPoolExecutor()
        self._gates: set[Gate] = set()

    def time(self) -> float:
        return self._now

    def run_in_executor(  # type: ignore[override]
        self, executor: Executor | None, func: Callable[..., Result], *args: Any
    ) -> asyncio.Future[Result]:
        self._add(1)
        job: Future[Result] = (executor or self._threads).submit(_LOOP.within, self, func, *args)
        future = asyncio.wrap_future(job, loop=self)
        job.add_done_callback(lambda _: self._add(-1))  # after its result is on the way to the loop
        return future

    async def shutdown_default_executor(self, timeout: float | None = None) -> None:
        for gate in self._gates:  # a test that failed may have left some closed
            gate.open()
        self._threads.shutdown()

    def _add(self, number: int) -> None:
        with self._lock:
            self._num_working += number
        if number < 0 and not self.is_closed():
            self.call_soon_threadsafe(lambda: None)  # it may be time to move on

    def _select(self, timeout: float | None) -> Any:
        events = self._look(0)
        if events or timeout == 0:
            return events
        with self._lock:
            is_idle = not self._num_working
        if is_idle and (events := self._look(0)):  # what a thread left just before it had no more to do
            return events
        if is_idle and timeout is not None:
            assert self._now < MAX_SECONDS, "the test waits for what never happens"
            self._now += timeout
            return []
        return self._look(None)


class _OfThread(threading.local):
    """The loop for which a thread works."""

    loop: VirtualTimeLoop | None = None

    def within(self, loop: VirtualTimeLoop, func: Callable[..., Result], *args: Any) -> Result:
        self.loop = loop
        try:
            return func(*args)
        finally:
            self.loop = None


_LOOP = _OfThread()


class Gate:
    """A gate that threads wait at until the test opens it; meanwhile virtual time goes on."""

    def __init__(self, is_open: bool = True) -> None:
        self._changed = threading.Condition()
        self._is_open = is_open
        self._standing: list[VirtualTimeLoop] = []

    def open(self) -> None:
        with self._changed:
            self._is_open = True
            for loop in self._standing:
                loop._add(1)
            self._standing.clear()
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_open = False

    def wait(self) -> None:
        """Go through, or stand until it is open."""
        with self._changed:
            if not self._is_open:
                if _LOOP.loop is not None:
                    self._standing.append(_LOOP.loop)
                    _LOOP.loop._gates.add(self)
                    _LOOP.loop._add(-1)
                self._changed.wait_for(lambda: self._is_open)
