"""Matrix products as ONNX ops."""

from __future__ import annotations

import onnx_ir as ir
from torch import fx

from inferc.codegen.node_types import dtype_of, rank_of
from inferc.codegen.onnx.graph import OnnxGraph
from inferc.ir.program import arguments


def linear(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    """Multiply x [..., k] by weight [n, k] in the dtype of the result, which is float32 for logits and routers."""
    x, weight, *given = arguments(node)
    dtype, bias = dtype_of(node), given[0] if given else None
    rows, matrix = (graph.cast(graph.value(each), dtype_of(each), dtype) for each in (x, weight))
    offset = None if bias is None else graph.cast(graph.value(bias), dtype_of(bias), dtype)
    if rank_of(x) == 2:
        return graph.op("Gemm", rows, matrix, offset, transB=1)
    product = graph.op("MatMul", rows, graph.op("Transpose", matrix, perm=[1, 0]))
    return product if offset is None else graph.op("Add", product, offset)


linear_wide = lm_head = linear  # the names of their kernels


def head_linear(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    """Multiply [T, heads, k] by [heads, n, k]: one matrix product for each head."""
    x, weight = arguments(node)
    heads_first = graph.op("Transpose", graph.value(x), perm=[1, 0, 2])
    product = graph.op("MatMul", heads_first, graph.op("Transpose", graph.value(weight), perm=[0, 2, 1]))
    return graph.op("Transpose", product, perm=[1, 0, 2])
