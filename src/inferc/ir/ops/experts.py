"""The reference ops of mixture of experts: the routing, and the experts themselves."""

from __future__ import annotations

import torch
from torch import Tensor

from inferc.ir.ops.elementwise import silu_mul
from inferc.ir.ops.quantize import linear_int4, linear_int8, linear_w4a8, linear_w8a8, quantize_rows
from inferc.ir.ops.registry import define

SCORES = ("softmax", "sigmoid", "chosen_softmax", "chosen_sigmoid", "near_softmax")
GROUP_SCORES = ("max", "top2_sum")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "swiglu_clamped")


def _moe_routing_fake(router_logits: Tensor, bias: Tensor | None, top_k: int, *_args: object) -> tuple[Tensor, Tensor]:
    shape = (router_logits.shape[0], top_k)
    return router_logits.new_empty(shape, dtype=torch.int32), router_logits.new_empty(shape, dtype=torch.float32)


@define(
    'moe_routing(Tensor router_logits, Tensor? bias, int top_k, bool renormalize, str score="softmax",'
    ' float scale=1.0, int num_groups=1, int topk_groups=1, str group_score="max", float margin=0.0)'
    " -> (Tensor, Tensor)",
    _moe_routing_fake,
)
def moe_routing(
    router_logits: Tensor,
    bias: Tensor | None,
    top_k: int,
    renormalize: bool,
    score: str = "softmax",
    scale: float = 1.0,
    num_groups: int = 1,
    topk_groups: int = 1,
    group_score: str = "max",
    margin: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Choose the top_k experts of each token and compute their weights in float32.

    score says how experts are scored and weighed: "softmax" and "sigmoid" score by the softmax over all experts, or by
    the sigmoid, and weigh by these scores; "chosen_softmax" and "chosen_sigmoid" score by the logits, and weigh by the
    softmax over the chosen experts or by their sigmoid; "near_softmax" scores by the logits, and weighs each chosen
    expert by a softmax over the experts near it that were not chosen before: an expert is near if its logit is below
    the chosen one's by at most `margin` times the larger of the chosen logit and its own magnitude. `bias`
    [num_experts] is added for the choice alone. With num_groups > 1 only experts of the topk_groups best groups are
    chosen, where a group's score is its best expert ("max") or the sum of its best two ("top2_sum"). Weights sum to 1
    if `renormalize` is set, and are multiplied by `scale`.

    router_logits [num_tokens, num_experts]; result: expert ids [num_tokens, top_k] i32, the best choice first (of
    equals the lower id), and weights [num_tokens, top_k] float32.
    Source: DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2 (sigmoid, bias and groups); Liu, Gao and Chen 2024,
    arXiv:2409.12136 (near_softmax: SparseMixer-v2 at inference).
    """
    logits = router_logits.float()
    scores = {"softmax": logits.softmax(-1), "sigmoid": logits.sigmoid()}.get(score, logits)
    choice = scores if bias is None else scores + bias.float()
    if num_groups > 1:
        groups = choice.unflatten(1, (num_groups, choice.shape[1] // num_groups))
        best = groups.amax(-1) if group_score == "max" else groups.topk(2, -1).values.sum(-1)
        kept = best.sort(stable=True, dim=-1, descending=True).indices[:, :topk_groups]
        dropped = torch.ones_like(best, dtype=torch.bool).scatter(1, kept, False)
        choice = groups.masked_fill(dropped[..., None], -torch.inf).flatten(1)
    ids = choice.sort(stable=True, dim=-1, descending=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if score == "near_softmax":
        weights = _near_softmax(logits, ids, margin)
    if score.startswith("chosen"):
        weights = weights.softmax(-1) if score == "chosen_softmax" else weights.sigmoid()
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids.to(torch.int32), (weights * scale).contiguous()


def _near_softmax(logits: Tensor, ids: Tensor, margin: float) -> Tensor:
    left, found = logits.clone(), []
    for chosen in ids.split(1, -1):
        best = logits.gather(1, chosen)
        distance = (best - logits) / torch.maximum(logits.abs(), best)
        found.append(left.masked_fill(distance > margin, -torch.inf).softmax(-1).gather(1, chosen))
        left = left.scatter(1, chosen, -torch.inf)
    return torch.cat(found, -1)


def activated(gate: Tensor, up: Tensor, activation: str, alpha: float, limit: float) -> Tensor:
    """Return the activation of an expert's gate and up rows, of a kind that `moe_experts` describes."""
    if activation == "silu":
        return silu_mul(gate, up)
    wide, other = gate.float(), up.float()
    if activation == "swiglu_clamped":
        wide, other = wide.clamp(max=limit), other.clamp(-limit, limit)
        return (wide * torch.sigmoid(wide * alpha) * (other + 1)).to(gate.dtype)
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return (torch.nn.functional.gelu(wide, approximate=approximate) * other).to(gate.dtype)


def _product(
    x: Tensor,
    x_scale: Tensor | None,
    dtype: torch.dtype,
    weight: Tensor,
    scale: Tensor | None,
    group_scale: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """Compute the matrix product of one expert by the `linear_*` reference that takes these operands."""
    if scale is None:
        return torch.nn.functional.linear(x, weight, bias)
    if x_scale is None and group_scale is not None:
        return linear_int4(x, weight, group_scale, scale, bias)
    if x_scale is None:
        return linear_int8(x, weight, scale, bias)
    if group_scale is not None:
        return linear_w4a8(x, x_scale, weight, group_scale, scale, dtype, bias)
    return linear_w8a8(x, x_scale, weight, scale, dtype, bias)


def _moe_experts_fake(x: Tensor, *args: object, dtype: torch.dtype | None = None) -> Tensor:
    given = (each for each in (dtype, *args) if isinstance(each, torch.dtype))
    return x.new_empty(x.shape, dtype=next(given, x.dtype))


@define(
    "moe_experts(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor gate_up, Tensor down,"
    ' Tensor? gate_up_bias=None, Tensor? down_bias=None, str activation="silu", float alpha=1.0, float limit=0.0,'
    " bool scale_input=False, Tensor? gate_up_scale=None, Tensor? down_scale=None, Tensor? x_scale=None,"
    " ScalarType? dtype=None, Tensor? gate_up_group_scale=None, Tensor? down_group_scale=None) -> Tensor",
    _moe_experts_fake,
)
def moe_experts(
    x: Tensor,
    expert_ids: Tensor,
    expert_weights: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float = 0.0,
    scale_input: bool = False,
    gate_up_scale: Tensor | None = None,
    down_scale: Tensor | None = None,
    x_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
    gate_up_group_scale: Tensor | None = None,
    down_group_scale: Tensor | None = None,
) -> Tensor:
    """Compute gated experts and sum their results by routing weight in float32, in rising expert id.

    x, result [num_tokens, hidden_size]; expert_ids, expert_weights [num_tokens, top_k]; gate_up
    [num_experts, 2 * intermediate_size, hidden_size], gate rows first; down [num_experts, hidden_size,
    intermediate_size]; biases [num_experts, …] of either. activation: "silu", "gelu", "gelu_tanh" of the gate times
    up, or "swiglu_clamped" (gpt-oss): `gate * sigmoid(alpha * gate) * (up + 1)`, both within `limit`.
    With `scale_input` (Llama 4) the routing weight multiplies an expert's input, which is rounded, and not its result.

    Quantized weights: with gate_up_scale [num_experts, 2 * intermediate_size] and down_scale [num_experts,
    hidden_size], both float32, the weights are int8 and multiplied as in `linear_int8`; with group scales, [...,
    groups] int8, they have four bits and are multiplied as in `linear_int4`. With x_scale [num_tokens], x is int8 too
    and the result has `dtype`: the products are those of `linear_w8a8`, or of `linear_w4a8` with group scales. Each
    activation is then quantized by `quantize_rows`, and `scale_input` multiplies the row's scale.
    """
    dtype = dtype or x.dtype
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(gate_up.shape[0]):
        rows, choice = torch.where(expert_ids == expert)
        if not rows.numel():
            continue
        first, second = (
            [None if each is None else each[expert] for each in of_matrix]
            for of_matrix in (
                (gate_up_scale, gate_up_group_scale, gate_up_bias),
                (down_scale, down_group_scale, down_bias),
            )
        )
        share = expert_weights[rows, choice].float()
        taken, taken_scale = x[rows], None if x_scale is None else x_scale[rows]
        if scale_input and taken_scale is not None:
            taken_scale = taken_scale * share
        elif scale_input:
            taken = (taken.float() * share[:, None]).to(dtype)
        gate, up = _product(taken, taken_scale, dtype, gate_up[expert], *first).chunk(2, -1)
        hidden, hidden_scale = activated(gate, up, activation, alpha, limit), None
        if x_scale is not None:
            hidden, hidden_scale = quantize_rows(hidden)
        result = _product(hidden, hidden_scale, dtype, down[expert], *second).float()
        out.index_add_(0, rows, result if scale_input else result * share[:, None])
    return out.to(dtype)
