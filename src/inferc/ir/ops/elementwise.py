"""The reference ops of fused elementwise arithmetic: SwiGLU and GeGLU."""

from __future__ import annotations

import torch
from torch import Tensor

from inferc.ir.ops.registry import define, like_first


@define("silu_mul(Tensor gate, Tensor up) -> Tensor", like_first)
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up`, computed in float32 and rounded once.

    gate, up, result [num_tokens, intermediate_size].
    """
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


@define("gelu_mul(Tensor gate, Tensor up, str approximate) -> Tensor", like_first)
def gelu_mul(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    """Return `gelu(gate) * up` (GeGLU), computed in float32 and rounded once.

    approximate: "none" (by erf) or "tanh". gate, up, result [num_tokens, intermediate_size].
    Source: Shazeer 2020, arXiv:2002.05202.
    """
    return (torch.nn.functional.gelu(gate.float(), approximate=approximate) * up.float()).to(gate.dtype)
