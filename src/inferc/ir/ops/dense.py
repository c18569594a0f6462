"""The reference ops of attention over a dense KV cache, in which each sequence has one row of fixed capacity.

Runtimes that know no block tables use this form (ONNX, TensorRT). A row is as long as any sequence may become. A call
has `num_seqs` sequences of equally many new tokens, `[num_seqs * num_new, …]` in the flattened form, and K and V of a
layer are separate tensors `[num_seqs, num_kv_heads, capacity, head_dim]`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inferc.ir.ops.attention import attend_to
from inferc.ir.ops.registry import define


def _dense_write_fake(cache: Tensor, *_args: object) -> Tensor:
    return torch.empty_like(cache)


@define("dense_write(Tensor cache, Tensor x, Tensor starts) -> Tensor", _dense_write_fake)
def dense_write(cache: Tensor, x: Tensor, starts: Tensor) -> Tensor:
    """Write new rows after those that each sequence has cached, and return the cache.

    In the graph the returned cache is a new value; when run, it is written in place. cache [num_seqs, heads, capacity,
    head_dim]; x [num_seqs * num_new, heads, head_dim]; starts [num_seqs] i64, the number of tokens cached already. This
    is ONNX's TensorScatter along axis 2.
    """
    return dense_write_in_place(cache.clone(), x, starts)


def dense_write_in_place(cache: Tensor, x: Tensor, starts: Tensor) -> Tensor:
    """Run `dense_write` on the given cache itself, as a runner does."""
    new = x.view(len(starts), -1, *x.shape[1:]).transpose(1, 2).to(cache.dtype)
    for seq, start in enumerate(starts.tolist()):
        cache[seq, :, start : start + new.shape[2]] = new[seq]
    return cache


@define(
    "dense_attention(Tensor q, Tensor k_cache, Tensor v_cache, Tensor seq_lens, Tensor? sinks, float scale, str mask,"
    " int window, float softcap) -> Tensor",
    lambda q, k_cache, v_cache, *_args: q.new_empty((*q.shape[:2], v_cache.shape[3])),
)
def dense_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    seq_lens: Tensor,
    sinks: Tensor | None,
    scale: float,
    mask: str,
    window: int,
    softcap: float,
) -> Tensor:
    """Compute attention of new queries over the dense KV cache, which already holds their own K and V.

    q [num_seqs * num_new, num_heads, head_dim]; k_cache, v_cache [num_seqs, num_kv_heads, capacity, …]; seq_lens
    [num_seqs] i64, the new tokens included; result [num_seqs * num_new, num_heads, v_dim]. mask, window, softcap and
    sinks as in `attention`.
    """
    num_seqs = len(seq_lens)
    queries = q.view(num_seqs, -1, *q.shape[1:])
    num_new = queries.shape[1]
    out = q.new_empty((num_seqs, num_new, q.shape[1], v_cache.shape[3]))
    for seq, length in enumerate(seq_lens.tolist()):
        k, v = (cache[seq, :, :length].float() for cache in (k_cache, v_cache))
        out[seq] = attend_to(queries[seq], k, v, sinks, scale, mask, window, softcap)
    return out.flatten(0, 1)


@define(
    "dense_latent_attention(Tensor q, Tensor cache, Tensor seq_lens, float scale, str mask, int window, float softcap,"
    " int v_dim) -> Tensor",
    lambda q, *args: q.new_empty((*q.shape[:2], args[-1])),
)
def dense_latent_attention(
    q: Tensor,
    cache: Tensor,
    seq_lens: Tensor,
    scale: float,
    mask: str,
    window: int,
    softcap: float,
    v_dim: int,
) -> Tensor:
    """Compute `dense_attention` over latents: K is the cached tensor, V its first `v_dim` elements.

    All heads share both. cache [num_seqs, 1, capacity, head_dim]; result [num_seqs * num_new, num_heads, v_dim].
    Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.2.
    """
    return dense_attention(q, cache, cache[..., :v_dim], seq_lens, None, scale, mask, window, softcap)


def _dense_write_attention_fake(
    q: Tensor, _k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, *_args: object
) -> tuple[Tensor, Tensor, Tensor]:
    return q.new_empty((*q.shape[:2], v.shape[2])), torch.empty_like(k_cache), torch.empty_like(v_cache)


@define(
    "dense_write_attention(Tensor q, Tensor k, Tensor v, Tensor k_cache, Tensor v_cache, Tensor starts,"
    " Tensor seq_lens, Tensor? sinks, float scale, str mask, int window, float softcap) -> (Tensor, Tensor, Tensor)",
    _dense_write_attention_fake,
)
def dense_write_attention(
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
    """Apply `dense_write` to K and to V, then `dense_attention`; return its result and both caches."""
    caches = (k_cache.clone(), v_cache.clone())
    return dense_write_attention_in_place(q, k, v, *caches, starts, seq_lens, sinks, scale, mask, window, softcap)


def dense_write_attention_in_place(
    q: Tensor, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, starts: Tensor, seq_lens: Tensor, *how: Any
) -> tuple[Tensor, Tensor, Tensor]:
    """Run `dense_write_attention` on the given caches themselves, as a runner does."""
    caches = dense_write_in_place(k_cache, k, starts), dense_write_in_place(v_cache, v, starts)
    return dense_attention(q, *caches, seq_lens, *how), *caches
