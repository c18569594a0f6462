"""The copies of KV blocks between a GPU and the offload tier in host memory, in the device's layout."""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import c_void_p

import numpy as np
from numpy.typing import NDArray

from inferc.runtime.runners.cuda.driver import Driver
from inferc.runtime.runners.cuda.staging import Staging
from inferc.runtime.step.plan import Copies

BUFFERS = 32  # blocks in transit to the device; one more waits until the first has arrived


class OffloadCopies:
    """The copies between the device's pools and the blocks of the offload tier.

    - pools: the device addresses of each KV group's blocks.
    - block_bytes, num_blocks: the size of a block and the number of blocks per group.
    - offloaded: the offload tier's blocks per group, [blocks, block_bytes], numbered after the device's.

    Loads go to the runner's stream, so whatever is given to the stream after them finds the blocks.
    Copies to the tier go to a stream of their own, and are requested by a single thread.
    """

    def __init__(
        self,
        driver: Driver,
        stream: c_void_p,
        pools: Sequence[int],
        block_bytes: Sequence[int],
        num_blocks: Sequence[int],
        offloaded: Sequence[NDArray[np.uint8]],
    ) -> None:
        self._driver, self._stream = driver, stream
        self._pools, self._block_bytes, self._num_blocks, self._offloaded = pools, block_bytes, num_blocks, offloaded
        self._staging = Staging(driver, stream, max(block_bytes), BUFFERS)
        # The stream for copies to the tier, and memory for a block; made when first needed.
        self._beside: tuple[c_void_p, NDArray[np.uint8]] | None = None

    def load(self, loads: Sequence[Copies]) -> None:
        """Copy blocks of the offload tier to the device, per group."""
        for group, copies in enumerate(loads):
            size, pool, first = self._block_bytes[group], self._pools[group], self._num_blocks[group]
            for source, target in zip(copies.source.tolist(), copies.target.tolist(), strict=True):
                with self._staging.buffer() as staged:
                    staged[:size] = self._offloaded[group][source - first]
                    self._driver.copy_in(pool + target * size, staged.ctypes.data, size, self._stream)

    def offload(self, group: int, block: int, to: NDArray[np.uint8]) -> None:
        """Copy a block that no step in flight changes to host memory, [block_bytes]. Raises InfercError."""
        if self._beside is None:
            self._beside = self._driver.new_stream(), self._driver.allocate_host(max(self._block_bytes))
        (stream, staged), size = self._beside, self._block_bytes[group]
        self._driver.copy_out(staged.ctypes.data, self._pools[group] + block * size, size, stream)
        self._driver.wait(stream)
        to[:] = staged[:size]

    def close(self) -> None:
        """Free the memory; no copy may be in flight."""
        self._staging.close()
        if self._beside is not None:
            stream, staged = self._beside
            self._driver.free_host(staged)
            self._driver.call("cuStreamDestroy_v2", stream)
            self._beside = None
