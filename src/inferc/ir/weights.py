"""The lazy weights: expressions over a checkpoint's tensors, computed in row chunks when an artifact is written.

A pass that packs or quantizes edits expressions, never data, so compiling needs memory for a chunk of rows and not
for the whole model.
"""

from __future__ import annotations

import base64
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from inferc.errors import UnsupportedError
from inferc.ir.ops.pointwise import pointwise
from inferc.ir.ops.quantize import (
    LARGEST,
    LARGEST_FP8,
    int4_divisors,
    quantize_int4,
    quantize_rows,
    quantize_rows_fp8,
    row_scales,
)

INT8_OPS = ("int8_values", "int8_scales")
FP8_OPS = ("fp8_values", "fp8_scales")
INT4_OPS = ("int4_values", "int4_group_scales", "int4_scales")


class TensorReader(Protocol):
    """A source of the rows of named tensors: a checkpoint, or a module's parameters."""

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Return rows [start, stop) of axis 0 of tensor `name`, in the dtype it is stored in."""


@dataclass(frozen=True)
class Weight:
    """A tensor that is computed later: `op` applied to `args`.

    Build one with the functions below, never directly.
    """

    op: str
    args: tuple[Weight, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype
    # Each of the following fields belongs to the ops named in its comment.
    name: str = ""  # source: the name of the checkpoint's tensor
    dim: int = 0  # slice, concat: the axis; int4_*: the size of a group
    start: int = 0  # slice: the range is [start, start + shape[dim])
    data: bytes = b""  # constant: the elements, little endian
    layout: str = ""  # pack: the physical layout's name
    perm: tuple[int, ...] = ()  # permute: the order of axes, as in torch.permute
    expression: str = ""  # pointwise: an expression of the args, as in ops/pointwise.py

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def sources(self) -> Iterator[Weight]:
        """Yield the leaves of the expression, left to right: checkpoint tensors, constants and zeros."""
        if not self.args:
            yield self
        for arg in self.args:
            yield from arg.sources()

    @property
    def is_constant(self) -> bool:
        """True if the value is known without a checkpoint."""
        return all(leaf.op == "constant" for leaf in self.sources())

    def __str__(self) -> str:
        inner = ", ".join(str(arg) for arg in self.args)
        if self.op == "source":
            return self.name
        if self.op == "constant":
            return f"constant{list(self.shape)}"
        if self.op == "slice":
            return f"{inner}[{self.start}:{self.start + self.shape[self.dim]}@{self.dim}]"
        detail = {"concat": f", dim={self.dim}", "permute": f", {list(self.perm)}", "pack": f", {self.layout}"}
        detail |= dict.fromkeys(INT4_OPS, f", {self.dim}") | {"pointwise": f", {self.expression!r}"}
        kind = str(self.dtype).removeprefix("torch.")
        return f"{self.op}({inner}{detail.get(self.op, '')}{f', {kind}' if self.op == 'cast' else ''})"


def source(name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Weight:
    return Weight("source", (), tuple(shape), dtype, name=name)


def constant(value: Tensor) -> Weight:
    """Return a small tensor that is kept in the Program itself (rope frequencies)."""
    data = value.detach().contiguous().view(torch.uint8).numpy().tobytes()
    return Weight("constant", (), tuple(value.shape), value.dtype, data=data)


def cast(weight: Weight, dtype: torch.dtype) -> Weight:
    return weight if weight.dtype == dtype else Weight("cast", (weight,), weight.shape, dtype)


def slice_(weight: Weight, dim: int, start: int, stop: int) -> Weight:
    shape = list(weight.shape)
    shape[dim] = stop - start
    return Weight("slice", (weight,), tuple(shape), weight.dtype, dim=dim, start=start)


def concat(weights: tuple[Weight, ...], dim: int = 0) -> Weight:
    shape = list(weights[0].shape)
    shape[dim] = sum(weight.shape[dim] for weight in weights)
    return Weight("concat", weights, tuple(shape), weights[0].dtype, dim=dim)


def stack(weights: tuple[Weight, ...]) -> Weight:
    """Return the weights stacked along a new axis 0, as experts are stacked."""
    return Weight("stack", weights, (len(weights), *weights[0].shape), weights[0].dtype)


def permute(weight: Weight, perm: tuple[int, ...]) -> Weight:
    return Weight("permute", (weight,), tuple(weight.shape[axis] for axis in perm), weight.dtype, perm=perm)


def reshape(weight: Weight, shape: tuple[int, ...]) -> Weight:
    return Weight("reshape", (weight,), tuple(shape), weight.dtype)


def elementwise(weights: tuple[Weight, ...], expression: str, dtype: torch.dtype) -> Weight:
    """Return `expression` of x0, x1, … (the weights, broadcast), computed in float32 and rounded once to `dtype`."""
    shape = torch.broadcast_shapes(*(weight.shape for weight in weights))
    return Weight("pointwise", weights, tuple(shape), dtype, expression=expression)


def zeros(shape: tuple[int, ...], dtype: torch.dtype) -> Weight:
    """Return zeros that fill in for elements that a checkpoint lacks, such as the extra rows of a padded head."""
    return Weight("zeros", (), tuple(shape), dtype)


def padded(weight: Weight, dim: int, size: int) -> Weight:
    """Return `weight` padded with zeros at the end of axis `dim` to `size` elements."""
    missing = list(weight.shape)
    missing[dim] = size - weight.shape[dim]
    return concat((weight, zeros(tuple(missing), weight.dtype)), dim) if missing[dim] else weight


FP4_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""The number that each value of the four bits of an MXFP4 element (E2M1) stands for."""


def mxfp4(blocks: Weight, scales: Weight) -> Weight:
    """Return the numbers of MXFP4 blocks in bfloat16, which holds them exactly.

    blocks uint8 [..., num_blocks, 16]: 32 elements, two to a byte, the first in the low bits; scales uint8
    [..., num_blocks]: a power of two, biased by 127. Result [..., num_blocks * 32]. Raises ValueError for other shapes.
    Source: Open Compute Project, OCP Microscaling Formats (MX) Specification 1.0, section 5.
    """
    if (blocks.dtype, scales.dtype) != (torch.uint8, torch.uint8) or blocks.shape != (*scales.shape, 16):
        raise ValueError(f"blocks {list(blocks.shape)} and scales {list(scales.shape)}, expected 16 bytes a scale")
    shape = (*scales.shape[:-1], scales.shape[-1] * 32)
    return Weight("mxfp4", (blocks, scales), shape, torch.bfloat16)


def _read_mxfp4(weight: Weight, reader: TensorReader, start: int, stop: int) -> Tensor:
    blocks, scales = (read_rows(arg, reader, start, stop) for arg in weight.args)
    values = torch.tensor(FP4_VALUES)
    pairs = torch.stack((values[(blocks & 15).long()], values[(blocks >> 4).long()]), -1)
    scaled = torch.ldexp(pairs.flatten(-2), scales.to(torch.int32)[..., None] - 127)
    return scaled.flatten(-2).to(torch.bfloat16)


def int8_scales(weight: Weight) -> Weight:
    """Return the float32 divisor of each row along the last axis for int8: weight [..., n, k], result [..., n]."""
    return Weight("int8_scales", (weight,), weight.shape[:-1], torch.float32)


def int8_values(weight: Weight) -> Weight:
    """Return `weight` over its `int8_scales`, rounded to nearest, ties to even: symmetric, so 0 stays 0."""
    return Weight("int8_values", (weight,), weight.shape, torch.int8)


def fp8_scales(weight: Weight) -> Weight:
    """Return the float32 divisor of each row along the last axis for fp8: weight [..., n, k], result [..., n]."""
    return Weight("fp8_scales", (weight,), weight.shape[:-1], torch.float32)


def fp8_values(weight: Weight) -> Weight:
    """Return `weight` over its `fp8_scales`, rounded to the nearest float8_e4m3fn, ties to even."""
    return Weight("fp8_values", (weight,), weight.shape, torch.float8_e4m3fn)


def _read_8_bits(weight: Weight, reader: TensorReader, start: int, stop: int) -> Tensor:
    """Read the values or the scales of a weight quantized to 8 bits.

    Both are computed from the same rows of the source, so a chunk of rows needs no other rows.
    """
    rows = read_rows(weight.args[0], reader, start, stop)
    is_int8, flat = weight.op in INT8_OPS, rows.flatten(0, -2)
    if weight.op.endswith("_scales"):
        return row_scales(flat, LARGEST if is_int8 else LARGEST_FP8).view(rows.shape[:-1])
    values, _ = quantize_rows(flat) if is_int8 else quantize_rows_fp8(flat)
    return values.view(rows.shape)


def _read_int4(weight: Weight, reader: TensorReader, start: int, stop: int) -> Tensor:
    """Read the values, the group scales or the row scales of a weight quantized to 4 bits."""
    rows = read_rows(weight.args[0], reader, start, stop)
    flat = rows.flatten(0, -2)
    if weight.op == "int4_values":
        return quantize_int4(flat, weight.dim)[0].view(*rows.shape[:-1], -1)
    of_groups, of_rows = int4_divisors(flat, weight.dim)
    return of_rows.view(rows.shape[:-1]) if weight.op == "int4_scales" else of_groups.view(*rows.shape[:-1], -1)


def int4_scales(weight: Weight, group: int) -> Weight:
    """Return the float32 divisor of each row along the last axis for int4: weight [..., n, k], result [..., n]."""
    return Weight("int4_scales", (weight,), weight.shape[:-1], torch.float32, dim=group)


def int4_group_scales(weight: Weight, group: int) -> Weight:
    """Return the int8 divisor of each `group` neighbours, applied after `int4_scales`: [..., n, groups]."""
    *lead, k = weight.shape
    return Weight("int4_group_scales", (weight,), (*lead, -(-k // group)), torch.int8, dim=group)


def int4_values(weight: Weight, group: int) -> Weight:
    """Return `weight` over both its int4 scales, rounded to nearest, plus 8, two values to a byte.

    The result is uint8 [..., n, groups * group / 2]. Eight consecutive elements take four bytes: the first four
    elements are their low four bits, the last four their high bits. The padding after the last element of a row is
    zero, so it is stored as 8.
    """
    *lead, k = weight.shape
    return Weight("int4_values", (weight,), (*lead, -(-k // group) * group // 2), torch.uint8, dim=group)


def pack(weight: Weight, layout: str) -> Weight:
    """Return the logical weight stored in a kernel's physical `layout`, a key of LAYOUTS.

    Its shape stays the logical one. Raises KeyError for an unknown layout.
    """
    if layout not in LAYOUTS:
        raise KeyError(f"unknown layout {layout!r}; known: {', '.join(LAYOUTS)}")
    return Weight("pack", (weight,), weight.shape, weight.dtype, layout=layout)


# ---------------------------------------------------------------------------------------------- packed layouts

PANEL = 16  # output rows of one panel


@dataclass(frozen=True)
class Layout:
    """A panel layout of a logical [..., n, k] tensor in memory."""

    name: str
    k_unit: int  # the number of neighbouring k elements of one output row that are kept together

    def physical_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        *lead, n, k = shape
        return (*lead, -(-n // PANEL), -(-k // self.k_unit), PANEL, self.k_unit)

    def pack(self, x: Tensor) -> Tensor:
        """Reorder x [..., n, k] to [..., n / 16, k / k_unit, 16, k_unit], zero padded to whole panels."""
        *lead, n, k = x.shape
        panels, units = -(-n // PANEL), -(-k // self.k_unit)
        x = torch.nn.functional.pad(x, (0, units * self.k_unit - k, 0, panels * PANEL - n))
        return x.view(*lead, panels, PANEL, units, self.k_unit).transpose(-2, -3).contiguous()


def _pairs(x: Tensor) -> Tensor:
    """Interleave the two halves of axis n of [..., 2 n, k] row by row: gate 0, up 0, gate 1, up 1, …."""
    *lead, rows, k = x.shape
    return x.view(*lead, 2, rows // 2, k).transpose(-2, -3).reshape(x.shape)


def _unsigned(x: Tensor) -> Tensor:
    """Add 128 to int8 values, which makes them unsigned, in the same bytes."""
    return (x.contiguous().view(torch.uint8) ^ 128).view(torch.int8)


def _neighbours(x: Tensor) -> Tensor:
    """Repack bytes of `int4_values` so that each byte holds two neighbours, the first in its low bits."""
    fours = x.reshape(*x.shape[:-1], -1, 4)
    eights = torch.cat((fours & 15, fours >> 4), -1)
    return (eights[..., 0::2] | eights[..., 1::2] << 4).reshape(x.shape)


def _signed(x: Tensor) -> Tensor:
    """Turn four-bit values that are stored plus 8 into signed four-bit values, in the same bytes."""
    return x ^ 0x88


@dataclass(frozen=True)
class Arranged:
    """A layout for onnxruntime's kernels: steps applied in order, none of which changes the shape."""

    name: str
    steps: tuple[Callable[[Tensor], Tensor], ...]

    def physical_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return shape

    def pack(self, x: Tensor) -> Tensor:
        for step in self.steps:
            x = step(x)
        return x


@dataclass(frozen=True)
class Transposed:
    """A layout that stores [n, k] as [k, n], transposed as a whole and not in chunks."""

    name: str = "transposed"

    def physical_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        n, k = shape
        return (k, n)

    def pack(self, x: Tensor) -> Tensor:
        return x.t().contiguous()


# panel16_k1 is for float32. panel16_k2 is for bfloat16: AVX-512 and AMX dot products take pairs along k. panel16_k4 is
# for int8, whose dot products take groups of four. The other layouts are for onnxruntime.
LAYOUTS: dict[str, Layout | Arranged | Transposed] = {
    **{f"panel16_k{unit}": Layout(f"panel16_k{unit}", unit) for unit in (1, 2, 4)},
    "pairs": Arranged("pairs", (_pairs,)),
    "unsigned": Arranged("unsigned", (_unsigned,)),
    "neighbours": Arranged("neighbours", (_neighbours,)),
    "neighbours_signed": Arranged("neighbours_signed", (_neighbours, _signed)),
    "pairs_unsigned": Arranged("pairs_unsigned", (_pairs, _unsigned)),
    "pairs_neighbours": Arranged("pairs_neighbours", (_pairs, _neighbours)),
    "transposed": Transposed(),
}


def physical_shape(weight: Weight) -> tuple[int, ...]:
    """Return the shape of the stored tensor: the logical one unless `weight` is packed."""
    return LAYOUTS[weight.layout].physical_shape(weight.shape) if weight.op == "pack" else weight.shape


# ------------------------------------------------------------------------------------------------ materialise


def read_rows(weight: Weight, reader: TensorReader, start: int, stop: int) -> Tensor:
    """Read rows [start, stop) of axis 0 of the logical tensor.

    `pack`, which may only be the outermost op, is not applied.
    """
    if weight.op == "source":
        return reader.rows(weight.name, start, stop)
    if weight.op == "constant":
        whole = torch.frombuffer(bytearray(weight.data), dtype=weight.dtype).view(weight.shape)
        return whole[start:stop]
    if weight.op == "zeros":
        return torch.zeros(stop - start, *weight.shape[1:], dtype=weight.dtype)
    if weight.op == "cast":
        return read_rows(weight.args[0], reader, start, stop).to(weight.dtype)
    if weight.op == "pointwise":
        inputs = [_broadcast_rows(arg, weight.shape, reader, start, stop) for arg in weight.args]
        return pointwise(inputs, weight.expression, weight.dtype)
    if weight.op == "slice":
        if weight.dim == 0:
            return read_rows(weight.args[0], reader, weight.start + start, weight.start + stop)
        rows = read_rows(weight.args[0], reader, start, stop)
        return rows.narrow(weight.dim, weight.start, weight.shape[weight.dim])
    if weight.op == "concat":
        if weight.dim != 0:
            return torch.cat([read_rows(arg, reader, start, stop) for arg in weight.args], weight.dim)
        parts, base = [], 0
        for arg in weight.args:
            low, high = max(start - base, 0), min(stop - base, arg.shape[0])
            if low < high:
                parts.append(read_rows(arg, reader, low, high))
            base += arg.shape[0]
        return torch.cat(parts)
    if weight.op == "stack":
        return torch.stack([read_whole(arg, reader) for arg in weight.args[start:stop]])
    if weight.op == "permute":
        if weight.perm[0] == 0:
            return read_rows(weight.args[0], reader, start, stop).permute(weight.perm)
        return read_whole(weight.args[0], reader).permute(weight.perm)[start:stop]
    if weight.op == "mxfp4":
        return _read_mxfp4(weight, reader, start, stop)
    if weight.op in (*INT8_OPS, *FP8_OPS):
        return _read_8_bits(weight, reader, start, stop)
    if weight.op in INT4_OPS:
        return _read_int4(weight, reader, start, stop)
    if weight.op == "reshape":
        return _read_reshaped(weight, reader, start, stop)
    if weight.op == "pack":
        return read_rows(weight.args[0], reader, start, stop)
    raise AssertionError(f"unknown weight op {weight.op}")


def _broadcast_rows(weight: Weight, shape: tuple[int, ...], reader: TensorReader, start: int, stop: int) -> Tensor:
    """Read the rows of an argument that is broadcast to `shape`, or all of it where it is broadcast along axis 0."""
    has_rows = len(weight.shape) == len(shape) and weight.shape[0] == shape[0]
    return read_rows(weight, reader, start, stop) if has_rows else read_whole(weight, reader)


def _read_reshaped(weight: Weight, reader: TensorReader, start: int, stop: int) -> Tensor:
    """Read rows of a reshape, from those rows of its argument that hold their elements."""
    source = weight.args[0]
    row, source_row = math.prod(weight.shape[1:]), math.prod(source.shape[1:])
    low, high = start * row, stop * row
    first = low // source_row
    rows = read_rows(source, reader, first, -(-high // source_row)).reshape(-1)
    return rows[low - first * source_row : high - first * source_row].view(stop - start, *weight.shape[1:])


def num_rows(weight: Weight) -> int:
    """Return the length of axis 0; raise UnsupportedError for a tensor without axes."""
    if not weight.shape:
        raise UnsupportedError(
            f"tensor {next(weight.sources())} is a single number (0-dimensional);"
            " expected weights with one axis or more"
        )
    return weight.shape[0]


def read_whole(weight: Weight, reader: TensorReader) -> Tensor:
    """Read the whole logical tensor."""
    return read_rows(weight, reader, 0, num_rows(weight))


def read_constant(weight: Weight) -> Tensor:
    """Read the whole of a weight whose leaves are all constants of the program, which needs no checkpoint."""
    return read_whole(weight, _NoReader())


class _NoReader:
    def rows(self, name: str, start: int, stop: int) -> Tensor:
        raise AssertionError(f"{name}: a constant has no checkpoint tensor")


def _row_bytes(weight: Weight) -> int:
    """Return the memory in bytes that a row of axis 0 takes while it is computed.

    Integers and their scales are computed from whole rows in float32.
    """
    inner = weight.args[0] if weight.op == "pack" else weight
    if inner.op in (*INT8_OPS, *FP8_OPS, *INT4_OPS):
        return 4 * math.prod(inner.args[0].shape[1:])
    return weight.num_bytes // num_rows(weight)


def materialize(weight: Weight, reader: TensorReader, chunk_bytes: int = 64 << 20) -> Iterator[Tensor]:
    """Yield the stored tensor in order, a chunk of rows at a time.

    Concatenated, the chunks have `physical_shape(weight)`. A transposed tensor is yielded whole.
    """
    layout = LAYOUTS[weight.layout] if weight.op == "pack" else None
    unit = PANEL if layout and len(weight.shape) == 2 else 1
    row_bytes = max(1, _row_bytes(weight))
    step = max(unit, chunk_bytes // row_bytes // unit * unit)
    chunks = (
        read_rows(weight, reader, start, min(start + step, weight.shape[0]))
        for start in range(0, weight.shape[0], step)
    )
    if isinstance(layout, Transposed):
        yield layout.pack(torch.cat(list(chunks)))
        return
    for rows in chunks:
        yield layout.pack(rows) if layout else rows.contiguous()


# ------------------------------------------------------------------------------------------------ JSON


def to_json(weight: Weight) -> dict[str, Any]:
    out: dict[str, Any] = {
        "op": weight.op,
        "shape": list(weight.shape),
        "dtype": str(weight.dtype).removeprefix("torch."),
    }
    if weight.args:
        out["args"] = [to_json(arg) for arg in weight.args]
    if weight.data:
        out["data"] = base64.b64encode(weight.data).decode()
    for field, empty in (("name", ""), ("dim", 0), ("start", 0), ("layout", ""), ("perm", ()), ("expression", "")):
        value = getattr(weight, field)
        if value != empty:
            out[field] = list(value) if isinstance(value, tuple) else value
    return out


def from_json(data: dict[str, Any]) -> Weight:
    fields: dict[str, Any] = {key: data[key] for key in ("name", "dim", "start", "layout", "expression") if key in data}
    if "data" in data:
        fields["data"] = base64.b64decode(data["data"])
    if "perm" in data:
        fields["perm"] = tuple(data["perm"])
    args = tuple(from_json(arg) for arg in data.get("args", ()))
    return Weight(data["op"], args, tuple(data["shape"]), getattr(torch, data["dtype"]), **fields)
