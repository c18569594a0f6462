"""The writes of K and V with the attention, by the references and by onnxruntime's GroupQueryAttention."""

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
from inferc.passes.fuse.dense_attention import fuse_dense_attention
from inferc.passes.verify import verify

aten, inferc = torch.ops.aten, torch.ops.inferc


def check(made: Example, tmp_path: Path, count: int) -> None:
    """So many attentions take in their writes, and no result changes."""
    want = as_captured(made)
    DenseKVCache(max_model_len=64)(made.program)
    assert fuse_dense_attention(made.program) == count
    verify(made.program)
    for chunk_size in (TOKENS, 2, 1):
        torch.testing.assert_close(run_dense(made, chunk_size), want)
    session = session_of(made, tmp_path)
    # onnxruntime takes several new tokens of several sequences only where they are their first.
    for chunk_size, apart in ((TOKENS, False), (2, True), (3, True), (1, False)):
        torch.testing.assert_close(run_dense(made, chunk_size, session, apart), want, rtol=1e-5, atol=1e-5)


def test_one_op_of_three(tmp_path: Path) -> None:
    made = model(("causal", 0), head_dim=8)
    golden = """
        %token_ids: int32[s0] = input
        %positions: int64[s0] = input
        %starts: int64[s1] = input
        %seq_lens: int64[s1] = input
        %logits_rows: int32[s2] = input
        %k_cache_0: float32[s1, 2, s3, 8] = input
        %v_cache_0: float32[s1, 2, s3, 8] = input
        %0: float32[s0, 32] = aten.embedding(@embed, %token_ids)
        %1: float32[s0, 4, 8] = aten.view(%0, [-1, 4, 8])
        %2: float32[s0, 16] = aten.slice.Tensor(%0, -1, 0, 16)
        %3: float32[s0, 2, 8] = aten.view(%2, [-1, 2, 8])
        %4: float32[s0, 16] = aten.slice.Tensor(%0, -1, 16, 32)
        %5: float32[s0, 2, 8] = aten.view(%4, [-1, 2, 8])
        %6: (float32[s0, 4, 8], float32[s1, 2, s3, 8], float32[s1, 2, s3, 8]) = inferc.dense_write_attention(%1, %3,
            %5, %k_cache_0, %v_cache_0, %starts, %seq_lens, None, 0.5, 'causal', 0, 0.0)
        %7: float32[s0, 4, 8] = getitem(%6, 0)
        %8: float32[s0, 32] = aten.view(%7, [-1, 32])
        return (%8)
    """
    DenseKVCache(max_model_len=64)(made.program)
    assert fuse_dense_attention(made.program) == 1
    text = made.program.to_text()
    assert text.split() == golden.split(), f"the program is now\n{text}"


@pytest.mark.parametrize(("mask", "window"), [("causal", 0), ("sliding", 1), ("sliding", 2), ("sliding", 9)])
def test_masks(mask: str, window: int, tmp_path: Path) -> None:
    check(model((mask, window), ("causal", 0), head_dim=8), tmp_path, 2)


def test_chunks_stay_apart(tmp_path: Path) -> None:
    check(model(("chunked", 2), ("causal", 0), head_dim=8), tmp_path, 1)


def test_heads_that_the_kernel_does_not_take(tmp_path: Path) -> None:
    made = model(("causal", 0), head_dim=4)
    DenseKVCache(64)(made.program)
    made.check_untouched(fuse_dense_attention)


@pytest.mark.parametrize("is_computed_again", [False, True])
def test_a_layer_that_shares_k_and_v_reads_what_the_first_wrote(is_computed_again: bool, tmp_path: Path) -> None:
    made = sharing(("sliding", 3), ("causal", 0), is_computed_again=is_computed_again, head_dim=8)
    check(made, tmp_path, 1)


@pytest.mark.parametrize(("mask", "window", "softcap"), [("causal", 0, 0.0), ("causal", 0, 2.0), ("sliding", 2, 2.0)])
@pytest.mark.parametrize("has_sinks", [False, True])
def test_softcap_and_sinks(mask: str, window: int, softcap: float, has_sinks: bool, tmp_path: Path) -> None:
    def graph(token_ids: Any, positions: Any, embed: Any, sinks: Any) -> Any:
        x = aten.embedding.default(embed, token_ids)
        q = aten.view.default(x, [-1, 4, 8])
        k, v = (aten.view.default(aten.slice.Tensor(x, -1, at, at + 16), [-1, 2, 8]) for at in (0, 16))
        return inferc.attention.default(q, k, v, sinks if has_sinks else None, 0.5, mask, window, softcap)

    check(example(graph, IDS, {"embed": 2 * random(7, 32), "sinks": random(4, seed=4)}), tmp_path, 1)
