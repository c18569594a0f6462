"""The reference ops of norms over the last axis: RMSNorm and LayerNorm."""

from __future__ import annotations

import torch
from torch import Tensor

from inferc.ir.ops.registry import define, like_first


@define(
    "rms_norm(Tensor x, Tensor? weight, float eps, float weight_offset=0.0, bool round_before_scale=True) -> Tensor",
    like_first,
)
def rms_norm(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, round_before_scale: bool = True
) -> Tensor:
    """Compute RMSNorm over the last axis, in float32.

    x, result [..., size]; weight [size], or None for 1. `round_before_scale` rounds the normalised x to its dtype
    before the multiplication by the weight (Llama) instead of after it (Gemma, gpt-oss); `weight_offset` is added to
    the weight in float32 (Gemma: 1).

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if weight is None:
        return normed.to(x.dtype)
    if round_before_scale:
        normed = normed.to(x.dtype)
        scale = weight if weight_offset == 0.0 else (weight.float() + weight_offset).to(x.dtype)
        return (normed * scale).to(x.dtype)
    return (normed * (weight.float() + weight_offset)).to(x.dtype)


def _rms_norm_add_fake(x: Tensor, residual: Tensor, *_args: object) -> tuple[Tensor, Tensor]:
    return like_first(x), like_first(residual)


@define(
    "rms_norm_add(Tensor x, Tensor residual, Tensor weight, float eps, float weight_offset=0.0,"
    " bool round_before_scale=True) -> (Tensor, Tensor)",
    _rms_norm_add_fake,
)
def rms_norm_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    weight_offset: float = 0.0,
    round_before_scale: bool = True,
) -> tuple[Tensor, Tensor]:
    """Compute `sum = x + residual`, rounded to their dtype, and its RMSNorm; return (normed, sum)."""
    total = x + residual
    return rms_norm(total, weight, eps, weight_offset, round_before_scale), total


@define("layer_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> Tensor", like_first)
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Compute LayerNorm over the last axis, in float32, rounded once.

    x, result [..., size]; weight and bias [size], or [heads, size] for heads that each have their own.
    Source: Ba et al. 2016, arXiv:1607.06450.
    """
    wide = x.float()
    centered = wide - wide.mean(-1, keepdim=True)
    normed = centered * torch.rsqrt(centered.pow(2).mean(-1, keepdim=True) + eps)
    if weight is not None:
        normed = normed * weight.float()
    if bias is not None:
        normed = normed + bias.float()
    return normed.to(x.dtype)
