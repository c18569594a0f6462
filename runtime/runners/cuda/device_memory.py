"""A runner's memory on a GPU: taken once, given back together."""

from __future__ import annotations

from ctypes import c_void_p

from inferc.errors import ConfigError
from inferc.runtime.runners.cuda.driver import Driver, OutOfMemory


class DeviceMemory:
    """All that one runner has taken of a device's memory."""

    def __init__(self, driver: Driver, stream: c_void_p) -> None:
        self._driver, self._stream = driver, stream
        self._owned: list[int] = []

    def new(self, num_bytes: int, *, poison: bool = False, zero: bool = False) -> int:
        """The address of new memory, which lives as long as the runner.

        poison: fill it with NaN, so that tests see a read of what was never written. Raises ConfigError if there is too little.
        """
        try:
            address = self._driver.allocate(num_bytes)
        except OutOfMemory:
            free, _ = self._driver.memory_info()
            raise ConfigError(
                f"out of device memory: {num_bytes} bytes asked for, {free} free; lower --kv-memory or --max-num-batched-tokens"
            ) from None
        self._owned.append(address)
        if poison or zero:
            self._driver.fill(
                address, 0 if zero else 0xFF, num_bytes, self._stream
            )  # 0xFF…: NaN in float32 and in bfloat16
        return address

    def free(self, address: int) -> None:
        """Give one piece back before the end; no step under way may use it."""
        self._owned.remove(address)
        self._driver.free(address)

    def forget(self) -> None:
        """Give nothing back: the device has failed, and takes nothing any more."""
        self._owned = []

    def close(self) -> None:
        for address in self._owned:
            self._driver.free(address)
        self._owned = []

    @property
    def is_open(self) -> bool:
        return bool(self._owned)
