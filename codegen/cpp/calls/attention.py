"""The calls of attention: rotary embeddings, writes of the KV cache, paged attention."""

from __future__ import annotations

from torch import fx

from inferc.codegen.cpp.calls.builder import Builder, cpp_float
from inferc.codegen.cpp.calls.matmul import int4_panels, scaled_rows
from inferc.codegen.cpp.calls.norms import norm_arguments
from inferc.codegen.cpp.values import Call, cpp_type, row_count
from inferc.codegen.values import Values
from inferc.ir.ops import cached_head_dim

MASKS = {"causal": "CAUSAL", "sliding": "SLIDING", "chunked": "CHUNKED"}


def rope_table(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    out, result = b.write()
    positions, frequencies, half = b.input("positions"), b.weight("inv_freq"), result.width // 2
    scaling = cpp_float(b.arg("scaling"))
    return b.done(f"rope_table(t, {positions}, {frequencies}, {scaling}, {row_count(result)}, {half}, {out});")


def rope(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, _ = b.read("x")
    table, rotary = b.read("table")
    out, result = b.write()
    _, heads, dim = node.meta["val"].shape
    how = f"{rotary.width // 2}, {b.arg('pairs').upper()}, {row_count(result)}, {heads}, {dim}"
    return b.done(f"rope<{cpp_type(result)}>(t, {x}, {table}, {how}, {out});")


def kv_write(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    k, operand = b.read("k")
    v, _ = b.read("v")
    cache, slots = b.cache(writes=True), b.input("slot_mapping")
    types = f"{cpp_type(operand)}, {b.stored}"
    return b.done(f"kv_write<{types}>(t, {cache}, {k}, {v}, {slots}, {row_count(operand)});")


def rope_kv_write(node: fx.Node, values: Values) -> Call:
    return _rope_kv_write(Builder(node, values), "")


def norm_rope_kv_write(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    return _rope_kv_write(b, f"{b.weight('q_weight')}, {b.weight('k_weight')}, {norm_arguments(b)}, ")


def _rope_kv_write(b: Builder, norms: str) -> Call:
    q, operand = b.read("q")
    k, _ = b.read("k")
    v, _ = b.read("v")
    table, rotary = b.read("table")
    out, _ = b.write(0)
    how = f"{rotary.width // 2}, {b.arg('pairs').upper()}"
    heads = b.arg("q").meta["val"].shape[1]
    cache, slots = b.cache(writes=True), b.input("slot_mapping")
    name = "norm_rope_kv_write" if norms else "rope_kv_write"
    sizes = f"{row_count(operand)}, {heads}"
    types = f"{cpp_type(operand)}, {b.stored}"
    return b.done(f"{name}<{types}>(t, {q}, {k}, {v}, {norms}{table}, {how}, {cache}, {slots}, {sizes}, {out});")


def qkv_rope_kv_write(node: fx.Node, values: Values) -> Call:
    return _float_qkv(Builder(node, values), "")


def qkv_rope_kv_write_int8(node: fx.Node, values: Values) -> Call:
    return _float_qkv(Builder(node, values), "_int8")


def qkv_rope_kv_write_w8a8(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    return _qkv_rope_kv_write(b, scaled_rows(b), b.panels("weight", "i8", most_pairs=_head_pairs(b)), "_w8a8")


def qkv_rope_kv_write_w4a8(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    return _qkv_rope_kv_write(b, scaled_rows(b), int4_panels(b), "_w4a8")


def _head_panels(b: Builder) -> int:
    """Return the number of panels in a head: what a thread projects before it rotates and stores them."""
    return cached_head_dim(b.arg("kv_cache").meta["val"]) // 16


def _head_pairs(b: Builder) -> int:
    return max(1, _head_panels(b) // 2)


def _float_qkv(b: Builder, scheme: str) -> Call:
    x, operand = b.read("x")
    return _qkv_rope_kv_write(b, x, b.panels("weight", cpp_type(operand), most_pairs=_head_pairs(b)), scheme)


def _qkv_rope_kv_write(b: Builder, x: str, panels: str, scheme: str) -> Call:
    table, rotary = b.read("table")
    out, result = b.write(0)
    weights = [b.streamed(panels, _head_panels(b)), *([b.weight("scale")] if scheme else []), b.weight("bias")]
    norms = f"{b.weight('q_weight')}, {b.weight('k_weight')}, {norm_arguments(b)}"
    how = f"{rotary.width // 2}, {b.arg('pairs').upper()}"
    cache, slots = b.cache(writes=True), b.input("slot_mapping")
    sizes = f"{row_count(result)}, {b.arg('num_heads')}"
    types = f"{cpp_type(result)}, {b.stored}"
    heads = f"Heads<{types}>{{{{{norms}, {table}, {how}, {cache}, {slots}, {sizes}, {out}}}}}"
    return b.done(f"qkv_rope_kv_write{scheme}<{types}>(t, {x}, {', '.join(weights)}, {heads});")


def latent_write(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    k, operand = b.read("k")
    cache, slots = b.latent(writes=True, v_dim=0), b.input("slot_mapping")
    types = f"{cpp_type(operand)}, {b.stored}"
    return b.done(f"latent_write<{types}>(t, {cache}, {k}, {slots}, {row_count(operand)});")


def paged_attention(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    q, operand = b.read("q")
    types = f"{cpp_type(operand)}, Cache<{b.stored}>"
    alibi = b.weight("alibi") if b.arg("alibi") is not None else ""
    return _attention(b, q, types, b.cache(writes=False), b.weight("sinks"), alibi)


def latent_attention(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    q, operand = b.read("q")
    types = f"{cpp_type(operand)}, Latent<{b.stored}>"
    return _attention(b, q, types, b.latent(writes=False, v_dim=b.arg("v_dim")), "nullptr")


def _attention(b: Builder, q: str, types: str, cache: str, sinks: str, alibi: str = "") -> Call:
    out, _ = b.write()
    group = b.values.cache_group(b.arg("kv_cache"))
    table, starts, lengths = b.input("block_table"), b.input("query_start_loc"), b.input("seq_lens")
    heads = int(b.node.meta["val"].shape[1])
    scale, softcap = cpp_float(b.arg("scale")), cpp_float(b.arg("softcap"))
    mask = MASKS[b.arg("mask")]
    b.reads.append(("partials", 0, 1))
    b.writes.append(("partials", 0, 1))
    fields = (
        f"{q}, {out}, {cache}, {table}, s.a.max_blocks[{group}], {starts}, {lengths}, {sinks}, s.seqs, {heads}, "
        f"{scale}, {softcap}, {mask}, {b.arg('window')}, "
        f"s.shared_scratch(), s.shared_floats(t), s.a.mass_from, s.masses({group}), s.echoes({group})"
    )
    if alibi:
        types, fields = f"{types}, Alibi", f"{fields}, {alibi}"
    return b.done(f"paged_attention<Attention<{types}>>(t, Attention<{types}>{{{{{fields}}}}});")
