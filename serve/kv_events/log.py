"""The last batches of KV events, numbered, for subscribers that follow at their own pace.

Whoever adds never waits for whoever reads: a subscriber holds a number, not a queue, and one that falls so far behind
that its next batch is not kept any more is told so.
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

NUM_KEPT = 10_000  # batches; a step makes one at most
MAX_KEPT_BYTES = 64 << 20
READ_AT_ONCE = 64
ENDPOINT = re.compile(r"tcp://(?:\*|[^*:/\s]+|\[[:.%\w]+\]):(\d+)|ipc://\S+")


@dataclass(frozen=True)
class KvPublisherConfig:
    """Where to publish: tcp://HOST:PORT or ipc://PATH. replay: the same, for who missed batches."""

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
    """A batch and its number: 0, 1, 2, … since the server started."""

    sequence: int
    batch: KvBatch


def block_number(name: bytes) -> int:
    """What stands for a block's hash outside: its last eight bytes, big-endian."""
    return int.from_bytes(name[-8:], "big")


class KvEventLog:
    """Batches [first, end), of which the oldest go. Thread-safe; listeners are called on the thread of who adds."""

    def __init__(self, num_kept: int = NUM_KEPT, max_bytes: int = MAX_KEPT_BYTES) -> None:
        self.epoch = time.time_ns()  # tells this numbering from that of a server before
        self.closed: str | None = None  # why nothing more comes
        self._num_kept, self._max_bytes = num_kept, max_bytes
        self._kept: deque[Numbered] = deque()
        self._bytes = 0
        self._end = 0
        self._lock = threading.Lock()
        self._listeners: list[Callable[[], None]] = []

    @property
    def first(self) -> int:
        """The number of the oldest batch that is kept, or `end`."""
        with self._lock:
            return self._end - len(self._kept)

    @property
    def end(self) -> int:
        """The number of the batch that comes next."""
        return self._end

    def add(self, batch: KvBatch) -> None:
        """Number a batch and wake everybody; nothing once it is closed."""
        with self._lock:
            if self.closed is None:
                self._append(batch)
            listeners = list(self._listeners)
        for wake in listeners:
            wake()

    def clear(self) -> None:
        """The engine is gone, and what it held; another one may come."""
        self.add(KvBatch(time.time(), [Cleared()]))

    def close(self, reason: str) -> None:
        """The engine is gone, or about to: what it held can not be found any more, and nothing more comes."""
        with self._lock:
            if self.closed is None:
                self._append(KvBatch(time.time(), [Cleared()]))
                self.closed = reason
            listeners = list(self._listeners)
        for wake in listeners:
            wake()

    def reopen(self) -> None:
        """Another engine comes; its batches are numbered from where the last one ended."""
        with self._lock:
            self.closed = None

    def _append(self, batch: KvBatch) -> None:
        self._kept.append(Numbered(self._end, batch))
        self._end += 1
        self._bytes += batch.num_bytes
        while len(self._kept) > self._num_kept or (self._bytes > self._max_bytes and len(self._kept) > 1):
            self._bytes -= self._kept.popleft().batch.num_bytes

    def read(self, start: int, limit: int = READ_AT_ONCE) -> list[Numbered]:
        """At most `limit` batches from `start` on, as many as there are. Raises BatchesGone."""
        with self._lock:
            first = self._end - len(self._kept)
            if not first <= start <= self._end:
                raise BatchesGone(
                    f"KV events from {start} on are not here: kept are {first} to {self._end - 1}, and {self._end} comes"
                    " next; forget what you know of this server, and subscribe again"
                )
            end = min(start + limit, self._end)
            return [self._kept[index] for index in range(start - first, end - first)]

    @contextmanager
    def listening(self, wake: Callable[[], None]) -> Iterator[None]:
        """Have `wake` called whenever there is something new, on any thread; it must not wait."""
        with self._lock:
            self._listeners.append(wake)
        try:
            yield
        finally:
            with self._lock:
                self._listeners.remove(wake)

    async def follow(self, start: int) -> AsyncGenerator[Numbered, None]:
        """Batches from `start` on, without end. Raises BatchesGone, or EngineUnavailable after the last one."""
        loop, news = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(news.set)

        with self.listening(wake):
            while True:
                news.clear()
                reason = self.closed  # before reading: what was added before it is read then
                batches = self.read(start)
                for numbered in batches:
                    yield numbered
                start += len(batches)
                if batches:
                    continue
                if reason is not None:
                    raise EngineUnavailable(reason)
                await news.wait()
