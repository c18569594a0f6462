"""Small programs of every op of dense-cache programs, except attention, for the whole-graph exporters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from graphs import TOKENS, Example, example, random, rows

aten, inferc = torch.ops.aten, torch.ops.inferc
IDS = torch.tensor([3, 1, 4, 1, 5], dtype=torch.int32)
assert TOKENS == len(IDS)


Graph = Callable[..., Any]
PLAIN: dict[str, tuple[Graph, dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {
    "embedding": (lambda ids, w: aten.embedding.default(w, ids), {"ids": IDS}, {"w": random(7, 16)}),
    "index_select": (lambda x, at: aten.index_select.default(x, 0, at), {"x": rows(8), "at": IDS[:2]}, {}),
    "cat": (lambda x, y: aten.cat.default([x, y], -1), {"x": rows(8), "y": rows(4, seed=2)}, {}),
    "add": (lambda x, y: aten.add.Tensor(x, y), {"x": rows(8), "y": rows(8, seed=2)}, {}),
    "add a number": (lambda x: aten.add.Tensor(x, 1.5), {"x": rows(8)}, {}),
    "mul": (lambda x, y: aten.mul.Tensor(x, y), {"x": rows(8), "y": rows(8, seed=2)}, {}),
    "mul by a number": (lambda x: aten.mul.Tensor(x, 0.25), {"x": rows(8)}, {}),
    "slice and view": (
        lambda x: aten.add.Tensor(aten.view.default(aten.slice.Tensor(x, -1, 4, 12), [-1, 2, 4]), 0.0),
        {"x": rows(16)},
        {},
    ),
    "linear": (lambda x, w: aten.linear.default(x, w), {"x": rows(8)}, {"w": random(6, 8)}),
    "linear with a bias": (
        lambda x, w, b: aten.linear.default(x, w, b),
        {"x": rows(8)},
        {"w": random(6, 8), "b": random(6)},
    ),
    "linear of heads": (
        lambda x, w, b: aten.linear.default(aten.view.default(x, [-1, 2, 4]), w, b),
        {"x": rows(8)},
        {"w": random(6, 4), "b": random(6)},
    ),
    "linear_wide": (lambda x, w: inferc.linear_wide.default(x, w), {"x": rows(8)}, {"w": random(6, 8)}),
    "lm_head": (lambda x, w, b: inferc.lm_head.default(x, w, b), {"x": rows(8)}, {"w": random(6, 8), "b": random(6)}),
    "head_linear": (
        lambda x, w: inferc.head_linear.default(aten.view.default(x, [-1, 2, 4]), w),
        {"x": rows(8)},
        {"w": random(2, 6, 4)},
    ),
    "rms_norm": (lambda x, w: inferc.rms_norm.default(x, w, 1e-5), {"x": rows(8)}, {"w": random(8)}),
    "rms_norm, offset": (
        lambda x, w: inferc.rms_norm.default(x, w, 1e-6, 1.0, False),
        {"x": rows(8)},
        {"w": random(8)},
    ),
    "rms_norm without a weight": (lambda x: inferc.rms_norm.default(x, None, 1e-5), {"x": rows(8)}, {}),
    "rms_norm of heads": (
        lambda x, w: inferc.rms_norm.default(aten.view.default(x, [-1, 2, 4]), w, 1e-5),
        {"x": rows(8)},
        {"w": random(4)},
    ),
    "layer_norm": (
        lambda x, w, b: inferc.layer_norm.default(x, w, b, 1e-5),
        {"x": rows(8)},
        {"w": random(8), "b": random(8)},
    ),
    "layer_norm without a bias": (
        lambda x, w: inferc.layer_norm.default(x, w, None, 1e-5),
        {"x": rows(8)},
        {"w": random(8)},
    ),
    "layer_norm of nothing": (lambda x: inferc.layer_norm.default(x, None, None, 1e-5), {"x": rows(8)}, {}),
    "layer_norm of heads": (
        lambda x, w, b: inferc.layer_norm.default(aten.view.default(x, [-1, 2, 4]), w, b, 1e-5),
        {"x": rows(8)},
        {"w": random(2, 4), "b": random(2, 4)},
    ),
    "silu_mul": (lambda x, y: inferc.silu_mul.default(x, y), {"x": rows(8), "y": rows(8, seed=2)}, {}),
    "gelu_mul": (lambda x, y: inferc.gelu_mul.default(x, y, "none"), {"x": rows(8), "y": rows(8, seed=2)}, {}),
    "gelu_mul, tanh": (lambda x, y: inferc.gelu_mul.default(x, y, "tanh"), {"x": rows(8), "y": rows(8, seed=2)}, {}),
}


def plain(name: str) -> Example:
    graph, inputs, weights = PLAIN[name]
    return example(graph, inputs, weights)


EXPRESSIONS = [
    *[f"{name}(x0)" for name in ("abs", "erf", "exp", "floor", "gelu", "gelu_tanh", "sigmoid", "silu", "tanh")],
    "log(abs(x0) + 1.5)",
    "rsqrt(abs(x0) + 0.5)",
    "sqrt(abs(x0))",
    "max(x0, 0.25)",
    "min(x0, x1)",
    "where(x0 > x1, x0, 0.0)",
    "where(x0 < 0.5, x1 / 3.0, -x0)",
    "t0 = tanh(x0 / 30.0); t0 * t0 - x1",
]


def pointwise(expression: str) -> Example:
    def graph(x: Any, y: Any) -> Any:
        return inferc.pointwise.default([x, y], expression, torch.float32)

    return example(graph, {"x": rows(8), "y": rows(8, seed=2)})


def product_of(x: torch.Tensor, column: torch.Tensor) -> Example:
    def graph(x: Any, column: Any) -> Any:
        return inferc.pointwise.default([x, column], "x0 * x1", torch.float32)

    return example(graph, {"x": x, "column": column})


def rope(pairs: str, rotary_dim: int, scaling: float) -> Example:
    def graph(x: Any, positions: Any, inv_freq: Any) -> Any:
        table = inferc.rope_table.default(positions, inv_freq, scaling)
        return inferc.rope.default(aten.view.default(x, [-1, 3, 8]), table, pairs)

    positions = torch.tensor([0, 1, 70, 700, 5000])
    return example(graph, {"x": rows(24), "positions": positions}, {"inv_freq": random(rotary_dim // 2).abs()})


ROUTING: list[dict[str, Any]] = [
    {"renormalize": True},
    {"renormalize": False, "scale": 2.5},
    {"renormalize": True, "score": "sigmoid", "has_bias": True},
    {"renormalize": False, "score": "chosen_softmax"},
    {"renormalize": False, "score": "chosen_sigmoid"},
    {"renormalize": True, "num_groups": 4, "topk_groups": 2},
    {
        "renormalize": True,
        "score": "sigmoid",
        "has_bias": True,
        "num_groups": 2,
        "topk_groups": 1,
        "group_score": "top2_sum",
    },
]


def routing(how: dict[str, Any]) -> Example:
    how = dict(how)
    has_bias, renormalize = how.pop("has_bias", False), how.pop("renormalize")

    def graph(logits: Any, bias: Any) -> Any:
        made = inferc.moe_routing.default(logits, bias if has_bias else None, 3, renormalize, **how)
        return made[0], made[1]

    logits = rows(8)
    logits[0] = 1.0  # all are equal: the lower ids are chosen
    return example(graph, {"logits": logits}, {"bias": random(8)})


EXPERTS: list[dict[str, Any]] = [
    {},
    {"activation": "swiglu_clamped", "alpha": 1.702, "limit": 0.5},
    {"has_biases": True},
    {"activation": "gelu"},
    {"activation": "gelu_tanh", "has_biases": True},
    {"scale_input": True},
    {"activation": "swiglu_clamped", "alpha": 1.702, "limit": 0.5, "scale_input": True},
]


def experts(how: dict[str, Any]) -> Example:
    how = dict(how)
    has_biases = how.pop("has_biases", False)

    def graph(x: Any, ids: Any, shares: Any, gate_up: Any, down: Any, first: Any, second: Any) -> Any:
        biases = (first, second) if has_biases else (None, None)
        return inferc.moe_experts.default(x, ids, shares, gate_up, down, *biases, **how)

    ids = torch.tensor([[0, 2], [3, 1], [1, 2], [2, 0], [3, 2]], dtype=torch.int32)
    shares = torch.tensor([[0.5, 0.25], [0.9, 0.3], [1.0, 0.0], [0.4, 0.6], [0.1, 0.2]])  # of whatever sum
    weights = {"gate_up": random(4, 12, 8), "down": random(4, 8, 6), "first": random(4, 12), "second": random(4, 8)}
    return example(graph, {"x": rows(8) * 3, "ids": ids, "shares": shares}, weights)
