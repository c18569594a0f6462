"""Matrix products that are more than `aten.linear`."""

from __future__ import annotations

import torch
from torch import Tensor

from inferc.ops.registry import define


def _lm_head_fake(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return hidden.new_empty((hidden.shape[0], weight.shape[0]), dtype=torch.float32)


@define("lm_head(Tensor hidden, Tensor weight, Tensor? bias) -> Tensor", _lm_head_fake)
def lm_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Logits in float32, not rounded to the model's dtype. hidden [rows, hidden_size]; weight [vocab_size, hidden_size]."""
    return torch.nn.functional.linear(hidden.float(), weight.float(), None if bias is None else bias.float())


def _linear_add_fake(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    return residual.new_empty(residual.shape)


@define("linear_add(Tensor x, Tensor weight, Tensor? bias, Tensor residual) -> Tensor", _linear_add_fake)
def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """`residual + linear(x)`: the product is rounded to its dtype, then the sum.

    x [num_tokens, in_features]; weight [out_features, in_features]; residual, result [num_tokens, out_features].
    """
    return residual + torch.nn.functional.linear(x, weight, bias)
