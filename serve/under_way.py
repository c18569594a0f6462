"""What is being answered, over both interfaces: for the end of a server to wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class UnderWay:
    """Counts requests that have come whole and are not answered: those that the engine has, and those whose text is still tokenized
    or rendered, or whose answer is being written."""

    def __init__(self) -> None:
        self.count = 0
        self._none = asyncio.Event()
        self._none.set()

    def begin(self) -> None:
        self.count += 1
        self._none.clear()

    def end(self) -> None:
        self.count -= 1
        if not self.count:
            self._none.set()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count one while it is inside."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    async def over(self, limit_seconds: float) -> bool:
        """Wait until nothing is, at most this long. Whether nothing is."""
        if self.count and limit_seconds > 0:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._none.wait(), limit_seconds)
        return not self.count
