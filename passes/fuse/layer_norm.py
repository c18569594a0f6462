"""Fuse LayerNorm into one op, whether the model calls torch's or spells it out (Cohere: in float32, without a bias)."""

from __future__ import annotations

import torch
from torch import Tensor, ops

from inferc.passes.rewrite import Rewrite

aten, inferc = ops.aten, ops.inferc


def spelled_out(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    wide = aten._to_copy.default(x, dtype=torch.float32)
    mean = aten.mean.dim(wide, [-1], True)
    variance = aten.mean.dim(aten.pow.Tensor_Scalar(aten.sub.Tensor(wide, mean), 2), [-1], True)
    normed = aten.mul.Tensor(aten.sub.Tensor(wide, mean), aten.rsqrt.default(aten.add.Tensor(variance, eps)))
    scaled = aten.mul.Tensor(aten._to_copy.default(weight, dtype=torch.float32), normed)
    return aten._to_copy.default(scaled, dtype=dtype)


def called(x: Tensor, shape: list[int], weight: Tensor | None, bias: Tensor | None, eps: float, fast: object) -> Tensor:
    return aten.layer_norm.default(x, shape, weight, bias, eps, fast)


def replacement(x: Tensor, weight: Tensor | None, eps: float, bias: Tensor | None = None) -> Tensor:
    return inferc.layer_norm.default(x, weight, bias, eps)


def check(x: Tensor, weight: Tensor | None, dtype: torch.dtype | None = None) -> str | None:
    if dtype is not None and x.dtype != dtype:
        return f"it takes {x.dtype} and returns {dtype}: one dtype is expected"
    if weight is not None and (weight.dim() > 2 or weight.shape[-1] != x.shape[-1]):
        return f"the weight has shape {list(weight.shape)}, the rows have {x.shape[-1]} elements"
    return None


def check_shape(x: Tensor, shape: list[int] | None = None) -> str | None:
    if shape is not None and list(shape) != [x.shape[-1]]:
        return f"it is over axes of {list(shape)}, expected the last alone"
    return None


fuse_layer_norm = Rewrite("fuse_layer_norm", (called, spelled_out), replacement, (check, check_shape))
