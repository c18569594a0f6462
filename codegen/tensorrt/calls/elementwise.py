"""Embeddings, element-wise ops and slices as TensorRT layers."""

from __future__ import annotations

import ast
from typing import Any

from torch import fx

from inferc.codegen.node_types import dtype_of, gate_of, rank_of
from inferc.codegen.tensorrt.network import Tensor, TensorRTNetwork
from inferc.ir.ops.pointwise import parse, walk
from inferc.ir.program import arguments


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


def activate(net: TensorRTNetwork, value: Tensor, name: str) -> Tensor:
    """Apply an activation to a value; `name` is silu, gelu or gelu_tanh."""
    if name == "silu":
        return net.mul(value, net.activation("SIGMOID", value))
    return net.activation("GELU_TANH" if name == "gelu_tanh" else "GELU_ERF", value)


def silu_mul(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    """Compute `activation(gate) * up` in float32, rounded once."""
    gate, up, activation = gate_of(node)
    return net.cast(net.mul(activate(net, net.wide(gate), activation), net.wide(up)), dtype_of(gate))


gelu_mul = silu_mul  # the names of their kernels


UNARY = {"abs": "ABS", "erf": "ERF", "exp": "EXP", "floor": "FLOOR", "log": "LOG", "sqrt": "SQRT"}
ACTIVATIONS = {"sigmoid": "SIGMOID", "tanh": "TANH"}
BINARY = {"max": "MAX", "min": "MIN"}
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
