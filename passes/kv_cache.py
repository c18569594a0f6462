"""Attention over the paged KV cache, and the step's inputs that it needs.

Each attention becomes a write of its new K and V and a read of everything cached. Layers that share kind, window, dtype
and bytes per token form a KV group with one cache and one block table. Query heads stay grouped over KV heads: K and V
are never expanded.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import fx

from inferc.errors import UnsupportedError
from inferc.passes.rewrite import arguments, infer_types
from inferc.program import KVGroup, Program

inferc = torch.ops.inferc
KINDS = {"causal": "full", "sliding": "window", "chunked": "chunk"}


@dataclass
class StepInputs:
    """The placeholders that `PageKVCache` adds, and the symbols of their shapes."""

    query_start_loc: fx.Node
    seq_lens: fx.Node
    slot_mappings: list[fx.Node] = field(default_factory=list)
    block_tables: list[fx.Node] = field(default_factory=list)
    kv_caches: list[fx.Node] = field(default_factory=list)


@dataclass(frozen=True)
class PageKVCache:
    """`block_size` is in tokens. Adds every input of the step struct that was not there."""

    block_size: int
    name: str = "page_kv_cache"

    def __call__(self, program: Program) -> int:
        attentions = [node for node in program.graph.nodes if node.target == inferc.attention.default]
        if program.kv_groups or not attentions:
            return 0
        members: dict[KVGroup, list[fx.Node]] = {}
        for node in attentions:
            members.setdefault(_group_of(node), []).append(node)
        program.kv_groups = tuple(
            KVGroup(
                group.kind,
                tuple(_layer(node, attentions) for node in nodes),
                group.num_kv_heads,
                group.head_dim,
                group.window,
                group.dtype,
            )
            for group, nodes in members.items()
        )
        program.block_size = self.block_size
        inputs = _add_inputs(program)
        for index, nodes in enumerate(members.values()):
            for layer, node in enumerate(nodes):
                _page(program, inputs, node, index, layer)
        program.drop_unused()
        return len(attentions)


def _layer(node: fx.Node, attentions: list[fx.Node]) -> int:
    """The model's layer; graphs without layer numbers count their attentions."""
    layer = node.meta.get("layer")
    return attentions.index(node) if layer is None else int(layer)


def _group_of(node: fx.Node) -> KVGroup:
    _, k, v, _, _, mask, window, _ = arguments(node)
    key, value = k.meta["val"], v.meta["val"]
    if key.dim() != 3:
        raise UnsupportedError(
            f"{node.meta.get('name')}: page_kv_cache needs flattened attention; run flatten_batch first"
        )
    if key.shape[2] != value.shape[2]:
        raise UnsupportedError(
            f"{node.meta.get('name')}: K has heads of {key.shape[2]}, V of {value.shape[2]}; the paged cache holds one size"
        )
    return KVGroup(KINDS[mask], (), int(key.shape[1]), int(key.shape[2]), int(window), key.dtype)


def _add_inputs(program: Program) -> StepInputs:
    """Placeholders in the order of the step struct, after `token_ids` and `positions`."""
    inputs = {node.name: node for node in program.inputs()}
    tokens = inputs["token_ids"].meta["val"].shape[0]
    token_ids = inputs["token_ids"]
    token_ids.meta["val"] = program.fake((tokens,), torch.int32)
    # Hints differ from one another, so that no two axes are taken for one; 11, 13, … are the smallest free primes.
    sequences, rows, blocks, most = (program.new_symbol(hint) for hint in (11, 13, 17, 19))
    last = list(inputs.values())[-1]

    def add(name: str, shape: tuple[int | torch.SymInt, ...], dtype: torch.dtype) -> fx.Node:
        nonlocal last
        with program.graph.inserting_after(last):
            last = program.graph.placeholder(name)
        last.meta.update(val=program.fake(shape, dtype), name=name, layer=None)
        return last

    made = StepInputs(add("query_start_loc", (sequences + 1,), torch.int32), add("seq_lens", (sequences,), torch.int32))
    add("seq_slots", (sequences,), torch.int32)
    add("logits_rows", (rows,), torch.int32)
    for index, group in enumerate(program.kv_groups):
        made.slot_mappings.append(add(f"slot_mapping_{index}", (tokens,), torch.int64))
        made.block_tables.append(add(f"block_table_{index}", (sequences, most), torch.int32))
        shape = (blocks, len(group.layers), 2, program.block_size, group.num_kv_heads, group.head_dim)
        made.kv_caches.append(add(f"kv_cache_{index}", shape, group.dtype))
    return made


def _page(program: Program, inputs: StepInputs, node: fx.Node, group: int, layer: int) -> None:
    q, k, v, sinks, scale, mask, window, softcap = arguments(node)
    base = str(node.meta.get("name", node.name))
    with program.graph.inserting_before(node):
        written = program.graph.call_function(
            inferc.kv_write.default, (inputs.kv_caches[group], k, v, inputs.slot_mappings[group], layer)
        )
        paged = program.graph.call_function(
            inferc.paged_attention.default,
            (q, written, inputs.block_tables[group], inputs.query_start_loc, inputs.seq_lens)
            + (sinks, layer, scale, mask, window, softcap),
        )
    written.meta.update(name=f"{base}.kv_write", layer=node.meta.get("layer"))
    paged.meta.update(name=base, layer=node.meta.get("layer"))
    infer_types(program, [written, paged])
    node.replace_all_uses_with(paged)
    # The next layer of the group writes into what this one returned: the order of writes is in the graph.
    inputs.kv_caches[group] = written
