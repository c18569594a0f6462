"""The taps: copies of the values of chosen nodes, for the rows of chosen sequences, made while the compiled step runs.

The compiled code looks each node up in a table (`InfercTaps`) and copies the wanted rows itself. A step without a
tapped sequence has no table and costs only one branch per node.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferc.manifest_types import Program
from inferc.runtime.artifact.numpy_dtypes import NUMPY_DTYPES
from inferc.runtime.runners.cpu import abi
from inferc.runtime.runners.nodes import Node
from inferc.runtime.step.plan import I64, StepPlan


class Tables:
    """The part of the C struct that is the same in every step: which nodes are tapped."""

    def __init__(self, program: Program, nodes: Sequence[Node]) -> None:
        count = 1 + max(entry.id for entry in program.observable)
        self.nodes = nodes
        self.row_bytes: I64 = np.zeros(count, np.int64)
        self.by_logits_row: NDArray[np.uint8] = np.zeros(count, np.uint8)
        for node in nodes:
            self.row_bytes[node.number] = node.row_bytes
            self.by_logits_row[node.number] = node.by_logits_row


class StepTaps:
    """The taps of one step; it owns the memory that its C struct points to."""

    def __init__(self, tables: Tables, plan: StepPlan) -> None:
        token_rows = np.ascontiguousarray(plan.tapped_rows, np.int64)
        logits_rows = np.ascontiguousarray(plan.tapped_logits, np.int64)
        self._counts = (len(token_rows), len(logits_rows))
        places: I64 = np.full(len(tables.row_bytes), -1, np.int64)
        size = 0
        for node in tables.nodes:
            places[node.number] = size
            size += self._counts[node.by_logits_row] * node.row_bytes
        seen: I64 = np.zeros(len(places), np.int64)
        self._tables, self._places = tables, places
        self._memory: NDArray[np.uint8] = np.empty(max(size, 1), np.uint8)
        self._keep = (token_rows, logits_rows, seen)
        arrays = (places, tables.row_bytes, tables.by_logits_row, seen)
        self.args = abi.InfercTaps(
            *[array.ctypes.data for array in arrays],
            token_rows.ctypes.data,
            len(token_rows),
            logits_rows.ctypes.data,
            len(logits_rows),
            self._memory.ctypes.data,
        )

    @property
    def pointer(self) -> int:
        return ctypes.addressof(self.args)

    def values(self) -> dict[str, NDArray[Any]]:
        """Return, by node, the values [rows, …] of the plan's tapped rows, or of the logits rows among them."""
        found: dict[str, NDArray[Any]] = {}
        for node in self._tables.nodes:
            count, start = self._counts[node.by_logits_row], int(self._places[node.number])
            part = self._memory[start : start + count * node.row_bytes]
            found[node.name] = part.view(NUMPY_DTYPES[node.dtype]).reshape(count, *node.shape)
        return found
