"""Tests of partition_segments: what TensorRT computes between our kernels, the order of both, and memory places."""

from __future__ import annotations

from itertools import combinations
from typing import Any

import torch
from graphs import Example, example, random

from inferc.arena import POOLS
from inferc.codegen.segments import segments_of
from inferc.ir.program import from_json, to_json
from inferc.passes.lower.partition_segments import PartitionSegments
from inferc.passes.lower.plan_memory import PlanMemory, memory_plan

aten, inferc = torch.ops.aten, torch.ops.inferc
INPUTS = {
    "token_ids": torch.tensor([3, 1, 4, 1, 5]),
    "positions": torch.arange(5),
    "query_start_loc": torch.tensor([0, 5], dtype=torch.int32),
    "seq_lens": torch.tensor([5], dtype=torch.int32),
    "logits_rows": torch.tensor([4, 1], dtype=torch.int32),
    "slot_mapping_0": torch.arange(4, 9),
    "block_table_0": torch.tensor([[1, 2]], dtype=torch.int32),
    "kv_cache_0": random(4, 2, 2, 4, 1, 4, seed=9),
}
WEIGHTS = {
    "embed": random(7, 8),
    "inv_freq": random(2).abs(),
    "qkv.0": random(16, 8),
    "qkv.1": random(16, 8),
    "o.0": random(8, 8),
    "o.1": random(8, 8),
    "norm": random(8),
    "router": random(4, 8),
    "gate_up": random(4, 12, 8),
    "down": random(4, 8, 6),
    "shared": random(8, 8),
    "head": random(7, 8),
}


def attend(qkv: Any, table: Any, inputs: dict[str, Any], layer: int) -> tuple[Any, Any]:
    q = aten.view.default(aten.slice.Tensor(qkv, -1, 0, 8), [-1, 2, 4])
    k = aten.view.default(aten.slice.Tensor(qkv, -1, 8, 12), [-1, 1, 4])
    v = aten.view.default(aten.slice.Tensor(qkv, -1, 12, 16), [-1, 1, 4])
    written = inferc.rope_kv_write.default(q, k, v, table, inputs["cache"], inputs["slots"], layer)
    cache = written[1]
    where = (inputs["block_table"], inputs["starts"], inputs["lens"], None, layer, 0.5, "causal", 0, 0.0)
    out = inferc.paged_attention.default(written[0], cache, *where)
    return aten.view.default(out, [-1, 8]), cache


def model(
    token_ids: Any,
    positions: Any,
    query_start_loc: Any,
    seq_lens: Any,
    logits_rows: Any,
    slot_mapping_0: Any,
    block_table_0: Any,
    kv_cache_0: Any,
    embed: Any,
    inv_freq: Any,
    qkv__0: Any,
    qkv__1: Any,
    o__0: Any,
    o__1: Any,
    norm: Any,
    router: Any,
    gate_up: Any,
    down: Any,
    shared: Any,
    head: Any,
) -> Any:
    """Two layers: in the first, experts beside one that all share; the second's rows are selected."""
    inputs = {"cache": kv_cache_0, "slots": slot_mapping_0, "block_table": block_table_0}
    inputs |= {"starts": query_start_loc, "lens": seq_lens}
    x = aten.embedding.default(embed, token_ids)
    normed = inferc.rms_norm.default(x, norm, 1e-5)
    table = inferc.rope_table.default(positions, inv_freq, 1.0)
    out, inputs["cache"] = attend(aten.linear.default(normed, qkv__0), table, inputs, 0)
    x = aten.add.Tensor(x, aten.linear.default(out, o__0))
    logits = aten.linear.default(x, router)
    chosen = inferc.moe_routing.default(logits, None, 2, True)
    routed = inferc.moe_experts.default(x, chosen[0], chosen[1], gate_up, down)
    beside = aten.linear.default(x, shared)
    x = aten.add.Tensor(aten.add.Tensor(routed, beside), x)
    out, _ = attend(aten.linear.default(x, qkv__1), table, inputs, 1)
    residual = aten.index_select.default(x, 0, logits_rows)
    last = aten.index_select.default(out, 0, logits_rows)
    hidden = aten.add.Tensor(residual, aten.linear.default(last, o__1))
    return hidden, inferc.lm_head.default(hidden, head, None)


def made() -> Example:
    return example(model, INPUTS, WEIGHTS)


GOLDEN = """
    %token_ids: int64[s0] = input
    %positions: int64[s0] = input
    %query_start_loc: int32[2] = input
    %seq_lens: int32[1] = input
    %logits_rows: int32[2] = input
    %slot_mapping_0: int64[s0] = input
    %block_table_0: int32[1, 2] = input
    %kv_cache_0: float32[4, 2, 2, 4, 1, 4] = input
    %0: float32[s0, 4] = inferc.rope_table(%positions, @inv_freq, 1.0)
    %1: float32[s0, 8] = aten.embedding(@embed, %token_ids)  # segment 0
    %2: float32[s0, 8] = inferc.rms_norm(%1, @norm, 1e-05)  # segment 0
    %3: float32[s0, 16] = aten.linear(%2, @qkv.0)  # segment 0
    %4: float32[s0, 8] = aten.slice.Tensor(%3, -1, 0, 8)
    %5: float32[s0, 2, 4] = aten.view(%4, [-1, 2, 4])
    %6: float32[s0, 4] = aten.slice.Tensor(%3, -1, 8, 12)
    %7: float32[s0, 1, 4] = aten.view(%6, [-1, 1, 4])
    %8: float32[s0, 4] = aten.slice.Tensor(%3, -1, 12, 16)
    %9: float32[s0, 1, 4] = aten.view(%8, [-1, 1, 4])
    %10: (float32[s0, 2, 4], float32[4, 2, 2, 4, 1, 4]) = inferc.rope_kv_write(%5, %7, %9, %0, %kv_cache_0, \
%slot_mapping_0, 0)
    %11: float32[4, 2, 2, 4, 1, 4] = getitem(%10, 1)
    %12: float32[s0, 2, 4] = getitem(%10, 0)
    %13: float32[s0, 2, 4] = inferc.paged_attention(%12, %11, %block_table_0, %query_start_loc, %seq_lens, None, 0, \
0.5, 'causal', 0, 0.0)
    %14: float32[s0, 8] = aten.view(%13, [-1, 8])
    %15: float32[s0, 8] = aten.linear(%14, @o.0)  # segment 1
    %16: float32[s0, 8] = aten.add.Tensor(%1, %15)  # segment 1
    %17: float32[s0, 4] = aten.linear(%16, @router)  # segment 1
    %18: float32[s0, 8] = aten.linear(%16, @shared)  # segment 1
    %19: (int32[s0, 2], float32[s0, 2]) = inferc.moe_routing(%17, None, 2, True)
    %20: int32[s0, 2] = getitem(%19, 0)
    %21: float32[s0, 2] = getitem(%19, 1)
    %22: float32[s0, 8] = inferc.moe_experts(%16, %20, %21, @gate_up, @down)
    %23: float32[s0, 8] = aten.add.Tensor(%22, %18)  # segment 2
    %24: float32[s0, 8] = aten.add.Tensor(%23, %16)  # segment 2
    %25: float32[s0, 16] = aten.linear(%24, @qkv.1)  # segment 2
    %26: float32[s0, 8] = aten.slice.Tensor(%25, -1, 0, 8)
    %27: float32[s0, 2, 4] = aten.view(%26, [-1, 2, 4])
    %28: float32[s0, 4] = aten.slice.Tensor(%25, -1, 8, 12)
    %29: float32[s0, 1, 4] = aten.view(%28, [-1, 1, 4])
    %30: float32[s0, 4] = aten.slice.Tensor(%25, -1, 12, 16)
    %31: float32[s0, 1, 4] = aten.view(%30, [-1, 1, 4])
    %32: (float32[s0, 2, 4], float32[4, 2, 2, 4, 1, 4]) = inferc.rope_kv_write(%27, %29, %31, %0, %11, \
%slot_mapping_0, 1)
    %33: float32[4, 2, 2, 4, 1, 4] = getitem(%32, 1)
    %34: float32[s0, 2, 4] = getitem(%32, 0)
    %35: float32[s0, 2, 4] = inferc.paged_attention(%34, %33, %block_table_0, %query_start_loc, %seq_lens, None, 1, \
0.5, 'causal', 0, 0.0)
    %36: float32[s0, 8] = aten.view(%35, [-1, 8])
    %37: float32[2, 8] = aten.index_select(%24, 0, %logits_rows)  # segment 3
    %38: float32[2, 8] = aten.index_select(%36, 0, %logits_rows)  # segment 3
    %39: float32[2, 8] = aten.linear(%38, @o.1)  # segment 3
    %40: float32[2, 8] = aten.add.Tensor(%37, %39)  # segment 3
    %41: float32[2, 7] = inferc.lm_head(%40, @head, None)
    return (%40, %41)
"""


def test_segments_lie_between_the_kernels() -> None:
    """The rotation table comes first; the shared expert is segmented with what precedes the chosen ones.

    Rows are selected last.
    """
    made().check(PartitionSegments(), 4, GOLDEN)


def test_the_program_keeps_its_segments_as_json() -> None:
    program = made().program
    PartitionSegments()(program)
    again = from_json(to_json(program))
    assert again.to_text() == program.to_text()
    assert [each.engine for each in segments_of(again)] == [each.engine for each in segments_of(program)]


def test_values_of_segments_have_places_that_engines_can_read() -> None:
    """Values lie in rows without gaps at multiples of 256 bytes, and never where the engine still reads.

    Values that stay inside of a segment have no place.
    """
    program = made().program
    PartitionSegments()(program)
    assert PlanMemory()(program) == len(memory_plan(program).values)
    plan, segments = memory_plan(program), segments_of(program)
    inside = {node.name for segment in segments for node in segment.nodes} - {
        node.name for segment in segments for node in segment.outputs.values()
    }
    assert inside and not inside & set(plan.values)
    sizes = (100, 30, 3)
    for segment in segments:
        given = [*segment.inputs.values(), *segment.outputs.values()]
        names = [node.name for node in given if node.op == "call_function"]
        for name in names:
            assert plan.address(name, *sizes) % 256 == 0
        for first, second in combinations(names, 2):
            a, b = plan.values[first], plan.values[second]
            assert a.pool != b.pool or a.offset + a.row_bytes <= b.offset or b.offset + b.row_bytes <= a.offset
        for node in given:
            if node.op == "call_function":
                width = torch.Size([int(size) for size in node.meta["val"].shape[1:]]).numel()
                assert plan.values[node.name].row_bytes == width * node.meta["val"].dtype.itemsize
    assert all(size % 4 == 0 for size in plan.arena.pools.values()) and set(plan.arena.pools) == set(POOLS)
