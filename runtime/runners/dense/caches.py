"""The dense KV cache: one row per sequence, in every layer that stores K and V of its own."""

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
    """One of the program's caches: [num_seqs, num_heads, capacity, head_dim], with a dtype given by its name."""

    name: str
    num_heads: int
    head_dim: int
    dtype: str

    @property
    def itemsize(self) -> int:
        return STORED_DTYPES[self.dtype][1]


def cache_inputs(artifact: Artifact) -> list[CacheInput]:
    """Return the caches among the step's inputs."""
    found = []
    for entry in artifact.program.step.inputs:
        if len(entry.shape) == 4:
            _, heads, _, head_dim = entry.shape
            found.append(CacheInput(entry.name, int(heads), int(head_dim), entry.dtype))
    return found


class Caches(Protocol):
    """The interface of the memory of a program's caches, with a row for each sequence."""

    @property
    def fixed_capacity(self) -> int | None:
        """The number of tokens that a row has room for, if it is fixed; else None."""

    def resize(self, rows: int, capacity: int) -> None:
        """Resize the caches to this many rows of this capacity.

        What fits both sizes is kept, and new memory is zero.
        """

    def rows(self, first: int, count: int) -> Mapping[str, Any]:
        """Return some rows of every cache, in the form that the model takes."""

    def clear(self, row: int) -> None:
        """Set a row to zero."""

    def close(self) -> None: ...


class HostCaches:
    """The caches as numpy arrays, which are reallocated when they are too small or too large."""

    fixed_capacity = None

    def __init__(self, inputs: Sequence[CacheInput]) -> None:
        self._inputs = tuple(inputs)
        self._arrays: dict[str, Array] = {}

    def resize(self, rows: int, capacity: int) -> None:
        for each in self._inputs:
            before = self._arrays.pop(each.name, None)  # popped so that at most one cache exists twice at a time
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
