"""Attention as ONNX ops: rotary embeddings, writes of the dense KV cache, attention over it.

The step's rows are tokens, `[T, …]` with T = num_seqs * num_new; only attention needs to know which rows are of one
sequence.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from inferc.codegen.node_types import dtype_of
from inferc.codegen.onnx.calls.elementwise import part_of
from inferc.codegen.onnx.graph import MICROSOFT, OnnxGraph
from inferc.ir.program import arguments, named_arguments


def rope_table(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    positions, inv_freq, scaling = arguments(node)
    column = graph.reshape(graph.wide(positions), -1, 1)
    angle = graph.op("Mul", column, graph.wide(inv_freq))
    table = graph.op("Concat", graph.op("Cos", angle), graph.op("Sin", angle), axis=1)
    return table if scaling == 1.0 else graph.op("Mul", table, graph.constant(scaling, np.float32))


def _cos_and_sin(graph: OnnxGraph, table: fx.Node) -> tuple[ir.Value, ir.Value]:
    """Return cos and sin, each [T, 1, rotary_dim / 2] as RotaryEmbedding takes them; made once for all layers."""
    half = int(table.meta["val"].shape[-1]) // 2
    cos, sin = (
        graph.shared(
            ("rope", table.name, start),
            lambda start=start: graph.reshape(  # type: ignore[misc]
                part_of(graph, graph.value(table), 1, start, start + half), -1, 1, half
            ),
        )
        for start in (0, half)
    )
    return cos, sin


def rope(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    """Write rope as RotaryEmbedding on rows [T, 1, heads * head_dim].

    Each token is a batch of its own with one position, so that no axis has to move.
    """
    x, table, pairs = arguments(node)
    _, heads, head_dim = x.meta["val"].shape
    dtype, rotary_dim = dtype_of(x), int(table.meta["val"].shape[-1])
    cos, sin = _cos_and_sin(graph, table)
    rows = graph.cast(graph.reshape(graph.value(x), -1, 1, int(heads * head_dim)), dtype, torch.float32)
    if pairs == "neighbours_to_halves":  # reorder, so that the pairs lie in two halves
        order = [*range(0, rotary_dim, 2), *range(1, rotary_dim, 2), *range(rotary_dim, int(head_dim))]
        whole = [int(head_dim) * head + place for head in range(heads) for place in order]
        rows = graph.op("Gather", rows, graph.constant(whole), axis=2)
    turned = graph.op(
        "RotaryEmbedding",
        rows,
        cos,
        sin,
        interleaved=int(pairs == "neighbours"),
        num_heads=int(heads),
        rotary_embedding_dim=0 if rotary_dim == head_dim else rotary_dim,
    )
    return graph.reshape(graph.cast(turned, torch.float32, dtype), -1, int(heads), int(head_dim))


def _shape_by_sequence(graph: OnnxGraph, *sizes: int) -> ir.Value:
    """Return the shape [num_seqs, *sizes] as a value of the graph."""
    return graph.shared(
        ("by sequence", sizes),
        lambda: graph.op("Concat", graph.op("Shape", graph.named_input("starts")), graph.constant(sizes), axis=0),
    )


def _by_sequence(graph: OnnxGraph, value: ir.Value, heads: int, head_dim: int) -> ir.Value:
    """Turn [T, heads, head_dim] into [num_seqs, heads, num_new, head_dim]."""
    split = graph.op("Reshape", value, _shape_by_sequence(graph, -1, heads, head_dim))
    return graph.op("Transpose", split, perm=[0, 2, 1, 3])


def dense_write(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    cache, x, starts = arguments(node)
    _, heads, head_dim = (int(size) if index else 0 for index, size in enumerate(x.meta["val"].shape))
    rows = _by_sequence(graph, graph.cast(graph.value(x), dtype_of(x), dtype_of(cache)), heads, head_dim)
    return graph.op("TensorScatter", graph.value(cache), rows, graph.value(starts), axis=2, mode="linear")


def _mask(graph: OnnxGraph, cache: ir.Value, mask: str, window: int) -> ir.Value:
    """Return which tokens of the cache each new token sees: bool [num_seqs, 1, num_new, capacity]."""

    def make() -> ir.Value:
        query = graph.op("Reshape", graph.named_input("positions"), _shape_by_sequence(graph, 1, -1, 1))
        capacity = graph.op("Squeeze", graph.op("Shape", cache, start=2, end=3), graph.constant([0]))
        key = graph.op("Range", graph.constant(0), capacity, graph.constant(1))
        seen = graph.op("LessOrEqual", key, query)
        if mask == "sliding":
            oldest = graph.op("Sub", query, graph.constant(window))
            seen = graph.op("And", seen, graph.op("Greater", key, oldest))
        elif mask == "chunked":
            size = graph.constant(window)
            same = graph.op("Equal", graph.op("Div", key, size), graph.op("Div", query, size))
            seen = graph.op("And", seen, same)
        return seen

    return graph.shared(("mask", mask, window), make)


def dense_attention(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    q, k_cache, v_cache, seq_lens, sinks, scale, mask, window, softcap = arguments(node)
    keys, values = graph.value(k_cache), graph.value(v_cache)
    return _attention(graph, node, q, keys, values, seq_lens, sinks, scale, mask, window, softcap)


def dense_write_attention(graph: OnnxGraph, node: fx.Node) -> Sequence[ir.Value]:
    """Write attention as onnxruntime's GroupQueryAttention, on rows [num_seqs, num_new, heads * head_dim]."""
    named = named_arguments(node)
    q, k_cache = named["q"], named["k_cache"]
    heads, head_dim = (int(size) for size in q.meta["val"].shape[1:])
    kv_heads = int(k_cache.meta["val"].shape[1])

    def rows(name: str, heads: int) -> ir.Value:
        value = graph.cast(graph.value(named[name]), dtype_of(named[name]), dtype_of(k_cache))
        return graph.op("Reshape", value, _shape_by_sequence(graph, -1, heads * head_dim))

    def last() -> ir.Value:  # the index of each sequence's last token
        return graph.op("Cast", graph.op("Sub", lengths, graph.constant(1)), to=ir.DataType.INT32.value)

    def longest() -> ir.Value:
        return graph.op("Cast", graph.op("ReduceMax", lengths, keepdims=0), to=ir.DataType.INT32.value)

    lengths, sinks = graph.value(named["seq_lens"]), named["sinks"]
    how: dict[str, Any] = {"num_heads": heads, "kv_num_heads": kv_heads, "scale": named["scale"]}
    if named["mask"] == "sliding":
        how["local_window_size"] = named["window"]
    if named["softcap"]:
        how["softcap"] = named["softcap"]
    out, keys, values = graph.ops(
        "GroupQueryAttention",
        rows("q", heads),
        rows("k", kv_heads),
        rows("v", kv_heads),
        graph.value(k_cache),
        graph.value(named["v_cache"]),
        graph.shared(("last", lengths.name), last),
        graph.shared(("longest", lengths.name), longest),
        None,
        None,
        None,
        None,
        None if sinks is None else graph.cast(graph.value(sinks), dtype_of(sinks), dtype_of(k_cache)),
        count=3,
        domain=MICROSOFT,
        **how,
    )
    out = graph.cast(graph.reshape(out, -1, heads, head_dim), dtype_of(k_cache), dtype_of(q))
    return out, keys, values


def dense_latent_attention(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    q, cache, seq_lens, scale, mask, window, softcap, v_dim = arguments(node)
    keys = graph.value(cache)
    values = part_of(graph, keys, 3, 0, v_dim)
    return _attention(graph, node, q, keys, values, seq_lens, None, scale, mask, window, softcap)


def _attention(
    graph: OnnxGraph,
    node: fx.Node,
    q: fx.Node,
    keys: ir.Value,
    values: ir.Value,
    seq_lens: fx.Node,
    sinks: fx.Node | None,
    scale: float,
    mask: str,
    window: int,
    softcap: float,
) -> ir.Value:
    heads, head_dim = (int(size) for size in q.meta["val"].shape[1:])
    v_dim = int(node.meta["val"].shape[2])
    queries = _by_sequence(graph, graph.value(q), heads, head_dim)
    how: dict[str, Any] = {"scale": scale, **({"softcap": softcap} if softcap else {})}
    if sinks is not None:
        made = _with_sinks(graph, queries, keys, values, sinks, q, scale, mask, window, softcap)
    elif mask == "causal":
        made = graph.op("Attention", queries, keys, values, None, None, None, graph.value(seq_lens), is_causal=1, **how)
    else:
        made = graph.op("Attention", queries, keys, values, _mask(graph, keys, mask, window), **how)
    return graph.reshape(graph.op("Transpose", made, perm=[0, 2, 1, 3]), -1, heads, v_dim)


def _with_sinks(
    graph: OnnxGraph,
    queries: ir.Value,
    keys: ir.Value,
    values: ir.Value,
    sinks: fx.Node,
    q: fx.Node,
    scale: float,
    mask: str,
    window: int,
    softcap: float,
) -> ir.Value:
    """Compute attention whose softmax has one more key without a value for each head: no op has that.

    The heads that share K and V are taken together, as more queries: [num_seqs, num_kv_heads, group * num_new, …].
    """
    heads, head_dim = (int(size) for size in q.meta["val"].shape[1:])
    kv_heads = int(keys.shape[1])  # type: ignore[index,arg-type]
    wide, wide_keys, wide_values = (graph.cast(each, dtype_of(q), torch.float32) for each in (queries, keys, values))
    outer = part_of(graph, graph.op("Shape", queries), 0, 0, 3)  # num_seqs, heads, num_new

    def behind(*sizes: ir.Value) -> ir.Value:
        return graph.op("Concat", *sizes, axis=0)

    grouped = graph.reshape(wide, 0, kv_heads, -1, head_dim)
    scores = graph.op("MatMul", grouped, graph.op("Transpose", wide_keys, perm=[0, 1, 3, 2]))
    scores = graph.op("Mul", scores, graph.constant(scale, np.float32))
    if softcap:
        cap = graph.constant(softcap, np.float32)
        scores = graph.op("Mul", graph.op("Tanh", graph.op("Div", scores, cap)), cap)
    scores = graph.op("Reshape", scores, behind(outer, graph.constant([-1])))
    scores = graph.op("Where", _mask(graph, keys, mask, window), scores, graph.constant(-math.inf, np.float32))
    column = graph.reshape(graph.wide(sinks), 1, heads, 1, 1)
    sink = graph.op("Expand", column, behind(outer, graph.constant([1])))
    weights = part_of(graph, graph.op("Softmax", graph.op("Concat", scores, sink, axis=3), axis=3), 3, 0, -1)
    capacity = graph.op("Shape", keys, start=2, end=3)
    grouped_shape = behind(part_of(graph, outer, 0, 0, 1), graph.constant([kv_heads, -1]), capacity)
    out = graph.op("MatMul", graph.op("Reshape", weights, grouped_shape), wide_values)
    out = graph.op("Reshape", out, behind(outer, graph.constant([-1])))
    return graph.cast(out, torch.float32, dtype_of(q))
