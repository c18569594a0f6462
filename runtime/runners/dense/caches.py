"""The dense KV cache: a row for each sequence, of every layer that stores K and V of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from inferc.manifest import STORED_DTYPES
from inferc.runtime.artifact.load import Artifact

Array = NDArray[Any]


@dataclass(frozen=True)
class CacheInput:
    """One of the program's caches: [num_seqs, num_heads, capacity, head_dim], of a dtype by its name."""

    name: str
    num_heads: int
    head_dim: int
    dtype: str

    @property
    def itemsize(self) -> int:
        return STORED_DTYPES[self.dtype][1]


def cache_inputs(artifact: Artifact) -> list[CacheInput]:
    """The caches among the step's inputs."""
    found = []
    for entry in artifact.program["step"]["inputs"]:
        if len(entry["shape"]) == 4:
            _, heads, _, head_dim = entry["shape"]
            found.append(CacheInput(entry["name"], int(heads), int(head_dim), entry["dtype"]))
    return found


class Caches(Protocol):
    """The memory of the program's caches, with a row for each sequence."""

    @property
    def fixed_capacity(self) -> int | None:
        """Tokens that rows have room for, where that is not to be chosen."""

    def resize(self, rows: int, capacity: int) -> None:
        """Have as many rows, as long; what lies in both stays, and what is new is 0."""

    def rows(self, first: int, count: int) -> Mapping[str, Any]:
        """Some rows of every cache, as the model takes them."""

    def clear(self, row: int) -> None:
        """Make it 0."""

    def close(self) -> None: ...


class HostCaches:
    """Arrays, which are made anew when they are too small or too large."""

    fixed_capacity = None

    def __init__(self, inputs: Sequence[CacheInput]) -> None:
        self._inputs = tuple(inputs)
        self._arrays: dict[str, Array] = {}

    def resize(self, rows: int, capacity: int) -> None:
        for each in self._inputs:
            before = self._arrays.pop(each.name, None)  # so that no more than one is there twice
            made = np.zeros((rows, each.num_heads, capacity, each.head_dim), each.dtype)
            if before is not None:
                both = min(before.shape[2], capacity)
                made[: len(before), :, :both] = before[:, :, :both]
            self._arrays[each.name] = made

    def rows(self, first: int, count: int) -> dict[str, Array]:
        return {name: array[first : first + count] for name, array in self._arrays.items()}

    def clear(self, row: int) -> None:
        for array in self._arrays.values():
            array[row] = 0.0

    def close(self) -> None:
        self._arrays.clear()
