"""The reference ops of attention: as captured from the model, and over the paged KV cache.

The canonical KV cache of one KV group is one tensor
`[num_blocks, num_layers_of_group, 2, block_size, num_kv_heads, head_dim]` (index 0 of axis 2 is K, 1 is V). For a
group of latents it is `[num_blocks, num_layers_of_group, 1, block_size, 1, head_dim]`. In int8 the last axis also
holds the four bytes of a float32 scale behind each row of head_dim elements. A backend may store the same bytes in
another order and then says so in `kv_layout`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inferc.ir.ops.norms import rms_norm
from inferc.ir.ops.quantize import quantize_rows
from inferc.ir.ops.registry import define, like_first
from inferc.ir.ops.rope import rope
from inferc.kv_groups import SCALE_BYTES


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *_args: object) -> Tensor:
    if q.dim() == 3:
        return q.new_empty((*q.shape[:2], v.shape[2]))
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3]))


@define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, float scale, str mask, int window, float softcap,"
    " Tensor? alibi=None) -> Tensor",
    _attention_fake,
)
def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scale: float,
    mask: str,
    window: int,
    softcap: float,
    alibi: Tensor | None = None,
) -> Tensor:
    """Compute attention as captured: what the Hugging Face model asks of its attention interface.

    q [batch, num_heads, T, head_dim]; k, v [batch, num_kv_heads, T, head_dim]; result [batch, T, num_heads, v_dim].
    Once the batch is flattened: q [T, num_heads, head_dim]; k, v [T, num_kv_heads, head_dim]; result
    [T, num_heads, v_dim].
    mask is "causal", "sliding" (the last `window` keys, the row's own included) or "chunked" (keys of the same
    chunk of `window`); window is 0 for "causal"; softcap 0.0 means none; sinks [num_heads] joins the softmax's sum.
    alibi, float32 [num_heads], are slopes: slope * (position of the key - position of the query) is added to a score
    after scale and softcap.

    Source of ALiBi: Press et al. 2022, arXiv:2108.12409.
    """
    if q.dim() == 3:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return attention(q, k, v, sinks, scale, mask, window, softcap, alibi)[0]
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.matmul(q.float(), k.float().transpose(2, 3)) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    length = q.shape[2]
    rows = torch.arange(length, device=q.device)
    if alibi is not None:
        scores = scores + position_bias(alibi, rows, rows)
    scores = scores.masked_fill(~visible(rows, rows, mask, window), float("-inf"))
    return _softmax(scores, sinks).matmul(v.float()).to(q.dtype).transpose(1, 2).contiguous()


def position_bias(slopes: Tensor, queries: Tensor, keys: Tensor) -> Tensor:
    """Return ALiBi's bias of the scores: slopes times distance, float32 [num_heads, len(queries), len(keys)].

    slopes [num_heads]; queries and keys are positions.
    """
    return slopes.float()[:, None, None] * (keys[None, :] - queries[:, None])


def visible(queries: Tensor, keys: Tensor, mask: str, window: int) -> Tensor:
    """Return which key positions each query position sees, as bool [len(queries), len(keys)]."""
    query, key = queries[:, None], keys[None, :]
    seen = key <= query
    if mask == "sliding":
        seen = seen & (key > query - window)
    elif mask == "chunked":
        seen = seen & (torch.div(key, window, rounding_mode="floor") == torch.div(query, window, rounding_mode="floor"))
    return seen


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Return the softmax over the last axis of scores [..., heads, queries, keys].

    sinks [heads], where given, acts as one more key without a value: it only adds to the softmax's sum.
    """
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]


def cached_head_dim(kv_cache: Tensor) -> int:
    """Return how many elements one head of K, or one latent, has in a canonical cache (int8 scales excluded)."""
    return kv_cache.shape[-1] - (SCALE_BYTES if kv_cache.dtype == torch.int8 else 0)


def _stored(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows [..., head_dim] in the form in which a cache of `dtype` stores them."""
    if dtype != torch.int8:
        return rows.to(dtype)
    values, scales = quantize_rows(rows.flatten(0, -2))
    return torch.cat((values, scales[:, None].view(torch.int8)), -1).view(*rows.shape[:-1], -1)


def loaded_rows(cached: Tensor) -> Tensor:
    """Return the rows of a cache as float32 [..., head_dim], dequantized where the cache is int8."""
    if cached.dtype != torch.int8:
        return cached.float()
    scales = cached[..., -SCALE_BYTES:].contiguous().view(torch.float32)
    return cached[..., :-SCALE_BYTES].float() * scales


def _kv_write_fake(kv_cache: Tensor, *_args: object) -> Tensor:
    return torch.empty_like(kv_cache)


@define("kv_write(Tensor kv_cache, Tensor k, Tensor v, Tensor slot_mapping, int layer) -> Tensor", _kv_write_fake)
def kv_write(kv_cache: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor, layer: int) -> Tensor:
    """Write new K and V into their slots and return the cache.

    In the graph the returned cache is a new value; when run, it is written in place. A cache in int8 gets each head's
    row as `quantize_rows` makes it, and its scale.

    kv_cache canonical (see the module); k, v [num_tokens, num_kv_heads, head_dim]; slot_mapping [num_tokens] i64;
    layer counts within the KV group.
    """
    return kv_write_in_place(kv_cache.clone(), k, v, slot_mapping, layer)


def kv_write_in_place(kv_cache: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor, layer: int) -> Tensor:
    """Run `kv_write` on the given cache itself, as a runner does."""
    block_size = kv_cache.shape[3]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    kv_cache[block, layer, 0, offset] = _stored(k, kv_cache.dtype)
    kv_cache[block, layer, 1, offset] = _stored(v, kv_cache.dtype)
    return kv_cache


def _rope_kv_write_fake(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, kv_cache: Tensor, *_a: object
) -> tuple[Tensor, Tensor]:
    return like_first(q), torch.empty_like(kv_cache)


@define(
    "rope_kv_write(Tensor q, Tensor k, Tensor v, Tensor table, Tensor kv_cache, Tensor slot_mapping, int layer,"
    ' str pairs="halves") -> (Tensor, Tensor)',
    _rope_kv_write_fake,
)
def rope_kv_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    layer: int,
    pairs: str = "halves",
) -> tuple[Tensor, Tensor]:
    """Apply `rope` to q and k, then `kv_write`; return (rotated q, cache)."""
    return rope(q, table, pairs), kv_write(kv_cache, rope(k, table, pairs), v, slot_mapping, layer)


def rope_kv_write_in_place(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    layer: int,
    pairs: str = "halves",
) -> tuple[Tensor, Tensor]:
    """Run `rope_kv_write` on the given cache itself, as a runner does."""
    written = kv_write_in_place(kv_cache, rope(k, table, pairs), v, slot_mapping, layer)
    return rope(q, table, pairs), written


def _norm_rope_kv_write_fake(q: Tensor, *args: Any) -> tuple[Tensor, Tensor]:
    return like_first(q), torch.empty_like(args[8])


@define(
    "norm_rope_kv_write(Tensor q, Tensor k, Tensor v, Tensor q_weight, Tensor k_weight, float eps, float weight_offset,"
    " bool round_before_scale, Tensor table, Tensor kv_cache, Tensor slot_mapping, int layer,"
    ' str pairs="halves") -> (Tensor, Tensor)',
    _norm_rope_kv_write_fake,
)
def norm_rope_kv_write(
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
    pairs: str = "halves",
) -> tuple[Tensor, Tensor]:
    """Apply `rms_norm` to every head of q and of k, then `rope_kv_write`; return (rotated q, cache).

    q [num_tokens, num_heads, head_dim]; k, v [num_tokens, num_kv_heads, head_dim]; q_weight, k_weight [head_dim].
    """
    how = (eps, weight_offset, round_before_scale)
    q, k = rms_norm(q, q_weight, *how), rms_norm(k, k_weight, *how)
    return rope_kv_write(q, k, v, table, kv_cache, slot_mapping, layer, pairs)


def norm_rope_kv_write_in_place(
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
    pairs: str = "halves",
) -> tuple[Tensor, Tensor]:
    """Run `norm_rope_kv_write` on the given cache itself, as a runner does."""
    how = (eps, weight_offset, round_before_scale)
    q, k = rms_norm(q, q_weight, *how), rms_norm(k, k_weight, *how)
    return rope_kv_write_in_place(q, k, v, table, kv_cache, slot_mapping, layer, pairs)


@define("latent_write(Tensor kv_cache, Tensor k, Tensor slot_mapping, int layer) -> Tensor", _kv_write_fake)
def latent_write(kv_cache: Tensor, k: Tensor, slot_mapping: Tensor, layer: int) -> Tensor:
    """Write new latents into their slots and return the cache, like `kv_write` for one tensor that is K and holds V.

    kv_cache canonical (see the module); k [num_tokens, 1, head_dim]; slot_mapping [num_tokens] i64.
    """
    return latent_write_in_place(kv_cache.clone(), k, slot_mapping, layer)


def latent_write_in_place(kv_cache: Tensor, k: Tensor, slot_mapping: Tensor, layer: int) -> Tensor:
    """Run `latent_write` on the given cache itself, as a runner does."""
    block_size = kv_cache.shape[3]
    kv_cache[slot_mapping // block_size, layer, 0, slot_mapping % block_size] = _stored(k, kv_cache.dtype)
    return kv_cache


def _paged_attention_fake(q: Tensor, *_args: object) -> Tensor:
    return like_first(q)


@define(
    "paged_attention(Tensor q, Tensor kv_cache, Tensor block_table, Tensor query_start_loc, Tensor seq_lens,"
    " Tensor? sinks, int layer, float scale, str mask, int window, float softcap, Tensor? alibi=None) -> Tensor",
    _paged_attention_fake,
)
def paged_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    layer: int,
    scale: float,
    mask: str,
    window: int,
    softcap: float,
    alibi: Tensor | None = None,
) -> Tensor:
    """Compute attention of new queries over the paged KV cache, which already holds their own K and V.

    q, result [num_tokens, num_heads, head_dim]; kv_cache canonical (see the module); block_table [num_seqs, max_blocks]
    i32; query_start_loc [num_seqs + 1] i32; seq_lens [num_seqs] i32, this step included. The queries of a sequence are
    its last positions. A block of which no query sees a token may hold anything: once it is returned to the pool, its
    entry in the block table is 0. mask, window, softcap, sinks and alibi as in `attention`.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.1.
    """
    k, v = (kv_cache[:, layer, part] for part in (0, 1))
    places = (block_table, query_start_loc, seq_lens)
    return _attend(q, k, v, cached_head_dim(kv_cache), *places, sinks, scale, mask, window, softcap, alibi)


def _latent_attention_fake(q: Tensor, kv_cache: Tensor, *args: Any) -> Tensor:
    return q.new_empty((q.shape[0], q.shape[1], args[-1]))


@define(
    "latent_attention(Tensor q, Tensor kv_cache, Tensor block_table, Tensor query_start_loc, Tensor seq_lens,"
    " int layer, float scale, str mask, int window, float softcap, int v_dim) -> Tensor",
    _latent_attention_fake,
)
def latent_attention(
    q: Tensor,
    kv_cache: Tensor,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    layer: int,
    scale: float,
    mask: str,
    window: int,
    softcap: float,
    v_dim: int,
) -> Tensor:
    """Compute `paged_attention` over latents: K is the cached tensor, V its first `v_dim` elements.

    All heads share both. q [num_tokens, num_heads, head_dim]; result [num_tokens, num_heads, v_dim].
    Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.2.
    """
    k = kv_cache[:, layer, 0]
    places = (block_table, query_start_loc, seq_lens)
    return _attend(q, k, k, v_dim, *places, None, scale, mask, window, softcap)


def _attend(
    q: Tensor,
    keys: Tensor,
    values: Tensor,
    v_dim: int,
    block_table: Tensor,
    query_start_loc: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    scale: float,
    mask: str,
    window: int,
    softcap: float,
    alibi: Tensor | None = None,
) -> Tensor:
    """Compute attention over paged keys and values [num_blocks, block_size, num_kv_heads, …].

    Only the first `v_dim` elements of each value count.
    """
    block_size = keys.shape[1]
    out = q.new_empty((*q.shape[:2], v_dim))
    for seq in range(seq_lens.shape[0]):
        start, end, length = int(query_start_loc[seq]), int(query_start_loc[seq + 1]), int(seq_lens[seq])
        blocks = block_table[seq, : -(-length // block_size)].long()
        k, v = (loaded_rows(cached[blocks]).flatten(0, 1)[:length].transpose(0, 1) for cached in (keys, values))
        out[start:end] = attend_to(q[start:end], k, v[..., :v_dim], sinks, scale, mask, window, softcap, alibi)
    return out


def attend_to(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    scale: float,
    mask: str,
    window: int,
    softcap: float,
    alibi: Tensor | None = None,
) -> Tensor:
    """Compute attention of the last queries of one sequence over all its keys and values.

    q [num_queries, num_heads, head_dim]; k, v float32 [num_kv_heads, length, …]; result
    [num_queries, num_heads, v_dim] in q's dtype.
    """
    length, groups = k.shape[1], q.shape[1] // k.shape[0]
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = torch.matmul(q.float().transpose(0, 1), k.transpose(1, 2)) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    positions = torch.arange(length, device=q.device)
    queries = positions[length - len(q) :]
    if alibi is not None:
        scores = scores + position_bias(alibi, queries, positions)
    seen = visible(queries, positions, mask, window)
    scores = scores.masked_fill(~seen, float("-inf"))
    # Values that no query sees may come from block 0, which holds anything: zero them, since 0 * NaN would be NaN.
    v = v.masked_fill(~seen.any(0)[:, None], 0.0)
    return _softmax(scores, sinks).matmul(v).transpose(0, 1).to(q.dtype)
