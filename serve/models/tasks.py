"""Helpers to run several coroutines at once, and to limit their time."""

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
    """Cancel what runs inside after so many seconds and raise RequestTimeout instead; None sets no limit."""
    try:
        async with asyncio.timeout(seconds) as limit:
            yield
    except TimeoutError:
        if limit.expired():
            raise RequestTimeout(f"the request was not done within its {seconds:g} s") from None
        raise


async def gather(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return all results in order; if one fails, cancel the others and raise its error once they have ended."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(work) for work in works]
    except BaseExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


async def all_ended(works: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Return all results in order; if one fails, raise its error once the others have ended by themselves."""
    found = await asyncio.gather(*works, return_exceptions=True)
    for result in found:
        if isinstance(result, BaseException):
            raise result
    return [result for result in found if not isinstance(result, BaseException)]


async def gather_some(
    work: Callable[[Value], Coroutine[Any, Any, Result]], values: Sequence[Value], at_once: int
) -> list[Result]:
    """Run `work` on each value as `gather` does, but on at most `at_once` values at the same time."""
    left, results = iter(enumerate(values)), dict[int, Result]()

    async def take() -> None:
        for index, value in left:
            results[index] = await work(value)

    await gather(take() for _ in range(min(at_once, len(values))))
    return [results[index] for index in range(len(results))]
