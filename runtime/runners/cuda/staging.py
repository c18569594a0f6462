"""Pinned memory between this machine and a GPU: all that the driver copies without making whoever asks wait."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_void_p

import numpy as np
from numpy.typing import NDArray

from inferc.runtime.runners.cuda.driver import Driver


class Staging:
    """`count` buffers of `num_bytes` in turn, for copies on one stream. Each is allocated when it is first needed."""

    def __init__(self, driver: Driver, stream: c_void_p, num_bytes: int, count: int) -> None:
        self._driver, self._stream = driver, stream
        self._num_bytes, self._count = num_bytes, count
        self._buffers: deque[tuple[NDArray[np.uint8], c_void_p]] = deque()  # that were used longest ago first

    @contextmanager
    def buffer(self) -> Iterator[NDArray[np.uint8]]:
        """One whose copies are done; those that are given to the stream within the block may still be under way after it."""
        driver = self._driver
        if len(self._buffers) < self._count:
            self._buffers.appendleft((driver.allocate_host(self._num_bytes), driver.new_event()))
        memory, event = self._buffers.popleft()
        self._buffers.append((memory, event))
        driver.wait_event(event)
        try:
            yield memory
        finally:
            driver.record(event, self._stream)

    def close(self) -> None:
        """Give the memory back; no copy may be under way."""
        for memory, event in self._buffers:
            self._driver.free_host(memory)
            self._driver.call("cuEventDestroy_v2", event)
        self._buffers.clear()
