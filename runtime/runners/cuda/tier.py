"""Blocks of the KV cache between a GPU and the lower tier in this machine's memory, as they lie."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_void_p

import numpy as np
from numpy.typing import NDArray

from inferc.runtime.runners.cuda.driver import Driver
from inferc.runtime.runners.cuda.staging import Staging
from inferc.runtime.step.plan import Copies

BUFFERS = 32  # blocks on their way to the device; the next one waits for the first of them


class TierCopies:
    """pools: where the blocks of each KV group lie on the device; block_bytes, num_blocks: of each; lower: the lower tier's blocks,
    of each group [blocks, block_bytes], numbered behind the device's.

    Blocks go up on the runner's stream: what is given to it behind them finds them there. They come down on a stream of its own,
    asked for by one thread.
    """

    def __init__(
        self,
        driver: Driver,
        stream: c_void_p,
        pools: Sequence[int],
        block_bytes: Sequence[int],
        num_blocks: Sequence[int],
        lower: Sequence[NDArray[np.uint8]],
    ) -> None:
        self._driver, self._stream = driver, stream
        self._pools, self._block_bytes, self._num_blocks, self._lower = pools, block_bytes, num_blocks, lower
        self._staging = Staging(driver, stream, max(block_bytes), BUFFERS)
        self._beside: tuple[c_void_p, NDArray[np.uint8]] | None = None  # a stream, and memory for a block

    def up(self, raised: Sequence[Copies]) -> None:
        """Copy blocks of the lower tier to the device, of each group."""
        for group, copies in enumerate(raised):
            size, pool, first = self._block_bytes[group], self._pools[group], self._num_blocks[group]
            for source, target in zip(copies.source.tolist(), copies.target.tolist(), strict=True):
                with self._staging.buffer() as staged:
                    staged[:size] = self._lower[group][source - first]
                    self._driver.copy_in(pool + target * size, staged.ctypes.data, size, self._stream)

    def down(self, group: int, block: int, to: NDArray[np.uint8]) -> None:
        """Copy a block, which no step under way changes, to memory here, [block_bytes]. Raises InfercError."""
        if self._beside is None:
            self._beside = self._driver.new_stream(), self._driver.allocate_host(max(self._block_bytes))
        (stream, staged), size = self._beside, self._block_bytes[group]
        self._driver.copy_out(staged.ctypes.data, self._pools[group] + block * size, size, stream)
        self._driver.wait(stream)
        to[:] = staged[:size]

    def close(self) -> None:
        """Give the memory back; nothing may be under way."""
        self._staging.close()
        if self._beside is not None:
            stream, staged = self._beside
            self._driver.free_host(staged)
            self._driver.call("cuStreamDestroy_v2", stream)
            self._beside = None
