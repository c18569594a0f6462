"""Give every value of the step a place in the arena: first fit by liveness, largest values first.

A value has rows on axis 0: one per token (pool "T"), per logits row ("S") or per sequence ("B"). The values of the LM
head and of sampling have at most 64 rows at a time and a pool of their own ("sample"). Rows of a multiple of 512 bytes
are followed by an unused cache line (see `padded`), except in a program with segments (`codegen/segments.py`).

Within a pool a place is counted in bytes per row, so one plan serves every token budget: the address of a place is
`offset` times the largest row count of the pool, rounded up to a multiple of 64. This aligns every value to 64 bytes,
and those of a program with segments to 256. Views, slices, parts of tuples and values that stay inside of a segment
have no place.
"""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from inferc.arena import ENGINE_ALIGNMENT, POOLS, ROW_ALIGNMENT, MemoryPlan, Place, Pool
from inferc.codegen.segments import segment_of, stays_inside
from inferc.codegen.values import IN_PLACE
from inferc.errors import UnsupportedError, VerifyError
from inferc.ir.program import Program, ancestors, target_name

aten, inferc = torch.ops.aten, torch.ops.inferc
VIEWS = (aten.view.default, aten.slice.Tensor)
# In bytes per row: the values of a program with segments, and their pools, begin at multiples of it.
SEGMENT_ALIGNMENT = ENGINE_ALIGNMENT // ROW_ALIGNMENT
ROTATES_AND_WRITES = (  # ops that return (q, cache)
    inferc.rope_kv_write.default,
    inferc.norm_rope_kv_write.default,
    inferc.qkv_rope_kv_write.default,
)
EXCHANGED = (inferc.all_reduce.default, inferc.all_gather.default, inferc.expert_combine.default)
CACHE_LINE, FEW_SETS = 64, 512  # bytes
HIDDEN_IN = "hidden_in"


@dataclass(frozen=True)
class Value:
    """A tensor that needs a place; it is live from call `first` to call `last` of the graph, both included."""

    name: str
    pool: Pool
    row_bytes: int
    first: int
    last: int
    alignment: int = 1  # the value's offset is a multiple of it

    def live_with(self, other: Value) -> bool:
        return self.pool == other.pool and self.first <= other.last and other.first <= self.last


NO_PLAN = MemoryPlan.of({}, dict.fromkeys(POOLS, 0))
"""The plan of a program whose values are placed by whatever runs it."""


# -------------------------------------------------------------------------------------------- liveness


def live_values(program: Program) -> list[Value]:
    """Return the values that need a place, in graph order."""
    results = program.output().all_input_nodes
    step = ancestors(results[:1])
    # Hidden rows that come from another pipeline stage need a place too.
    calls = [node for node in program.graph.nodes if node.op == "call_function" or node.name == HIDDEN_IN]
    index = _order(calls)
    last = _last_uses(calls, index, results)
    axes = _row_axes(program)
    # Engines support no row strides, and kernels that read rows of an engine beside other rows need one stride for
    # both.
    is_dense = any(segment_of(node) is not None for node in calls)
    made = []
    for node in calls:
        value = node.meta["val"]
        if (
            node.target in VIEWS
            or _is_in_place(node)
            or not isinstance(value, Tensor)
            or _is_cache(node)
            or stays_inside(node)
        ):
            continue
        pool: Pool | None = axes.get(str(value.shape[0])) if node in step else "sample"
        if pool is None:
            name = node.meta.get("name", node.name)
            raise UnsupportedError(f"{name}: axis 0 is {value.shape[0]}; expected tokens, logits rows or sequences")
        row_bytes = math.prod(int(size) for size in value.shape[1:]) * value.dtype.itemsize
        # The ranks send and add the rows of an exchanged value as one contiguous run of bytes.
        if node.target not in EXCHANGED and not is_dense:
            row_bytes = padded(row_bytes)
        # A part of a tuple is live from the call that made the tuple, though its getitem may come later.
        maker = node.args[0] if node.target is operator.getitem else node
        assert isinstance(maker, fx.Node)
        alignment = SEGMENT_ALIGNMENT if is_dense else 1
        made.append(Value(node.name, pool, row_bytes, index[maker], max(last[node], index[maker]), alignment))
    return made


def _order(calls: list[fx.Node]) -> dict[fx.Node, int]:
    """Return the position at which each call runs.

    All calls of a segment share one position: any of its results may be written before any of its inputs is read.
    """
    index = {node: at for at, node in enumerate(calls)}
    ends = {segment_of(node): at for node, at in index.items() if segment_of(node) is not None}
    return {node: ends.get(segment_of(node), at) for node, at in index.items()}


def padded(row_bytes: int) -> int:
    """Return the distance in bytes from one row to the next, for rows of `row_bytes` bytes.

    A product reads a block of columns of many rows. Where rows lie a multiple of 512 bytes apart, the lines of a column
    are in at most 8 of the 64 sets of a first-level cache and drive each other out of it, so one more line is left free
    behind each row.
    """
    return row_bytes + CACHE_LINE if row_bytes and row_bytes % FEW_SETS == 0 else row_bytes


def _last_uses(calls: list[fx.Node], index: dict[fx.Node, int], results: list[fx.Node]) -> dict[fx.Node, int]:
    """Return the position of the last call that reads each node, directly or through views; results live to the end.

    What is computed in place is read under both names.
    """
    last = dict(index)
    for node in results:
        last[node] = len(calls)
    for node in reversed(calls):
        for source in node.all_input_nodes:
            if source in last:
                alias = node.target in VIEWS or (_is_in_place(node) and source is node.args[0])
                last[source] = max(last[source], last[node] if alias else index[node])
    return last


def _is_in_place(node: fx.Node) -> bool:
    """Return whether the node is its first argument, into which its kernel writes."""
    return target_name(node.target) in IN_PLACE


def _is_cache(node: fx.Node) -> bool:
    """Return whether the node is a KV cache, which has its own memory."""
    if node.target is operator.getitem:
        source = node.args[0]
        assert isinstance(source, fx.Node)
        return bool(source.target in ROTATES_AND_WRITES and node.args[1] == 1)
    return node.target in (inferc.kv_write.default, inferc.latent_write.default)


def _row_axes(program: Program) -> dict[str, Pool]:
    inputs = {node.name: node for node in program.inputs()}
    named: dict[Pool, str] = {"T": "token_ids", "S": "logits_rows", "B": "seq_lens"}
    return {str(inputs[name].meta["val"].shape[0]): pool for pool, name in named.items() if name in inputs}


# ------------------------------------------------------------------------------------------------ plan


def place_values(values: list[Value]) -> MemoryPlan:
    """Place values by first fit, largest first: each at the lowest offset that no value live with it covers."""
    placed: list[tuple[Value, Place]] = []
    for value in sorted(values, key=lambda each: (-each.row_bytes, each.first)):
        taken = sorted((p.offset, p.offset + p.row_bytes) for other, p in placed if other.live_with(value))
        offset = 0
        for start, end in taken:
            if offset + value.row_bytes <= start:
                break
            offset = max(offset, -(-end // value.alignment) * value.alignment)
        placed.append((value, Place(value.pool, value.row_bytes, offset)))
    by_name = {value.name: place for value, place in placed}
    pools = {
        pool: max((p.offset + p.row_bytes for p in by_name.values() if p.pool == pool), default=0) for pool in POOLS
    }
    to = max((value.alignment for value in values), default=1)
    pools = {pool: -(-size // to) * to for pool, size in pools.items()}  # the next pool begins at an aligned offset
    return MemoryPlan.of({value.name: by_name[value.name] for value in values}, pools)


def verify_plan(values: list[Value], plan: MemoryPlan) -> None:
    """Raise VerifyError if two live values share a byte, or if a value reaches past its pool."""
    for at, value in enumerate(values):
        place = plan.values.get(value.name)
        if place is None or (place.pool, place.row_bytes) != (value.pool, value.row_bytes):
            raise VerifyError(
                f"memory plan: {value.name} needs {value.row_bytes} bytes a row in {value.pool}, has {place}"
            )
        if place.offset % value.alignment:
            raise VerifyError(f"memory plan: {value.name} at {place} is not aligned to {value.alignment}")
        if place.offset < 0 or place.offset + place.row_bytes > plan.arena.pools[place.pool]:
            raise VerifyError(f"memory plan: {value.name} at {place} lies outside of its pool")
        for other in values[:at]:
            if value.live_with(other):
                there = plan.values[other.name]
                if place.offset < there.offset + there.row_bytes and there.offset < place.offset + place.row_bytes:
                    raise VerifyError(f"memory plan: {value.name} at {place} overlaps {other.name} at {there}")


def memory_plan(program: Program) -> MemoryPlan:
    """Return the verified memory plan of a lowered program; equal programs have equal plans."""
    values = live_values(program)
    plan = place_values(values)
    verify_plan(values, plan)
    return plan


@dataclass(frozen=True)
class PlanMemory:
    """A pass that writes each value's place into `meta["place"]`; `memory_plan` returns the whole plan."""

    name: str = "plan_memory"

    def __call__(self, program: Program) -> int:
        plan = memory_plan(program)
        for node in program.graph.nodes:
            if node.name in plan.values:
                place = plan.values[node.name]
                node.meta["place"] = f"{place.pool}+{place.offset}"
        return len(plan.values)
