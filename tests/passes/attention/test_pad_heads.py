"""Heads that no kernel takes get zeros behind their elements, and the same numbers come out."""

import sys
from typing import Any

import torch
from graphs import Example, example, random, rows
from torch import ops

from inferc.passes.attention.pad_heads import PadHeads
from inferc.passes.fuse.pack_projections import PackProjections

aten, inferc = ops.aten, ops.inferc
HOW = (None, 0.25, "causal", 0, 0.0)
WEIGHTS = {"q": random(12, 8), "k": random(6, 8, seed=1), "v": random(6, 8, seed=2), "o": random(8, 12, seed=3)}


def heads(x: Any, weight: Any, count: int, *bias: Any) -> Any:
    return aten.view.default(aten.linear.default(x, weight, *bias), [-1, count, 6])


def attended(q: Any, k: Any, v: Any, o: Any) -> Any:
    return aten.linear.default(aten.view.default(inferc.attention.default(q, k, v, *HOW), [-1, 12]), o)


def model(function: Any, weights: dict[str, torch.Tensor] | None = None) -> Example:
    inputs = {"x": rows(8), "table": torch.randn(5, 4, generator=torch.Generator().manual_seed(0))}
    return example(function, inputs, WEIGHTS if weights is None else weights)


def test_projections_rotations_and_clamps_are_padded_in_their_weights() -> None:
    def graph(x: Any, table: Any, q: Any, k: Any, v: Any, o: Any, k_bias: Any) -> Any:
        queries, keys = inferc.rope.default(heads(x, q, 2), table), inferc.rope.default(heads(x, k, 1, k_bias), table)
        clamped = aten.view.default(aten.clamp.default(aten.linear.default(x, v), -0.5, 0.5), [-1, 1, 6])
        return attended(queries, keys, clamped, o)

    golden = """
        %x: float32[s0, 8] = input
        %table: float32[s0, 4] = input
        %0: float32[s0, 16] = aten.linear(%x, @q.heads_of_8)
        %1: float32[s0, 2, 8] = aten.view(%0, [-1, 2, 8])
        %2: float32[s0, 2, 8] = inferc.rope(%1, %table)
        %3: float32[s0, 8] = aten.linear(%x, @k.heads_of_8, @k_bias.heads_of_8)
        %4: float32[s0, 1, 8] = aten.view(%3, [-1, 1, 8])
        %5: float32[s0, 1, 8] = inferc.rope(%4, %table)
        %6: float32[s0, 8] = aten.linear(%x, @v.heads_of_8)
        %7: float32[s0, 8] = aten.clamp(%6, -0.5, 0.5)
        %8: float32[s0, 1, 8] = aten.view(%7, [-1, 1, 8])
        %9: float32[s0, 2, 8] = inferc.attention(%2, %5, %8, None, 0.25, 'causal', 0, 0.0, None)
        %10: float32[s0, 16] = aten.view(%9, [-1, 16])
        %11: float32[s0, 8] = aten.linear(%10, @o.heads_of_8)
        return (%11)
    """
    made = model(graph, {**WEIGHTS, "k_bias": random(6, seed=4)})
    made.check(PadHeads(8), 1, golden)
    assert "zeros" in str(made.program.weights["o.heads_of_8"])


def test_columns_of_one_projection_are_padded_apart_and_packed_again() -> None:
    def graph(x: Any, qkv: Any, bias: Any, o: Any) -> Any:
        packed = aten.linear.default(x, qkv, bias)
        parts = [aten.slice.Tensor(packed, -1, *part) for part in ((0, 12), (12, 18), (-6, sys.maxsize))]
        q, k, v = (aten.view.default(part, [-1, count, 6]) for part, count in zip(parts, (2, 1, 1), strict=True))
        return attended(q, k, v, o)

    golden = """
        %x: float32[s0, 8] = input
        %table: float32[s0, 4] = input
        %0: float32[s0, 32] = aten.linear(%x, @qkv.0:12+12:18+18:24.heads_of_8, @bias.0:12+12:18+18:24.heads_of_8)
        %1: float32[s0, 16] = aten.slice.Tensor(%0, -1, 0, 16)
        %2: float32[s0, 8] = aten.slice.Tensor(%0, -1, 16, 24)
        %3: float32[s0, 8] = aten.slice.Tensor(%0, -1, 24, 32)
        %4: float32[s0, 2, 8] = aten.view(%1, [-1, 2, 8])
        %5: float32[s0, 1, 8] = aten.view(%2, [-1, 1, 8])
        %6: float32[s0, 1, 8] = aten.view(%3, [-1, 1, 8])
        %7: float32[s0, 2, 8] = inferc.attention(%4, %5, %6, None, 0.25, 'causal', 0, 0.0, None)
        %8: float32[s0, 16] = aten.view(%7, [-1, 16])
        %9: float32[s0, 8] = aten.linear(%8, @o.heads_of_8)
        return (%9)
    """
    weights = {"qkv": random(24, 8), "bias": random(24, seed=1), "o": WEIGHTS["o"]}
    model(graph, weights).check(lambda program: PadHeads(8)(program) + PackProjections()(program), 2, golden)


def test_heads_behind_a_norm_and_in_front_of_a_gate_are_copied() -> None:
    def graph(x: Any, table: Any, q: Any, k: Any, v: Any, o: Any, norm: Any) -> Any:
        queries = inferc.rope.default(inferc.rms_norm.default(heads(x, q, 2), norm, 1e-5), table)
        out = inferc.attention.default(queries, heads(x, k, 1), heads(x, v, 1), *HOW)
        gated = aten.mul.Tensor(aten.view.default(out, [-1, 12]), aten.linear.default(x, q))
        return aten.linear.default(gated, o)

    golden = """
        %x: float32[s0, 8] = input
        %table: float32[s0, 4] = input
        %0: float32[s0, 12] = aten.linear(%x, @q)
        %1: float32[s0, 2, 6] = aten.view(%0, [-1, 2, 6])
        %2: float32[s0, 2, 6] = inferc.rms_norm(%1, @norm, 1e-05)
        %3: float32[s0, 2, 8] = inferc.resize_heads(%2, 8)
        %4: float32[s0, 2, 8] = inferc.rope(%3, %table)
        %5: float32[s0, 8] = aten.linear(%x, @k.heads_of_8)
        %6: float32[s0, 1, 8] = aten.view(%5, [-1, 1, 8])
        %7: float32[s0, 8] = aten.linear(%x, @v.heads_of_8)
        %8: float32[s0, 1, 8] = aten.view(%7, [-1, 1, 8])
        %9: float32[s0, 2, 8] = inferc.attention(%4, %6, %8, None, 0.25, 'causal', 0, 0.0, None)
        %10: float32[s0, 2, 6] = inferc.resize_heads(%9, 6)
        %11: float32[s0, 12] = aten.view(%10, [-1, 12])
        %12: float32[s0, 12] = aten.linear(%x, @q)
        %13: float32[s0, 12] = aten.mul.Tensor(%11, %12)
        %14: float32[s0, 8] = aten.linear(%13, @o)
        return (%14)
    """
    model(graph, {**WEIGHTS, "norm": random(6, seed=5)}).check(PadHeads(8), 1, golden)


def test_values_of_another_size_than_keys_become_alike() -> None:
    def graph(x: Any, q: Any, k: Any, v: Any, o: Any) -> Any:
        values = aten.view.default(aten.linear.default(x, v), [-1, 1, 4])
        out = inferc.attention.default(heads(x, q, 2), heads(x, k, 1), values, *HOW)
        return aten.linear.default(aten.view.default(out, [-1, 8]), o)

    weights = {**WEIGHTS, "v": random(4, 8, seed=2), "o": random(8, 8, seed=3)}
    made = model(graph, weights)
    before = made.run()
    assert PadHeads(6)(made.program) == 1
    attention = made.program.graph.find_nodes(op="call_function", target=inferc.attention.default)[0]
    assert [list(each.meta["val"].shape[1:]) for each in (*attention.args[:3], attention)] == [
        [2, 6],
        [1, 6],
        [1, 6],
        [2, 6],
    ]
    torch.testing.assert_close(made.run(), before, rtol=1e-6, atol=1e-6)


def test_keeps_heads_that_fit_and_latents() -> None:
    def graph(x: Any, q: Any, k: Any, v: Any, o: Any) -> Any:
        latent = aten.view.default(aten.linear.default(x, k), [-1, 1, 6])
        shared = inferc.attention.default(heads(x, q, 2), latent, aten.slice.Tensor(latent, -1, 0, 4), *HOW)
        return attended(heads(x, q, 2), heads(x, k, 1), heads(x, v, 1), o), shared

    model(graph).check_untouched(PadHeads(6))
    example(lambda x: x, {"x": rows(8)}).check_untouched(PadHeads(16))
