from dataclasses import replace
from typing import Any

import torch
from graphs import TOKENS, Example, example, random
from paged import IDS, model, run_paged

from inferc.ir.model_info import ModelInfo
from inferc.manifest_types import Quantization
from inferc.passes.attention.page_kv_cache import PageKVCache
from inferc.passes.fuse.rope_kv_write import fuse_rope_kv_write
from inferc.passes.quantize.kv_cache import QuantizeKVCache
from inferc.passes.quantize.schemes import KV_INT8, SCHEMES, budgets_of, together
from inferc.passes.verify import verify

aten, inferc = torch.ops.aten, torch.ops.inferc
QUANTIZE = QuantizeKVCache()


def paged(*kinds: tuple[str, int]) -> Example:
    made = model(*kinds)
    PageKVCache(block_size=2)(made.program)
    return made


def test_the_cache_becomes_int8_with_a_scale_behind_each_row() -> None:
    made = paged(("causal", 0), ("sliding", 2))
    before = run_paged(made, 2)
    assert QUANTIZE(made.program) == 2
    verify(made.program)
    golden = """
        %token_ids: int32[s0] = input
        %positions: int64[s0] = input
        %query_start_loc: int32[s1 + 1] = input
        %seq_lens: int32[s1] = input
        %seq_slots: int32[s1] = input
        %logits_rows: int32[s2] = input
        %slot_mapping_0: int64[s0] = input
        %block_table_0: int32[s1, s3] = input
        %kv_cache_0: int8[s4, 1, 2, 2, 2, 8] = input
        %slot_mapping_1: int64[s0] = input
        %block_table_1: int32[s1, s3] = input
        %kv_cache_1: int8[s4, 1, 2, 2, 2, 8] = input
        %0: float32[s0, 16] = aten.embedding(@embed, %token_ids)
        %1: float32[s0, 4, 4] = aten.view(%0, [-1, 4, 4])
        %2: float32[s0, 8] = aten.slice.Tensor(%0, -1, 0, 8)
        %3: float32[s0, 2, 4] = aten.view(%2, [-1, 2, 4])
        %4: float32[s0, 8] = aten.slice.Tensor(%0, -1, 8, 16)
        %5: float32[s0, 2, 4] = aten.view(%4, [-1, 2, 4])
        %6: int8[s4, 1, 2, 2, 2, 8] = inferc.kv_write(%kv_cache_0, %3, %5, %slot_mapping_0, 0)
        %7: float32[s0, 4, 4] = inferc.paged_attention(%1, %6, %block_table_0, %query_start_loc, %seq_lens, None, 0,
            0.5, 'causal', 0, 0.0)
        %8: float32[s0, 16] = aten.view(%7, [-1, 16])
        %9: float32[s0, 4, 4] = aten.view(%8, [-1, 4, 4])
        %10: float32[s0, 8] = aten.slice.Tensor(%8, -1, 0, 8)
        %11: float32[s0, 2, 4] = aten.view(%10, [-1, 2, 4])
        %12: float32[s0, 8] = aten.slice.Tensor(%8, -1, 8, 16)
        %13: float32[s0, 2, 4] = aten.view(%12, [-1, 2, 4])
        %14: int8[s4, 1, 2, 2, 2, 8] = inferc.kv_write(%kv_cache_1, %11, %13, %slot_mapping_1, 0)
        %15: float32[s0, 4, 4] = inferc.paged_attention(%9, %14, %block_table_1, %query_start_loc, %seq_lens, None,
            0, 0.5, 'sliding', 2, 0.0)
        %16: float32[s0, 16] = aten.view(%15, [-1, 16])
        return (%16)
    """
    text = made.program.to_text()
    assert text.split() == golden.split(), f"the program is now\n{text}"
    assert [group.dtype for group in made.program.kv_groups] == [torch.int8, torch.int8]
    assert [group.bytes_per_token for group in made.program.kv_groups] == [2 * 2 * (4 + 4)] * 2
    after = run_paged(made, TOKENS)
    for chunk_size in (2, 1):
        assert torch.equal(run_paged(made, chunk_size), after)
    error = (after - before).pow(2).mean().sqrt() / before.pow(2).mean().sqrt()
    assert 1e-4 < error < 0.01


def test_a_latent_has_one_scale() -> None:
    def graph(token_ids: Any, positions: Any, embed: Any) -> Any:
        q = aten.view.default(aten.embedding.default(embed, token_ids), [-1, 3, 8])
        k = aten.slice.Tensor(q, 1, 0, 1)
        return inferc.attention.default(q, k, aten.slice.Tensor(k, -1, 0, 6), None, 0.5, "causal", 0, 0.0)

    made = example(graph, IDS, {"embed": random(7, 24)})
    PageKVCache(block_size=2)(made.program)
    before = run_paged(made, 2)
    assert QUANTIZE(made.program) == 1
    verify(made.program)
    (group,) = made.program.kv_groups
    assert (group.kind, group.head_dim, group.bytes_per_token) == ("latent", 8, 8 + 4)
    error = (run_paged(made, 2) - before).abs().max() / before.abs().max()
    assert 1e-4 < error < 0.02


def test_writes_that_fuse_still_find_the_cache() -> None:
    """The fused op rounds what the two did, to the bit."""

    def graph(token_ids: Any, positions: Any, embed: Any, freq: Any) -> Any:
        x = aten.view.default(aten.embedding.default(embed, token_ids), [-1, 3, 4])
        table = inferc.rope_table.default(positions, freq, 1.0)
        q, k = (inferc.rope.default(aten.slice.Tensor(x, 1, at, at + 1), table) for at in (0, 1))
        return inferc.attention.default(q, k, aten.slice.Tensor(x, 1, 2, 3), None, 0.5, "causal", 0, 0.0)

    made = example(graph, IDS, {"embed": random(7, 12), "freq": random(2)})
    PageKVCache(block_size=2)(made.program)
    QUANTIZE(made.program)
    before = run_paged(made, 2)
    assert fuse_rope_kv_write(made.program) == 1
    verify(made.program)
    assert torch.equal(run_paged(made, 2), before)


def test_a_cache_in_int8_stays_as_it_is() -> None:
    made = paged(("causal", 0))
    QUANTIZE(made.program)
    text = made.program.to_text()
    assert QUANTIZE(made.program) == 0
    assert made.program.to_text() == text


def test_budgets_of_what_a_program_went_through() -> None:
    made = paged(("causal", 0))
    assert budgets_of(made.program) == []
    QUANTIZE(made.program)
    assert budgets_of(made.program) == [KV_INT8]
    made.program.info = ModelInfo(quantization=Quantization("w8a8", 3, {}))
    both = together(budgets_of(made.program))
    scheme = SCHEMES["w8a8"].budget
    assert both == replace(
        scheme,
        name="kv_int8 with w8a8",
        max_kl=KV_INT8.max_kl + scheme.max_kl,
        min_top1=1.0 - (1.0 - KV_INT8.min_top1) - (1.0 - scheme.min_top1),
    )
