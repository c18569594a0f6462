"""Small lowered programs built by hand, and what runs them: for tests of the C++ backend alone."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from inferc.arena import POOLS, MemoryPlan, Place, Pool
from inferc.codegen.artifact_writer import stored_program
from inferc.codegen.cpp.build import build_program
from inferc.codegen.cpp.emit import emit
from inferc.codegen.cpp.table import KERNELS
from inferc.codegen.select import needs_kernel, select
from inferc.ir import weights as weight_lib
from inferc.ir.model_info import ModelInfo
from inferc.ir.program import KVGroup, Program, argument, dtype_name, new_program
from inferc.manifest_types import KvGroup, StoredWeight
from inferc.passes.rewrite import infer_type
from inferc.runtime.artifact.libraries import Library
from inferc.runtime.step.plan import SampleRows, StepPlan
from inferc.targets import Target

aten, inferc = torch.ops.aten, torch.ops.inferc


@dataclass(frozen=True)
class Heads:
    """The attention of one layer; with `reads`, over the K and V of that layer and without its own."""

    kv_heads: int
    dim: int
    mask: str = "causal"
    window: int = 0
    reads: int | None = None


@dataclass(frozen=True)
class Shape:
    """A toy decoder in Llama's shape.

    `attention` says it layer by layer, if they differ, and begins again at its end.
    """

    dtype: torch.dtype = torch.float32
    layers: int = 3
    hidden: int = 64
    inter: int = 96
    heads: int = 4
    kv_heads: int = 2
    dim: int = 16
    vocab: int = 90
    block_size: int = 32
    tied: bool = False
    experts: int = 0
    top_k: int = 2
    mask: str = "causal"
    window: int = 0
    qk_norm: bool = False
    bias: bool = False
    max_positions: int = 2048
    attention: tuple[Heads, ...] = ()
    int8_kv: bool = False

    def heads_of(self, layer: int) -> Heads:
        if not self.attention:
            return Heads(self.kv_heads, self.dim, self.mask, self.window)
        return self.attention[layer % len(self.attention)]


class Builder:
    """Adds nodes to a program, typed as they are made."""

    def __init__(self, shape: Shape) -> None:
        self.shape, self.program = shape, new_program()
        self.tensors: dict[str, Tensor] = {}
        self.generator = torch.Generator().manual_seed(0)
        self.layer: int | None = None

    def input(self, name: str, sizes: tuple[Any, ...], dtype: torch.dtype) -> fx.Node:
        node = self.program.graph.placeholder(name)
        node.meta.update(val=self.program.fake(sizes, dtype), name=name, layer=None)
        return node

    def weight(self, name: str, *sizes: int, dtype: torch.dtype | None = None, value: Tensor | None = None) -> fx.Node:
        dtype = dtype or self.shape.dtype
        name = name if self.layer is None else f"layers.{self.layer}.{name}"
        if name not in self.tensors:
            scale = 1.0 / math.sqrt(sizes[-1]) if len(sizes) > 1 else 0.2
            data = torch.randn(sizes, generator=self.generator) * scale + (1.0 if len(sizes) == 1 else 0.0)
            self.tensors[name] = (data if value is None else value).to(dtype)
            self.program.weights[name] = weight_lib.source(name, sizes, dtype)
        node = self.program.graph.get_attr(name)
        node.meta.update(val=self.program.fake(sizes, dtype), name=name, layer=self.layer)
        return node

    def __call__(self, target: Any, *args: Any, name: str | None = None) -> fx.Node:
        node = self.program.graph.call_function(target, args)
        node.meta.update(name=name or node.name, layer=self.layer, val=infer_type(self.program, node))
        return node

    def part(self, node: fx.Node, index: int) -> fx.Node:
        made = self.program.graph.call_function(operator.getitem, (node, index))
        made.meta.update(name=f"{node.meta['name']}.{index}", layer=self.layer, val=node.meta["val"][index])
        return made


def toy(shape: Shape) -> tuple[Program, dict[str, Tensor]]:
    """A lowered program with its kernels chosen, and its weights' logical values."""
    b = Builder(shape)
    s, p = shape, b.program
    tokens, seqs, rows, blocks, most = (p.new_symbol(hint) for hint in (23, 11, 13, 17, 19))
    token_ids = b.input("token_ids", (tokens,), torch.int32)
    positions = b.input("positions", (tokens,), torch.int64)
    starts = b.input("query_start_loc", (seqs + 1,), torch.int32)
    lengths = b.input("seq_lens", (seqs,), torch.int32)
    b.input("seq_slots", (seqs,), torch.int32)
    logits_rows = b.input("logits_rows", (rows,), torch.int32)
    p.kv_groups, place = groups_of(s)
    slots, table_ids, caches = [], [], []
    for index, kv_group in enumerate(p.kv_groups):
        slots.append(b.input(f"slot_mapping_{index}", (tokens,), torch.int64))
        table_ids.append(b.input(f"block_table_{index}", (seqs, most), torch.int32))
        shape_of_cache = (blocks, len(kv_group.layers), 2, s.block_size, kv_group.num_kv_heads, kv_group.row_size)
        caches.append(b.input(f"kv_cache_{index}", shape_of_cache, kv_group.dtype))
    embed = b.weight("embed", s.vocab, s.hidden)
    x = b(aten.embedding.default, embed, token_ids, name="embed.out")
    tables = {}
    for dim in sorted({kv_group.head_dim for kv_group in p.kv_groups}):
        frequencies = 10000.0 ** (-torch.arange(0, dim, 2).float() / dim)
        inv_freq = b.weight(f"inv_freq_{dim}", dim // 2, dtype=torch.float32, value=frequencies)
        tables[dim] = b(inferc.rope_table.default, positions, inv_freq, 1.0, name=f"rope_{dim}")
    residual = x
    for layer in range(s.layers):
        b.layer = layer
        heads = s.heads_of(layer)
        group, index = place[layer]
        q_size, kv_size = s.heads * heads.dim, heads.kv_heads * heads.dim if heads.reads is None else 0
        norm = b.weight("norm1", s.hidden)
        if layer == 0:
            h = b(inferc.rms_norm.default, x, norm, 1e-5)
        else:
            both = b(inferc.rms_norm_add.default, x, residual, norm, 1e-5)
            h, residual = b.part(both, 0), b.part(both, 1)
        args: tuple[fx.Node, ...] = (b.weight("qkv", q_size + 2 * kv_size, s.hidden),)
        if s.bias:
            args += (b.weight("qkv_bias", q_size + 2 * kv_size),)
        qkv = b(aten.linear.default, h, *args, name=f"layers.{layer}.qkv")
        cuts = (0, q_size, q_size + kv_size, q_size + 2 * kv_size)
        q, *kv = (
            b(aten.view.default, b(aten.slice.Tensor, qkv, -1, low, high), [-1, (high - low) // heads.dim, heads.dim])
            for low, high in pairwise(cuts)
            if low < high
        )
        if s.qk_norm:
            q = b(inferc.rms_norm.default, q, b.weight("q_norm", heads.dim), 1e-5)
        if kv:
            k, v = kv
            if s.qk_norm:
                k = b(inferc.rms_norm.default, k, b.weight("k_norm", heads.dim), 1e-5)
            both = b(inferc.rope_kv_write.default, q, k, v, tables[heads.dim], caches[group], slots[group], index)
            q, caches[group] = b.part(both, 0), b.part(both, 1)
        else:
            q = b(inferc.rope.default, q, tables[heads.dim])
        where = (q, caches[group], table_ids[group], starts, lengths, None, index)
        attention = (*where, heads.dim**-0.5, heads.mask, heads.window, 0.0)
        out = b(inferc.paged_attention.default, *attention, name=f"layers.{layer}.attention")
        out = b(aten.view.default, out, [-1, q_size])
        if layer == s.layers - 1:
            out = b(aten.index_select.default, out, 0, logits_rows)
            residual = b(aten.index_select.default, residual, 0, logits_rows)
        out = b(aten.linear.default, out, b.weight("o", s.hidden, q_size))
        both = b(inferc.rms_norm_add.default, out, residual, b.weight("norm2", s.hidden), 1e-5)
        h, residual = b.part(both, 0), b.part(both, 1)
        if s.experts:
            router = b(aten.linear.default, h, b.weight("router", s.experts, s.hidden))
            chosen = b(inferc.moe_routing.default, router, None, s.top_k, True)
            weights = (
                b.weight("gate_up", s.experts, 2 * s.inter, s.hidden),
                b.weight("down", s.experts, s.hidden, s.inter),
            )
            x = b(inferc.moe_experts.default, h, b.part(chosen, 0), b.part(chosen, 1), *weights)
        else:
            both = b(aten.linear.default, h, b.weight("gate_up", 2 * s.inter, s.hidden))
            gate = b(aten.slice.Tensor, both, -1, 0, s.inter)
            up = b(aten.slice.Tensor, both, -1, s.inter, 2 * s.inter)
            x = b(aten.linear.default, b(inferc.silu_mul.default, gate, up), b.weight("down", s.hidden, s.inter))
    b.layer = None
    hidden = b.part(b(inferc.rms_norm_add.default, x, residual, b.weight("norm", s.hidden), 1e-5), 0)
    head = b.weight("embed" if s.tied else "head", s.vocab, s.hidden)
    logits = b(inferc.lm_head.default, hidden, head, None, name="logits")
    p.graph.output((hidden, logits))
    p.block_size, p.num_layers = s.block_size, s.layers
    p.info = ModelInfo(vocab_size=s.vocab, max_model_len=s.max_positions)
    choose(p)
    return p, b.tensors


def groups_of(shape: Shape) -> tuple[tuple[KVGroup, ...], dict[int, tuple[int, int]]]:
    """The KV groups, and of each layer (group, layer within it) that it reads."""
    kinds = {"causal": "full", "sliding": "window", "chunked": "chunk"}
    members: dict[KVGroup, list[int]] = {}
    for layer in range(shape.layers):
        heads = shape.heads_of(layer)
        if heads.reads is None:
            dtype = torch.int8 if shape.int8_kv else shape.dtype
            group = KVGroup(kinds[heads.mask], (), heads.kv_heads, heads.dim, heads.window, dtype)
            members.setdefault(group, []).append(layer)
    place = {layer: (index, at) for index, layers in enumerate(members.values()) for at, layer in enumerate(layers)}
    for layer in range(shape.layers):
        reads = shape.heads_of(layer).reads
        if reads is not None:
            place[layer] = place[reads]
    return tuple(replace(group, layers=tuple(layers)) for group, layers in members.items()), place


def choose(program: Program) -> None:
    """Kernels for the cpu target, and weights in the layouts they read."""
    for node in program.graph.nodes:
        if needs_kernel(node):
            kernel = select(node, Target.parse("cpu"), KERNELS)
            node.meta["kernel"] = kernel.name
            for name, layout in kernel.weight_layouts.items():
                weight = argument(node, name)
                if layout and program.weights[weight.target].op != "pack":
                    program.weights[weight.target] = weight_lib.pack(program.weights[weight.target], layout)


def places(program: Program) -> tuple[dict[str, Place], dict[Pool, int]]:
    """A memory plan without reuse: every value has its own place."""
    output: Any = program.output().args[0]
    step: set[fx.Node] = set()
    todo: list[fx.Node] = [output[0]]
    while todo:
        node = todo.pop()
        if node not in step:
            step.add(node)
            todo += node.all_input_nodes
    tokens = str(program.inputs()[0].meta["val"].shape[0])
    made: dict[str, Place] = {}
    pools: dict[Pool, int] = {}
    for node in program.graph.nodes:
        value = node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor) or value.dim() == 6:
            continue
        if node.target in (aten.view.default, aten.slice.Tensor):
            continue
        pool: Pool = "sample" if node not in step else "T" if str(value.shape[0]) == tokens else "S"
        size = math.prod(int(n) for n in value.shape[1:]) * value.dtype.itemsize
        made[node.name] = Place(pool, size, pools.get(pool, 0))
        pools[pool] = pools.get(pool, 0) + -(-size // 64) * 64
    return made, pools


class Compiled:
    """A toy program compiled in memory, with the face of a loaded artifact."""

    def __init__(self, shape: Shape, isas: tuple[str, ...] = ("avx512", "avx2")) -> None:
        self.shape = shape
        self.lowered, self.tensors = toy(shape)
        self.unit = emit(self.lowered, *places(self.lowered))
        self.libraries = build_program(self.unit, isas)
        self.isas = isas
        self.finish(shape.block_size, shape.max_positions, shape.vocab)

    def finish(self, block_size: int, max_model_len: int, vocab_size: int) -> None:
        """Add the facts of the compiled program that a loaded artifact has."""
        self.stored = {name: self.store(name) for name in self.lowered.weights}
        self.weights = [
            StoredWeight(name, "", 0, value.nbytes, str(value.dtype), value.shape, value.shape, "")
            for name, value in self.stored.items()
        ]
        self.memory = self.unit.arena
        self.kv_bytes_per_token = sum(group.bytes_per_token for group in self.lowered.kv_groups)
        groups = [
            {
                "kind": group.kind,
                "window": group.window,
                "layers": group.layers,
                "num_kv_heads": group.num_kv_heads,
                "head_dim": group.head_dim,
                "dtype": dtype_name(group.dtype),
                "bytes_per_token": group.bytes_per_token,
            }
            for group in self.lowered.kv_groups
        ]
        self.kv_groups = msgspec.convert(groups, list[KvGroup])
        self.block_size, self.max_model_len, self.vocab_size = block_size, max_model_len, vocab_size
        self.num_logits = vocab_size
        values, pools = places(self.lowered)
        plan = MemoryPlan.of(values, {**dict.fromkeys(POOLS, 0), **pools})
        self.program = stored_program(self.lowered, plan, self.unit.part, self.weights)

    def store(self, name: str) -> NDArray[Any]:
        weight, value = self.lowered.weights[name], self.tensors[name]
        if weight.op == "pack":
            value = weight_lib.LAYOUTS[weight.layout].pack(value)
        return as_numpy(value.contiguous())

    def library(self, isa: str) -> Library:
        return Library.read(self.libraries[isa])

    def view(self, weight: StoredWeight) -> NDArray[Any]:
        return self.stored[weight.name]

    def reference(self, plan: StepPlan, cache: Tensor) -> tuple[Tensor, Tensor]:
        """(hidden, logits) by the ops' references; cache is canonical."""
        inputs = {name: torch.from_numpy(np.ascontiguousarray(getattr(plan, name))) for name in STEP_INPUTS}
        inputs |= {"slot_mapping_0": torch.from_numpy(plan.slot_mapping[0]), "kv_cache_0": cache}
        inputs["block_table_0"] = torch.from_numpy(plan.block_tables[0])
        hidden, logits = self.lowered.run(inputs, self.tensors.__getitem__)
        return hidden, logits


STEP_INPUTS = ("token_ids", "positions", "query_start_loc", "seq_lens", "seq_slots", "logits_rows")


def as_numpy(value: Tensor) -> NDArray[Any]:
    """A tensor's memory as numpy; bfloat16 as its bits."""
    return value.view(torch.uint16).numpy() if value.dtype == torch.bfloat16 else value.numpy()


def as_torch(value: NDArray[Any]) -> Tensor:
    """The inverse of as_numpy."""
    tensor = torch.from_numpy(np.ascontiguousarray(value))
    return tensor.view(torch.bfloat16) if tensor.dtype == torch.uint16 else tensor


def make_plan(
    chunks: list[tuple[int, list[int], int]],
    *,
    block_size: int = 32,
    max_blocks: int = 8,
    sample: SampleRows | None = None,
    all_rows: bool = False,
) -> StepPlan:
    """A step over (sequence slot, new token ids, tokens cached before) for each sequence; slot s owns its own blocks.

    The last row of each sequence is sampled, or with all_rows every row.
    """
    ids, positions, slots, starts, rows = [], [], [], [0], []
    for slot, tokens, cached in chunks:
        for offset, token in enumerate(tokens):
            position = cached + offset
            ids.append(token)
            positions.append(position)
            slots.append((1 + slot * max_blocks + position // block_size) * block_size + position % block_size)
            if all_rows:
                rows.append(len(ids) - 1)
        starts.append(len(ids))
        if not all_rows:
            rows.append(len(ids) - 1)
    tables = [[1 + slot * max_blocks + block for block in range(max_blocks)] for slot, _, _ in chunks]
    row_slots = np.array([slot for slot, tokens, _ in chunks for _ in (tokens if all_rows else [0])], np.int32)
    return StepPlan(
        token_ids=np.array(ids, np.int32),
        positions=np.array(positions, np.int64),
        query_start_loc=np.array(starts, np.int32),
        seq_lens=np.array([cached + len(tokens) for _, tokens, cached in chunks], np.int32),
        seq_slots=np.array([slot for slot, _, _ in chunks], np.int32),
        logits_rows=np.array(rows, np.int32),
        slot_mapping=(np.array(slots, np.int64),),
        block_tables=(np.array(tables, np.int32),),
        sample=sample or SampleRows.greedy(row_slots),
    )
