"""The LoRA adapters on a GPU: their matrices, and the table by which kernels find them."""

from __future__ import annotations

from ctypes import c_void_p

import numpy as np
from numpy.typing import NDArray

from inferc.ir.adapter_sites import Adapters
from inferc.runtime.adapters.arrange import ArrangedAdapter, room_of, sizes_of
from inferc.runtime.adapters.store import MOST_ADAPTERS
from inferc.runtime.runners.compiled import CompiledForCuda
from inferc.runtime.runners.cuda.device_memory import DeviceMemory
from inferc.runtime.runners.cuda.driver import Driver

STAGED_BYTES = 16 << 20  # copied to the device at a time


class DeviceAdapters:
    """The adapters of a runner, by their numbers; the form of `table` is that of codegen/triton/kernels/lora.py."""

    def __init__(self, room: Adapters, driver: Driver, stream: c_void_p, memory: DeviceMemory) -> None:
        self._driver, self._stream, self._memory = driver, stream, memory
        self._num_sites = len(room.sites)
        self._entry_bytes = 8 * (1 + 3 * self._num_sites)
        self.table = memory.new(self._entry_bytes * (1 + MOST_ADAPTERS), zero=True)
        self._placed: dict[int, int] = {}  # the address of each adapter's matrices
        widths = [sizes_of(site)[1] for site in room.sites]
        self._write(0, [0, *(site.begin for site in room.sites), *widths, *[0] * self._num_sites])

    @staticmethod
    def of(artifact: CompiledForCuda, driver: Driver, stream: c_void_p, memory: DeviceMemory) -> DeviceAdapters | None:
        """Return the adapters of an artifact, none yet; None if it has no room for any."""
        room = room_of(artifact.program)
        return None if room is None else DeviceAdapters(room, driver, stream, memory)

    def set(self, number: int, adapter: ArrangedAdapter | None) -> None:
        """Put an adapter at a number, or nothing, once the steps in flight are done."""
        self._driver.wait(self._stream)
        if (old := self._placed.pop(number, None)) is not None:
            self._memory.free(old)
        if adapter is None:
            self._write(number, [0] * (1 + 3 * self._num_sites))
            return
        address = self._placed[number] = self._memory.new(max(1, adapter.data.nbytes))
        self._copy(address, adapter.data)
        self._write(number, [address, *adapter.ranks.tolist(), *adapter.down.tolist(), *adapter.up.tolist()])

    def _write(self, number: int, entry: list[int]) -> None:
        self._copy(self.table + self._entry_bytes * number, np.array(entry, np.int64))

    def _copy(self, address: int, data: NDArray[np.generic]) -> None:
        driver, source = self._driver, data.view(np.uint8)
        staged = driver.allocate_host(min(STAGED_BYTES, len(source)))
        try:
            for at in range(0, len(source), STAGED_BYTES):
                part = source[at : at + STAGED_BYTES]
                staged[: len(part)] = part
                driver.copy_in(address + at, staged.ctypes.data, len(part), self._stream)
                driver.wait(self._stream)
        finally:
            driver.free_host(staged)
