"""The TensorRT layers of the dense KV cache and of attention over it.

A mask tells TensorRT's attention what each query sees, which holds whatever the kernel makes of `key_value_lengths`;
these lengths only say how much of the cache it need not read. TensorRT's own causal masks are not used: for a cache
that is longer than its contents they may count from the end of the cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import fx

from inferc.codegen.node_types import dtype_of
from inferc.codegen.tensorrt.network import Tensor, TensorRTNetwork
from inferc.ir.program import arguments


def rope_table(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    positions, inv_freq, scaling = arguments(node)
    column = net.view(net.wide(positions), -1, 1)
    angle = net.mul(column, net.wide(inv_freq))
    return net.times(net.concat([net.unary("COS", angle), net.unary("SIN", angle)], 1), scaling)


def _cos_and_sin(net: TensorRTNetwork, table: fx.Node) -> tuple[Tensor, Tensor]:
    """Return cos and sin, each [T, 1, rotary_dim / 2]; made once for all layers."""
    half = int(table.meta["val"].shape[-1]) // 2

    def make(start: int) -> Callable[[], Tensor]:
        return lambda: net.view(net.part(net.value(table), 1, start, start + half), -1, 1, half)

    return net.shared(("cos", table), make(0)), net.shared(("sin", table), make(half))


def rope(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    """Compute rope by elementwise layers.

    TensorRT's own layer documents neither the precision in which it computes nor where it rounds.
    """
    x, table, pairs = arguments(node)
    _, heads, head_dim = (int(size) if index else 0 for index, size in enumerate(x.meta["val"].shape))
    rotary_dim = int(table.meta["val"].shape[-1])
    half = rotary_dim // 2
    cos, sin = _cos_and_sin(net, table)
    value = net.value(x)
    rotated = net.cast(value if rotary_dim == head_dim else net.part(value, 2, 0, rotary_dim), torch.float32)
    if pairs == "halves":
        first, second = net.part(rotated, 2, 0, half), net.part(rotated, 2, half, rotary_dim)
    else:
        first, second = (net.part(rotated, 2, start, rotary_dim, 2) for start in (0, 1))
    turned = [
        net.elementwise("SUB", net.mul(first, cos), net.mul(second, sin)),
        net.plus(net.mul(second, cos), net.mul(first, sin)),
    ]
    if pairs == "neighbours":
        both = net.concat([net.view(each, -1, heads, half, 1) for each in turned], 3)
        made = net.view(both, -1, heads, rotary_dim)
    else:
        made = net.concat(turned, 2)
    made = net.cast(made, dtype_of(x))
    return made if rotary_dim == head_dim else net.concat([made, net.part(value, 2, rotary_dim, head_dim)], 2)


def _by_sequence(net: TensorRTNetwork, value: Tensor, heads: int, head_dim: int) -> Tensor:
    """Turn [T, heads, head_dim] into [num_seqs, heads, num_new, head_dim]."""
    return net.transpose(net.view(value, *_per_sequence(net), heads, head_dim), 0, 2, 1, 3)


def _per_sequence(net: TensorRTNetwork) -> tuple[Tensor, Tensor]:
    """Return num_seqs and num_new, which are known when the step runs."""

    def num_seqs() -> Tensor:
        return net.size(net.named_input("starts"), 0)

    def num_new() -> Tensor:
        num_tokens = net.size(net.named_input("positions"), 0)
        return net.elementwise("FLOOR_DIV", num_tokens, net.shared("num_seqs", num_seqs))

    return net.shared("num_seqs", num_seqs), net.shared("num_new", num_new)


def _as_int32(net: TensorRTNetwork, name: str) -> Tensor:
    return net.shared(("int32", name), lambda: net.cast(net.named_input(name), torch.int32))


def dense_write(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    """Write the new rows into the cache's memory: the caller must bind the output to the input."""
    cache, x, _ = arguments(node)
    heads, head_dim = (int(size) for size in x.meta["val"].shape[1:])
    rows = _by_sequence(net, net.cast(net.value(x), dtype_of(cache)), heads, head_dim)
    linear = net.trt.KVCacheMode.LINEAR
    return net.add("kv_cache_update", net.value(cache), rows, _as_int32(net, "starts"), linear)


def _mask(net: TensorRTNetwork, mask: str, window: int) -> Tensor:
    """Return which tokens of the cache each new token sees: bool [num_seqs, 1, num_new, capacity]."""

    def make() -> Tensor:
        num_seqs, num_new = _per_sequence(net)
        query = net.view(_as_int32(net, "positions"), num_seqs, 1, num_new, 1)
        key = net.constant(np.arange(net.capacity).reshape(1, 1, 1, -1), np.int32)

        def number(value: int) -> Tensor:
            return net.number(value, 4, torch.int32)

        seen = net.elementwise("LESS", key, net.plus(query, number(1)))
        if mask == "sliding":
            oldest = net.elementwise("SUB", query, number(window))
            seen = net.elementwise("AND", seen, net.elementwise("GREATER", key, oldest))
        elif mask == "chunked":
            chunks = (net.elementwise("FLOOR_DIV", each, number(window)) for each in (key, query))
            seen = net.elementwise("AND", seen, net.elementwise("EQUAL", *chunks))
        return seen

    return net.shared(("mask", mask, window), make)


def _back(net: TensorRTNetwork, value: Tensor) -> Tensor:
    """Turn [num_seqs, heads, num_new, v_dim] into [T, heads, v_dim]."""
    heads, v_dim = int(value.shape[1]), int(value.shape[3])
    return net.view(net.transpose(value, 0, 2, 1, 3), -1, heads, v_dim)


def dense_attention(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    """Compute attention by TensorRT's fused layer, which applies no scale: the queries are scaled before."""
    q, k_cache, v_cache, _, _, scale, mask, window, _ = arguments(node)
    heads, head_dim = (int(size) for size in q.meta["val"].shape[1:])
    scaled = net.cast(net.times(net.wide(q), scale), dtype_of(q))
    queries, seen, seq_lens = (
        _by_sequence(net, scaled, heads, head_dim),
        _mask(net, mask, window),
        _as_int32(net, "seq_lens"),
    )
    trt = net.trt
    attention = net.layer(
        "attention_v2",
        queries,
        net.value(k_cache),
        net.value(v_cache),
        trt.AttentionNormalizationOp.SOFTMAX,
        trt.CausalMaskKind.NONE,
    )
    attention.mask, attention.key_value_lengths = seen, seq_lens
    return _back(net, attention.get_output(0))


def spelled_attention(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    """Compute attention as products and a softmax in float32.

    This is for float32 models, heads that are too large for the fused layer, softcaps and sinks.
    """
    q, k_cache, v_cache, _, sinks, scale, mask, window, softcap = arguments(node)
    keys, values = (net.wide(each) for each in (k_cache, v_cache))
    return _spelled(net, q, keys, values, sinks, scale, mask, window, softcap)


def spelled_latent_attention(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    """Compute attention over latents, whose first `v_dim` elements are the values."""
    q, cache, _, scale, mask, window, softcap, v_dim = arguments(node)
    keys = net.wide(cache)
    return _spelled(net, q, keys, net.part(keys, 3, 0, v_dim), None, scale, mask, window, softcap)


def _spelled(
    net: TensorRTNetwork,
    q: fx.Node,
    keys: Tensor,
    values: Tensor,
    sinks: fx.Node | None,
    scale: float,
    mask: str,
    window: int,
    softcap: float,
) -> Tensor:
    """Compute attention as products and a softmax in float32.

    The heads that share K and V are taken together, as more queries: [num_seqs, num_kv_heads, group * num_new, …].
    """
    heads, head_dim = (int(size) for size in q.meta["val"].shape[1:])
    kv_heads, v_dim = int(keys.shape[1]), int(values.shape[3])
    num_seqs, num_new = _per_sequence(net)
    group = net.shared(
        ("rows of a KV head", heads // kv_heads),
        lambda: net.elementwise("PROD", num_new, net.constant([heads // kv_heads])),
    )
    queries = _by_sequence(net, net.wide(q), heads, head_dim)
    scores = net.matmul(net.view(queries, num_seqs, kv_heads, group, head_dim), keys, transposed=True)
    scores = net.times(scores, scale)
    if softcap:
        scores = net.times(net.activation("TANH", net.times(scores, 1.0 / softcap)), softcap)
    scores = net.view(scores, num_seqs, heads, num_new, net.capacity)
    scores = net.where(_mask(net, mask, window), scores, net.number(-math.inf, 4))
    weights = net.softmax(scores, 3) if sinks is None else _softmax_with_sinks(net, scores, sinks)
    weights = net.view(weights, num_seqs, kv_heads, group, net.capacity)
    out = net.view(net.matmul(weights, values), num_seqs, heads, num_new, v_dim)
    return net.cast(_back(net, out), dtype_of(q))


def _softmax_with_sinks(net: TensorRTNetwork, scores: Tensor, sinks: fx.Node) -> Tensor:
    """Return the softmax over the last axis with one more key without a value for each head.

    The scores are [num_seqs, heads, num_new, capacity].
    """
    sink = net.view(net.wide(sinks), 1, -1, 1, 1)
    most = net.elementwise("MAX", net.reduce("MAX", scores, 3), sink)
    raised = net.unary("EXP", net.elementwise("SUB", scores, most))
    total = net.plus(net.reduce("SUM", raised, 3), net.unary("EXP", net.elementwise("SUB", sink, most)))
    return net.elementwise("DIV", raised, total)
