"""Mixture of experts: routing, and the experts themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from inferc.ops.elementwise import silu_mul
from inferc.ops.registry import define, like_first


def _moe_routing_fake(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    shape = (router_logits.shape[0], top_k)
    return router_logits.new_empty(shape, dtype=torch.int32), router_logits.new_empty(shape, dtype=torch.float32)


@define("moe_routing(Tensor router_logits, int top_k, bool renormalize) -> (Tensor, Tensor)", _moe_routing_fake)
def moe_routing(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Softmax over experts in float32, the top_k largest, renormalised to sum 1 if asked.

    router_logits [num_tokens, num_experts]; result: expert ids [num_tokens, top_k] i32, falling by weight (equal
    weights: the lower id first), and their weights, float32.
    """
    probabilities = router_logits.float().softmax(-1)
    weights, ids = probabilities.sort(stable=True, dim=-1, descending=True)
    weights, ids = weights[:, :top_k], ids[:, :top_k]
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids.to(torch.int32), weights.contiguous()


def _moe_experts_fake(x: Tensor, *_args: object) -> Tensor:
    return like_first(x)


@define(
    "moe_experts(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor gate_up, Tensor down) -> Tensor",
    _moe_experts_fake,
)
def moe_experts(x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU experts, summed by routing weight in float32, in rising expert id.

    x, result [num_tokens, hidden_size]; expert_ids, expert_weights [num_tokens, top_k]; gate_up
    [num_experts, 2 * intermediate_size, hidden_size], gate rows first; down [num_experts, hidden_size,
    intermediate_size].
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(gate_up.shape[0]):
        rows, choice = torch.where(expert_ids == expert)
        if rows.numel():
            gate, up = torch.nn.functional.linear(x[rows], gate_up[expert]).chunk(2, -1)
            result = torch.nn.functional.linear(silu_mul(gate, up), down[expert])
            out.index_add_(0, rows, result.float() * expert_weights[rows, choice].float()[:, None])
    return out.to(x.dtype)
