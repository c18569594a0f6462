"""Norms as ONNX ops."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from inferc.codegen.node_types import dtype_of, rank_of
from inferc.codegen.onnx.graph import OnnxGraph
from inferc.ir.program import arguments


def rms_norm(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    x, weight, eps, weight_offset, round_before_scale = arguments(node)
    dtype, size = dtype_of(x), int(x.meta["val"].shape[-1])
    if weight is None:
        scale = graph.constant([1.0] * size, np.float32)
    else:
        scale = graph.wide(weight)
        if weight_offset:
            scale = graph.op("Add", scale, graph.constant(weight_offset, np.float32))
    if round_before_scale and weight is not None and dtype != torch.float32:
        ones = graph.cast(graph.constant([1.0] * size, np.float32), torch.float32, dtype)
        normed = graph.op("RMSNormalization", graph.value(x), ones, axis=-1, epsilon=eps, stash_type=1)
        return graph.op("Mul", normed, graph.cast(scale, torch.float32, dtype))
    wide = graph.cast(graph.value(x), dtype, torch.float32)
    normed = graph.op("RMSNormalization", wide, scale, axis=-1, epsilon=eps, stash_type=1)
    return graph.cast(normed, torch.float32, dtype)


def layer_norm(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    x, weight, bias, eps = arguments(node)
    dtype, size = dtype_of(x), int(x.meta["val"].shape[-1])
    wide = graph.cast(graph.value(x), dtype, torch.float32)
    scale = graph.constant([1.0] * size, np.float32)
    if weight is not None and rank_of(weight) == 1:
        scale = graph.wide(weight)
    offset = None
    if bias is not None and rank_of(bias) == 1:
        offset = graph.wide(bias)
    made = graph.op("LayerNormalization", wide, scale, offset, axis=-1, epsilon=eps, stash_type=1)
    if weight is not None and rank_of(weight) == 2:  # each head has its own weight
        made = graph.op("Mul", made, graph.wide(weight))
    if bias is not None and rank_of(bias) == 2:
        made = graph.op("Add", made, graph.wide(bias))
    return graph.cast(made, torch.float32, dtype)
