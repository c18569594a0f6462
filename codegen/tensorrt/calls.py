"""The functions that write each op of a lowered program as TensorRT layers, named by `emit` of the kernel table.

The step's rows are tokens, `[T, …]` with T = num_seqs * num_new. The arithmetic is that of the references: norms,
activations, rope and ops that are defined in float32 are computed in float32 and rounded once; products take and give
the model's dtype.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from inferc.codegen.tensorrt.network import Tensor, TensorRTNetwork
from inferc.ir.ops.pointwise import parse, walk
from inferc.ir.program import arguments


def dtype_of(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def rank_of(node: fx.Node) -> int:
    rank: int = node.meta["val"].dim()
    return rank


# ------------------------------------------------------------------------------------------------- plain


def embedding(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    weight, ids, *_ = arguments(node)
    return net.gather(net.value(weight), net.value(ids), 0)


def embedding_int8(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    weight, scale, ids, dtype = arguments(node)
    rows = net.packed_rows(weight, net.value(ids))
    scales = net.view(net.gather(net.wide(scale), net.value(ids), 0), -1, 1)
    return net.cast(net.mul(rows, scales), dtype)


def index_select(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    x, axis, rows = arguments(node)
    return net.gather(net.value(x), net.value(rows), axis % rank_of(x))


def cat(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    parts, axis = arguments(node)
    return net.concat([net.value(each) for each in parts], axis)


def _other(net: TensorRTNetwork, node: fx.Node, other: Any) -> Tensor:
    return net.value(other) if isinstance(other, fx.Node) else net.number(other, rank_of(node), dtype_of(node))


def add(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    x, other, alpha = arguments(node)
    value = _other(net, node, other)
    return net.plus(net.value(x), value if alpha == 1 else net.mul(value, _other(net, node, alpha)))


def mul(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    x, other = arguments(node)
    return net.mul(net.value(x), _other(net, node, other))


def view(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    x, _ = arguments(node)
    return net.view(net.value(x), -1, *(int(size) for size in node.meta["val"].shape[1:]))


def part(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    """Return the part of a node with several results that a `getitem` node selects."""
    source, index = node.args
    return net.value(source)[index]


def slice_(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    x, axis, start, end, step = arguments(node)
    size = int(x.meta["val"].shape[axis])
    stop = size if end is None else min(end if end >= 0 else end + size, size)
    return net.part(net.value(x), axis, (start or 0) % size if start else 0, stop, step)


# ---------------------------------------------------------------------------------------------- products


def _linear(net: TensorRTNetwork, x: fx.Node, weight: fx.Node, bias: fx.Node | None, dtype: torch.dtype) -> Tensor:
    """Multiply x [..., k] by weight [n, k], in `dtype`."""
    rows, matrix = (net.cast(net.value(each), dtype) for each in (x, weight))
    product = net.matmul(rows, matrix, transposed=True)
    return product if bias is None else net.plus(product, net.cast(net.value(bias), dtype))


def linear(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    x, weight, bias = arguments(node)
    return _linear(net, x, weight, bias, dtype_of(node))


def linear_wide(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    x, weight = arguments(node)
    return _linear(net, x, weight, None, torch.float32)


def lm_head(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    """Compute the logits in float32, their dtype, since TensorRT rounds a product to its operands' dtype."""
    hidden, weight, bias = arguments(node)
    return _linear(net, hidden, weight, bias, torch.float32)


def linear_int8(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    """Multiply by an int8 weight that is scaled before the product, each element rounded to the result's dtype."""
    x, weight, scale, bias, residual, _ = arguments(node)
    dtype = dtype_of(node)
    product = net.matmul(net.cast(net.value(x), dtype), net.dequantized(weight, scale, dtype), transposed=True)
    for added in (bias, residual):
        product = product if added is None else net.plus(product, net.cast(net.value(added), dtype))
    return product


def head_linear(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    """Multiply [T, heads, k] by [heads, n, k]: one matrix product for each head."""
    x, weight = arguments(node)
    heads_first = net.transpose(net.value(x), 1, 0, 2)
    return net.transpose(net.matmul(heads_first, net.value(weight), transposed=True), 1, 0, 2)


# ------------------------------------------------------------------------------------------------- norms


def _over_root(net: TensorRTNetwork, value: Tensor, eps: float) -> Tensor:
    """Compute `value / sqrt(mean(value²) + eps)` over the last axis."""
    rank = len(value.shape)
    mean = net.reduce("AVG", net.mul(value, value), rank - 1)
    root = net.unary("SQRT", net.plus(mean, net.number(eps, rank)))
    return net.mul(value, net.unary("RECIP", root))


def rms_norm(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    x, weight, eps, weight_offset, round_before_scale = arguments(node)
    dtype = dtype_of(x)
    normed = _over_root(net, net.wide(x), eps)
    if weight is None:
        return net.cast(normed, dtype)
    scale = net.wide(weight)
    if weight_offset:
        scale = net.plus(scale, net.number(weight_offset, 1))
    if round_before_scale:
        return net.mul(net.cast(normed, dtype), net.cast(scale, dtype))
    return net.cast(net.mul(normed, scale), dtype)


def layer_norm(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    x, weight, bias, eps = arguments(node)
    wide = net.wide(x)
    mean = net.reduce("AVG", wide, rank_of(x) - 1)
    made = _over_root(net, net.elementwise("SUB", wide, mean), eps)
    if weight is not None:
        made = net.mul(made, net.wide(weight))
    if bias is not None:
        made = net.plus(made, net.wide(bias))
    return net.cast(made, dtype_of(x))


# ------------------------------------------------------------------------------------------- elementwise


def activate(net: TensorRTNetwork, value: Tensor, name: str) -> Tensor:
    """Apply an activation to a value; `name` is silu, gelu or gelu_tanh."""
    if name == "silu":
        return net.mul(value, net.activation("SIGMOID", value))
    return net.activation("GELU_TANH" if name == "gelu_tanh" else "GELU_ERF", value)


def _gated(net: TensorRTNetwork, gate: fx.Node, up: fx.Node, activation: str) -> Tensor:
    """Compute `activation(gate) * up` in float32, rounded once."""
    return net.cast(net.mul(activate(net, net.wide(gate), activation), net.wide(up)), dtype_of(gate))


def silu_mul(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    gate, up = arguments(node)
    return _gated(net, gate, up, "silu")


def gelu_mul(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    gate, up, approximate = arguments(node)
    return _gated(net, gate, up, "gelu_tanh" if approximate == "tanh" else "gelu")


UNARY = {"abs": "ABS", "erf": "ERF", "exp": "EXP", "floor": "FLOOR", "log": "LOG", "sqrt": "SQRT"}
ACTIVATIONS = {"sigmoid": "SIGMOID", "tanh": "TANH"}
BINARY = {"max": "MAX", "min": "MIN"}
SPELLED = ("silu", "gelu", "gelu_tanh", "rsqrt", "where")
_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "SUM",
    ast.Sub: "SUB",
    ast.Mult: "PROD",
    ast.Div: "DIV",
    ast.Lt: "LESS",
    ast.Gt: "GREATER",
}


def _function(net: TensorRTNetwork, name: str, args: list[Tensor]) -> Tensor:
    if name in ("silu", "gelu", "gelu_tanh"):
        return activate(net, args[0], name)
    if name == "rsqrt":
        return net.unary("RECIP", net.unary("SQRT", args[0]))
    if name == "where":
        return net.where(*args)
    if name in BINARY:
        return net.elementwise(BINARY[name], *args)
    return net.activation(ACTIVATIONS[name], args[0]) if name in ACTIVATIONS else net.unary(UNARY[name], args[0])


def pointwise(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    inputs, expression, dtype = arguments(node)
    names = {f"x{index}": net.wide(each) for index, each in enumerate(inputs)}
    rank = rank_of(node)

    def fold(each: ast.expr) -> Tensor:
        return walk(
            each,
            names,
            lambda number: net.number(number, rank),
            lambda name, args: _function(net, name, args),
            lambda kind, left, right: net.elementwise(_OPERATORS[kind], left, right),
        )

    named, result = parse(expression)
    for name, each in named:
        names[name] = fold(each)
    return net.cast(fold(result), dtype)


# -------------------------------------------------------------------------------------------------- rope


def rope_table(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    positions, inv_freq, scaling = arguments(node)
    column = net.view(net.wide(positions), -1, 1)
    angle = net.mul(column, net.wide(inv_freq))
    return net.times(net.concat([net.unary("COS", angle), net.unary("SIN", angle)], 1), scaling)


def _cos_and_sin(net: TensorRTNetwork, table: fx.Node) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [T, 1, rotary_dim / 2]; made once for all layers."""
    half = int(table.meta["val"].shape[-1]) // 2

    def make(start: int) -> Callable[[], Tensor]:
        return lambda: net.view(net.part(net.value(table), 1, start, start + half), -1, 1, half)

    return net.shared(("cos", table), make(0)), net.shared(("sin", table), make(half))


def rope(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    """Compute rope by elementwise layers.

    TensorRT's own layer documents neither the precision in which it computes nor where it rounds.
    """
    x, table, pairs = arguments(node)
    _, heads, head_dim = (int(size) if index else 0 for index, size in enumerate(x.meta["val"].shape))
    rotary_dim = int(table.meta["val"].shape[-1])
    half = rotary_dim // 2
    cos, sin = _cos_and_sin(net, table)
    value = net.value(x)
    rotated = net.cast(value if rotary_dim == head_dim else net.part(value, 2, 0, rotary_dim), torch.float32)
    if pairs == "halves":
        first, second = net.part(rotated, 2, 0, half), net.part(rotated, 2, half, rotary_dim)
    else:
        first, second = (net.part(rotated, 2, start, rotary_dim, 2) for start in (0, 1))
    turned = [
        net.elementwise("SUB", net.mul(first, cos), net.mul(second, sin)),
        net.plus(net.mul(second, cos), net.mul(first, sin)),
    ]
    if pairs == "neighbours":
        both = net.concat([net.view(each, -1, heads, half, 1) for each in turned], 3)
        made = net.view(both, -1, heads, rotary_dim)
    else:
        made = net.concat(turned, 2)
    made = net.cast(made, dtype_of(x))
    return made if rotary_dim == head_dim else net.concat([made, net.part(value, 2, rotary_dim, head_dim)], 2)
