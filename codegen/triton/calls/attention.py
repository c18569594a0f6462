"""The launches of attention: rotary embeddings, writes of the KV cache, paged attention."""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
from torch import fx

from inferc.codegen.triton.calls.builder import ROWS, Builder, Call
from inferc.codegen.triton.kernels import (
    attention_decode,
    attention_plan,
    attention_prefill,
    attention_tiles,
    kv_write,
    rms_norm,
    rope,
    rope_apply,
)
from inferc.codegen.values import Operand, Values
from inferc.ir.program import dtype_name
from inferc.manifest import FAST, INVARIANT, PREFILL, SHARED
from inferc.manifest_types import Scratch, Where

NUM_PROGRAMS = 296  # the most programs of decode attention on any chip: see `occupancy.PROGRAMS`


def rope_table(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    b.input("positions_ptr", "positions")
    b.weight("inv_freq_ptr", "inv_freq")
    out = b.write("out_ptr")
    return b.done("rope_table", out, rope.rope_table(out.width // 2, out.stride, float(b.arg("scaling"))))


def rope_kv_write(node: fx.Node, values: Values) -> Call:
    return _rope_kv_write(Builder(node, values), 0.0, 0.0, 0)


def norm_rope_kv_write(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    b.weight("q_weight_ptr", "q_weight")
    b.weight("k_weight_ptr", "k_weight")
    how = rms_norm.weight_order(True, bool(b.arg("round_before_scale")))
    return _rope_kv_write(b, float(b.arg("eps")), float(b.arg("weight_offset")), how)


def _rope_kv_write(b: Builder, eps: float, offset: float, how: int) -> Call:
    q, k, v = (b.read(f"{name}_ptr", name) for name in ("q", "k", "v"))
    table = b.read("table_ptr", "table")
    layers, block_size = b.cache("cache_ptr")
    b.input("slots_ptr", "slot_mapping")
    out = b.write("out_ptr", 0)
    _, heads, dim = b.arg("q").meta["val"].shape
    kv_heads = int(b.arg("k").meta["val"].shape[1])
    strides = (q.stride, k.stride, v.stride, table.stride, out.stride)
    source = rope.rope_kv_write(
        dtype_name(out.dtype),
        int(heads),
        kv_heads,
        int(dim),
        table.width // 2,
        str(b.arg("pairs")),
        strides,
        layers,
        block_size,
        eps,
        offset,
        how,
        b.unaligned(),
        b.arg("kv_cache").meta["val"].dtype == torch.int8,
    )
    return b.done("rope_kv_write", out, source)


def paged_attention_(node: fx.Node, values: Values) -> tuple[Call, ...]:
    b = Builder(node, values)
    q, out = b.read("q_ptr", "q"), b.write("out_ptr")
    cache = b.arg("kv_cache").meta["val"]
    layers, block_size = b.cache("cache_ptr")
    for name, of in (("block_table", "block_table"), ("query_start", "query_start_loc"), ("seq_lens", "seq_lens")):
        b.input(f"{name}_ptr", of)
    has_sinks, has_alibi = b.weight("sinks_ptr", "sinks"), b.weight("alibi_ptr", "alibi")
    b.arguments["max_blocks_ptr"] = Where(input=f"max_blocks_{values.cache_group(b.arg('kv_cache'))}")
    _, heads, dim = (int(size) if at else 0 for at, size in enumerate(b.arg("q").meta["val"].shape))
    kv_heads, mask, window = int(cache.shape[4]), str(b.arg("mask")), int(b.arg("window"))
    shape = attention_tiles.AttentionShape(
        dtype=dtype_name(out.dtype),
        heads=heads,
        kv_heads=kv_heads,
        dim=dim,
        strides=(q.stride, out.stride),
        layers=layers,
        block_size=block_size,
        scale=float(b.arg("scale")),
        softcap=float(b.arg("softcap")),
        mask=mask,
        window=window,
        has_sinks=has_sinks,
        int8_kv=cache.dtype == torch.int8,
        has_alibi=has_alibi,
    )
    kind = hashlib.sha256(repr((heads, kv_heads, dim, mask, window)).encode()).hexdigest()[:6]
    group = values.cache_group(b.arg("kv_cache"))
    cells = attention_plan.invariant_cells(mask, window, values.program.info.max_model_len)
    prefix = [_prefix_attention(b, out, shape, group, kind)] if mask == "causal" and not has_alibi else []
    made = [
        *prefix,
        _decode_attention(b, out, shape, group, kind, attention_plan.TILES, order=FAST),
        _decode_attention(b, out, shape, group, f"{kind}_in_cells", cells, order=INVARIANT),
    ]
    for order, each in ((FAST, attention_plan.TILES), (INVARIANT, cells)):
        prefill = attention_prefill.prefill_attention(shape, each)
        made.append(b.done("prefill_attention", out, prefill, only=PREFILL, order=order))
    return tuple(made)


def _decode_attention(
    b: Builder,
    out: Operand,
    shape: attention_tiles.AttentionShape,
    cache_group: int,
    kind: str,
    cells: attention_plan.Cells,
    order: str,
) -> Call:
    """Return the decode call of the attention whose operands `b` holds.

    In the fast order, it also reads the partial results that `_prefix_attention` made of the prefixes of groups of
    sequences.
    """
    has_shared = order == FAST and shape.mask == "causal" and not shape.has_alibi
    partial = attention_decode.partial_bytes(attention_tiles.decode_rows(shape.group), shape.dim, NUM_PROGRAMS, cells)
    planned = attention_plan.attention_plan(
        shape.kv_heads,
        attention_tiles.query_limit(shape.group),
        shape.mask,
        shape.window,
        NUM_PROGRAMS,
        cells,
        has_shared,
    )
    places, scratch = _of_plan(kind, partial)
    shared = {}
    if has_shared:
        shared = {"shared_ptr": Where(input=f"shared_{cache_group}")}
        places["prefix_ptr"] = Where(scratch=f"prefix_{kind}")
        scratch[f"prefix_{kind}"] = Scratch(per_seq=attention_decode.prefix_bytes(shape.heads, shape.dim))
    lengths = {name: b.arguments[name] for name in ("query_start_ptr", "seq_lens_ptr")}
    before = Builder(b.node, b.values, {**lengths, **shared, "plan_ptr": places["plan_ptr"]})
    begin = replace(before.done("attention_plan", out, planned, order=order), node=None)
    source = attention_decode.decode_attention(shape, NUM_PROGRAMS, cells, has_shared)
    each = Builder(b.node, b.values, {**b.arguments, **places, **shared}, b.writes)
    return each.done("decode_attention", out, source, order=order, scratch=scratch, begin=(begin,))


def _prefix_attention(
    b: Builder, out: Operand, shape: attention_tiles.AttentionShape, cache_group: int, kind: str
) -> Call:
    """Return the call that attends to the keys that groups of sequences share.

    Only steps with such groups launch it. The host lists the groups in a `SharedPrefixes`.
    """
    rows = attention_decode.prefix_rows(shape.group, shape.dim, shape.int8_kv)
    members = attention_decode.prefix_members(shape.group, shape.dim, shape.int8_kv)
    partial = attention_decode.partial_bytes(rows, shape.dim, NUM_PROGRAMS)
    places, scratch = _of_plan(f"{kind}_prefix", partial)
    counts = {"counts_ptr": Where(input=f"group_counts_{cache_group}")}
    lengths = {"seq_lens_ptr": Where(input=f"group_keys_{cache_group}")}
    starts = Where(input=f"member_start_{cache_group}")
    before = Builder(b.node, b.values, {**lengths, "query_start_ptr": starts, "plan_ptr": places["plan_ptr"]})
    planned = attention_plan.attention_plan(shape.kv_heads, members, shape.mask, shape.window, NUM_PROGRAMS)
    begin = replace(before.done("attention_plan", out, planned, order=FAST, only=SHARED), node=None)
    begin = replace(begin, arguments={**begin.arguments, **counts})
    places |= {"members_ptr": Where(input=f"members_{cache_group}"), "member_start_ptr": starts}
    places["prefix_ptr"] = Where(scratch=f"prefix_{kind}")
    arguments = {name: at for name, at in b.arguments.items() if name not in ("seq_lens_ptr", "out_ptr")}
    each = Builder(b.node, b.values, {**arguments, **lengths, **places})
    source = attention_decode.prefix_attention(shape, NUM_PROGRAMS)
    call = each.done("prefix_attention", out, source, order=FAST, only=SHARED, scratch=scratch, begin=(begin,))
    return replace(call, arguments={**call.arguments, **counts})


def _of_plan(kind: str, partial_bytes: int) -> tuple[dict[str, Where], dict[str, Scratch]]:
    """Return the arguments that place the scratch memory of a plan and its partial results, and its sizes."""
    none = attention_plan.plan_bytes(0)
    scratch = {
        f"plan_{kind}": Scratch(const=none, per_seq=attention_plan.plan_bytes(1) - none),
        f"partial_{kind}": Scratch(const=partial_bytes),
        f"arrived_{kind}": Scratch(const=4 * NUM_PROGRAMS),
    }
    return {f"{name.split('_')[0]}_ptr": Where(scratch=name) for name in scratch}, scratch


def rope_(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, table, out = b.read("x_ptr", "x"), b.read("table_ptr", "table"), b.write("out_ptr")
    _, heads, dim = node.meta["val"].shape
    source = rope_apply.rope_apply(
        dtype_name(out.dtype),
        ROWS[out.pool],
        int(heads),
        int(dim),
        table.width // 2,
        str(b.arg("pairs")),
        (x.stride, table.stride, out.stride),
        b.unaligned(),
    )
    return b.done("rope", out, source)


def kv_write_(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    k, v = b.read("k_ptr", "k"), b.read("v_ptr", "v")
    layers, block_size = b.cache("cache_ptr")
    b.input("slots_ptr", "slot_mapping")
    _, kv_heads, dim = b.arg("k").meta["val"].shape
    source = kv_write.kv_write(
        dtype_name(k.dtype),
        int(kv_heads),
        int(dim),
        (k.stride, v.stride),
        layers,
        block_size,
        b.unaligned(),
    )
    return b.done("kv_write", k, source)
