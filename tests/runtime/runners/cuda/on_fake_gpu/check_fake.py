"""Tests that the fake GPU notices what a real one would answer with silence and wrong numbers."""

from collections.abc import Iterator

import numpy as np
import pytest
from fake_cuda import FakeCuda, Misuse

from inferc.runtime.runners.cuda.driver import Driver
from inferc.runtime.runners.cuda.staging import Staging


@pytest.fixture
def driver() -> Iterator[Driver]:
    yield Driver(library=FakeCuda())


@pytest.mark.parametrize("copy", ["copy_in", "copy_out"])
def test_a_copy_from_memory_that_is_not_pinned(driver: Driver, copy: str) -> None:
    there, here = driver.allocate(256), np.zeros(256, np.uint8)
    addresses = (there, here.ctypes.data) if copy == "copy_in" else (here.ctypes.data, there)
    with pytest.raises(Misuse, match="256 bytes at .* are not in pinned memory"):
        getattr(driver, copy)(*addresses, 256, driver.new_stream())


def test_memory_that_is_written_while_it_is_copied(driver: Driver) -> None:
    there, here, stream = driver.allocate(256), driver.allocate_host(256), driver.new_stream()
    driver.copy_in(there, here.ctypes.data, 256, stream)
    here[3] = 7
    with pytest.raises(Misuse, match="written before their copy to the device was done"):
        driver.wait(stream)


def test_staged_memory_is_used_again_when_its_copy_is_done(driver: Driver) -> None:
    stream = driver.new_stream()
    staging, there = Staging(driver, stream, 16, count=2), driver.allocate(16 * 5)
    for index in range(5):
        with staging.buffer() as staged:
            staged[:] = index
            driver.copy_in(there + 16 * index, staged.ctypes.data, 16, stream)
    driver.wait(stream)
    found = np.zeros(16 * 5, np.uint8)
    driver.read(found.ctypes.data, there, len(found))
    assert found.reshape(5, 16).tolist() == [[index] * 16 for index in range(5)]
    staging.close()
    driver.free(there)
    driver.close()
