"""The reference ops of matrix products that do more than `aten.linear`."""

from __future__ import annotations

import torch
from torch import Tensor

from inferc.ir.ops.elementwise import silu_mul
from inferc.ir.ops.quantize import linear_int8
from inferc.ir.ops.registry import define


def _lm_head_fake(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return hidden.new_empty((hidden.shape[0], weight.shape[0]), dtype=torch.float32)


@define("lm_head(Tensor hidden, Tensor weight, Tensor? bias) -> Tensor", _lm_head_fake)
def lm_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute the logits in float32, not rounded to the model's dtype.

    hidden [rows, hidden_size]; weight [vocab_size, hidden_size].
    """
    return torch.nn.functional.linear(hidden.float(), weight.float(), None if bias is None else bias.float())


def _linear_wide_fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=torch.float32)


@define("linear_wide(Tensor x, Tensor weight) -> Tensor", _linear_wide_fake)
def linear_wide(x: Tensor, weight: Tensor) -> Tensor:
    """Compute a matrix product in float32, not rounded to the model's dtype, as routers need it.

    x [num_tokens, k]; weight [n, k].
    """
    return torch.nn.functional.linear(x.float(), weight.float())


def _linear_add_fake(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    return residual.new_empty(residual.shape)


@define("linear_add(Tensor x, Tensor weight, Tensor? bias, Tensor residual) -> Tensor", _linear_add_fake)
def linear_add(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor) -> Tensor:
    """Return `residual + linear(x)`: the product is rounded to its dtype, then the sum.

    x [num_tokens, in_features]; weight [out_features, in_features]; residual, result [num_tokens, out_features].
    """
    return residual + torch.nn.functional.linear(x, weight, bias)


def _linear_silu_mul_fake(x: Tensor, weight: Tensor, *_args: object) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0] // 2))


@define("linear_silu_mul(Tensor x, Tensor weight, Tensor? bias, Tensor? scale=None) -> Tensor", _linear_silu_mul_fake)
def linear_silu_mul(x: Tensor, weight: Tensor, bias: Tensor | None, scale: Tensor | None = None) -> Tensor:
    """Return `silu_mul` of the two halves of `linear(x)`, each rounded to its dtype first (SwiGLU).

    x [num_tokens, in_features]; weight [2 * intermediate_size, in_features], gate rows first, then up rows; result
    [num_tokens, intermediate_size]. With `scale` the product is `linear_int8`. Source: Shazeer 2020, arXiv:2002.05202.
    """
    if scale is None:
        both = torch.nn.functional.linear(x, weight, bias)
    else:
        both = linear_int8(x, weight, scale, bias)
    return silu_mul(*both.chunk(2, dim=-1))


def _head_linear_fake(x: Tensor, weight: Tensor) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0], weight.shape[1]))


@define("head_linear(Tensor x, Tensor weight) -> Tensor", _head_linear_fake)
def head_linear(x: Tensor, weight: Tensor) -> Tensor:
    """Project each head by its own weight.

    x [num_tokens, heads, k]; weight [heads, n, k]; result [num_tokens, heads, n].
    """
    product = torch.einsum("thk,hnk->thn", x.float(), weight.float())
    return product.to(x.dtype).contiguous()  # einsum may leave heads first in memory
