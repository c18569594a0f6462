"""Attention over a dense cache: what the pass writes, and that results stay, by the references and by onnxruntime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from dense import as_captured, run_dense
from graphs import TOKENS, Example, example, random
from onnx_runs import session_of
from paged import IDS, model, sharing

from inferc.passes.attention.dense_kv_cache import DenseKVCache
from inferc.passes.verify import verify

aten, inferc = torch.ops.aten, torch.ops.inferc


def check(made: Example, tmp_path: Path, count: int) -> None:
    """The pass rewrites so many attentions, and neither it nor onnxruntime changes a result."""
    want = as_captured(made)
    assert DenseKVCache(max_model_len=64)(made.program) == count
    verify(made.program)
    for chunk_size in (TOKENS, 2, 1):
        torch.testing.assert_close(run_dense(made, chunk_size), want)
    session = session_of(made, tmp_path)
    for chunk_size in (TOKENS, 2, 1):
        torch.testing.assert_close(run_dense(made, chunk_size, session), want, rtol=1e-5, atol=1e-5)


def test_k_and_v_of_each_layer_are_inputs_of_their_own(tmp_path: Path) -> None:
    made = model(("causal", 0), ("causal", 0))
    check(made, tmp_path, 2)
    golden = """
        %token_ids: int32[s0] = input
        %positions: int64[s0] = input
        %starts: int64[s1] = input
        %seq_lens: int64[s1] = input
        %logits_rows: int32[s2] = input
        %k_cache_0: float32[s1, 2, s3, 4] = input
        %v_cache_0: float32[s1, 2, s3, 4] = input
        %k_cache_1: float32[s1, 2, s3, 4] = input
        %v_cache_1: float32[s1, 2, s3, 4] = input
        %0: float32[s0, 16] = aten.embedding(@embed, %token_ids)
        %1: float32[s0, 4, 4] = aten.view(%0, [-1, 4, 4])
        %2: float32[s0, 8] = aten.slice.Tensor(%0, -1, 0, 8)
        %3: float32[s0, 2, 4] = aten.view(%2, [-1, 2, 4])
        %4: float32[s0, 8] = aten.slice.Tensor(%0, -1, 8, 16)
        %5: float32[s0, 2, 4] = aten.view(%4, [-1, 2, 4])
        %6: float32[s1, 2, s3, 4] = inferc.dense_write(%k_cache_0, %3, %starts)
        %7: float32[s1, 2, s3, 4] = inferc.dense_write(%v_cache_0, %5, %starts)
        %8: float32[s0, 4, 4] = inferc.dense_attention(%1, %6, %7, %seq_lens, None, 0.5, 'causal', 0, 0.0)
        %9: float32[s0, 16] = aten.view(%8, [-1, 16])
        %10: float32[s0, 4, 4] = aten.view(%9, [-1, 4, 4])
        %11: float32[s0, 8] = aten.slice.Tensor(%9, -1, 0, 8)
        %12: float32[s0, 2, 4] = aten.view(%11, [-1, 2, 4])
        %13: float32[s0, 8] = aten.slice.Tensor(%9, -1, 8, 16)
        %14: float32[s0, 2, 4] = aten.view(%13, [-1, 2, 4])
        %15: float32[s1, 2, s3, 4] = inferc.dense_write(%k_cache_1, %12, %starts)
        %16: float32[s1, 2, s3, 4] = inferc.dense_write(%v_cache_1, %14, %starts)
        %17: float32[s0, 4, 4] = inferc.dense_attention(%10, %15, %16, %seq_lens, None, 0.5, 'causal', 0, 0.0)
        %18: float32[s0, 16] = aten.view(%17, [-1, 16])
        return (%18)
    """
    text = made.program.to_text().replace("  # onnx.dense_attention", "").replace("  # onnx.dense_write", "")
    text = text.replace("  # onnx.embedding", "")
    assert text.split() == golden.split(), f"the program is now\n{made.program.to_text()}"
    (group,) = made.program.kv_groups
    assert (group.kind, group.layers, group.bytes_per_token, made.program.block_size) == ("full", (0, 1), 128, 64)


@pytest.mark.parametrize(("mask", "window"), [("sliding", 1), ("sliding", 2), ("sliding", 9), ("chunked", 2)])
def test_windows_and_chunks_are_masks(mask: str, window: int, tmp_path: Path) -> None:
    made = model((mask, window), ("causal", 0), (mask, window))
    check(made, tmp_path, 3)
    assert [(group.kind, group.window, group.layers) for group in made.program.kv_groups] == [("full", 0, (0, 1, 2))]


@pytest.mark.parametrize("is_computed_again", [False, True])
def test_a_layer_that_shares_k_and_v_has_no_cache(is_computed_again: bool, tmp_path: Path) -> None:
    made = sharing(("sliding", 3), ("causal", 0), is_computed_again=is_computed_again)
    check(made, tmp_path, 2)
    assert [node.name for node in made.program.inputs()][-2:] == ["k_cache_0", "v_cache_0"]


@pytest.mark.parametrize(("mask", "window", "softcap"), [("causal", 0, 0.0), ("causal", 0, 2.0), ("sliding", 2, 2.0)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_softcap_and_sinks(mask: str, window: int, softcap: float, has_sinks: bool, tmp_path: Path) -> None:
    def graph(token_ids: Any, positions: Any, embed: Any, sinks: Any) -> Any:
        x = aten.embedding.default(embed, token_ids)
        q = aten.view.default(x, [-1, 4, 4])
        k, v = (aten.view.default(aten.slice.Tensor(x, -1, at, at + 8), [-1, 2, 4]) for at in (0, 8))
        return inferc.attention.default(q, k, v, sinks if has_sinks else None, 0.5, mask, window, softcap)

    check(example(graph, IDS, {"embed": 2 * random(7, 16), "sinks": random(4, seed=4)}), tmp_path, 1)


def test_a_latent_is_one_cache(tmp_path: Path) -> None:
    def graph(token_ids: Any, positions: Any, embed: Any) -> Any:
        x = aten.embedding.default(embed, token_ids)
        q = aten.view.default(x, [-1, 2, 8])
        latent = aten.view.default(aten.slice.Tensor(x, -1, 0, 8), [-1, 1, 8])
        return inferc.attention.default(q, latent, aten.slice.Tensor(latent, -1, 0, 6), None, 0.5, "causal", 0, 0.0)

    made = example(graph, IDS, {"embed": random(7, 16)})
    check(made, tmp_path, 1)
    assert [node.name for node in made.program.inputs()][-1] == "latent_cache_0"
    assert [(group.kind, group.bytes_per_token) for group in made.program.kv_groups] == [("latent", 32)]


def test_leaves_a_program_without_attention_or_with_a_cache() -> None:
    model().check_untouched(DenseKVCache(64))
    made = model(("causal", 0))
    DenseKVCache(64)(made.program)
    made.check_untouched(DenseKVCache(64))
