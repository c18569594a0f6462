"""The reference ops of rotary position embedding (RoPE)."""

from __future__ import annotations

import torch
from torch import Tensor

from inferc.ir.ops.registry import define, like_first


def _rope_table_fake(positions: Tensor, inv_freq: Tensor, scaling: float) -> Tensor:
    return inv_freq.new_empty((positions.shape[0], inv_freq.shape[0] * 2), dtype=torch.float32)


@define("rope_table(Tensor positions, Tensor inv_freq, float scaling) -> Tensor", _rope_table_fake)
def rope_table(positions: Tensor, inv_freq: Tensor, scaling: float) -> Tensor:
    """Compute the cosines and sines of a step's positions, once for all layers.

    positions [num_tokens] i64; inv_freq [rotary_dim / 2] float32; result [num_tokens, rotary_dim] float32:
    the first half cosines, the second half sines, both times `scaling` (YaRN's attention factor).
    """
    angle = positions.float()[:, None] * inv_freq.float()[None, :]
    return torch.cat((angle.cos() * scaling, angle.sin() * scaling), -1)


PAIRS = ("halves", "neighbours", "neighbours_to_halves")


@define('rope(Tensor x, Tensor table, str pairs="halves") -> Tensor', like_first)
def rope(x: Tensor, table: Tensor, pairs: str = "halves") -> Tensor:
    """Rotate the first `rotary_dim` elements of every head, in float32, rounded once.

    x, result [num_tokens, heads, head_dim]; table from `rope_table`. Pair i is the elements (i, i + rotary_dim / 2) of
    x and of the result for "halves", and (2 i, 2 i + 1) for "neighbours"; "neighbours_to_halves" reads neighbours and
    writes halves (DeepSeek). Source: Su et al. 2021, arXiv:2104.09864.
    """
    half = table.shape[-1] // 2
    cos, sin = table[:, None, :half], table[:, None, half:]
    rotated, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if pairs == "halves":
        first, second = rotated[..., :half], rotated[..., half:]
    else:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    turned = first * cos - second * sin, second * cos + first * sin
    out = torch.stack(turned, -1).flatten(-2) if pairs == "neighbours" else torch.cat(turned, -1)
    return torch.cat((out.to(x.dtype), rest), -1)
