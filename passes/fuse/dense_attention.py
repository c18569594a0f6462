"""Fuse the writes of K and V into a dense KV cache with the attention that reads it.

onnxruntime's GroupQueryAttention does all three on rows of tokens, and reads only the filled part of the cache.
"""

from __future__ import annotations

import operator

from torch import Tensor, ops

from inferc.passes.rewrite import Rewrite

inferc = ops.inferc


def pattern(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    scale: float,
    mask: str,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    keys = inferc.dense_write.default(k_cache, k, starts)
    values = inferc.dense_write.default(v_cache, v, starts)
    return inferc.dense_attention.default(q, keys, values, seq_lens, sinks, scale, mask, window, softcap), keys, values


def replacement(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    starts: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    scale: float,
    mask: str,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor, Tensor]:
    how = (scale, mask, window, softcap)
    three = inferc.dense_write_attention.default(q, k, v, k_cache, v_cache, starts, seq_lens, sinks, *how)
    return operator.getitem(three, 0), operator.getitem(three, 1), operator.getitem(three, 2)


def check(k: Tensor, v: Tensor, mask: str) -> str | None:
    if mask not in ("causal", "sliding"):
        return f"mask {mask}: expected causal or sliding"
    if k.shape[2] != v.shape[2]:
        return f"head_dim {k.shape[2]} of K and {v.shape[2]} of V: expected the same"
    if k.shape[2] % 8:
        return f"head_dim {k.shape[2]}: expected a multiple of 8"
    return None


fuse_dense_attention = Rewrite("fuse_dense_attention", pattern, replacement, (check,))
