"""The packed projection of q, k and v joins the rotation and the cache write; other projections stay as they are."""

import operator
from typing import Any

import pytest
import torch
from graphs import example, random, rows
from torch import ops

from inferc.passes.fuse.qkv_rope_kv_write import FuseQKV

aten, inferc = ops.aten, ops.inferc
INPUTS: dict[str, torch.Tensor] = {
    "x": rows(6),
    "table": rows(8, seed=3),
    "kv_cache": torch.zeros(4, 1, 2, 4, 2, 8),
    "slot_mapping": torch.tensor([4, 5, 9, 12, 15]),
}
WEIGHTS = {
    "qkv": random(64, 6),
    "bias": random(64, seed=1),
    "q_norm": random(8, seed=2),
    "k_norm": random(8, seed=3),
}
CUTS = ((0, 32), (32, 48), (48, 64))


def heads(packed: Any, cuts: Any = CUTS) -> list[Any]:
    parts = [aten.slice.Tensor(packed, -1, low, high) for low, high in cuts]
    return [aten.view.default(part, [-1, (high - low) // 8, 8]) for part, (low, high) in zip(parts, cuts, strict=True)]


def results(both: Any) -> tuple[Any, Any]:
    return operator.getitem(both, 0), operator.getitem(both, 1)


def test_takes_the_projection_in() -> None:
    def graph(x: Any, table: Any, kv_cache: Any, slot_mapping: Any, qkv: Any) -> Any:
        q, k, v = heads(aten.linear.default(x, qkv))
        return results(inferc.rope_kv_write.default(q, k, v, table, kv_cache, slot_mapping, 0))

    golden = """
        %x: float32[s0, 6] = input
        %table: float32[s0, 8] = input
        %kv_cache: float32[4, 1, 2, 4, 2, 8] = input
        %slot_mapping: int64[s0] = input
        %0: (float32[s0, 4, 8], float32[4, 1, 2, 4, 2, 8]) = inferc.qkv_rope_kv_write(%x, @qkv, None, None, None, \
0.0, 0.0, False, %table, %kv_cache, %slot_mapping, 0, 4, 'halves')
        %1: float32[s0, 4, 8] = getitem(%0, 0)
        %2: float32[4, 1, 2, 4, 2, 8] = getitem(%0, 1)
        return (%1, %2)
    """
    example(graph, INPUTS, WEIGHTS).check(FuseQKV(), 1, golden)


def test_takes_the_projection_in_front_of_the_norms_in_with_its_bias() -> None:
    def graph(
        x: Any, table: Any, kv_cache: Any, slot_mapping: Any, qkv: Any, bias: Any, q_norm: Any, k_norm: Any
    ) -> Any:
        q, k, v = heads(aten.linear.default(x, qkv, bias))
        how = (q_norm, k_norm, 1e-5, 1.0, True, table, kv_cache, slot_mapping, 0)
        return results(inferc.norm_rope_kv_write.default(q, k, v, *how))

    golden = """
        %x: float32[s0, 6] = input
        %table: float32[s0, 8] = input
        %kv_cache: float32[4, 1, 2, 4, 2, 8] = input
        %slot_mapping: int64[s0] = input
        %0: (float32[s0, 4, 8], float32[4, 1, 2, 4, 2, 8]) = inferc.qkv_rope_kv_write(%x, @qkv, @bias, @q_norm, \
@k_norm, 1e-05, 1.0, True, %table, %kv_cache, %slot_mapping, 0, 4, 'halves')
        %1: float32[s0, 4, 8] = getitem(%0, 0)
        %2: float32[4, 1, 2, 4, 2, 8] = getitem(%0, 1)
        return (%1, %2)
    """
    example(graph, INPUTS, WEIGHTS).check(FuseQKV(), 1, golden)


def test_takes_a_quantized_projection_in() -> None:
    """With the scales of rows, outputs and groups, and the dtype of what integers give."""

    def graph(
        x: Any, x_scale: Any, table: Any, kv_cache: Any, slot_mapping: Any, qkv: Any, groups: Any, scale: Any, bias: Any
    ) -> Any:
        packed = inferc.linear_w4a8.default(x, x_scale, qkv, groups, scale, torch.float32, bias)
        q, k, v = heads(packed)
        return results(inferc.rope_kv_write.default(q, k, v, table, kv_cache, slot_mapping, 0))

    golden = """
        %x: int8[s0, 32] = input
        %x_scale: float32[s0] = input
        %table: float32[s0, 8] = input
        %kv_cache: float32[4, 1, 2, 4, 2, 8] = input
        %slot_mapping: int64[s0] = input
        %0: (float32[s0, 4, 8], float32[4, 1, 2, 4, 2, 8]) = inferc.qkv_rope_kv_write(%x, @qkv, @bias, None, None, \
0.0, 0.0, False, %table, %kv_cache, %slot_mapping, 0, 4, 'halves', %x_scale, @scale, @groups, float32)
        %1: float32[s0, 4, 8] = getitem(%0, 0)
        %2: float32[4, 1, 2, 4, 2, 8] = getitem(%0, 1)
        return (%1, %2)
    """
    integers = {"x": (rows(32) * 40).to(torch.int8), "x_scale": rows(1)[:, 0].abs()}
    inputs = {**integers, **{name: INPUTS[name] for name in ("table", "kv_cache", "slot_mapping")}}
    stored = {"qkv": (random(64, 16).abs() * 100).to(torch.uint8), "groups": (random(64, 1) * 50).to(torch.int8)}
    weights = {**stored, "scale": random(64).abs(), "bias": WEIGHTS["bias"]}
    example(graph, inputs, weights).check(FuseQKV(), 1, golden)


def test_keeps_a_projection_that_something_else_reads() -> None:
    def graph(x: Any, table: Any, kv_cache: Any, slot_mapping: Any, qkv: Any) -> Any:
        packed = aten.linear.default(x, qkv)
        q, k, v = heads(packed)
        both = inferc.rope_kv_write.default(q, k, v, table, kv_cache, slot_mapping, 0)
        return (*results(both), aten.silu.default(packed))

    example(graph, INPUTS, WEIGHTS).check_untouched(FuseQKV())


@pytest.mark.parametrize(
    "cuts",
    [((32, 64), (0, 16), (16, 32)), ((0, 32), (48, 64), (32, 48))],
    ids=["k first", "v before k"],
)
def test_keeps_parts_in_another_order(cuts: Any) -> None:
    def graph(x: Any, table: Any, kv_cache: Any, slot_mapping: Any, qkv: Any) -> Any:
        q, k, v = heads(aten.linear.default(x, qkv), cuts)
        return results(inferc.rope_kv_write.default(q, k, v, table, kv_cache, slot_mapping, 0))

    example(graph, INPUTS, WEIGHTS).check_untouched(FuseQKV())


def test_keeps_projections_of_their_own() -> None:
    def graph(x: Any, table: Any, kv_cache: Any, slot_mapping: Any, qkv: Any) -> Any:
        q, k = heads(aten.linear.default(x, qkv), CUTS[:2])
        (v,) = heads(aten.linear.default(aten.silu.default(x), qkv), CUTS[2:])
        return results(inferc.rope_kv_write.default(q, k, v, table, kv_cache, slot_mapping, 0))

    example(graph, INPUTS, WEIGHTS).check_untouched(FuseQKV())
