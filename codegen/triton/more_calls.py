"""What each node of a step launches, of the ops that a dense Llama does without: as calls.py has those of the others."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from inferc.codegen.triton.aot.source import POINTERS
from inferc.codegen.triton.calls import ROWS, Builder, Call
from inferc.codegen.triton.kernels import (
    embedding_int8,
    gather_rows,
    kv_write,
    layer_norm,
    pointwise,
    rms_norm,
    rope_apply,
)
from inferc.codegen.triton.kernels import resize_heads as resizing
from inferc.codegen.values import Operand, Values
from inferc.ir.program import dtype_name


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
        *(expression, [dtype_name(each.meta["val"].dtype) for each in inputs], dtype_name(out.dtype), ROWS[out.pool]),
        *((math.prod(sizes[:split]), math.prod(sizes[split:])), strides, out.stride, b.unaligned()),
    )
    return b.done("pointwise", out, source)


def _input_stride(b: Builder, name: str, node: fx.Node) -> int:
    """Place an input, and tell how far its rows lie apart: weights have one for all, inputs of the step one number each."""
    if node.op == "get_attr":
        b.arguments[name] = {"weight": str(node.target)}
        return 0
    if node.op == "placeholder":
        b.arguments[name] = {"input": str(node.target)}
        return 1
    return b.place(name, b.values.operand(node)).stride


def _row_shape(node: fx.Node, rank: int) -> list[int]:
    """The sizes of one row, of as many axes as the result's have; a weight is the same for every row."""
    shape = list(node.meta["val"].shape)
    sizes = [int(size) for size in (shape if node.op == "get_attr" else shape[1:])]
    return [1] * (rank - len(sizes)) + sizes


def split_of(sizes: list[int], shapes: list[list[int]]) -> int | None:
    """Where the axes of a row divide, so that every input is whole or repeated on either side; None if nowhere."""
    for split in range(len(sizes) + 1):
        sides = [(sizes[at], [shape[at] for shape in shapes]) for at in (slice(split), slice(split, None))]
        if all(part in (whole, [1] * len(whole)) for whole, parts in sides for part in parts):
            return split
    return None


def embedding_by_position(node: fx.Node, values: Values) -> Call:
    """`aten.embedding` by positions, which are wider than token ids."""
    b = Builder(node, values)
    b.weight("table_ptr", "weight")
    b.input("index_ptr", "indices")
    out = b.write("out_ptr")
    source = gather_rows.gather_rows(dtype_name(out.dtype), ROWS[out.pool], out.width, out.width, out.stride)
    signature = {**source.signature, "index_ptr": POINTERS["int64"]}
    return b.done("gather_rows", out, replace(source, signature=signature))


def layer_norm_(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    how = rms_norm.how_scaled(b.weight("weight_ptr", "weight"), round_before_scale=False)
    return _norm_parts(b, "layer_norm", how, {"centers": True, "has_bias": b.weight("bias_ptr", "bias")})


def rms_norm_heads(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    how = rms_norm.how_scaled(b.weight("weight_ptr", "weight"), bool(b.arg("round_before_scale")))
    return _norm_parts(b, "rms_norm_heads", how, {"offset": float(b.arg("weight_offset"))})


def rms_norm_of_sum(node: fx.Node, values: Values) -> Call:
    """`inferc.rms_norm_add` whose second result, the sum, has no place: nothing reads it."""
    b = Builder(node, values)
    how = rms_norm.how_scaled(b.weight("weight_ptr", "weight"), bool(b.arg("round_before_scale")))
    more = {"offset": float(b.arg("weight_offset")), "adds": True}
    return _norm_parts(b, "rms_norm_of_sum", how, more, b.read("residual_ptr", "residual"))


def _norm_parts(b: Builder, name: str, how: int, more: dict[str, Any], residual: Operand | None = None) -> Call:
    x, out = b.read("x_ptr", "x"), b.write("out_ptr", None if residual is None else 0)
    added = out if residual is None else residual
    weight = b.arg("weight")
    width = int(b.arg("x").meta["val"].shape[-1])
    of_parts = weight is not None and weight.meta["val"].dim() > 1
    source = layer_norm.norm_parts(
        *(dtype_name(out.dtype), ROWS[out.pool], (out.width // width, width)),
        *((x.stride, added.stride, out.stride, width if of_parts else 0), float(b.arg("eps")), how),
        **more,
        unaligned=b.unaligned(),
    )
    return b.done(name, out, source)


def rope(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, table, out = b.read("x_ptr", "x"), b.read("table_ptr", "table"), b.write("out_ptr")
    _, heads, dim = node.meta["val"].shape
    source = rope_apply.rope_apply(
        *(dtype_name(out.dtype), ROWS[out.pool], int(heads), int(dim), table.width // 2, str(b.arg("pairs"))),
        *((x.stride, table.stride, out.stride), b.unaligned()),
    )
    return b.done("rope", out, source)


def resize_heads(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, out = b.read("x_ptr", "x"), b.write("out_ptr")
    heads, had = (int(size) for size in b.arg("x").meta["val"].shape[1:])
    sizes, strides = (had, int(node.meta["val"].shape[2])), (x.stride, out.stride)
    source = resizing.resize_heads(dtype_name(out.dtype), ROWS[out.pool], heads, sizes, strides, b.unaligned())
    return b.done("resize_heads", out, source)


def kv_write_(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    k, v = b.read("k_ptr", "k"), b.read("v_ptr", "v")
    layers, block_size = b.cache("cache_ptr")
    b.input("slots_ptr", "slot_mapping")
    _, kv_heads, dim = b.arg("k").meta["val"].shape
    source = kv_write.kv_write(
        *(dtype_name(k.dtype), int(kv_heads), int(dim), (k.stride, v.stride), layers, block_size, b.unaligned()),
    )
    return b.done("kv_write", k, source)


def embedding_int8_(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    b.weight("table_ptr", "weight")
    b.weight("scale_ptr", "scale")
    b.input("index_ptr", "indices")
    out = b.write("out_ptr")
    index = dtype_name(b.arg("indices").meta["val"].dtype)
    source = embedding_int8.embedding_int8(dtype_name(out.dtype), index, ROWS[out.pool], out.width, out.stride)
    return b.done("embedding_int8", out, source)
