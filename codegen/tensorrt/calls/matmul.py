"""Matrix products as TensorRT layers."""

from __future__ import annotations

from torch import fx

from inferc.codegen.node_types import dtype_of
from inferc.codegen.tensorrt.network import Tensor, TensorRTNetwork
from inferc.ir.program import arguments


def linear(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    """Multiply x [..., k] by weight [n, k] in the dtype of the result, which is float32 for logits and routers.

    TensorRT rounds a product to its operands' dtype, so they are cast.
    """
    x, weight, *given = arguments(node)
    dtype, bias = dtype_of(node), given[0] if given else None
    rows, matrix = (net.cast(net.value(each), dtype) for each in (x, weight))
    product = net.matmul(rows, matrix, transposed=True)
    return product if bias is None else net.plus(product, net.cast(net.value(bias), dtype))


linear_wide = lm_head = linear  # the names of their kernels


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
