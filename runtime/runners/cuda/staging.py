"""The pinned staging buffers for copies between this machine and a GPU, which the driver runs asynchronously."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from ctypes import c_void_p

import numpy as np
from numpy.typing import NDArray

from inferc.runtime.runners.cuda.driver import Driver


class Staging:
    """A ring of `count` pinned buffers of `num_bytes` for copies on one stream; each is allocated when first needed."""

    def __init__(self, driver: Driver, stream: c_void_p, num_bytes: int, count: int) -> None:
        self._driver, self._stream = driver, stream
        self._num_bytes, self._count = num_bytes, count
        self._buffers: deque[tuple[NDArray[np.uint8], c_void_p]] = deque()  # the least recently used first

    @contextmanager
    def buffer(self) -> Iterator[NDArray[np.uint8]]:
        """Yield a buffer whose copies are done; copies that the block gives to the stream may outlast the block."""
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
        """Free the memory; no copy may be in flight."""
        for memory, event in self._buffers:
            self._driver.free_host(memory)
            self._driver.call("cuEventDestroy_v2", event)
        self._buffers.clear()
