"""The launches of embeddings, of element-wise ops and of views that are copied."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from torch import fx

from inferc.codegen.triton.aot.source import POINTERS, Source
from inferc.codegen.triton.calls.builder import ROWS, Builder, Call
from inferc.codegen.triton.kernels import concat as concatenation
from inferc.codegen.triton.kernels import (
    embedding_int8,
    gather_rows,
    pointwise,
    silu_mul,
)
from inferc.codegen.triton.kernels import resize_heads as resizing
from inferc.codegen.values import Operand, Values
from inferc.ir.program import dtype_name
from inferc.manifest_types import Where


def add(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    alpha = b.arg("alpha")
    return _with_other(b, "x0 + {}" if alpha == 1 else f"x0 + {{}} * {float(alpha)!r}")


def mul(node: fx.Node, values: Values) -> Call:
    return _with_other(Builder(node, values), "x0 * {}")


def _with_other(b: Builder, expression: str) -> Call:
    x, other = b.arg("self"), b.arg("other")
    if isinstance(other, fx.Node):
        return _pointwise(b, [x, other], expression.format("x1"))
    return _pointwise(b, [x], expression.format(f"({float(other)!r})"))


def gelu_mul(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    name = "gelu_tanh" if b.arg("approximate") == "tanh" else "gelu"
    return _pointwise(b, [b.arg("gate"), b.arg("up")], f"{name}(x0) * x1")


def pointwise_(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    return _pointwise(b, list(b.arg("inputs")), str(b.arg("expression")))


def _pointwise(b: Builder, inputs: Sequence[fx.Node], expression: str) -> Call:
    sizes = [int(size) for size in b.node.meta["val"].shape[1:]]
    shapes = [_row_shape(each, len(sizes)) for each in inputs]
    split = split_of(sizes, shapes)
    assert split is not None, "conditions.pointwise_fits refuses it"
    strides = []
    for at, (node, shape) in enumerate(zip(inputs, shapes, strict=True)):
        outer, inner = math.prod(shape[:split]), math.prod(shape[split:])
        row = _input_stride(b, f"x{at}_ptr", node)
        strides.append((row, inner if outer > 1 else 0, 1 if inner > 1 else 0))
    out = b.write("out_ptr")
    source = pointwise.pointwise(
        expression,
        [dtype_name(each.meta["val"].dtype) for each in inputs],
        dtype_name(out.dtype),
        ROWS[out.pool],
        (math.prod(sizes[:split]), math.prod(sizes[split:])),
        strides,
        out.stride,
        b.unaligned(),
    )
    return b.done("pointwise", out, source)


def _input_stride(b: Builder, name: str, node: fx.Node) -> int:
    """Place an input and return the distance of its rows, in elements.

    It is 0 for a weight, which is the same for all rows, and 1 for an input of the step, which has one number per row.
    """
    if node.op == "get_attr":
        b.arguments[name] = Where(weight=str(node.target))
        return 0
    if node.op == "placeholder":
        b.arguments[name] = Where(input=str(node.target))
        return 1
    return b.place(name, b.values.operand(node)).stride


def _row_shape(node: fx.Node, rank: int) -> list[int]:
    """Return the sizes of one row of a node, padded with leading ones to `rank` axes.

    A weight is the same for every row, so that all of its axes count.
    """
    shape = list(node.meta["val"].shape)
    sizes = [int(size) for size in (shape if node.op == "get_attr" else shape[1:])]
    return [1] * (rank - len(sizes)) + sizes


def split_of(sizes: list[int], shapes: list[list[int]]) -> int | None:
    """Return the axis at which a row divides so that every input is whole or repeated on either side.

    Returns None if there is no such axis.
    """
    for split in range(len(sizes) + 1):
        sides = [(sizes[at], [shape[at] for shape in shapes]) for at in (slice(split), slice(split, None))]
        if all(part in (whole, [1] * len(whole)) for whole, parts in sides for part in parts):
            return split
    return None


def embedding_by_position(node: fx.Node, values: Values) -> Call:
    """Return the call of `aten.embedding` by positions, which are int64 where token ids are int32."""
    b = Builder(node, values)
    b.weight("table_ptr", "weight")
    b.input("index_ptr", "indices")
    out = b.write("out_ptr")
    source = gather_rows.gather_rows(dtype_name(out.dtype), ROWS[out.pool], out.width, out.width, out.stride)
    signature = {**source.signature, "index_ptr": POINTERS["int64"]}
    return b.done("gather_rows", out, replace(source, signature=signature))


def concat(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, other = (
        b.place(name, values.operand(each)) for name, each in zip(("x_ptr", "other_ptr"), b.arg("tensors"), strict=True)
    )
    out = b.write("out_ptr")
    widths, strides = (x.width, other.width), (x.stride, other.stride, out.stride)
    source = concatenation.concat(dtype_name(out.dtype), ROWS[out.pool], widths, strides, b.unaligned())
    return b.done("concat", out, source)


def resize_heads(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, out = b.read("x_ptr", "x"), b.write("out_ptr")
    heads, had = (int(size) for size in b.arg("x").meta["val"].shape[1:])
    sizes, strides = (had, int(node.meta["val"].shape[2])), (x.stride, out.stride)
    source = resizing.resize_heads(dtype_name(out.dtype), ROWS[out.pool], heads, sizes, strides, b.unaligned())
    return b.done("resize_heads", out, source)


def embedding_int8_(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    b.weight("table_ptr", "weight")
    b.weight("scale_ptr", "scale")
    b.input("index_ptr", "indices")
    out = b.write("out_ptr")
    index = dtype_name(b.arg("indices").meta["val"].dtype)
    source = embedding_int8.embedding_int8(dtype_name(out.dtype), index, ROWS[out.pool], out.width, out.stride)
    return b.done("embedding_int8", out, source)


def embedding(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    b.weight("table_ptr", "weight")
    b.input("index_ptr", "indices")
    out = b.write("out_ptr")
    return b.done("gather_rows", out, _gather(out, out.width))


def index_select(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    table, out = b.read("table_ptr", "self"), b.write("out_ptr")
    b.input("index_ptr", "index")
    return b.done("gather_rows", out, _gather(out, table.stride))


def _gather(out: Operand, table_stride: int) -> Source:
    return gather_rows.gather_rows(dtype_name(out.dtype), ROWS[out.pool], out.width, table_stride, out.stride)


def silu_mul_(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    gate, up, out = b.read("gate_ptr", "gate"), b.read("up_ptr", "up"), b.write("out_ptr")
    strides = (gate.stride, up.stride, out.stride)
    source = silu_mul.silu_mul(dtype_name(out.dtype), ROWS[out.pool], out.width, strides, b.unaligned())
    return b.done("silu_mul", out, source)
