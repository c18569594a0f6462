"""Fuse the residual addition into the RMSNorm that follows it.

Each norm saves one read of a [num_tokens, hidden_size] activation.
"""

from __future__ import annotations

import operator

from torch import Tensor, ops

from inferc.passes.rewrite import Rewrite


def pattern(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float, round_before_scale: bool
) -> tuple[Tensor, Tensor]:
    total = ops.aten.add.Tensor(residual, x)
    return ops.inferc.rms_norm.default(total, weight, eps, weight_offset, round_before_scale), total


def replacement(
    x: Tensor, residual: Tensor, weight: Tensor, eps: float, weight_offset: float, round_before_scale: bool
) -> tuple[Tensor, Tensor]:
    both = ops.inferc.rms_norm_add.default(x, residual, weight, eps, weight_offset, round_before_scale)
    return operator.getitem(both, 0), operator.getitem(both, 1)


def check(x: Tensor, residual: Tensor) -> str | None:
    if x.dtype != residual.dtype or [str(size) for size in x.shape] != [str(size) for size in residual.shape]:
        return f"x is {x.dtype}{list(x.shape)}, the residual {residual.dtype}{list(residual.shape)}"
    return None


fuse_rms_norm_add = Rewrite("fuse_rms_norm_add", pattern, replacement, (check,))
