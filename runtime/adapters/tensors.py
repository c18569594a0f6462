"""The tensors of one safetensors file as numpy arrays in float32, for adapters, which are small.

Checkpoints are read by the frontend, by rows and with torch, which a process that serves does not load.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from inferc.errors import ArtifactError
from inferc.runtime.artifact.numpy_dtypes import widened
from inferc.runtime.step.plan import F32

MAX_HEADER_BYTES = 100_000_000  # the format's own limit
DTYPES: Mapping[str, np.dtype[np.generic]] = {
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}


def read_tensors(path: Path, data: bytes) -> dict[str, F32]:
    """Return all tensors of a safetensors file, whose contents are `data`, by name.

    Raises ArtifactError for a file that is truncated or damaged, or a tensor that is not of floats.
    """
    if len(data) < 8:
        raise ArtifactError(f"{path}: {len(data)} bytes, expected a safetensors file; download it again")
    size = int.from_bytes(data[:8], "little")
    if size > min(len(data) - 8, MAX_HEADER_BYTES):
        raise ArtifactError(f"{path}: a header of {size} bytes in a file of {len(data)}; download it again")
    try:
        header = json.loads(data[8 : 8 + size])
        rows = {name: entry for name, entry in header.items() if name != "__metadata__"}
        found: dict[str, F32] = {}
        left = len(data) - 8 - size
        for name, entry in rows.items():
            found[name] = _tensor(path, name, entry, data, 8 + size)
            start, end = map(int, entry["data_offsets"])
            left -= end - start
            if left < 0:  # a small file could fill the memory
                raise ValueError(f"{name} shares bytes with others")
        return found
    except (ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError) as error:
        raise ArtifactError(
            f"{path}: its header is not of the safetensors format ({error}); download it again"
        ) from None


def _tensor(path: Path, name: str, entry: Mapping[str, object], data: bytes, base: int) -> F32:
    dtype = DTYPES.get(str(entry["dtype"]))
    if dtype is None:
        raise ArtifactError(f"{path}: {name} is {entry['dtype']}; expected {', '.join(DTYPES)}")
    shape = [int(each) for each in entry["shape"]]  # type: ignore[attr-defined]
    start, end = (base + int(each) for each in entry["data_offsets"])  # type: ignore[attr-defined]
    count = int(np.prod(shape, dtype=object)) if shape else 1
    if min(shape, default=0) < 0 or not base <= start <= end <= len(data) or end - start != count * dtype.itemsize:
        raise ArtifactError(
            f"{path}: {name} of shape {shape} lies at bytes {start} to {end} of {len(data)}; download it again"
        )
    values = np.frombuffer(data, dtype, count, start).reshape(shape)
    if entry["dtype"] == "BF16":
        return widened(values)
    with np.errstate(over="ignore"):  # of F64: infinite, which is no number of an adapter
        return values.astype(np.float32)
