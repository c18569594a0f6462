"""The ONNX ops of products with integer weights, by onnxruntime's kernels or by the standard's ops."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from inferc.codegen.onnx.calls.elementwise import part_of
from inferc.codegen.onnx.conditions import nbits_block
from inferc.codegen.onnx.graph import MICROSOFT, OnnxGraph
from inferc.ir.ops.quantize import LARGEST, int4_group
from inferc.ir.program import named_arguments

# The accuracy level of MatMulNBits: rows may be rounded to int8, block by block. Its 8-bit kernels are slow otherwise.
INT8_ACCURACY = 4


def finish(graph: OnnxGraph, node: fx.Node, product: ir.Value, named: dict[str, Any]) -> ir.Value:
    """Add the bias to a product in float32, round it to the node's dtype, and add the residual."""
    if (bias := named["bias"]) is not None:
        product = graph.op("Add", product, graph.wide(bias))
    product = graph.cast(product, torch.float32, node.meta["val"].dtype)
    residual = named["residual"]
    return product if residual is None else graph.op("Add", graph.value(residual), product)


def linear_int8(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    """Write an int8 product as MatMulNBits, in blocks that all have the scale of their output."""
    named = named_arguments(node)
    weight, scale = named["weight"], named["scale"]
    n, k = (int(size) for size in weight.meta["val"].shape)
    block = nbits_block(k)
    blocks = graph.weight(weight, (n, k // block, block), torch.uint8)
    column = graph.reshape(graph.value(scale), n, 1)
    scales = graph.op("Expand", column, graph.constant([n, k // block]))
    x = graph.wide(named["x"])
    product = _nbits(graph, x, blocks, scales, n, k, 8, block)
    if named["dtype"] is not None:  # logits: NaN must survive, since it tells that a sequence is broken
        product = graph.op("Add", product, _zeros(graph, x))
    return finish(graph, node, product, named)


def linear_int4(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    """Write an int4 product as MatMulNBits; a group's scale is its integer scale times the scale of its output."""
    named = named_arguments(node)
    weight, group_scale = named["weight"], named["group_scale"]
    (n, groups), k = (int(size) for size in group_scale.meta["val"].shape), int(named["x"].meta["val"].shape[1])
    group = int4_group(weight.meta["val"], group_scale.meta["val"])
    blocks = graph.weight(weight, (n, groups, group // 2), torch.uint8)
    scales = scales_of_groups(graph, group_scale, named["scale"])
    return finish(graph, node, _nbits(graph, graph.wide(named["x"]), blocks, scales, n, k, 4, group), named)


def scales_of_groups(graph: OnnxGraph, group_scale: fx.Node, scale: fx.Node) -> ir.Value:
    """Return the group scales in float32 [..., n, groups], which onnxruntime computes once, at load time."""
    by = graph.op("Unsqueeze", graph.value(scale), graph.constant([-1]))
    return graph.op("Mul", graph.cast(graph.value(group_scale), torch.int8, torch.float32), by)


def _nbits(
    graph: OnnxGraph, x: ir.Value, blocks: ir.Value, scales: ir.Value, n: int, k: int, bits: int, block: int
) -> ir.Value:
    sizes = {"N": n, "K": k, "bits": bits, "block_size": block}
    return graph.op("MatMulNBits", x, blocks, scales, domain=MICROSOFT, accuracy_level=INT8_ACCURACY, **sizes)


def linear_int8_wide(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    """Write an int8 product by the standard's ops, for any k: the weight is widened to float32 in every call."""
    named = named_arguments(node)
    weight, scale = named["weight"], graph.value(named["scale"])
    zeros = graph.zero_points(weight, int(weight.meta["val"].shape[0]))
    wide = graph.op("DequantizeLinear", graph.value(weight), scale, zeros, axis=0)
    return finish(graph, node, graph.op("Gemm", graph.wide(named["x"]), wide, transB=1), named)


def linear_int4_wide(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    """Write an int4 product by the standard's ops: the weight is widened to float32 in every call."""
    named = named_arguments(node)
    wide = widened(graph, named["weight"], named["group_scale"], named["scale"], int(named["x"].meta["val"].shape[1]))
    return finish(graph, node, graph.op("Gemm", graph.wide(named["x"]), wide, transB=1), named)


def widened(graph: OnnxGraph, weight: fx.Node, group_scale: fx.Node, scale: fx.Node, k: int) -> ir.Value:
    """Widen weights in four bits to float32 [..., n, k], in every call."""
    *lead, size = (int(each) for each in weight.meta["val"].shape)
    group = int4_group(weight.meta["val"], group_scale.meta["val"])
    values = graph.weight(weight, (*lead, 2 * size), ir.DataType.INT4)
    scales = scales_of_groups(graph, group_scale, scale)
    wide = graph.op("DequantizeLinear", values, scales, axis=-1, block_size=group)
    return wide if k == 2 * size else part_of(graph, wide, len(lead), 0, k)


def embedding_int8(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    """Look up rows of the table that `linear_int8` reads too, in its unsigned layout."""
    named = named_arguments(node)
    n, k = (int(size) for size in named["weight"].meta["val"].shape)
    table = graph.weight(named["weight"], (n, k), torch.uint8)
    rows = graph.cast(graph.op("Gather", table, graph.value(named["indices"]), axis=0), torch.uint8, torch.float32)
    rows = graph.op("Sub", rows, graph.constant(128.0, np.float32))
    return _scaled_rows(graph, node, rows, named)


def embedding_int8_plain(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    """Look up rows of the table that `linear_int8_wide` reads too."""
    named = named_arguments(node)
    rows = graph.op("Gather", graph.value(named["weight"]), graph.value(named["indices"]), axis=0)
    return _scaled_rows(graph, node, graph.cast(rows, torch.int8, torch.float32), named)


def embedding_int8_columns(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    """Look up columns of the transposed table that `linear_w8a8` reads too."""
    named = named_arguments(node)
    n, k = (int(size) for size in named["weight"].meta["val"].shape)
    table = graph.weight(named["weight"], (k, n), torch.int8)
    columns = graph.op("Gather", table, graph.value(named["indices"]), axis=1)
    rows = graph.op("Transpose", graph.cast(columns, torch.int8, torch.float32), perm=[1, 0])
    return _scaled_rows(graph, node, rows, named)


def _scaled_rows(graph: OnnxGraph, node: fx.Node, rows: ir.Value, named: dict[str, Any]) -> ir.Value:
    by = graph.op("Gather", graph.value(named["scale"]), graph.value(named["indices"]), axis=0)
    scaled = graph.op("Mul", rows, graph.op("Unsqueeze", by, graph.constant([-1])))
    return graph.cast(scaled, torch.float32, node.meta["val"].dtype)


def _zeros(graph: OnnxGraph, x: ir.Value) -> ir.Value:
    """Return [num_tokens, 1]: 0 for each row, or NaN for a row with a NaN or an infinity.

    Added to a result, it restores the NaN that ReduceMax and integers lose.
    """
    return graph.op("Mul", graph.op("ReduceL1", x, graph.constant([-1]), keepdims=1), graph.constant(0.0, np.float32))


def quantize_rows(graph: OnnxGraph, node: fx.Node) -> tuple[ir.Value, ir.Value]:
    x = graph.wide(named_arguments(node)["x"])
    largest = graph.op("ReduceMax", graph.op("Abs", x), graph.constant([-1]), keepdims=1)
    scale = graph.op("Div", graph.op("Add", largest, _zeros(graph, x)), graph.constant(float(LARGEST), np.float32))
    is_empty = graph.op("Equal", scale, graph.constant(0.0, np.float32))
    scale = graph.op("Where", is_empty, graph.constant(1.0, np.float32), scale)
    rounded = graph.op("Round", graph.op("Div", x, scale))
    values = graph.op("Cast", rounded, to=ir.DataType.INT8.value)
    return values, graph.op("Squeeze", scale, graph.constant([-1]))


def linear_w8a8(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    """Write a product of int8 rows and weights by the standard's ops, with exact sums in int32.

    The rows are made unsigned, because onnxruntime has faster kernels for these.
    """
    named = named_arguments(node)
    x, (n, k) = named["x"], (int(size) for size in named["weight"].meta["val"].shape)

    def unsigned() -> ir.Value:
        wide = graph.op("Add", graph.cast(graph.value(x), torch.int8, torch.int32), graph.constant(128, np.int32))
        return graph.cast(wide, torch.int32, torch.uint8)

    rows, weight = graph.shared(("unsigned", x.name), unsigned), graph.weight(named["weight"], (k, n), torch.int8)
    sums = graph.op("MatMulInteger", rows, weight, graph.constant(128, np.uint8))
    wide = graph.cast(sums, torch.int32, torch.float32)
    column = graph.op("Unsqueeze", graph.value(named["x_scale"]), graph.constant([-1]))
    scaled = graph.op("Mul", graph.op("Mul", wide, column), graph.value(named["scale"]))
    return finish(graph, node, scaled, named)
