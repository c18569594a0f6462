"""Norms as TensorRT layers."""

from __future__ import annotations

from torch import fx

from inferc.codegen.node_types import dtype_of, rank_of
from inferc.codegen.tensorrt.network import Tensor, TensorRTNetwork
from inferc.ir.program import arguments


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
