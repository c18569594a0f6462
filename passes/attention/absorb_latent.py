"""Let multi-head latent attention (MLA) attend to the latent itself, instead of the K and V that are computed from it.

K and V of every head are projections of one latent per token, so their weights can be moved to the other side of the
scores and of the weighted sum: queries are projected into the latent's space, and the attended latent out of it. The
cache then holds the latent and the one rotated part of K that all heads share, [num_tokens, 1, kv_lora_rank +
rope_dim]; V is its first part.

Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1.2 and appendix C.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import fx, ops

from inferc.ir import weights as weight_lib
from inferc.ir.program import Program, arguments, name_of, named_arguments
from inferc.passes.rewrite import infer_types, no_rewrite

aten, inferc = ops.aten, ops.inferc


@dataclass(frozen=True)
class Latent:
    """The parts of one attention that is computed from a latent."""

    attention: fx.Node
    q: fx.Node  # [num_tokens, heads, nope_dim]
    q_rotated: fx.Node  # [num_tokens, heads, rope_dim]
    latent: fx.Node  # [num_tokens, kv_lora_rank], perhaps with an axis of one head
    k_rotated: fx.Node  # [num_tokens, 1, rope_dim]
    k_weight: fx.Node  # [heads * nope_dim, kv_lora_rank]
    v_weight: fx.Node  # [heads * v_dim, kv_lora_rank]


@dataclass(frozen=True)
class AbsorbLatent:
    name: str = "absorb_latent"

    def __call__(self, program: Program) -> int:
        count = 0
        for node in list(program.graph.find_nodes(op="call_function", target=inferc.attention.default, sort=True)):
            found = _read(node)
            if isinstance(found, str):
                no_rewrite(self.name, node, found)
            elif found is not None:
                _rewrite(program, found)
                count += 1
        if count:
            program.drop_unused()
        return count


def _is(node: Any, target: Any) -> bool:
    return isinstance(node, fx.Node) and node.target == target


def _read(node: fx.Node) -> Latent | str | None:
    """Return the parts of an attention, why they do not fit, or None if the attention has no such parts."""
    named = named_arguments(node)
    q, k, v = (named[name] for name in "qkv")
    if not _is(q, aten.cat.default) or not _is(k, aten.cat.default):
        return None
    queries, keys = list(q.args[0]), list(k.args[0])
    if len(queries) != 2 or len(keys) != 2:
        return f"q and k have {len(queries)} and {len(keys)} parts, expected one with and one without rope"
    if named["sinks"] is not None or named["alibi"] is not None:
        return "it has sinks or ALiBi"
    shared = keys[1].args[0] if _is(keys[1], aten.expand.default) else None
    if shared is None or shared.meta["val"].shape[1] != 1:
        return f"the rotated part of k is {name_of(keys[1])}, expected one that all heads share"
    k_part, v_part = _projection(keys[0]), _projection(v)
    if k_part is None or v_part is None:
        return "k and v are no projections of their own, without a bias"
    if k_part[0] is not v_part[0]:
        return f"k is made of {name_of(k_part[0])}, v of {name_of(v_part[0])}: expected one latent"
    if queries[0].meta["val"].shape[1:] != keys[0].meta["val"].shape[1:]:
        found = f"{list(queries[0].meta['val'].shape[1:])} and {list(keys[0].meta['val'].shape[1:])}"
        return f"the parts of q and k without rope are {found}, expected equal heads"
    return Latent(node, queries[0], queries[1], k_part[0], shared, k_part[1], v_part[1])


def _projection(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """Return (latent, weight) of heads that are a projection without a bias, or None."""
    linear: Any = node.args[0] if _is(node, aten.view.default) else None
    if not _is(linear, aten.linear.default) or len(linear.users) > 1 or (len(linear.args) > 2 and linear.args[2]):
        return None
    latent, weight = linear.args[:2]
    return (latent, weight) if weight.op == "get_attr" and len(weight.users) == 1 else None


def _rewrite(program: Program, found: Latent) -> None:
    graph, node = program.graph, found.attention
    heads, nope_dim = (int(size) for size in found.q.meta["val"].shape[1:])
    v_dim, rank = int(node.meta["val"].shape[2]), int(found.latent.meta["val"].shape[-1])
    k_rows = weight_lib.reshape(program.weight(found.k_weight), (heads, nope_dim, rank))
    v_rows = weight_lib.reshape(program.weight(found.v_weight), (heads, v_dim, rank))
    # Scores are q . (K c) = (q K) . c, so the weight of K is transposed within each head.
    into = program.add_weight(f"{found.k_weight.target}.absorbed", weight_lib.permute(k_rows, (0, 2, 1)), before=node)
    out_of = program.add_weight(f"{found.v_weight.target}.absorbed", v_rows, before=node)
    sinks, *how = arguments(node)[3:8]
    with graph.inserting_before(node):
        q = graph.call_function(inferc.head_linear.default, (found.q, into))
        q_whole = graph.call_function(aten.cat.default, ([q, found.q_rotated], -1))
        latent = graph.call_function(aten.view.default, (found.latent, [-1, 1, rank]))
        k = graph.call_function(aten.cat.default, ([latent, found.k_rotated], -1))
        v = graph.call_function(aten.slice.Tensor, (k, -1, 0, rank))
        attended = graph.call_function(inferc.attention.default, (q_whole, k, v, sinks, *how))
        out = graph.call_function(inferc.head_linear.default, (attended, out_of))
    made = [q, q_whole, latent, k, v, attended, out]
    infer_types(program, made)
    names = ("q_latent", "q", "latent", "k", "v", "latent_out")
    for each, name in zip(made, names, strict=False):
        each.meta.update(name=f"{name_of(node)}.{name}", layer=node.meta.get("layer"))
    attended.meta["name"] = name_of(node)
    out.meta.update(name=f"{name_of(node)}.v", layer=node.meta.get("layer"))
    node.replace_all_uses_with(out)
