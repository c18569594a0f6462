"""Rewrite attention to use the paged KV cache, and add the inputs of the step that it needs.

Each attention becomes a write of its new K and V and a read of everything cached. Layers that share kind, window, dtype
and bytes per token form a KV group with one cache and one block table. An attention whose K and V are those of an
earlier one writes nothing and reads what the earlier one stored, under its own mask. Query heads stay grouped over KV
heads: K and V are never expanded.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx

from inferc.errors import UnsupportedError
from inferc.ir.program import MASK_KINDS, KVGroup, Program, arguments
from inferc.passes.rewrite import infer_types

aten, inferc = torch.ops.aten, torch.ops.inferc


@dataclass
class StepInputs:
    """The placeholders that `PageKVCache` adds, and the symbols of their shapes."""

    query_start_loc: fx.Node
    seq_lens: fx.Node
    slot_mappings: list[fx.Node] = field(default_factory=list)
    block_tables: list[fx.Node] = field(default_factory=list)
    kv_caches: list[fx.Node] = field(default_factory=list)


@dataclass
class Stored:
    """The K and V of one attention, and all attentions that read them; the first reader writes them."""

    readers: list[fx.Node]

    @property
    def writer(self) -> fx.Node:
        return self.readers[0]

    @property
    def reach(self) -> tuple[str, int]:
        """The (kind, window) of the KV group: a token is kept as long as any reader attends to it."""
        masks = {tuple(arguments(node)[5:7]) for node in self.readers}
        if any(mask == "causal" for mask, _ in masks):
            return "full", 0
        if len(masks) == 1:
            ((mask, window),) = masks
            return MASK_KINDS[mask], int(window)
        # The queries of a chunk see no key that a window of the chunk's size does not see.
        return "window", max(int(window) for _, window in masks)


@dataclass(frozen=True)
class PageKVCache:
    """A pass that adds the paged KV cache and every missing input of the step struct; `block_size` is in tokens."""

    block_size: int
    name: str = "page_kv_cache"

    def __call__(self, program: Program) -> int:
        attentions = [node for node in program.graph.nodes if node.target == inferc.attention.default]
        if program.kv_groups or not attentions:
            return 0
        members: dict[KVGroup, list[Stored]] = {}
        for stored in stored_kv(program):
            members.setdefault(group_of(stored), []).append(stored)
        program.kv_groups = tuple(
            replace(group, layers=tuple(layer_of(stored.writer, attentions) for stored in of_group))
            for group, of_group in members.items()
        )
        program.block_size = self.block_size
        inputs = _add_inputs(program)
        places = {
            reader: (index, layer)
            for index, of_group in enumerate(members.values())
            for layer, stored in enumerate(of_group)
            for reader in stored.readers
        }
        written: set[tuple[int, int]] = set()
        for node in attentions:
            place = places[node]
            if place not in written:
                _write(program, inputs, node, *place)
                written.add(place)
            _read(program, inputs, node, *place)
        program.drop_unused()
        return len(attentions)


def stored_kv(program: Program) -> list[Stored]:
    """Group the attentions by their K and V, which are equal if the same ops compute them from the same values."""
    numbers: dict[Any, int] = {}
    value: dict[fx.Node, int] = {}
    for node in program.graph.nodes:
        inputs = fx.map_arg((node.args, node.kwargs), lambda arg: ("value", value[arg]))
        key = (node.target, repr(inputs)) if node.op == "call_function" else (node.op, node.target)
        value[node] = numbers.setdefault(key, len(numbers))
    found: dict[tuple[int, int], Stored] = {}
    for node in program.graph.find_nodes(op="call_function", target=inferc.attention.default, sort=True):
        _, k, v, *_ = arguments(node)
        found.setdefault((value[k], value[v]), Stored([])).readers.append(node)
    return list(found.values())


def layer_of(node: fx.Node, attentions: list[fx.Node]) -> int:
    """Return the model's layer of an attention; in graphs without layer numbers it is the attention's index."""
    layer = node.meta.get("layer")
    return attentions.index(node) if layer is None else int(layer)


def group_of(stored: Stored) -> KVGroup:
    """Return the KV group that stores the K and V of a layer, without the numbers of its layers."""
    node = stored.writer
    _, k, v, *_ = arguments(node)
    key, value = k.meta["val"], v.meta["val"]
    if key.dim() != 3:
        raise UnsupportedError(
            f"{node.meta.get('name')}: page_kv_cache needs flattened attention; run flatten_batch first"
        )
    if is_latent(k, v):
        return KVGroup("latent", (), 1, int(key.shape[2]), 0, key.dtype)
    if key.shape[2] != value.shape[2]:
        raise UnsupportedError(
            f"{node.meta.get('name')}: K has heads of {key.shape[2]}, V of {value.shape[2]};"
            " the paged cache holds one size"
        )
    kind, window = stored.reach
    return KVGroup(kind, (), int(key.shape[1]), int(key.shape[2]), window, key.dtype)


def is_latent(k: fx.Node, v: fx.Node) -> bool:
    """Return whether all heads share one head of K, and V is its first part."""
    if v.target != aten.slice.Tensor or k.meta["val"].shape[1] != 1:
        return False
    source, dim, start, _, step = arguments(v)
    return source is k and dim == -1 and (start or 0) == 0 and step == 1


def _add_inputs(program: Program) -> StepInputs:
    """Add placeholders in the order of the step struct, after `token_ids` and `positions`."""
    inputs = {node.name: node for node in program.inputs()}
    tokens = inputs["token_ids"].meta["val"].shape[0]
    token_ids = inputs["token_ids"]
    token_ids.meta["val"] = program.fake((tokens,), torch.int32)
    # The size hints differ from one another, so that torch does not take two axes for one; 11, 13, … are the smallest
    # free primes.
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
        shape = (blocks, len(group.layers), group.num_parts, program.block_size, group.num_kv_heads, group.row_size)
        made.kv_caches.append(add(f"kv_cache_{index}", shape, group.dtype))
    return made


def _write(program: Program, inputs: StepInputs, node: fx.Node, group: int, layer: int) -> None:
    """Store the K and V of attention `node`, just before it."""
    _, k, v, *_ = arguments(node)
    cache, slots = inputs.kv_caches[group], inputs.slot_mappings[group]
    with program.graph.inserting_before(node):
        if program.kv_groups[group].kind == "latent":
            written = program.graph.call_function(inferc.latent_write.default, (cache, k, slots, layer))
        else:
            written = program.graph.call_function(inferc.kv_write.default, (cache, k, v, slots, layer))
    written.meta.update(name=f"{node.meta.get('name', node.name)}.kv_write", layer=node.meta.get("layer"))
    infer_types(program, [written])
    # The next layer of the group writes into the cache that this write returned, so the graph holds the order of
    # writes.
    inputs.kv_caches[group] = written


def _read(program: Program, inputs: StepInputs, node: fx.Node, group: int, layer: int) -> None:
    """Replace `node` by an attention over the stored K and V."""
    q, _, _, sinks, scale, mask, window, softcap, alibi = arguments(node)
    where = (q, inputs.kv_caches[group], inputs.block_tables[group], inputs.query_start_loc, inputs.seq_lens)
    how = (layer, scale, mask, window, softcap)
    with program.graph.inserting_before(node):
        if program.kv_groups[group].kind == "latent":
            v_dim = int(node.meta["val"].shape[2])
            paged = program.graph.call_function(inferc.latent_attention.default, (*where, *how, v_dim))
        else:
            bias = () if alibi is None else (alibi,)
            paged = program.graph.call_function(inferc.paged_attention.default, (*where, sinks, *how, *bias))
    paged.meta.update(name=node.meta.get("name", node.name), layer=node.meta.get("layer"))
    infer_types(program, [paged])
    node.replace_all_uses_with(paged)
