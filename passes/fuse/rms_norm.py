"""Fuse RMSNorm, in the three rounding orders that models use.

Each fusion saves five writes and reads of a [num_tokens, hidden_size] activation in float32.
"""

from __future__ import annotations

import torch
from torch import Tensor, ops

from inferc.passes.rewrite import Rewrite

aten = ops.aten


def _normalised(x: Tensor, eps: float) -> Tensor:
    wide = aten._to_copy.default(x, dtype=torch.float32)
    variance = aten.mean.dim(aten.pow.Tensor_Scalar(wide, 2), [-1], True)
    return aten.mul.Tensor(wide, aten.rsqrt.default(aten.add.Tensor(variance, eps)))


def rounded_before_scale(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Match Llama's order: the normalised row is rounded to the model's dtype, then multiplied by the weight."""
    return aten.mul.Tensor(aten._to_copy.default(_normalised(x, eps), dtype=dtype), weight)


def rounded_after_scale(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Match gpt-oss's order: the normalised row is multiplied by the weight in float32, then rounded."""
    scaled = aten.mul.Tensor(_normalised(x, eps), aten._to_copy.default(weight, dtype=torch.float32))
    return aten._to_copy.default(scaled, dtype=dtype)


def promoted_by_scale(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Match the order of `rounded_after_scale` if type promotion casts the weight instead of an explicit op."""
    return aten._to_copy.default(aten.mul.Tensor(_normalised(x, eps), weight), dtype=dtype)


def offset_weight(x: Tensor, weight: Tensor, eps: float, weight_offset: float, dtype: torch.dtype) -> Tensor:
    """Match Gemma's order: the normalised row is multiplied by `offset + weight` in float32, then rounded."""
    scale = aten.add.Tensor(aten._to_copy.default(weight, dtype=torch.float32), weight_offset)
    return aten._to_copy.default(aten.mul.Tensor(_normalised(x, eps), scale), dtype=dtype)


def unscaled(x: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """Match a norm without a weight, as of Llama 4's q and k and of Gemma 3n's v."""
    return aten._to_copy.default(_normalised(x, eps), dtype=dtype)


def alone(x: Tensor, eps: float) -> Tensor:
    return ops.inferc.rms_norm.default(x, None, eps)


def before(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return ops.inferc.rms_norm.default(x, weight, eps)


def after(x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0) -> Tensor:
    return ops.inferc.rms_norm.default(x, weight, eps, weight_offset, False)


def check_dtype(x: Tensor, dtype: torch.dtype) -> str | None:
    return None if x.dtype == dtype else f"it takes {x.dtype} and returns {dtype}: one dtype is expected"


def check(x: Tensor, weight: Tensor, dtype: torch.dtype) -> str | None:
    if weight.dim() != 1 or weight.shape[0] != x.shape[-1]:
        return f"the weight has shape {list(weight.shape)}, the rows have {x.shape[-1]} elements"
    if x.dtype != dtype or weight.dtype != dtype:
        return f"it takes {x.dtype} times {weight.dtype} and returns {dtype}: one dtype is expected"
    return None


def check_order(x: Tensor, weight_offset: float = 0.0) -> str | None:
    if x.dtype == torch.float32 and weight_offset == 0.0:
        return "in float32 the rounding orders are one, and fuse_rms_norm knows it"
    return None


fuse_rms_norm = Rewrite("fuse_rms_norm", rounded_before_scale, before, (check,))
fuse_rms_norm_wide = Rewrite(
    "fuse_rms_norm_wide", (offset_weight, rounded_after_scale, promoted_by_scale), after, (check, check_order)
)
fuse_rms_norm_unscaled = Rewrite("fuse_rms_norm_unscaled", unscaled, alone, (check_dtype,))
