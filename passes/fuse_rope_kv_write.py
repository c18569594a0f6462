"""Fuse the rotation of q and k with the write of K and V into the cache.

Rotated K goes straight into its slot: one write and one read of [num_tokens, num_kv_heads, head_dim] less.
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
