"""The count of requests that are being answered, over HTTP and gRPC, for which the shutdown of the server waits."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class UnderWay:
    """A count of the requests that were received completely and are not fully answered.

    These are the requests in the engine, those whose text is still being rendered or tokenized, and those whose
    answer is still being written.
    """

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
        """Count one request while the body runs."""
        self.begin()
        try:
            yield
        finally:
            self.end()

    async def over(self, limit_seconds: float) -> bool:
        """Wait at most this long until no request is under way, and return whether none is."""
        if self.count and limit_seconds > 0:
            with suppress(TimeoutError):
                async with asyncio.timeout(limit_seconds):
                    await self._none.wait()
        return not self.count
