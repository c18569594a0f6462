"""The TensorRT layers of mixtures of experts, where every expert sees every token.

TensorRT's own layer for experts builds for none of the chips that inferc targets.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import fx

from inferc.codegen.node_types import dtype_of
from inferc.codegen.tensorrt.calls.elementwise import activate
from inferc.codegen.tensorrt.network import Tensor, TensorRTNetwork
from inferc.ir.program import named_arguments


def _top(net: TensorRTNetwork, value: Tensor, count: int, axis: int) -> tuple[Tensor, Tensor]:
    """Return the largest elements of an axis, and their indices in int32."""
    layer = net.layer("topk", value, net.trt.TopKOperation.MAX, count, 1 << axis)
    return layer.get_output(0), layer.get_output(1)


def _is_chosen(net: TensorRTNetwork, ids: Tensor, count: int) -> Tensor:
    """Return which of `count` experts the ids [T, k] name: bool [T, k, count]."""
    every = net.constant(np.arange(count).reshape(1, 1, -1), np.int32)
    return net.elementwise("EQUAL", net.view(ids, -1, int(ids.shape[1]), 1), every)


def _spread(net: TensorRTNetwork, ids: Tensor, values: Tensor, count: int) -> Tensor:
    """Spread the float32 values of the chosen experts [T, k] over all of them, with 0 elsewhere: [T, count]."""
    column = net.view(values, -1, int(ids.shape[1]), 1)
    placed = net.where(_is_chosen(net, ids, count), column, net.number(0.0, 3))
    return net.reduce("SUM", placed, 1, keep=False)


def moe_routing(net: TensorRTNetwork, node: fx.Node) -> tuple[Tensor, Tensor]:
    """Return expert ids in int32 and weights in float32, each [T, top_k].

    Which of equal scores is taken depends on TensorRT.
    """
    named = named_arguments(node)
    router, score = named["router_logits"], named["score"]
    num_experts = int(router.meta["val"].shape[1])
    scores = net.wide(router)
    if score in ("softmax", "sigmoid"):
        scores = net.softmax(scores, 1) if score == "softmax" else net.activation("SIGMOID", scores)
    choice = scores
    if named["bias"] is not None:
        choice = net.plus(scores, net.wide(named["bias"]))
    if named["num_groups"] > 1:
        choice = _of_best_groups(
            net, choice, num_experts, named["num_groups"], named["topk_groups"], named["group_score"]
        )
    _, ids = _top(net, choice, int(named["top_k"]), 1)
    layer = net.layer("gather_v2", scores, ids, net.trt.GatherMode.ELEMENT)
    layer.axis = 1
    weights = layer.get_output(0)
    if score == "chosen_softmax":
        weights = net.softmax(weights, 1)
    if score == "chosen_sigmoid":
        weights = net.activation("SIGMOID", weights)
    if named["renormalize"]:
        weights = net.elementwise("DIV", weights, net.reduce("SUM", weights, 1))
    return ids, net.times(weights, named["scale"])


def _of_best_groups(
    net: TensorRTNetwork, choice: Tensor, num_experts: int, num_groups: int, topk_groups: int, group_score: str
) -> Tensor:
    """Return the scores [T, num_experts], with -inf for the experts outside of the best groups."""
    groups = net.view(choice, -1, num_groups, num_experts // num_groups)
    if group_score == "max":
        best = net.reduce("MAX", groups, 2, keep=False)
    else:
        best = net.reduce("SUM", _top(net, groups, 2, 2)[0], 2, keep=False)
    _, kept = _top(net, best, topk_groups, 1)
    ones = net.where(_is_chosen(net, kept, num_groups), net.number(1.0, 3), net.number(0.0, 3))
    is_kept = net.elementwise("GREATER", net.reduce("SUM", ones, 1, keep=False), net.number(0.5, 2))
    kept_groups = net.where(net.view(is_kept, -1, num_groups, 1), groups, net.number(-math.inf, 3))
    return net.view(kept_groups, -1, num_experts)


def all_experts(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    """Compute every expert on every token, weighted by 0 where it was not chosen; it costs the work of all."""
    named = named_arguments(node)
    x, gate_up, down = named["x"], named["gate_up"], named["down"]
    dtype = dtype_of(x)
    num_experts, both, hidden_size = (int(size) for size in gate_up.meta["val"].shape)
    share = _spread(net, net.value(named["expert_ids"]), net.value(named["expert_weights"]), num_experts)
    share = net.view(net.transpose(share, 1, 0), num_experts, -1, 1)
    taken = net.view(net.value(x), 1, -1, hidden_size)
    if named["scale_input"]:
        taken = net.cast(net.mul(net.cast(taken, torch.float32), share), dtype)
    product = net.matmul(taken, _weight(net, gate_up, named["gate_up_scale"], dtype), transposed=True)
    if (bias := named["gate_up_bias"]) is not None:
        product = net.plus(product, net.view(net.value(bias), num_experts, 1, both))
    gate, up = (net.part(product, 2, start, start + both // 2) for start in (0, both // 2))
    hidden = _activated(net, gate, up, named["activation"], named["alpha"], named["limit"], dtype)
    result = net.matmul(hidden, _weight(net, down, named["down_scale"], dtype), transposed=True)
    if (bias := named["down_bias"]) is not None:
        result = net.plus(result, net.view(net.value(bias), num_experts, 1, hidden_size))
    result = net.cast(result, torch.float32)
    if named["scale_input"]:  # an expert that was not chosen had an input of 0, but perhaps a bias
        result = net.where(net.elementwise("EQUAL", share, net.number(0.0, 3)), net.number(0.0, 3), result)
    else:
        result = net.mul(result, share)
    return net.cast(net.reduce("SUM", result, 0, keep=False), dtype)


def _weight(net: TensorRTNetwork, weight: fx.Node, scale: fx.Node | None, dtype: torch.dtype) -> Tensor:
    return net.value(weight) if scale is None else net.dequantized(weight, scale, dtype)


def _activated(
    net: TensorRTNetwork, gate: Tensor, up: Tensor, activation: str, alpha: float, limit: float, dtype: torch.dtype
) -> Tensor:
    gate, up = net.cast(gate, torch.float32), net.cast(up, torch.float32)
    if activation == "swiglu_clamped":
        gate = net.elementwise("MIN", gate, net.number(limit, 3))
        up = net.elementwise("MAX", net.elementwise("MIN", up, net.number(limit, 3)), net.number(-limit, 3))
        active = net.mul(gate, net.activation("SIGMOID", net.times(gate, alpha)))
        return net.cast(net.mul(active, net.plus(up, net.number(1.0, 3))), dtype)
    return net.cast(net.mul(activate(net, gate, activation), up), dtype)
