"""Fuse a router's float32 product into one op that reads the activation and the weight in the model's dtype."""

from __future__ import annotations

import torch
from torch import Tensor, ops

from inferc.passes.rewrite import Rewrite

aten, inferc = ops.aten, ops.inferc


def pattern(x: Tensor, weight: Tensor) -> Tensor:
    wide = aten._to_copy.default(x, dtype=torch.float32)
    return aten.linear.default(wide, aten._to_copy.default(weight, dtype=torch.float32))


def replacement(x: Tensor, weight: Tensor) -> Tensor:
    return inferc.linear_wide.default(x, weight)


def check(x: Tensor, weight: Tensor) -> str | None:
    if x.dtype != weight.dtype or x.dtype == torch.float32:
        return f"it is a product of {x.dtype} and {weight.dtype}"
    return None


fuse_linear_wide = Rewrite("fuse_linear_wide", pattern, replacement, (check,))
