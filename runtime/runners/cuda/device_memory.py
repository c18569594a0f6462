"""The memory of one runner on a GPU: allocated piece by piece, and freed together."""

from __future__ import annotations

from ctypes import c_void_p

from inferc.errors import ConfigError
from inferc.runtime.runners.cuda.driver import Driver, OutOfMemory


class DeviceMemory:
    """The owner of all device memory that one runner has allocated."""

    def __init__(self, driver: Driver, stream: c_void_p) -> None:
        self._driver, self._stream = driver, stream
        self._owned: list[int] = []

    def new(self, num_bytes: int, *, poison: bool = False, zero: bool = False) -> int:
        """Allocate memory that lives as long as the runner, and return its address.

        poison: fill it with NaN, so that tests notice reads of memory never written. Raises ConfigError if too little
        is free.
        """
        try:
            address = self._driver.allocate(num_bytes)
        except OutOfMemory:
            free, _ = self._driver.memory_info()
            raise ConfigError(
                f"out of device memory: {num_bytes} bytes asked for, {free} free;"
                " lower --kv-memory or --max-num-batched-tokens"
            ) from None
        self._owned.append(address)
        if poison or zero:
            # Bytes of 0xFF are a NaN in float32 and in bfloat16.
            self._driver.fill(address, 0 if zero else 0xFF, num_bytes, self._stream)
        return address

    def free(self, address: int) -> None:
        """Free one piece early; no step in flight may use it."""
        self._owned.remove(address)
        self._driver.free(address)

    def forget(self) -> None:
        """Forget the memory without freeing it, because the device has failed and accepts no more calls."""
        self._owned = []

    def close(self) -> None:
        for address in self._owned:
            self._driver.free(address)
        self._owned = []

    @property
    def is_open(self) -> bool:
        return bool(self._owned)
