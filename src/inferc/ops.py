"""Our ops: each with its schema, its reference in PyTorch and its fake kernel.

The reference is what correctness means for every backend. Rows are tokens: `[num_tokens, …]`, no batch axis,
except in the captured form of `attention`, which sees the tensors as the Hugging Face model makes them.

The canonical KV cache of one group is one tensor
`[num_blocks, num_layers_of_group, 2, block_size, num_kv_heads, head_dim]` (index 0 of axis 2 is K, 1 is V);
a backend may store the same bytes in another order and says so in `kv_layout`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

LIBRARY = torch.library.Library("inferc", "DEF")


Reference = TypeVar("Reference", bound=Callable[..., object])


def define(schema: str, fake: Callable[..., object]) -> Callable[[Reference], Reference]:
    """Register `schema` with the decorated function as reference and `fake` as its shape function."""
    name = schema.split("(", 1)[0]

    def register(reference: Reference) -> Reference:
        LIBRARY.define(schema)
        LIBRARY.impl(name, reference, "CompositeExplicitAutograd")
        torch.library.register_fake(f"inferc::{name}", fake, lib=LIBRARY)
        return reference

    return register


# ---------------------------------------------------------------------------------------------- norms


def _like_first(x: Tensor, *_args: object) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


@define(
    "rms_norm(Tensor x, Tensor weight, float eps, float weight_offset=0.0, bool round_before_scale=True) -> Tensor",
    _like_first,
)
def rms_norm(
    x: Tensor, weight: Tensor, eps: float, weight_offset: float = 0.0, round_before_scale: bool = True
) -> Tensor:
    """RMSNorm over the last axis, computed in float32.

    x, result [..., size]; weight [size]. `round_before_scale` rounds the normalised x to its dtype before the
    multiplication by the weight (Llama) instead of after it (Gemma, gpt-oss); `weight_offset` is added to the
    weight in float32 (Gemma: 1).

    Source: Zhang and Sennrich 2019, arXiv:1910.07467.
    """
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    if round_before_scale:
        normed = normed.to(x.dtype)
        scale = weight if weight_offset == 0.0 else (weight.float() + weight_offset).to(x.dtype)
        return (normed * scale).to(x.dtype)
    return (normed * (weight.float() + weight_offset)).to(x.dtype)


def _rms_norm_add_fake(x: Tensor, residual: Tensor, *_args: object) -> tuple[Tensor, Tensor]:
    return _like_first(x), _like_first(residual)


@define(
    "rms_norm_add(Tensor x, Tensor residual, Tensor weight, float eps, float weight_offset=0.0,"
    " bool round_before_scale=True) -> (Tensor, Tensor)",
    _rms_norm_add_fake,
)
def rms_norm_add(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    weight_offset: float = 0.0,
    round_before_scale: bool = True,
) -> tuple[Tensor, Tensor]:
    """`sum = x + residual` (rounded to their dtype) and its RMSNorm: returns (normed, sum)."""
    total = x + residual
    return rms_norm(total, weight, eps, weight_offset, round_before_scale), total


# ----------------------------------------------------------------------------------------------- rope


def _rope_table_fake(positions: Tensor, inv_freq: Tensor, scaling: float) -> Tensor:
    return inv_freq.new_empty((positions.shape[0], inv_freq.shape[0] * 2), dtype=torch.float32)


@define("rope_table(Tensor positions, Tensor inv_freq, float scaling) -> Tensor", _rope_table_fake)
def rope_table(positions: Tensor, inv_freq: Tensor, scaling: float) -> Tensor:
    """Cosines and sines of a step's positions, made once for all layers.

    positions [num_tokens] i64; inv_freq [rotary_dim / 2] float32; result [num_tokens, rotary_dim] float32:
    the first half cosines, the second half sines, both times `scaling` (YaRN's attention factor).
    """
    angle = positions.float()[:, None] * inv_freq.float()[None, :]
    return torch.cat((angle.cos() * scaling, angle.sin() * scaling), -1)


@define("rope(Tensor x, Tensor table, bool interleaved=False) -> Tensor", _like_first)
def rope(x: Tensor, table: Tensor, interleaved: bool = False) -> Tensor:
    """Rotate the first `rotary_dim` elements of every head, in float32, rounded once.

    x, result [num_tokens, heads, head_dim]; table from `rope_table`. Pairs are (i, i + rotary_dim / 2), or
    (2 i, 2 i + 1) when `interleaved`. Source: Su et al. 2021, arXiv:2104.09864.
    """
    half = table.shape[-1] // 2
    cos, sin = table[:, None, :half], table[:, None, half:]
    rotated, rest = x[..., : 2 * half].float(), x[..., 2 * half :]
    if interleaved:
        first, second = rotated[..., 0::2], rotated[..., 1::2]
    else:
        first, second = rotated[..., :half], rotated[..., half:]
    out_first, out_second = first * cos - second * sin, second * cos + first * sin
    if interleaved:
        out = torch.stack((out_first, out_second), -1).flatten(-2)
    else:
        out = torch.cat((out_first, out_second), -1)
    return torch.cat((out.to(x.dtype), rest), -1)


# ------------------------------------------------------------------------------------------ attention


def _attention_fake(q: Tensor, k: Tensor, v: Tensor, *_args: object) -> Tensor:
    if q.dim() == 3:
        return q.new_empty((*q.shape[:2], v.shape[2]))
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3]))


@define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? sinks, float scale, str mask, int window, float softcap) -> Tensor",
    _attention_fake,
)
def attention(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, scale: float, mask: str, window: int, softcap: float
) -> Tensor:
    """Attention as captured: what the Hugging Face model asked of its attention interface.

    q [batch, num_heads, T, head_dim]; k, v [batch, num_kv_heads, T, head_dim]; result [batch, T, num_heads, v_dim].
    Once the batch is flattened: q [T, num_heads, head_dim]; k, v [T, num_kv_heads, head_dim]; result
    [T, num_heads, v_dim].
    mask is "causal", "sliding" (the last `window` keys, the row's own included) or "chunked" (keys of the same
    chunk of `window`); window is 0 for "causal"; softcap 0.0 means none; sinks [num_heads] joins the softmax's sum.
    """
    if q.dim() == 3:
        q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
        return attention(q, k, v, sinks, scale, mask, window, softcap)[0]
    groups = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(groups, 1), v.repeat_interleave(groups, 1)
    scores = torch.matmul(q.float(), k.float().transpose(2, 3)) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    length = q.shape[2]
    rows = torch.arange(length, device=q.device)
    scores = scores.masked_fill(~visible(rows, rows, mask, window), float("-inf"))
    return _softmax(scores, sinks).matmul(v.float()).to(q.dtype).transpose(1, 2).contiguous()


def visible(queries: Tensor, keys: Tensor, mask: str, window: int) -> Tensor:
    """Which key positions each query position sees: bool [len(queries), len(keys)]."""
    query, key = queries[:, None], keys[None, :]
    seen = key <= query
    if mask == "sliding":
        seen = seen & (key > query - window)
    elif mask == "chunked":
        seen = seen & (torch.div(key, window, rounding_mode="floor") == torch.div(query, window, rounding_mode="floor"))
    return seen


def _softmax(scores: Tensor, sinks: Tensor | None) -> Tensor:
    """Softmax over the last axis of scores [..., heads, queries, keys]; sinks [heads] is one more, valueless key."""
    if sinks is None:
        return scores.softmax(-1)
    sink = sinks.float()[:, None, None].expand(*scores.shape[:-1], 1)
    return torch.cat((scores, sink), -1).softmax(-1)[..., :-1]


def _kv_write_fake(kv_cache: Tensor, *_args: object) -> Tensor:
    return torch.empty_like(kv_cache)


@define("kv_write(Tensor kv_cache, Tensor k, Tensor v, Tensor slot_mapping, int layer) -> Tensor", _kv_write_fake)
def kv_write(kv_cache: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor, layer: int) -> Tensor:
    """Write new K and V into their slots and return the cache: a new value in the graph, in place when run.

    kv_cache canonical (see the module); k, v [num_tokens, num_kv_heads, head_dim]; slot_mapping [num_tokens] i64;
    layer counts within the KV group.
    """
    return kv_write_in_place(kv_cache.clone(), k, v, slot_mapping, layer)


def kv_write_in_place(kv_cache: Tensor, k: Tensor, v: Tensor, slot_mapping: Tensor, layer: int) -> Tensor:
    """`kv_write` as a runner does it."""
    block_size = kv_cache.shape[3]
    block, offset = slot_mapping // block_size, slot_mapping % block_size
    kv_cache[block, layer, 0, offset] = k.to(kv_cache.dtype)
    kv_cache[block, layer, 1, offset] = v.to(kv_cache.dtype)
    return kv_cache


def _rope_kv_write_fake(
    q: Tensor, k: Tensor, v: Tensor, table: Tensor, kv_cache: Tensor, *_a: object
) -> tuple[Tensor, Tensor]:
    return _like_first(q), torch.empty_like(kv_cache)


@define(
    "rope_kv_write(Tensor q, Tensor k, Tensor v, Tensor table, Tensor kv_cache, Tensor slot_mapping, int layer,"
    " bool interleaved=False) -> (Tensor, Tensor)",
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
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """`rope` on q and k, then `kv_write`: returns (rotated q, cache)."""
    return rope(q, table, interleaved), kv_write(kv_cache, rope(k, table, interleaved), v, slot_mapping, layer)


def rope_kv_write_in_place(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    kv_cache: Tensor,
    slot_mapping: Tensor,
    layer: int,
    interleaved: bool = False,
) -> tuple[Tensor, Tensor]:
    """`rope_kv_write` as a runner does it."""
    written = kv_write_in_place(kv_cache, rope(k, table, interleaved), v, slot_mapping, layer)
    return rope(q, table, interleaved), written


def _paged_attention_fake(q: Tensor, *_args: object) -> Tensor:
    return _like_first(q)


@define(
    "paged_attention(Tensor q, Tensor kv_cache, Tensor block_table, Tensor query_start_loc, Tensor seq_lens,"
    " Tensor? sinks, int layer, float scale, str mask, int window, float softcap) -> Tensor",
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
) -> Tensor:
    """Attention of new queries over the paged cache, which holds their own K and V already.

    q, result [num_tokens, num_heads, head_dim]; kv_cache canonical (see the module); block_table
    [num_seqs, max_blocks] i32; query_start_loc [num_seqs + 1] i32; seq_lens [num_seqs] i32, this step included.
    The queries of a sequence are its last positions. Blocks of which none of them sees a token may be any: given
    back, their entries are 0. mask, window, softcap and sinks as in `attention`.

    Source: Kwon et al. 2023, arXiv:2309.06180, section 4.1.
    """
    block_size = kv_cache.shape[3]
    groups = q.shape[1] // kv_cache.shape[4]
    out = torch.empty_like(q)
    for seq in range(seq_lens.shape[0]):
        start, end, length = int(query_start_loc[seq]), int(query_start_loc[seq + 1]), int(seq_lens[seq])
        blocks = block_table[seq, : -(-length // block_size)].long()
        k, v = (
            kv_cache[blocks, layer, part].flatten(0, 1)[:length].float().repeat_interleave(groups, 1).transpose(0, 1)
            for part in (0, 1)
        )
        scores = torch.matmul(q[start:end].float().transpose(0, 1), k.transpose(1, 2)) * scale
        if softcap:
            scores = torch.tanh(scores / softcap) * softcap
        positions = torch.arange(length, device=q.device)
        seen = visible(positions[length - (end - start) :], positions, mask, window)
        scores = scores.masked_fill(~seen, float("-inf"))
        # What no query sees may lie in block 0, where anything is: 0 * NaN would be NaN.
        v = v.masked_fill(~seen.any(0)[:, None], 0.0)
        out[start:end] = _softmax(scores, sinks).matmul(v).transpose(0, 1).to(q.dtype)
    return out


# -------------------------------------------------------------------------------- activations, experts


@define("silu_mul(Tensor gate, Tensor up) -> Tensor", _like_first)
def silu_mul(gate: Tensor, up: Tensor) -> Tensor:
    """`silu(gate) * up` in float32, rounded once. gate, up, result [num_tokens, intermediate_size]."""
    return (torch.nn.functional.silu(gate.float()) * up.float()).to(gate.dtype)


def _moe_routing_fake(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    shape = (router_logits.shape[0], top_k)
    return router_logits.new_empty(shape, dtype=torch.int32), router_logits.new_empty(shape, dtype=torch.float32)


@define("moe_routing(Tensor router_logits, int top_k, bool renormalize) -> (Tensor, Tensor)", _moe_routing_fake)
def moe_routing(router_logits: Tensor, top_k: int, renormalize: bool) -> tuple[Tensor, Tensor]:
    """Softmax over experts in float32, the top_k largest, renormalised to sum 1 if asked.

    router_logits [num_tokens, num_experts]; result: expert ids [num_tokens, top_k] i32, falling by weight (equal
    weights: the lower id first), and their weights, float32.
    """
    probabilities = router_logits.float().softmax(-1)
    weights, ids = probabilities.sort(stable=True, dim=-1, descending=True)
    weights, ids = weights[:, :top_k], ids[:, :top_k]
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return ids.to(torch.int32), weights.contiguous()


def _moe_experts_fake(x: Tensor, *_args: object) -> Tensor:
    return _like_first(x)


@define(
    "moe_experts(Tensor x, Tensor expert_ids, Tensor expert_weights, Tensor gate_up, Tensor down) -> Tensor",
    _moe_experts_fake,
)
def moe_experts(x: Tensor, expert_ids: Tensor, expert_weights: Tensor, gate_up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU experts, summed by routing weight in float32, in rising expert id.

    x, result [num_tokens, hidden_size]; expert_ids, expert_weights [num_tokens, top_k]; gate_up
    [num_experts, 2 * intermediate_size, hidden_size], gate rows first; down [num_experts, hidden_size,
    intermediate_size].
    """
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for expert in range(gate_up.shape[0]):
        rows, choice = torch.where(expert_ids == expert)
        if rows.numel():
            gate, up = torch.nn.functional.linear(x[rows], gate_up[expert]).chunk(2, -1)
            result = torch.nn.functional.linear(silu_mul(gate, up), down[expert])
            out.index_add_(0, rows, result.float() * expert_weights[rows, choice].float()[:, None])
    return out.to(x.dtype)


# ------------------------------------------------------------------------------------------------ head


def _lm_head_fake(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return hidden.new_empty((hidden.shape[0], weight.shape[0]), dtype=torch.float32)


@define("lm_head(Tensor hidden, Tensor weight, Tensor? bias) -> Tensor", _lm_head_fake)
def lm_head(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Logits in float32, not rounded to the model's dtype. hidden [rows, hidden_size]; weight [vocab_size, hidden_size]."""
    return torch.nn.functional.linear(hidden.float(), weight.float(), None if bias is None else bias.float())
