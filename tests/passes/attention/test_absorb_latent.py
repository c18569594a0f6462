from typing import Any

import torch
from graphs import example, random, rows
from torch import ops

from inferc.passes.attention.absorb_latent import AbsorbLatent
from inferc.passes.attention.page_kv_cache import PageKVCache
from inferc.passes.verify import verify

aten, inferc = ops.aten, ops.inferc
INPUTS = {"q": rows(3, 4), "q_rot": rows(3, 2, seed=1), "latent": rows(8, seed=2), "k_rot": rows(1, 2, seed=3)}
WEIGHTS = {"k": random(12, 8), "v": random(18, 8, seed=1)}


def attended(q: Any, q_rot: Any, latent: Any, k_rot: Any, k: Any, v: Any) -> Any:
    keys = aten.view.default(aten.linear.default(latent, k), [-1, 3, 4])
    values = aten.view.default(aten.linear.default(latent, v), [-1, 3, 6])
    shared = aten.expand.default(k_rot, [-1, 3, 2])
    whole = aten.cat.default([q, q_rot], -1), aten.cat.default([keys, shared], -1)
    return inferc.attention.default(*whole, values, None, 0.5, "causal", 0, 0.0)


def test_weights_move_to_the_queries_and_behind_the_sum() -> None:
    golden = """
        %q: float32[s0, 3, 4] = input
        %q_rot: float32[s0, 3, 2] = input
        %latent: float32[s0, 8] = input
        %k_rot: float32[s0, 1, 2] = input
        %0: float32[s0, 3, 8] = inferc.head_linear(%q, @k.absorbed)
        %1: float32[s0, 3, 10] = aten.cat([%0, %q_rot], -1)
        %2: float32[s0, 1, 8] = aten.view(%latent, [-1, 1, 8])
        %3: float32[s0, 1, 10] = aten.cat([%2, %k_rot], -1)
        %4: float32[s0, 1, 8] = aten.slice.Tensor(%3, -1, 0, 8)
        %5: float32[s0, 3, 8] = inferc.attention(%1, %3, %4, None, 0.5, 'causal', 0, 0.0)
        %6: float32[s0, 3, 6] = inferc.head_linear(%5, @v.absorbed)
        return (%6)
    """
    example(attended, INPUTS, WEIGHTS).check(AbsorbLatent(), 1, golden, tolerance=1e-5)


def test_the_latent_is_what_is_paged() -> None:
    def graph(token_ids: Any, positions: Any, q: Any, q_rot: Any, latent: Any, k_rot: Any, k: Any, v: Any) -> Any:
        return attended(q, q_rot, latent, k_rot, k, v)

    step = {"token_ids": torch.arange(5), "positions": torch.arange(5)}
    program = example(graph, {**step, **INPUTS}, WEIGHTS).program
    assert AbsorbLatent()(program) == 1
    assert PageKVCache(16)(program) == 1
    verify(program)
    (group,) = program.kv_groups
    assert (group.kind, group.num_kv_heads, group.head_dim, group.bytes_per_token) == ("latent", 1, 10, 40)
    targets = [str(node.target) for node in program.graph.nodes]
    assert "inferc.latent_write.default" in targets and "inferc.latent_attention.default" in targets


def test_keeps_heads_of_another_source_or_with_a_bias() -> None:
    def two_sources(q: Any, q_rot: Any, latent: Any, other: Any, k_rot: Any, k: Any, v: Any) -> Any:
        keys = aten.view.default(aten.linear.default(latent, k), [-1, 3, 4])
        values = aten.view.default(aten.linear.default(other, v), [-1, 3, 6])
        shared = aten.expand.default(k_rot, [-1, 3, 2])
        whole = aten.cat.default([q, q_rot], -1), aten.cat.default([keys, shared], -1)
        return inferc.attention.default(*whole, values, None, 0.5, "causal", 0, 0.0)

    def biased(q: Any, q_rot: Any, latent: Any, k_rot: Any, k: Any, v: Any, bias: Any) -> Any:
        keys = aten.view.default(aten.linear.default(latent, k, bias), [-1, 3, 4])
        values = aten.view.default(aten.linear.default(latent, v), [-1, 3, 6])
        shared = aten.expand.default(k_rot, [-1, 3, 2])
        whole = aten.cat.default([q, q_rot], -1), aten.cat.default([keys, shared], -1)
        return inferc.attention.default(*whole, values, None, 0.5, "causal", 0, 0.0)

    example(two_sources, {**INPUTS, "other": rows(8, seed=5)}, WEIGHTS).check_untouched(AbsorbLatent())
    example(biased, INPUTS, {**WEIGHTS, "bias": random(12)}).check_untouched(AbsorbLatent())
