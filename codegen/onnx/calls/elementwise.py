"""Embeddings, element-wise ops and slices as ONNX ops."""

from __future__ import annotations

import ast
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from inferc.codegen.node_types import dtype_of, gate_of
from inferc.codegen.onnx.graph import OnnxGraph
from inferc.ir.ops.pointwise import parse, walk
from inferc.ir.program import arguments

INT64_MAX = (1 << 63) - 1


def embedding(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    weight, ids, *_ = arguments(node)
    return graph.op("Gather", graph.value(weight), graph.value(ids), axis=0)


def index_select(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    x, axis, rows = arguments(node)
    return graph.op("Gather", graph.value(x), graph.value(rows), axis=axis)


def cat(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    parts, axis = arguments(node)
    return graph.op("Concat", *(graph.value(each) for each in parts), axis=axis)


def _other(graph: OnnxGraph, node: fx.Node, other: Any) -> ir.Value:
    if isinstance(other, fx.Node):
        value: ir.Value = graph.value(other)
        return value
    return graph.cast(graph.constant(other, np.float32), torch.float32, dtype_of(node))


def add(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    x, other, alpha = arguments(node)
    value = _other(graph, node, other)
    return graph.op("Add", graph.value(x), value if alpha == 1 else graph.op("Mul", value, _other(graph, node, alpha)))


def mul(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    x, other = arguments(node)
    return graph.op("Mul", graph.value(x), _other(graph, node, other))


def view(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    x, _ = arguments(node)
    return graph.reshape(graph.value(x), -1, *(int(size) for size in node.meta["val"].shape[1:]))


def part(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    """Return the part of a node with several results that a `getitem` node selects."""
    source, index = node.args
    found: ir.Value = graph.value(source)[index]
    return found


def part_of(graph: OnnxGraph, value: ir.Value, axis: int, start: int, end: int, step: int = 1) -> ir.Value:
    where = (graph.constant([each]) for each in (start, end, axis, step))
    return graph.op("Slice", value, *where)


def slice_(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    x, axis, start, end, step = arguments(node)
    return part_of(graph, graph.value(x), axis, start or 0, INT64_MAX if end is None else end, step)


def activate(graph: OnnxGraph, value: ir.Value, name: str) -> ir.Value:
    """Apply an activation to a value; `name` is silu, gelu or gelu_tanh."""
    if name == "silu":
        return graph.op("Mul", value, graph.op("Sigmoid", value))
    return graph.op("Gelu", value, approximate="tanh" if name == "gelu_tanh" else "none")


def silu_mul(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    """Compute `activation(gate) * up` in float32, rounded once."""
    gate, up, activation = gate_of(node)
    dtype = dtype_of(gate)
    wide, other = (graph.cast(graph.value(each), dtype, torch.float32) for each in (gate, up))
    return graph.cast(graph.op("Mul", activate(graph, wide, activation), other), torch.float32, dtype)


gelu_mul = silu_mul  # the names of their kernels


_FUNCTIONS = {
    "abs": "Abs",
    "erf": "Erf",
    "exp": "Exp",
    "floor": "Floor",
    "log": "Log",
    "max": "Max",
    "min": "Min",
    "sigmoid": "Sigmoid",
    "sqrt": "Sqrt",
    "tanh": "Tanh",
    "where": "Where",
}
_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "Add",
    ast.Sub: "Sub",
    ast.Mult: "Mul",
    ast.Div: "Div",
    ast.Lt: "Less",
    ast.Gt: "Greater",
}


def pointwise(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    inputs, expression, dtype = arguments(node)
    names: dict[str, ir.Value] = {f"x{index}": graph.wide(each) for index, each in enumerate(inputs)}

    def call(name: str, args: list[ir.Value]) -> ir.Value:
        if name in ("silu", "gelu", "gelu_tanh"):
            return activate(graph, args[0], name)
        if name == "rsqrt":
            return graph.op("Reciprocal", graph.op("Sqrt", *args))
        return graph.op(_FUNCTIONS[name], *args)

    def fold(each: ast.expr) -> ir.Value:
        made: ir.Value = walk(
            each,
            names,
            lambda number: graph.constant(number, np.float32),
            call,
            lambda kind, left, right: graph.op(_OPERATORS[kind], left, right),
        )
        return made

    named, result = parse(expression)
    for name, each in named:
        names[name] = fold(each)
    return graph.cast(fold(result), torch.float32, dtype)
