"""Matrix products as ONNX ops."""

from __future__ import annotations

import onnx_ir as ir
import torch
from torch import fx

from inferc.codegen.node_types import dtype_of, rank_of
from inferc.codegen.onnx.graph import OnnxGraph
from inferc.ir.program import arguments


def _linear(graph: OnnxGraph, x: fx.Node, weight: fx.Node, bias: fx.Node | None, dtype: torch.dtype) -> ir.Value:
    """Multiply x [..., k] by weight [n, k], in `dtype`."""
    rows, matrix = (graph.cast(graph.value(each), dtype_of(each), dtype) for each in (x, weight))
    offset = None if bias is None else graph.cast(graph.value(bias), dtype_of(bias), dtype)
    if rank_of(x) == 2:
        return graph.op("Gemm", rows, matrix, offset, transB=1)
    product = graph.op("MatMul", rows, graph.op("Transpose", matrix, perm=[1, 0]))
    return product if offset is None else graph.op("Add", product, offset)


def linear(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    x, weight, bias = arguments(node)
    return _linear(graph, x, weight, bias, dtype_of(node))


def linear_wide(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    x, weight = arguments(node)
    return _linear(graph, x, weight, None, torch.float32)


def lm_head(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    hidden, weight, bias = arguments(node)
    return _linear(graph, hidden, weight, bias, torch.float32)


def head_linear(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    """Multiply [T, heads, k] by [heads, n, k]: one matrix product for each head."""
    x, weight = arguments(node)
    heads_first = graph.op("Transpose", graph.value(x), perm=[1, 0, 2])
    product = graph.op("MatMul", heads_first, graph.op("Transpose", graph.value(weight), perm=[0, 2, 1]))
    return graph.op("Transpose", product, perm=[1, 0, 2])
