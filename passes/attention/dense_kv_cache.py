"""Rewrite attention to use a dense KV cache, for runtimes that know no block tables (ONNX, TensorRT).

Each layer's K and V are inputs of their own, `[num_seqs, num_kv_heads, capacity, head_dim]`, which a call writes in
place: for a scheduler, the cache has one block per sequence. As in `PageKVCache`, an attention whose K and V are those
of an earlier one writes nothing, and query heads stay grouped over KV heads. Windows and chunks are only masks here: no
token is freed before its sequence ends, so all groups are of kind "full" or "latent".

In each call all sequences have equally many new tokens: `token_ids [num_seqs * num_new]`, sequence by sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import fx

from inferc.errors import UnsupportedError
from inferc.ir.program import KVGroup, Program, arguments, name_of
from inferc.passes.attention.page_kv_cache import Stored, group_of, layer_of, stored_kv
from inferc.passes.rewrite import infer_types

inferc = torch.ops.inferc


@dataclass(frozen=True)
class DenseKVCache:
    """A pass that adds dense KV caches and the missing step inputs to a program.

    max_model_len: the most tokens of a sequence, which is also the size of its one block.
    """

    max_model_len: int
    name: str = "dense_kv_cache"

    def __call__(self, program: Program) -> int:
        attentions = [node for node in program.graph.nodes if node.target == inferc.attention.default]
        if program.kv_groups or not attentions:
            return 0
        members: dict[KVGroup, list[Stored]] = {}
        for stored in stored_kv(program):
            group = group_of(stored)
            kind = group.kind if group.kind == "latent" else "full"
            members.setdefault(replace(group, kind=kind, window=0), []).append(stored)
        program.kv_groups = tuple(
            replace(group, layers=tuple(layer_of(stored.writer, attentions) for stored in of_group))
            for group, of_group in members.items()
        )
        program.block_size = self.max_model_len
        inputs = _Inputs.add(program)
        caches: dict[fx.Node, tuple[fx.Node, ...]] = {}  # by attention: the caches that it reads
        for group, of_group in members.items():
            for stored in of_group:
                made = _write(program, inputs, group, stored.writer, layer_of(stored.writer, attentions))
                caches.update(dict.fromkeys(stored.readers, made))
        for node in attentions:
            _read(program, inputs, node, caches[node])
        program.drop_unused()
        return len(attentions)


@dataclass
class _Inputs:
    """The placeholders that the pass adds, and the symbols of the caches' shapes."""

    starts: fx.Node
    seq_lens: fx.Node
    last: fx.Node
    sequences: torch.SymInt
    capacity: torch.SymInt

    @staticmethod
    def add(program: Program) -> _Inputs:
        """Add the placeholders behind `token_ids` and `positions`."""
        named = {node.name: node for node in program.inputs()}
        token_ids = named["token_ids"]
        token_ids.meta["val"] = program.fake((token_ids.meta["val"].shape[0],), torch.int32)
        # The size hints differ from one another, so that torch does not take two axes for one.
        sequences, rows, capacity = (program.new_symbol(hint) for hint in (11, 13, 19))
        last = list(named.values())[-1]
        made = _Inputs(last, last, last, sequences, capacity)
        made.starts = made.placeholder(program, "starts", (sequences,), torch.int64)
        made.seq_lens = made.placeholder(program, "seq_lens", (sequences,), torch.int64)
        made.placeholder(program, "logits_rows", (rows,), torch.int32)
        return made

    def placeholder(
        self, program: Program, name: str, shape: tuple[int | torch.SymInt, ...], dtype: torch.dtype
    ) -> fx.Node:
        with program.graph.inserting_after(self.last):
            self.last = program.graph.placeholder(name)
        self.last.meta.update(val=program.fake(shape, dtype), name=name, layer=None)
        return self.last


def _write(program: Program, inputs: _Inputs, group: KVGroup, node: fx.Node, layer: int) -> tuple[fx.Node, ...]:
    """Store K and V of attention `node` in caches of their own, just before the attention."""
    _, k, v, *_ = arguments(node)
    parts = {"latent": k} if group.kind == "latent" else {"k": k, "v": v}
    made = []
    for part, value in parts.items():
        shape = (inputs.sequences, group.num_kv_heads, inputs.capacity, group.head_dim)
        cache = inputs.placeholder(program, f"{part}_cache_{layer}", shape, group.dtype)
        with program.graph.inserting_before(node):
            written = program.graph.call_function(inferc.dense_write.default, (cache, value, inputs.starts))
        written.meta.update(name=f"{node.meta.get('name', node.name)}.{part}_write", layer=node.meta.get("layer"))
        infer_types(program, [written])
        made.append(written)
    return tuple(made)


def _read(program: Program, inputs: _Inputs, node: fx.Node, caches: tuple[fx.Node, ...]) -> None:
    """Replace `node` by an attention over the stored K and V."""
    q, _, _, sinks, scale, mask, window, softcap, alibi = arguments(node)
    if alibi is not None:
        raise UnsupportedError(
            f"{name_of(node)}: ALiBi over a dense cache is not built, and so not for onnx and tensorrt;"
            " use --target cpu, cuda or tensorrt-paged"
        )
    how = (scale, mask, window, softcap)
    with program.graph.inserting_before(node):
        where = (q, *caches, inputs.seq_lens)
        if len(caches) == 1:
            v_dim = int(node.meta["val"].shape[2])
            dense = program.graph.call_function(inferc.dense_latent_attention.default, (*where, *how, v_dim))
        else:
            dense = program.graph.call_function(inferc.dense_attention.default, (*where, sinks, *how))
    dense.meta.update(name=node.meta.get("name", node.name), layer=node.meta.get("layer"))
    infer_types(program, [dense])
    node.replace_all_uses_with(dense)
