"""Waiting for several things at once, and not for ever."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Any, TypeVar

from inferc.serve.errors import RequestTimeout

Value = TypeVar("Value")
Result = TypeVar("Result")


@asynccontextmanager
async def deadline(seconds: float | None) -> AsyncIterator[None]:
    """Cancel what is inside after so many seconds, and raise RequestTimeout instead; None: never."""
    task, is_late = asyncio.current_task(), False
    assert task is not None

    def cancel() -> None:
        nonlocal is_late
        is_late = True
        task.cancel()

    handle = None if seconds is None else asyncio.get_running_loop().call_later(seconds, cancel)
    try:
        yield
    except asyncio.CancelledError:
        if is_late:
            raise RequestTimeout(f"the request was not done within its {seconds:g} s") from None
        raise
    finally:
        if handle is not None:
            handle.cancel()


async def gather(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results in their order. If one fails, or the caller is cancelled, the others are cancelled, and have ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        return [await task for task in tasks]
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def gather_some(
    work: Callable[[Value], Coroutine[Any, Any, Result]], values: Sequence[Value], at_once: int
) -> list[Result]:
    """As `gather` of the work on each value, of which so many are under way at the same time."""
    left, results = iter(enumerate(values)), dict[int, Result]()

    async def take() -> None:
        for index, value in left:
            results[index] = await work(value)

    await gather(take() for _ in range(min(at_once, len(values))))
    return [results[index] for index in range(len(results))]
