"""The GPU of a machine, by what its driver says."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inferc.system import gpu
from inferc.system.gpu import find_arch


class Driver:
    """A driver's library with GPUs of these compute capabilities; init: what cuInit returns."""

    def __init__(self, *capabilities: tuple[int, int], init: int = 0) -> None:
        self.capabilities, self.init = capabilities, init

    def cuInit(self, flags: int) -> int:
        return self.init

    def cuDeviceGet(self, out: Any, index: int) -> int:
        out._obj.value = 7 + index
        return 0 if index < len(self.capabilities) else 101

    def cuDeviceGetAttribute(self, out: Any, attribute: int, device: int) -> int:
        out._obj.value = self.capabilities[device - 7][attribute - 75]
        return 0


def test_the_first_gpu() -> None:
    assert find_arch(Driver((9, 0), (8, 0))) == "sm_90"
    assert find_arch(Driver((12, 0))) == "sm_120"


@pytest.mark.parametrize("driver", [Driver(), Driver((9, 0), init=803)], ids=["no GPU", "a driver that is too old"])
def test_none(driver: Driver) -> None:
    assert find_arch(driver) is None


def test_no_driver(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(gpu, "LIBRARY", str(tmp_path / "libcuda.so.1"))
    assert find_arch() is None
