"""The numpy dtypes of an artifact's values: numpy has no bfloat16 and no fp8, so their bits are integers."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferc.manifest import STORED_DTYPES

BITS = {"bfloat16": "uint16", "float8_e4m3fn": "uint8"}
NUMPY_DTYPES: dict[str, np.dtype[Any]] = {name: np.dtype(BITS.get(name, name)) for name in STORED_DTYPES}
"""The numpy dtype in which values of an artifact's dtype are viewed, by the name of that dtype."""


def widened(bits: NDArray[np.uint16]) -> NDArray[np.float32]:
    """Convert bfloat16 values, given as their bits, to float32, which represents each of them exactly."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def rounded(values: NDArray[np.float32]) -> NDArray[np.uint16]:
    """Return the bits of the nearest bfloat16 values, ties to even; a NaN stays a NaN."""
    bits = values.view(np.uint32)
    nearest = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
    return np.where(np.isnan(values), bits >> 16 | 0x40, nearest).astype(np.uint16)
