"""The operands of a lowered program's kernels: where its values lie in memory, for the code of every target.

A value is rows in a pool of the arena: a byte offset per row, a column (which views and slices move) and a row stride.
Slices and views have no storage of their own.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx

from inferc.arena import Place, Pool
from inferc.errors import UnsupportedError
from inferc.ir.program import Program, dtype_name, name_of, target_name
from inferc.manifest_types import Observable

IN_PLACE = ("inferc.lora_expand",)  # ops whose kernels write into their first argument


@dataclass(frozen=True)
class Operand:
    """A value as a kernel reads or writes it."""

    dtype: torch.dtype
    pool: Pool
    offset: int
    column: int  # in bytes
    stride: int  # in elements
    width: int  # elements of a row that belong to the value
    row_bytes: int  # bytes per row of the storage, from `offset` on
    # Whether the value has rows of the step but is read in the `sample` part, where it starts at the first of 64 rows.
    shifted: bool = False

    @property
    def extent(self) -> tuple[str, int, int]:
        """The memory that a write to the operand touches: (pool, first, last + 1) in bytes per row."""
        return self.pool, self.offset, self.offset + self.row_bytes


@dataclass
class Values:
    """The operands of a program's nodes; `sampled` holds the nodes of the sample part."""

    program: Program
    places: Mapping[str, Place]
    sampled: frozenset[fx.Node] = frozenset()
    weight_index: dict[str, int] = field(init=False)

    def __post_init__(self) -> None:
        self.weight_index = {name: index for index, name in enumerate(self.program.weights)}

    def operand(self, node: fx.Node) -> Operand:
        """Return the operand of a node that has rows, following views and slices to their storage."""
        op = target_name(node.target) if node.op == "call_function" else node.op
        if op == "aten.view":
            source = self.operand(node.args[0])  # type: ignore[arg-type]
            return self._with(source, source.column, math.prod(_sizes(node)))
        if op == "aten.slice.Tensor":
            return self._slice(node)
        if op in IN_PLACE:
            return self.operand(node.args[0])  # type: ignore[arg-type]
        if node.name not in self.places:
            raise UnsupportedError(f"{name_of(node)}: {op} has no place in the memory plan")
        place = self.places[node.name]
        value = node.meta["val"]
        width = math.prod(_sizes(node))
        stride, rest = divmod(place.row_bytes, value.dtype.itemsize)
        if stride < width or rest:
            raise AssertionError(f"{node.name}: plan has {place.row_bytes} bytes a row, the value {width} elements")
        return Operand(
            value.dtype,
            place.pool,
            place.offset,
            0,
            stride,
            width,
            place.row_bytes,
            self._shifted(node),
        )

    def _shifted(self, node: fx.Node) -> bool:
        return bool(self.sampled) and node not in self.sampled

    def _with(self, source: Operand, column: int, width: int) -> Operand:
        return Operand(
            source.dtype, source.pool, source.offset, column, source.stride, width, source.row_bytes, source.shifted
        )

    def _slice(self, node: fx.Node) -> Operand:
        args: list[Any] = [*node.args, *(0, None, None, 1)[len(node.args) - 1 :]]
        source_node, dim, start, _, step = args
        source, sizes = self.operand(source_node), [1, *_sizes(source_node)]
        dim = dim + len(sizes) if dim < 0 else dim
        if dim == 0 or step != 1 or math.prod(sizes[1:dim]) != 1:
            raise UnsupportedError(f"{name_of(node)}: a slice that is not one range of columns; no kernel reads it")
        start = start or 0
        start = start + sizes[dim] if start < 0 else start
        itemsize: int = node.meta["val"].dtype.itemsize
        column = source.column + start * math.prod(sizes[dim + 1 :]) * itemsize
        return self._with(source, column, math.prod(_sizes(node)))

    def weight(self, node: fx.Node) -> int:
        """Return the index of a weight in the step's table."""
        if node.op != "get_attr":
            raise UnsupportedError(f"{name_of(node)}: {node.op} where a kernel reads a weight")
        return self.weight_index[str(node.target)]

    def cache_group(self, node: fx.Node) -> int:
        """Return the KV group whose cache the node is (an input, or the result of a write)."""
        while node.op != "placeholder":
            if target_name(node.target) == "getitem":
                node = node.args[0]  # type: ignore[assignment]
            schema = node.target._schema  # type: ignore[union-attr]
            index = [argument.name for argument in schema.arguments].index("kv_cache")
            node = node.args[index]  # type: ignore[assignment]
        return int(str(node.target).removeprefix("kv_cache_"))


def outputs(program: Program) -> tuple[fx.Node, fx.Node | None]:
    """Return the hidden rows and the logits, which only the last pipeline stage has."""
    results = program.output().args[0]
    assert isinstance(results, (tuple, list)) and len(results) in (1, 2), "a lowered program returns (hidden, logits)"
    hidden, logits = (*results, None)[:2]
    assert isinstance(hidden, fx.Node) and (logits is None or isinstance(logits, fx.Node))
    return hidden, logits


def part(node: fx.Node, index: int) -> fx.Node | None:
    """Return the getitem that takes result `index` of a node with several results, or None if nothing reads it."""
    for user in node.users:
        if target_name(user.target) == "getitem" and user.args[1] == index:
            return user
    return None


def _sizes(node: fx.Node) -> list[int]:
    value = node.meta["val"]
    assert isinstance(value, Tensor), f"{node.name} is not one tensor"
    return [int(size) for size in value.shape[1:]]


def observable(node: fx.Node, number: int) -> Observable:
    """Return the entry of `observable` in program.json for a value that a step writes into the arena."""
    value = node.meta["val"]
    shape = [int(size) for size in value.shape[1:]]
    return Observable(number, name_of(node), node.meta.get("layer"), dtype_name(value.dtype), shape)
