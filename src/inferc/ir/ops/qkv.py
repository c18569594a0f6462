"""The reference op that fuses the projection of q, k and v with norm, rope and the write into the KV cache."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from inferc.ir.ops.attention import cached_head_dim, rope_kv_write, rope_kv_write_in_place
from inferc.ir.ops.norms import rms_norm
from inferc.ir.ops.quantize import linear_int8, linear_w4a8, linear_w8a8
from inferc.ir.ops.registry import define


def _fake(x: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    kv_cache, num_heads, dtype = args[8], args[11], args[16] if len(args) > 16 else None
    q = x.new_empty((x.shape[0], num_heads, cached_head_dim(kv_cache)), dtype=dtype)
    return q, torch.empty_like(kv_cache)


@define(
    "qkv_rope_kv_write(Tensor x, Tensor weight, Tensor? bias, Tensor? q_weight, Tensor? k_weight, float eps,"
    " float weight_offset, bool round_before_scale, Tensor table, Tensor kv_cache, Tensor slot_mapping, int layer,"
    " int num_heads, str pairs, Tensor? x_scale=None, Tensor? scale=None, Tensor? group_scale=None,"
    " ScalarType? dtype=None) -> (Tensor, Tensor)",
    _fake,
)
def qkv_rope_kv_write(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    weight_offset: float,
    round_before_scale: bool,
    table: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    layer: int,
    num_heads: int,
    pairs: str,
    x_scale: Tensor | None = None,
    scale: Tensor | None = None,
    group_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute q, k and v by one `linear`, apply `rms_norm` to q and k where they have weights, then `rope_kv_write`.

    x [num_tokens, hidden_size]; weight [(num_heads + 2 * num_kv_heads) * head_dim, hidden_size], rows of q, k and v in
    this order; q_weight and k_weight [head_dim], both or neither; num_kv_heads and head_dim are the cache's. With
    `scale` the product is `linear_int8`; with `scale` and `x_scale` it is `linear_w8a8`; with `group_scale` too it is
    `linear_w4a8`. The last two give `dtype`. Returns (rotated q [num_tokens, num_heads, head_dim], cache).
    """
    product = _product(x, weight, bias, x_scale, scale, group_scale, dtype)
    q, k, v = _heads(product, kv_cache, num_heads)
    q, k = _normed(q, k, q_weight, k_weight, (eps, weight_offset, round_before_scale))
    return rope_kv_write(q, k, v, table, kv_cache, slot_mapping, layer, pairs)


def qkv_rope_kv_write_in_place(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    eps: float,
    weight_offset: float,
    round_before_scale: bool,
    table: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    layer: int,
    num_heads: int,
    pairs: str,
    x_scale: Tensor | None = None,
    scale: Tensor | None = None,
    group_scale: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Run `qkv_rope_kv_write` on the given cache itself, as a runner does."""
    product = _product(x, weight, bias, x_scale, scale, group_scale, dtype)
    q, k, v = _heads(product, kv_cache, num_heads)
    q, k = _normed(q, k, q_weight, k_weight, (eps, weight_offset, round_before_scale))
    return rope_kv_write_in_place(q, k, v, table, kv_cache, slot_mapping, layer, pairs)


def _product(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x_scale: Tensor | None,
    scale: Tensor | None,
    group_scale: Tensor | None,
    dtype: torch.dtype | None,
) -> Tensor:
    if scale is None:
        return linear(x, weight, bias)
    if x_scale is None:
        return linear_int8(x, weight, scale, bias)
    assert dtype is not None, "rows in int8 do not say what their product is"
    if group_scale is None:
        return linear_w8a8(x, x_scale, weight, scale, dtype, bias)
    return linear_w4a8(x, x_scale, weight, group_scale, scale, dtype, bias)


def _heads(product: Tensor, kv_cache: Tensor, num_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    num_kv_heads = kv_cache.shape[4]
    heads = product.view(len(product), -1, cached_head_dim(kv_cache))
    q, k, v = heads.split([num_heads, num_kv_heads, num_kv_heads], 1)
    return q, k, v


def _normed(
    q: Tensor, k: Tensor, q_weight: Tensor | None, k_weight: Tensor | None, how: tuple[float, float, bool]
) -> tuple[Tensor, Tensor]:
    if q_weight is None or k_weight is None:
        return q, k
    return rms_norm(q, q_weight, *how), rms_norm(k, k_weight, *how)
