"""The sender of a planned load: open loop, each request when it is due, or closed loop, a fixed number in flight."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import numpy as np

from inferc.bench.answers import Answer
from inferc.bench.endpoints import Endpoint
from inferc.bench.workload import FIRST_ID, Plan, Planned, Prompt
from inferc.errors import InfercError

TICK_SECONDS = 0.02
WARM_TOKENS = 2
Progress = Callable[[int, int], None]  # called with the number of finished requests and the number of all requests


@dataclass
class Load:
    """The raw result of a load: the answers, and how far the load generator itself lagged behind.

    lags: seconds by which each request was sent later than planned.
    ticks: seconds by which the event loop, which records the arrival of tokens, woke up late.
    cpu: CPU seconds of this process divided by the elapsed seconds.
    """

    answers: list[Answer] = field(default_factory=list)
    seconds: float = 0.0
    ticks: list[float] = field(default_factory=list)
    cpu: float = 0.0
    is_interrupted: bool = False

    @property
    def lags(self) -> list[float]:
        return [each.sent - each.planned for each in self.answers if each.sent >= 0]


class Interrupt:
    """A stop flag for Ctrl-C and SIGTERM: the first signal cancels requests in flight, the next ends the process."""

    def __init__(self) -> None:
        self.is_set = False
        self._tasks: set[asyncio.Task[None]] = set()

    def set(self) -> None:
        self.is_set = True
        for task in self._tasks:
            task.cancel()

    @contextlib.contextmanager
    def listening(self) -> Iterator[None]:
        loop = asyncio.get_running_loop()
        taken: list[signal.Signals] = []

        def on_signal() -> None:
            forget()
            self.set()

        def forget() -> None:
            while taken:
                loop.remove_signal_handler(taken.pop())

        # Signal handlers can only be installed in the main thread; other threads run without them.
        with contextlib.suppress(ValueError, RuntimeError, NotImplementedError):
            for each in (signal.SIGINT, signal.SIGTERM):
                loop.add_signal_handler(each, on_signal)
                taken.append(each)
        try:
            yield
        finally:
            forget()

    @asynccontextmanager
    async def ending(self, task: asyncio.Task[None]) -> AsyncIterator[None]:
        """Cancel `task` if the interrupt is set while the context is active."""
        self._tasks.add(task)
        try:
            yield
        finally:
            self._tasks.discard(task)


async def run_load(
    endpoint: Endpoint,
    plan: Plan,
    interrupt: Interrupt,
    concurrency: int | None = None,
    seconds: float | None = None,
    progress: Progress | None = None,
) -> Load:
    """Send the requests of a plan and wait for the answers.

    concurrency: the number of requests to keep in flight; no new one begins after `seconds`. None: each request is sent
    at its planned arrival time, whether or not earlier ones have ended.
    """
    load, running = Load(), _Running(endpoint, plan, progress)
    if interrupt.is_set:
        load.is_interrupted = True
        return load
    ticker = asyncio.create_task(_tick(load.ticks))
    cpu = time.process_time()
    running.begin()
    send = running.keep(concurrency, seconds) if concurrency is not None else running.send_when_due()
    task = asyncio.create_task(send)
    async with interrupt.ending(task):
        await asyncio.wait({task})
    if not task.cancelled():
        task.result()
    await running.end()
    load.answers = running.answers
    load.is_interrupted = interrupt.is_set
    load.seconds = time.perf_counter() - running.start
    load.cpu = (time.process_time() - cpu) / max(load.seconds, 1e-9)
    ticker.cancel()
    return load


async def warm_up(endpoint: Endpoint, plan: Plan, count: int, seed: int, interrupt: Interrupt) -> None:
    """Warm the server up with `count` concurrent requests of two output tokens.

    Their prompts share no prefix with those of the load. Raises InfercError if all of them fail.
    """
    if not count or not plan.requests:
        return
    warm = [
        Planned(number, 0.0, plan.requests[number % len(plan.requests)].input_len, WARM_TOKENS)
        for number in range(count)
    ]

    def prompt(request: Planned) -> Prompt:
        if not request.input_len:
            return "Please wait. " * (1 + request.number)
        random = np.random.default_rng((seed, 2**31, request.number))
        return random.integers(FIRST_ID, endpoint.facts.vocab_size, request.input_len).tolist()  # type: ignore[no-any-return]

    load = await run_load(endpoint, Plan(warm, prompt), interrupt, concurrency=count)
    if load.answers and not load.is_interrupted and not any(each.is_ok for each in load.answers):
        first = load.answers[0]
        raise InfercError(f"all {count} requests that should warm the server up failed: {first.status}: {first.detail}")


class _Running:
    """The requests of one load that are in flight, and the answers recorded so far."""

    def __init__(self, endpoint: Endpoint, plan: Plan, progress: Progress | None) -> None:
        self.answers: list[Answer] = []
        self.start = 0.0
        self._endpoint, self._plan, self._progress = endpoint, plan, progress
        self._tasks: set[asyncio.Task[None]] = set()
        self._faults: list[BaseException] = []  # errors of the load generator; errors of the server are in the answers
        self._num_over = 0

    def begin(self) -> None:
        self.start = time.perf_counter()

    async def send_when_due(self) -> None:
        for request in self._plan.requests:
            prepared = self._prepared(request)
            left = request.arrival - (time.perf_counter() - self.start)
            await asyncio.sleep(max(0.0, left))  # even 0 seconds let the requests in flight make progress
            task = asyncio.create_task(self._one(request, request.arrival, prepared))
            self._tasks.add(task)
            task.add_done_callback(self._is_over)
        if self._tasks:
            await asyncio.wait(set(self._tasks))

    async def keep(self, concurrency: int, seconds: float | None) -> None:
        """Keep `concurrency` requests in flight until all are sent, or until `seconds` have passed."""
        waiting = iter(self._plan.requests)

        async def worker() -> None:
            for request in waiting:
                prepared = self._prepared(request)
                now = time.perf_counter() - self.start
                if seconds is not None and now >= seconds:
                    return
                await self._one(request, now, prepared)

        self._tasks = {asyncio.create_task(worker()) for _ in range(concurrency)}
        await asyncio.wait(self._tasks)

    async def end(self) -> None:
        """Cancel the requests still in flight, whose answers stay unfinished, and raise the first internal error."""
        tasks = set(self._tasks)
        for task in tasks:
            task.cancel()
        found = [*self._faults, *await asyncio.gather(*tasks, return_exceptions=True)]
        for fault in found:
            if isinstance(fault, Exception):
                raise fault

    def _is_over(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (fault := task.exception()) is not None:
            self._faults.append(fault)

    def _prepared(self, request: Planned) -> object:
        return self._endpoint.prepare(self._plan.prompt(request), request.output_len)

    async def _one(self, request: Planned, planned: float, prepared: object) -> None:
        answer = Answer(request.number, planned, request.input_len, request.output_len)
        self.answers.append(answer)
        answer.sent = time.perf_counter() - self.start
        await self._endpoint.send(prepared, answer)
        self._num_over += 1
        if self._progress is not None:
            self._progress(self._num_over, len(self._plan.requests))


async def _tick(late: list[float]) -> None:
    while True:
        due = time.perf_counter() + TICK_SECONDS
        await asyncio.sleep(TICK_SECONDS)
        late.append(time.perf_counter() - due)
