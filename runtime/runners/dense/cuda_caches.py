"""The dense KV cache in a GPU's memory, for runtimes that take device addresses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inferc.arena import ENGINE_ALIGNMENT
from inferc.config import EngineConfig, ResolvedEngineConfig
from inferc.errors import ConfigError
from inferc.kv_groups import CacheGroup
from inferc.runtime.artifact.load import Artifact
from inferc.runtime.runners.cuda.driver import Driver, OutOfMemory
from inferc.runtime.runners.dense.caches import CacheInput, cache_inputs

RESERVE_BYTES = 256 << 20  # device memory left for what the runtime allocates while it runs


@dataclass(frozen=True)
class Rows:
    """Some rows of a cache on the device, each of `num_bytes`."""

    address: int
    num_bytes: int
    shape: tuple[int, int, int]  # (heads, capacity, head_dim)


class DeviceCaches:
    """The caches in a GPU's memory, allocated once: a row for every sequence that can run, at its largest length."""

    def __init__(self, driver: Driver, inputs: Sequence[CacheInput], num_rows: int, capacity: int) -> None:
        """Allocate the caches. Raises ConfigError if the device has too little memory."""
        self._driver, self._inputs, self._num_rows = driver, tuple(inputs), num_rows
        self.fixed_capacity: int | None = capacity
        self._stream = driver.new_stream()
        self._addresses: dict[str, int] = {}
        for each in self._inputs:
            assert self._row_bytes(each) % ENGINE_ALIGNMENT == 0, f"{each} of {capacity} tokens: rows are not aligned"
            num_bytes = num_rows * self._row_bytes(each)
            try:
                self._addresses[each.name] = driver.allocate(num_bytes)
            except OutOfMemory:
                self.close()
                raise ConfigError(
                    f"{driver.name} has no memory for K and V of {num_rows} sequences of {capacity} tokens; lower"
                    " --max-num-seqs, or compile with a smaller --max-model-len"
                ) from None
            driver.fill(self._addresses[each.name], 0, num_bytes, self._stream)
        driver.wait(self._stream)

    def _row_bytes(self, each: CacheInput) -> int:
        assert self.fixed_capacity is not None
        return each.num_heads * self.fixed_capacity * each.head_dim * each.itemsize

    def resize(self, rows: int, capacity: int) -> None:
        assert rows <= self._num_rows and capacity == self.fixed_capacity, (rows, capacity)

    def rows(self, first: int, count: int) -> dict[str, Rows]:
        assert self.fixed_capacity is not None and first + count <= self._num_rows, (first, count)
        return {
            each.name: Rows(
                self._addresses[each.name] + first * self._row_bytes(each),
                self._row_bytes(each),
                (each.num_heads, self.fixed_capacity, each.head_dim),
            )
            for each in self._inputs
        }

    def clear(self, row: int) -> None:
        self._driver.enter()
        for each in self._inputs:
            size = self._row_bytes(each)
            self._driver.fill(self._addresses[each.name] + row * size, 0, size, self._stream)
        self._driver.wait(self._stream)

    def close(self) -> None:
        self._driver.enter()
        for address in self._addresses.values():
            self._driver.free(address)
        self._addresses.clear()
        self._driver.call("cuStreamDestroy_v2", self._stream)


def device_caches(
    artifact: Artifact, config: EngineConfig, groups: Sequence[CacheGroup], driver: Driver, device: str
) -> tuple[DeviceCaches, ResolvedEngineConfig]:
    """Allocate as many rows as the config asks for and the free memory holds; return them and the resolved config."""
    free, _ = driver.memory_info()
    available = max(free - RESERVE_BYTES, 0)
    resolved = config.resolve(artifact.max_model_len, artifact.block_size, groups, available, device)
    num_rows = min(config.max_num_seqs, *(count - 1 for count in resolved.num_blocks))
    return DeviceCaches(driver, cache_inputs(artifact), num_rows, artifact.block_size), resolved
