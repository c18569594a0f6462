"""The functions that write each op of a lowered program as ONNX ops, named by `emit` of the kernel table.

The step's rows are tokens, `[T, …]` with T = num_seqs * num_new; only attention needs to know which rows are of one
sequence.
"""

from __future__ import annotations

import ast
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from torch import fx

from inferc.codegen.onnx.graph import MICROSOFT, OnnxGraph
from inferc.ir.ops.pointwise import parse, walk
from inferc.ir.program import arguments, named_arguments

INT64_MAX = (1 << 63) - 1


def _dtype(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def _rank(node: fx.Node) -> int:
    rank: int = node.meta["val"].dim()
    return rank


# ------------------------------------------------------------------------------------------------- plain


def embedding(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    weight, ids, *_ = arguments(node)
    return graph.op("Gather", graph.value(weight), graph.value(ids), axis=0)


def index_select(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    x, axis, rows = arguments(node)
    return graph.op("Gather", graph.value(x), graph.value(rows), axis=axis)


def cat(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    parts, axis = arguments(node)
    return graph.op("Concat", *(graph.value(each) for each in parts), axis=axis)


def _other(graph: OnnxGraph, node: fx.Node, other: Any) -> ir.Value:
    if isinstance(other, fx.Node):
        value: ir.Value = graph.value(other)
        return value
    return graph.cast(graph.constant(other, np.float32), torch.float32, _dtype(node))


def add(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    x, other, alpha = arguments(node)
    value = _other(graph, node, other)
    return graph.op("Add", graph.value(x), value if alpha == 1 else graph.op("Mul", value, _other(graph, node, alpha)))


def mul(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    x, other = arguments(node)
    return graph.op("Mul", graph.value(x), _other(graph, node, other))


def view(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    x, _ = arguments(node)
    return graph.reshape(graph.value(x), -1, *(int(size) for size in node.meta["val"].shape[1:]))


def part(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    """Return the part of a node with several results that a `getitem` node selects."""
    source, index = node.args
    found: ir.Value = graph.value(source)[index]
    return found


def part_of(graph: OnnxGraph, value: ir.Value, axis: int, start: int, end: int, step: int = 1) -> ir.Value:
    where = (graph.constant([each]) for each in (start, end, axis, step))
    return graph.op("Slice", value, *where)


def slice_(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    x, axis, start, end, step = arguments(node)
    return part_of(graph, graph.value(x), axis, start or 0, INT64_MAX if end is None else end, step)


# ---------------------------------------------------------------------------------------------- products


def _linear(graph: OnnxGraph, x: fx.Node, weight: fx.Node, bias: fx.Node | None, dtype: torch.dtype) -> ir.Value:
    """Multiply x [..., k] by weight [n, k], in `dtype`."""
    rows, matrix = (graph.cast(graph.value(each), _dtype(each), dtype) for each in (x, weight))
    offset = None if bias is None else graph.cast(graph.value(bias), _dtype(bias), dtype)
    if _rank(x) == 2:
        return graph.op("Gemm", rows, matrix, offset, transB=1)
    product = graph.op("MatMul", rows, graph.op("Transpose", matrix, perm=[1, 0]))
    return product if offset is None else graph.op("Add", product, offset)


def linear(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    x, weight, bias = arguments(node)
    return _linear(graph, x, weight, bias, _dtype(node))


def linear_wide(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    x, weight = arguments(node)
    return _linear(graph, x, weight, None, torch.float32)


def lm_head(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    hidden, weight, bias = arguments(node)
    return _linear(graph, hidden, weight, bias, torch.float32)


def head_linear(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    """Multiply [T, heads, k] by [heads, n, k]: one matrix product for each head."""
    x, weight = arguments(node)
    heads_first = graph.op("Transpose", graph.value(x), perm=[1, 0, 2])
    product = graph.op("MatMul", heads_first, graph.op("Transpose", graph.value(weight), perm=[0, 2, 1]))
    return graph.op("Transpose", product, perm=[1, 0, 2])


# ------------------------------------------------------------------------------------------------- norms


def rms_norm(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    x, weight, eps, weight_offset, round_before_scale = arguments(node)
    dtype, size = _dtype(x), int(x.meta["val"].shape[-1])
    if weight is None:
        scale = graph.constant([1.0] * size, np.float32)
    else:
        scale = graph.wide(weight)
        if weight_offset:
            scale = graph.op("Add", scale, graph.constant(weight_offset, np.float32))
    if round_before_scale and weight is not None and dtype != torch.float32:
        ones = graph.cast(graph.constant([1.0] * size, np.float32), torch.float32, dtype)
        normed = graph.op("RMSNormalization", graph.value(x), ones, axis=-1, epsilon=eps, stash_type=1)
        return graph.op("Mul", normed, graph.cast(scale, torch.float32, dtype))
    wide = graph.cast(graph.value(x), dtype, torch.float32)
    normed = graph.op("RMSNormalization", wide, scale, axis=-1, epsilon=eps, stash_type=1)
    return graph.cast(normed, torch.float32, dtype)


def layer_norm(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    x, weight, bias, eps = arguments(node)
    dtype, size = _dtype(x), int(x.meta["val"].shape[-1])
    wide = graph.cast(graph.value(x), dtype, torch.float32)
    scale = graph.constant([1.0] * size, np.float32)
    if weight is not None and _rank(weight) == 1:
        scale = graph.wide(weight)
    offset = None
    if bias is not None and _rank(bias) == 1:
        offset = graph.wide(bias)
    made = graph.op("LayerNormalization", wide, scale, offset, axis=-1, epsilon=eps, stash_type=1)
    if weight is not None and _rank(weight) == 2:  # each head has its own weight
        made = graph.op("Mul", made, graph.wide(weight))
    if bias is not None and _rank(bias) == 2:
        made = graph.op("Add", made, graph.wide(bias))
    return graph.cast(made, torch.float32, dtype)


# ------------------------------------------------------------------------------------------- elementwise


def activate(graph: OnnxGraph, value: ir.Value, name: str) -> ir.Value:
    """Apply an activation to a value; `name` is silu, gelu or gelu_tanh."""
    if name == "silu":
        return graph.op("Mul", value, graph.op("Sigmoid", value))
    return graph.op("Gelu", value, approximate="tanh" if name == "gelu_tanh" else "none")


def _gated(graph: OnnxGraph, gate: fx.Node, up: fx.Node, activation: str) -> ir.Value:
    """Compute `activation(gate) * up` in float32, rounded once."""
    dtype = _dtype(gate)
    wide, other = (graph.cast(graph.value(each), dtype, torch.float32) for each in (gate, up))
    return graph.cast(graph.op("Mul", activate(graph, wide, activation), other), torch.float32, dtype)


def silu_mul(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    gate, up = arguments(node)
    return _gated(graph, gate, up, "silu")


def gelu_mul(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    gate, up, approximate = arguments(node)
    return _gated(graph, gate, up, "gelu_tanh" if approximate == "tanh" else "gelu")


_FUNCTIONS = {
    "abs": "Abs",
    "erf": "Erf",
    "exp": "Exp",
    "floor": "Floor",
    "log": "Log",
    "max": "Max",
    "min": "Min",
    "sigmoid": "Sigmoid",
    "sqrt": "Sqrt",
    "tanh": "Tanh",
    "where": "Where",
}
_OPERATORS: dict[type[ast.AST], str] = {
    ast.Add: "Add",
    ast.Sub: "Sub",
    ast.Mult: "Mul",
    ast.Div: "Div",
    ast.Lt: "Less",
    ast.Gt: "Greater",
}


def pointwise(graph: OnnxGraph, node: fx.Node) -> ir.Value:
    inputs, expression, dtype = arguments(node)
    names: dict[str, ir.Value] = {f"x{index}": graph.wide(each) for index, each in enumerate(inputs)}

    def call(name: str, args: list[ir.Value]) -> ir.Value:
        if name in ("silu", "gelu", "gelu_tanh"):
            return activate(graph, args[0], name)
        if name == "rsqrt":
            return graph.op("Reciprocal", graph.op("Sqrt", *args))
        return graph.op(_FUNCTIONS[name], *args)

    def fold(each: ast.expr) -> ir.Value:
        made: ir.Value = walk(
            each,
            names,
            lambda number: graph.constant(number, np.float32),
            call,
            lambda kind, left, right: graph.op(_OPERATORS[kind], left, right),
        )
        return made

    named, result = parse(expression)
    for name, each in named:
        names[name] = fold(each)
    return graph.cast(fold(result), torch.float32, dtype)


# -------------------------------------------------------------------------------------------------- rope


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
    dtype, rotary_dim = _dtype(x), int(table.meta["val"].shape[-1])
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


# --------------------------------------------------------------------------------------------- attention


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
    rows = _by_sequence(graph, graph.cast(graph.value(x), _dtype(x), _dtype(cache)), heads, head_dim)
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
        value = graph.cast(graph.value(named[name]), _dtype(named[name]), _dtype(k_cache))
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
        None if sinks is None else graph.cast(graph.value(sinks), _dtype(sinks), _dtype(k_cache)),
        count=3,
        domain=MICROSOFT,
        **how,
    )
    out = graph.cast(graph.reshape(out, -1, heads, head_dim), _dtype(k_cache), _dtype(q))
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
    wide, wide_keys, wide_values = (graph.cast(each, _dtype(q), torch.float32) for each in (queries, keys, values))
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
    return graph.cast(out, torch.float32, _dtype(q))
