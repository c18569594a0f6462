"""The log of the last batches of KV events, numbered, which subscribers read at their own pace.

The writer never waits for a reader: a subscriber holds only the number of its next batch, not a queue. A subscriber
that falls so far behind that its next batch is not kept any more gets an error.
"""

from __future__ import annotations

import asyncio
import re
import threading
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass

from inferc.errors import ConfigError
from inferc.runtime.kv_cache.events import Cleared, KvBatch
from inferc.serve.errors import BatchesGone, EngineUnavailable

NUM_KEPT = 10_000  # batches that are kept; a step makes one at most
MAX_KEPT_BYTES = 64 << 20
READ_AT_ONCE = 64
ENDPOINT = re.compile(r"tcp://(?:\*|[^*:/\s]+|\[[:.%\w]+\]):(\d+)|ipc://\S+")


@dataclass(frozen=True)
class KvPublisherConfig:
    """The ZeroMQ endpoint (tcp://HOST:PORT or ipc://PATH) where KV events are published, and their topic.

    replay: the endpoint where subscribers ask for batches that they missed.
    """

    endpoint: str
    replay: str | None = None
    topic: str = ""

    def __post_init__(self) -> None:
        for name, endpoint in (("--kv-events", self.endpoint), ("--kv-events-replay", self.replay)):
            found = ENDPOINT.fullmatch(endpoint or "ipc://none")
            if found is None or int(found[1] or 0) > 65535:
                raise ConfigError(
                    f"{name} {endpoint}: expected tcp://ADDRESS:PORT, for example tcp://127.0.0.1:5557, or ipc://PATH"
                )


@dataclass(frozen=True)
class Numbered:
    """A batch of KV events and its number, which counts from 0 since the server started."""

    sequence: int
    batch: KvBatch


def block_number(name: bytes) -> int:
    """Return the number by which clients know a block: the last eight bytes of its hash, big-endian."""
    return int.from_bytes(name[-8:], "big")


class KvEventLog:
    """The log of the batches [first, end), which drops the oldest ones beyond its bounds.

    It is thread-safe. Listeners are called on the thread of the writer.
    """

    def __init__(self, num_kept: int = NUM_KEPT, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self.epoch = time.time_ns()  # distinguishes this numbering from that of an earlier server process
        self.closed: str | None = None  # the reason why no more batches come, once closed
        self._num_kept, self._max_bytes = num_kept, max_bytes
        self._kept: deque[Numbered] = deque()
        self._bytes = 0
        self._end = 0
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    @property
    def first(self) -> int:
        """The number of the oldest batch that is kept, or `end` if there is none."""
        with self._lock:
            return self._end - len(self._kept)

    @property
    def end(self) -> int:
        """The number of the batch that comes next."""
        return self._end

    def add(self, batch: KvBatch) -> None:
        """Number and keep a batch unless the log is closed, and wake all listeners."""
        with self._lock:
            if self.closed is None:
                self._append(batch)
            listeners = list(self._listeners)
        for wake in listeners:
            wake()

    def clear(self) -> None:
        """Add an event that the cache is empty, since the engine is gone; another engine may come."""
        self.add(KvBatch(time.time(), [Cleared()]))

    def close(self, reason: str) -> None:
        """Add an event that the cache is empty, since the engine is gone or about to go, and accept no more batches."""
        with self._lock:
            if self.closed is None:
                self._append(KvBatch(time.time(), [Cleared()]))
                self.closed = reason
            listeners = list(self._listeners)
        for wake in listeners:
            wake()

    def reopen(self) -> None:
        """Accept batches again, from another engine; the numbering continues."""
        with self._lock:
            self.closed = None

    def _append(self, batch: KvBatch) -> None:
        self._kept.append(Numbered(self._end, batch))
        self._end += 1
        self._bytes += batch.num_bytes
        while len(self._kept) > self._num_kept or (self._bytes > self._max_bytes and len(self._kept) > 1):
            self._bytes -= self._kept.popleft().batch.num_bytes

    def read(self, start: int, limit: int = READ_AT_ONCE) -> list[Numbered]:
        """Return the batches from `start` on, at most `limit`; raise BatchesGone if `start` is not kept."""
        with self._lock:
            first = self._end - len(self._kept)
            if not first <= start <= self._end:
                raise BatchesGone(
                    f"KV events from {start} on are not here: kept are {first} to {self._end - 1}, and {self._end}"
                    " comes next; forget what you know of this server, and subscribe again"
                )
            end = min(start + limit, self._end)
            return [self._kept[index] for index in range(start - first, end - first)]

    @contextmanager
    def listening(self, wake: Callable[[], None]) -> Iterator[None]:
        """Call `wake` for every new batch while the body runs, on any thread; `wake` must not block."""
        with self._lock:
            self._listeners.append(wake)
        try:
            yield
        finally:
            with self._lock:
                self._listeners.remove(wake)

    async def follow(self, start: int) -> AsyncGenerator[Numbered, None]:
        """Yield the batches from `start` on, as they come.

        Raises BatchesGone, and EngineUnavailable after the last batch of a log that was closed.
        """
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed, so nobody waits for this
                loop.call_soon_threadsafe(news.set)

        with self.listening(wake):
            while True:
                news.clear()
                reason = self.closed  # read before the batches, so that none added before the close is missed
                batches = self.read(start)
                for numbered in batches:
                    yield numbered
                start += len(batches)
                if batches:
                    continue
                if reason is not None:
                    raise EngineUnavailable(reason)
                await news.wait()
