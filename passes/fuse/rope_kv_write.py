"""Fuse the rotation of q and k with the write of K and V into the cache, and the norms of their heads with both.

Rotated K goes straight into its slot, which saves one write and one read of [num_tokens, num_kv_heads, head_dim]. With
the norms in it (Qwen3, Gemma 3) another write and read of q and of k is saved.
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
    table: Tensor,
    pairs: str,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    layer: int,
    scale: float,
    mask: str,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    rotated = inferc.rope.default(q, table, pairs)
    written = inferc.kv_write.default(kv_cache, inferc.rope.default(k, table, pairs), v, slot_mapping, layer)
    places = (block_table, query_start_loc, seq_lens)
    return inferc.paged_attention.default(
        rotated, written, *places, sinks, layer, scale, mask, window, softcap
    ), written


def replacement(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    pairs: str,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    layer: int,
    scale: float,
    mask: str,
    window: int,
    softcap: float,
) -> tuple[Tensor, Tensor]:
    both = inferc.rope_kv_write.default(q, k, v, table, kv_cache, slot_mapping, layer, pairs)
    rotated, written = operator.getitem(both, 0), operator.getitem(both, 1)
    places = (block_table, query_start_loc, seq_lens)
    return inferc.paged_attention.default(
        rotated, written, *places, sinks, layer, scale, mask, window, softcap
    ), written


fuse_rope_kv_write = Rewrite("fuse_rope_kv_write", pattern, replacement)


def normed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    weight_offset: float,
    round_before_scale: bool,
    table: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    layer: int,
    pairs: str,
) -> Tensor:
    how = (eps, weight_offset, round_before_scale)
    heads = inferc.rms_norm.default(q, q_weight, *how), inferc.rms_norm.default(k, k_weight, *how)
    return inferc.rope_kv_write.default(*heads, v, table, kv_cache, slot_mapping, layer, pairs)


def with_norms(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    q_weight: Tensor,
    k_weight: Tensor,
    eps: float,
    weight_offset: float,
    round_before_scale: bool,
    table: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    layer: int,
    pairs: str,
) -> Tensor:
    how = (eps, weight_offset, round_before_scale)
    where = (table, kv_cache, slot_mapping, layer, pairs)
    return inferc.norm_rope_kv_write.default(q, k, v, q_weight, k_weight, *how, *where)


def check_heads(q: Tensor, k: Tensor) -> str | None:
    return None if q.dim() == k.dim() == 3 else f"q is {list(q.shape)}, k is {list(k.shape)}: expected heads"


fuse_norm_rope_kv_write = Rewrite("fuse_norm_rope_kv_write", normed, with_norms, (check_heads,))
