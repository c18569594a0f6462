"""Fuse a router in front of its experts: softmax over experts, the top_k largest, renormalised or not.

Replaces a [num_tokens, num_experts] softmax, a selection and a division by one op over the router's logits. The weights
stay float32, where some models round them to their dtype.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor, ops

from inferc.passes.rewrite import Rewrite

aten = ops.aten


def _top(logits: Any, top_k: Any) -> tuple[Any, Any]:
    probabilities = aten.softmax.int(aten._to_copy.default(logits, dtype=torch.float32), -1)
    top = aten.topk.default(probabilities, top_k, -1)
    return operator.getitem(top, 0), operator.getitem(top, 1)


def renormalized(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
    weights, ids = _top(logits, top_k)
    weights = aten.div.Tensor(weights, aten.sum.dim_IntList(weights, [-1], True))
    return ops.inferc.moe_experts.default(x, ids, aten._to_copy.default(weights, dtype=dtype), gate_up, down)


def plain(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, dtype: torch.dtype) -> Tensor:
    weights, ids = _top(logits, top_k)
    return ops.inferc.moe_experts.default(x, ids, aten._to_copy.default(weights, dtype=dtype), gate_up, down)


def routed(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int, renormalize: bool) -> Tensor:
    routing = ops.inferc.moe_routing.default(logits, top_k, renormalize)
    return ops.inferc.moe_experts.default(x, operator.getitem(routing, 0), operator.getitem(routing, 1), gate_up, down)


def with_renormalization(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int) -> Tensor:
    return routed(x, logits, gate_up, down, top_k, True)


def without(x: Tensor, logits: Tensor, gate_up: Tensor, down: Tensor, top_k: int) -> Tensor:
    return routed(x, logits, gate_up, down, top_k, False)


def check(logits: Tensor, gate_up: Tensor) -> str | None:
    if logits.dim() != 2 or logits.shape[1] != gate_up.shape[0]:
        return f"the router has shape {list(logits.shape)} for {gate_up.shape[0]} experts"
    return None


fuse_moe_routing = Rewrite("fuse_moe_routing", renormalized, with_renormalization, (check,))
fuse_moe_routing_plain = Rewrite("fuse_moe_routing_plain", plain, without, (check,))
