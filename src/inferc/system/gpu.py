"""The GPU that this machine has, found without opening it; inferc.runtime.runners.cuda.driver opens it."""

from __future__ import annotations

import ctypes
from ctypes import byref, c_int
from typing import Any

LIBRARY = "libcuda.so.1"
COMPUTE_CAPABILITY_MAJOR, COMPUTE_CAPABILITY_MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_…


def find_arch(library: Any = None) -> str | None:
    """Return the chip of this machine's first GPU, as "sm_90"; None where there is no GPU or no driver that works.

    library: the driver's library, or a test's stand-in. No context is made, which would take memory of the device.
    """
    if library is None:
        try:
            library = ctypes.CDLL(LIBRARY)
        except OSError:
            return None
    handle, major, minor = c_int(), c_int(), c_int()
    failed = (
        library.cuInit(0)
        or library.cuDeviceGet(byref(handle), 0)
        or library.cuDeviceGetAttribute(byref(major), COMPUTE_CAPABILITY_MAJOR, handle.value)
        or library.cuDeviceGetAttribute(byref(minor), COMPUTE_CAPABILITY_MINOR, handle.value)
    )
    return None if failed else f"sm_{major.value}{minor.value}"
