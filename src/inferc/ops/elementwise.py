"""Elementwise arithmetic, fused."""

from __future__ import annotations

import torch
from torch import Tensor

from inferc.ops.registry import define, like_first


@define("silu_mul(Tensor gate, Tensor up) -> Tensor", like_first)
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up` in float32, rounded once. gate, up, result [num_tokens, intermediate_size]."""
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)
