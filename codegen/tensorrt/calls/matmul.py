"""Matrix products as TensorRT layers."""

from __future__ import annotations

import torch
from torch import fx

from inferc.codegen.node_types import dtype_of
from inferc.codegen.tensorrt.network import Tensor, TensorRTNetwork
from inferc.ir.program import arguments


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
