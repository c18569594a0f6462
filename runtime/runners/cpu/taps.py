"""The taps: copies of the values of chosen nodes, for the rows of chosen sequences, made while the compiled step runs.

The compiled code looks each node up in a table (`InfercTaps`) and copies the wanted rows itself. A step without a
tapped sequence has no table and costs only one branch per node.
"""

from __future__ import annotations

import ctypes
import difflib
import fnmatch
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from inferc.errors import ConfigError
from inferc.manifest_types import Program, TensorType
from inferc.runtime.runners.cpu import abi
from inferc.runtime.step.plan import I64, StepPlan

# numpy has no bfloat16, so its bits are viewed as uint16.
DTYPES = {"bfloat16": np.uint16, "float32": np.float32, "int32": np.int32, "int64": np.int64, "int8": np.int8}
ANY = "*?["
SHOWN = 5  # how many similar names an error message suggests


@dataclass(frozen=True)
class Node:
    """A value of the step that can be tapped.

    shape: of one row; by_logits_row: it has a row only for each sampled row, not for each token.
    """

    name: str
    number: int  # its id in program.json's "observable"
    layer: int | None
    dtype: str
    shape: tuple[int, ...]
    by_logits_row: bool

    @cached_property
    def row_bytes(self) -> int:
        return math.prod(self.shape) * np.dtype(DTYPES[self.dtype]).itemsize


def all_nodes(program: Program) -> dict[str, Node]:
    """Return the nodes of a program.json that have a row per token or per sampled row, by name, in execution order."""
    inputs = {entry.name: entry.shape for entry in program.step.inputs}
    by_row = {"token_ids": False, "logits_rows": True}
    domains = {inputs[name][0]: of for name, of in by_row.items() if name in inputs}
    numbers = {entry.name: entry.id for entry in program.observable}
    found = {}
    for number, node in enumerate(program.program.nodes):
        name, value = str(node.name), node.val
        if node.op != "call_function" or not isinstance(value, TensorType) or (numbers and name not in numbers):
            continue
        sizes = value.shape[1:]
        is_known = value.shape and value.shape[0] in domains and all(str(size).isdigit() for size in sizes)
        if value.dtype in DTYPES and is_known:
            shape = tuple(map(int, sizes))
            domain = domains[value.shape[0]]
            found[name] = Node(name, numbers.get(name, number), node.layer, value.dtype, shape, domain)
    return found


def choose_nodes(program: Program, wanted: Sequence[str]) -> tuple[Node, ...]:
    """Return the nodes that match these names, where `*` matches any text.

    Raises ConfigError for a name without a match.
    """
    known = all_nodes(program)
    found: dict[str, Node] = {}
    for each in wanted:
        names = fnmatch.filter(known, each) if any(char in each for char in ANY) else [each] if each in known else []
        if not names:
            near = difflib.get_close_matches(each, known, SHOWN, 0.5) or list(known)[:SHOWN]
            raise ConfigError(
                f"--tap {each}: the artifact's step has no such value; near: {', '.join(near)}"
                ' (program.json, "observable", has all)'
            )
        found.update((name, known[name]) for name in names)
    return tuple(found[name] for name in known if name in found)


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
            found[node.name] = part.view(DTYPES[node.dtype]).reshape(count, *node.shape)
        return found
