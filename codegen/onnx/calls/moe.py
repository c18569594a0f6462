"""The ONNX ops of mixtures of experts: routing by the standard's ops, experts by onnxruntime's where it has them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from inferc.codegen.onnx.calls.elementwise import activate
from inferc.codegen.onnx.calls.quantized import scales_of_groups, widened
from inferc.codegen.onnx.graph import MICROSOFT, OnnxGraph
from inferc.ir.ops.quantize import int4_group
from inferc.ir.program import named_arguments

NOT_CHOSEN = -6e4  # the logit of an expert that was not chosen: float16 holds it, and its exponential is 0


def moe_routing(graph: OnnxGraph, node: fx.Node) -> tuple[ir.Value, ir.Value]:
    """Return expert ids in int32 and weights in float32, each [num_tokens, top_k].

    Of equal scores TopK takes the lower id, as inferc's own kernels do.
    """
    named = named_arguments(node)
    router, score, top_k = named["router_logits"], named["score"], int(named["top_k"])
    logits = graph.wide(router)
    scores = logits
    if score in ("softmax", "sigmoid"):
        scores = graph.op("Softmax", logits, axis=1) if score == "softmax" else graph.op("Sigmoid", logits)
    choice = scores
    if (bias := named["bias"]) is not None:
        choice = graph.op("Add", scores, graph.wide(bias))
    if named["num_groups"] > 1:
        num_experts = int(router.meta["val"].shape[1])
        choice = _of_best_groups(
            graph, choice, num_experts, named["num_groups"], named["topk_groups"], named["group_score"]
        )
    _, ids = graph.ops("TopK", choice, graph.constant([top_k]), count=2, axis=1, largest=1, sorted=1)
    weights = graph.op("GatherElements", scores, ids, axis=1)
    if score == "chosen_softmax":
        weights = graph.op("Softmax", weights, axis=1)
    if score == "chosen_sigmoid":
        weights = graph.op("Sigmoid", weights)
    if named["renormalize"]:
        weights = graph.op("Div", weights, graph.op("ReduceSum", weights, graph.constant([1]), keepdims=1))
    if named["scale"] != 1.0:
        weights = graph.op("Mul", weights, graph.constant(named["scale"], np.float32))
    return graph.op("Cast", ids, to=ir.DataType.INT32.value), weights


def _of_best_groups(
    graph: OnnxGraph, choice: ir.Value, num_experts: int, num_groups: int, topk_groups: int, group_score: str
) -> ir.Value:
    """Return the scores [num_tokens, num_experts], with -inf for the experts outside of the best groups."""
    groups = graph.reshape(choice, -1, num_groups, num_experts // num_groups)
    if group_score == "max":
        best = graph.op("ReduceMax", groups, graph.constant([2]), keepdims=0)
    else:
        two, _ = graph.ops("TopK", groups, graph.constant([2]), count=2, axis=2, largest=1, sorted=1)
        best = graph.op("ReduceSum", two, graph.constant([2]), keepdims=0)
    _, kept = graph.ops("TopK", best, graph.constant([topk_groups]), count=2, axis=1, largest=1, sorted=1)
    dropped = graph.op("Expand", graph.constant(-math.inf, np.float32), graph.op("Shape", best))
    zeros = graph.op("Expand", graph.constant(0.0, np.float32), graph.op("Shape", kept))
    penalty = graph.op("ScatterElements", dropped, kept, zeros, axis=1)
    return graph.reshape(graph.op("Add", groups, graph.op("Unsqueeze", penalty, graph.constant([2]))), -1, num_experts)


def _spread(graph: OnnxGraph, ids: fx.Node, values: ir.Value, num_experts: int, elsewhere: float) -> ir.Value:
    """Spread the values of the chosen experts [num_tokens, top_k] over all of them: [num_tokens, num_experts]."""
    rows = graph.op("Shape", values, start=0, end=1)
    shape = graph.op("Concat", rows, graph.constant([num_experts]), axis=0)
    others = graph.op("Expand", graph.constant(elsewhere, np.float32), shape)
    where = graph.op("Cast", graph.value(ids), to=ir.DataType.INT64.value)
    return graph.op("ScatterElements", others, where, values, axis=1)


def moe_experts(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    """Write the experts as onnxruntime's MoE."""
    named = named_arguments(node)
    first = (graph.value(named["gate_up"]), _bias(graph, named["gate_up_bias"]))
    second = (graph.value(named["down"]), graph.value(named["down_bias"]))
    return _chosen_experts(graph, named, "MoE", (*first, *second), {})


def moe_experts_int8(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    """Write the experts as onnxruntime's QMoE in eight bits, with a scale for each output."""
    named = named_arguments(node)
    operands = []
    for name, scale in (("gate_up", _pairs(graph, named["gate_up_scale"])), ("down", graph.value(named["down_scale"]))):
        weight = named[name]
        experts, n, k = (int(size) for size in weight.meta["val"].shape)
        operands += [
            graph.weight(weight, (experts, n, k), torch.uint8),
            scale,
            _bias(graph, named[f"{name}_bias"], name),
        ]
    return _chosen_experts(graph, named, "QMoE", tuple(operands), {"expert_weight_bits": 8})


def moe_experts_int4(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    """Write the experts as onnxruntime's QMoE in four bits, with a scale for each group."""
    named = named_arguments(node)
    operands, group = [], 0
    for name in ("gate_up", "down"):
        scales = scales_of_groups(graph, named[f"{name}_group_scale"], named[f"{name}_scale"])
        if name == "gate_up":
            scales = _in_pairs(graph, scales, named[f"{name}_group_scale"])
        group = int4_group(*(named[each].meta["val"] for each in (name, f"{name}_group_scale")))
        operands += [graph.value(named[name]), scales, _bias(graph, named[f"{name}_bias"], name)]
    sizes = {"expert_weight_bits": 4, "block_size": group}
    return _chosen_experts(graph, named, "QMoE", tuple(operands), sizes)


def _chosen_experts(
    graph: OnnxGraph, named: dict[str, Any], kind: str, operands: tuple[ir.Value | None, ...], how: dict[str, Any]
) -> ir.Value:
    """Write the experts as onnxruntime's op of the given kind, which does its own routing.

    It is given logits whose softmax over all experts is proportional to the chosen weights; the result is then
    multiplied by the weights' sum.
    """
    num_experts = int(named["gate_up"].meta["val"].shape[0])
    weights, dtype = graph.value(named["expert_weights"]), named["x"].meta["val"].dtype
    total = graph.op("ReduceSum", weights, graph.constant([1]), keepdims=1)
    # The largest logit is 0, so that rounding to 16 bits changes no share by much.
    shares = graph.op("Log", graph.op("Div", weights, graph.op("ReduceMax", weights, graph.constant([1]), keepdims=1)))
    logits = _spread(graph, named["expert_ids"], shares, num_experts, NOT_CHOSEN)
    is_clamped = named["activation"] == "swiglu_clamped"
    if is_clamped:
        how = {**how, "swiglu_limit": float(named["limit"])}
    made = graph.op(
        kind,
        graph.value(named["x"]),
        graph.cast(logits, torch.float32, dtype),
        *operands,
        domain=MICROSOFT,
        activation_type="swiglu",
        swiglu_fusion=1,
        k=int(named["expert_ids"].meta["val"].shape[1]),
        normalize_routing_weights=0,
        activation_alpha=float(named["alpha"]) if is_clamped else 1.0,
        activation_beta=1.0 if is_clamped else 0.0,
        **how,
    )
    return graph.cast(graph.op("Mul", graph.cast(made, dtype, torch.float32), total), torch.float32, dtype)


def _bias(graph: OnnxGraph, bias: fx.Node | None, of: str = "gate_up") -> ir.Value | None:
    if bias is None:
        return None
    value: ir.Value = _pairs(graph, bias) if of == "gate_up" else graph.value(bias)
    return value


def _pairs(graph: OnnxGraph, values: fx.Node) -> ir.Value:
    """Return [experts, 2 n] with gate and up alternating, as in the weights; computed once, at load time."""
    return _in_pairs(graph, graph.value(values), values)


def _in_pairs(graph: OnnxGraph, value: ir.Value, like: fx.Node) -> ir.Value:
    """Reorder [experts, 2 n, …], of the shape of `like`, so that gate and up alternate."""
    experts, size, *rest = (int(each) for each in like.meta["val"].shape)
    halves = graph.reshape(value, experts, 2, size // 2, *rest)
    turned = graph.op("Transpose", halves, perm=[0, 2, 1, *(3 + axis for axis in range(len(rest)))])
    return graph.reshape(turned, experts, size, *rest)


def all_experts(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    """Compute every expert on every token, weighted by 0 where it was not chosen: for experts that no op fits."""
    named = named_arguments(node)
    return _all_experts(graph, named, *(graph.wide(named[name]) for name in ("gate_up", "down")))


def all_experts_int8(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    """Compute every expert on every token as `all_experts`, with int8 weights that are widened in every call."""
    named, wide = named_arguments(node), []
    for name in ("gate_up", "down"):
        num_experts, n, k = (int(size) for size in named[name].meta["val"].shape)
        values = graph.weight(named[name], (num_experts * n, k), torch.int8)
        scale = graph.op("Reshape", graph.value(named[f"{name}_scale"]), graph.constant([-1]))
        zeros = graph.zero_points(named[name], num_experts * n)
        rows = graph.op("DequantizeLinear", values, scale, zeros, axis=0)
        wide.append(graph.op("Reshape", rows, graph.constant([num_experts, n, k])))
    return _all_experts(graph, named, *wide)


def all_experts_int4(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    """Compute every expert on every token as `all_experts`, with int4 weights that are widened in every call."""
    named, wide = named_arguments(node), []
    inputs = (int(named["x"].meta["val"].shape[1]), int(named["gate_up"].meta["val"].shape[1]) // 2)
    for name, k in zip(("gate_up", "down"), inputs, strict=True):
        wide.append(widened(graph, named[name], named[f"{name}_group_scale"], named[f"{name}_scale"], k))
    return _all_experts(graph, named, *wide)


def _all_experts(graph: OnnxGraph, named: dict[str, Any], gate_up: ir.Value, down: ir.Value) -> ir.Value:
    """Compute every expert on every token with float32 weights gate_up [experts, 2 n, k] and down [experts, k, n]."""
    x, num_experts = named["x"], int(named["gate_up"].meta["val"].shape[0])

    def of_experts(values: ir.Value) -> ir.Value:  # [T, top_k] as [experts, T, 1], 0 for experts not chosen
        spread = _spread(graph, named["expert_ids"], values, num_experts, 0.0)
        return graph.op("Unsqueeze", graph.op("Transpose", spread, perm=[1, 0]), graph.constant([2]))

    weights = graph.value(named["expert_weights"])
    share = of_experts(weights)
    taken = graph.op("Unsqueeze", graph.wide(x), graph.constant([0]))
    if named["scale_input"]:
        taken = graph.op("Mul", taken, share)
    product = graph.op("MatMul", taken, graph.op("Transpose", gate_up, perm=[0, 2, 1]))
    if (bias := named["gate_up_bias"]) is not None:
        product = graph.op("Add", product, graph.op("Unsqueeze", graph.wide(bias), graph.constant([1])))
    gate, up = graph.ops("Split", product, count=2, axis=2, num_outputs=2)
    hidden = _activated(graph, gate, up, named["activation"], named["alpha"], named["limit"])
    result = graph.op("MatMul", hidden, graph.op("Transpose", down, perm=[0, 2, 1]))
    if (bias := named["down_bias"]) is not None:
        result = graph.op("Add", result, graph.op("Unsqueeze", graph.wide(bias), graph.constant([1])))
    if not named["scale_input"]:
        result = graph.op("Mul", result, share)
    elif named["gate_up_bias"] is not None or named["down_bias"] is not None:
        # Experts that were not chosen had an input of 0, but would add their biases.
        ones = graph.op("Expand", graph.constant(1.0, np.float32), graph.op("Shape", weights))
        result = graph.op("Mul", result, of_experts(ones))
    total = graph.op("ReduceSum", result, graph.constant([0]), keepdims=0)
    return graph.cast(total, torch.float32, x.meta["val"].dtype)


def _activated(graph: OnnxGraph, gate: ir.Value, up: ir.Value, activation: str, alpha: float, limit: float) -> ir.Value:
    if activation == "swiglu_clamped":
        most, least = graph.constant(limit, np.float32), graph.constant(-limit, np.float32)
        gate, up = graph.op("Min", gate, most), graph.op("Max", graph.op("Min", up, most), least)
        scaled = graph.op("Mul", gate, graph.constant(alpha, np.float32))
        active = graph.op("Mul", gate, graph.op("Sigmoid", scaled))
        return graph.op("Mul", active, graph.op("Add", up, graph.constant(1.0, np.float32)))
    return graph.op("Mul", activate(graph, gate, activation), up)
