"""A test of the GPU in two halves: what it compiles, on any machine, and what it runs, where there is a GPU."""

from __future__ import annotations

from functools import cache

import pytest

from inferc.errors import InfercError
from inferc.runtime.runners.cuda.driver import Driver


@cache
def _arch() -> str | None:
    try:
        driver = Driver()
    except InfercError:
        return None
    driver.close()
    return driver.arch


def chip(elsewhere: str = "sm_90") -> str:
    """Return the chip to compile for: the GPU of this machine; `elsewhere` where there is none."""
    return _arch() or elsewhere


def need_gpu(compiled: str = "") -> None:
    """Skip the rest of a test where there is no GPU. Before it stands all that can be compiled without one.

    compiled: what was, for the reason; nothing where there is nothing to compile.
    """
    if _arch() is None:
        done = f"{compiled} compiled" if compiled else "nothing to compile"
        pytest.skip(f"{done}; needs an NVIDIA GPU to run")
