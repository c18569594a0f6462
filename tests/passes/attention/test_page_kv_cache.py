from typing import Any

import pytest
import torch
from graphs import TOKENS, Example, example, random
from oracle import export_module
from paged import IDS, model, run_paged, sharing
from random_models import SIZES

from inferc.errors import UnsupportedError
from inferc.ir.ops import visible
from inferc.ir.program import target_name
from inferc.kv_groups import KINDS
from inferc.passes.attention.dense_kv_cache import DenseKVCache
from inferc.passes.attention.page_kv_cache import PageKVCache, stored_kv
from inferc.passes.fuse.rope_kv_write import fuse_rope_kv_write
from inferc.passes.verify import verify

aten, inferc = torch.ops.aten, torch.ops.inferc


def test_attention_writes_then_reads_the_cache() -> None:
    made = model(("causal", 0), ("causal", 0))
    (before,) = made.run()
    assert PageKVCache(block_size=2)(made.program) == 2
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
        %kv_cache_0: float32[s4, 2, 2, 2, 2, 4] = input
        %0: float32[s0, 16] = aten.embedding(@embed, %token_ids)
        %1: float32[s0, 4, 4] = aten.view(%0, [-1, 4, 4])
        %2: float32[s0, 8] = aten.slice.Tensor(%0, -1, 0, 8)
        %3: float32[s0, 2, 4] = aten.view(%2, [-1, 2, 4])
        %4: float32[s0, 8] = aten.slice.Tensor(%0, -1, 8, 16)
        %5: float32[s0, 2, 4] = aten.view(%4, [-1, 2, 4])
        %6: float32[s4, 2, 2, 2, 2, 4] = inferc.kv_write(%kv_cache_0, %3, %5, %slot_mapping_0, 0)
        %7: float32[s0, 4, 4] = inferc.paged_attention(%1, %6, %block_table_0, %query_start_loc, %seq_lens, None, 0,
            0.5, 'causal', 0, 0.0)
        %8: float32[s0, 16] = aten.view(%7, [-1, 16])
        %9: float32[s0, 4, 4] = aten.view(%8, [-1, 4, 4])
        %10: float32[s0, 8] = aten.slice.Tensor(%8, -1, 0, 8)
        %11: float32[s0, 2, 4] = aten.view(%10, [-1, 2, 4])
        %12: float32[s0, 8] = aten.slice.Tensor(%8, -1, 8, 16)
        %13: float32[s0, 2, 4] = aten.view(%12, [-1, 2, 4])
        %14: float32[s4, 2, 2, 2, 2, 4] = inferc.kv_write(%6, %11, %13, %slot_mapping_0, 1)
        %15: float32[s0, 4, 4] = inferc.paged_attention(%9, %14, %block_table_0, %query_start_loc, %seq_lens, None,
            1, 0.5, 'causal', 0, 0.0)
        %16: float32[s0, 16] = aten.view(%15, [-1, 16])
        return (%16)
    """
    text = made.program.to_text()
    assert text.split() == golden.split(), f"the program is now\n{text}"
    (group,) = made.program.kv_groups
    assert (group.kind, group.layers, group.num_kv_heads, group.bytes_per_token) == (
        "full",
        (0, 1),
        2,
        2 * 2 * 2 * 4 * 4,
    )
    for chunk_size in (TOKENS, 2, 1):
        torch.testing.assert_close(run_paged(made, chunk_size), before)


def test_layers_of_one_window_form_a_group() -> None:
    made = model(("sliding", 2), ("causal", 0), ("sliding", 2), ("chunked", 2))
    (before,) = made.run()
    assert PageKVCache(block_size=2)(made.program) == 4
    groups = [(group.kind, group.window, group.layers) for group in made.program.kv_groups]
    assert groups == [("window", 2, (0, 2)), ("full", 0, (1,)), ("chunk", 2, (3,))]
    assert [node.name for node in made.program.inputs()][-3:] == ["slot_mapping_2", "block_table_2", "kv_cache_2"]
    torch.testing.assert_close(run_paged(made, 2), before)


@pytest.mark.parametrize("is_computed_again", [False, True])
def test_a_layer_that_shares_k_and_v_reads_what_the_first_wrote(is_computed_again: bool) -> None:
    made = sharing(("sliding", 3), ("sliding", 3), is_computed_again=is_computed_again)
    (before,) = made.run()
    assert PageKVCache(block_size=2)(made.program) == 2
    verify(made.program)
    golden = """
        %token_ids: int32[s0] = input
        %positions: int64[s0] = input
        %table: float32[s0, 4] = input
        %query_start_loc: int32[s1 + 1] = input
        %seq_lens: int32[s1] = input
        %seq_slots: int32[s1] = input
        %logits_rows: int32[s2] = input
        %slot_mapping_0: int64[s0] = input
        %block_table_0: int32[s1, s3] = input
        %kv_cache_0: float32[s4, 1, 2, 2, 2, 4] = input
        %0: float32[s0, 16] = aten.embedding(@embed, %token_ids)
        %1: float32[s0, 8] = aten.slice.Tensor(%0, -1, 0, 8)
        %2: float32[s0, 2, 4] = aten.view(%1, [-1, 2, 4])
        %3: float32[s0, 2, 4] = inferc.rope(%2, %table)
        %4: float32[s0, 8] = aten.slice.Tensor(%0, -1, 8, 16)
        %5: float32[s0, 2, 4] = aten.view(%4, [-1, 2, 4])
        %6: float32[s0, 4, 4] = aten.view(%0, [-1, 4, 4])
        %7: float32[s0, 4, 4] = inferc.rope(%6, %table)
        %8: float32[s4, 1, 2, 2, 2, 4] = inferc.kv_write(%kv_cache_0, %3, %5, %slot_mapping_0, 0)
        %9: float32[s0, 4, 4] = inferc.paged_attention(%7, %8, %block_table_0, %query_start_loc, %seq_lens, None, 0,
            0.5, 'sliding', 3, 0.0)
        %10: float32[s0, 16] = aten.view(%9, [-1, 16])
        %11: float32[s0, 16] = aten.mul.Tensor(%10, 1.5)
        %12: float32[s0, 4, 4] = aten.view(%11, [-1, 4, 4])
        %13: float32[s0, 4, 4] = inferc.rope(%12, %table)
        %14: float32[s0, 4, 4] = inferc.paged_attention(%13, %8, %block_table_0, %query_start_loc, %seq_lens, None,
            0, 0.5, 'sliding', 3, 0.0)
        %15: float32[s0, 16] = aten.view(%14, [-1, 16])
        %16: float32[s0, 16] = aten.mul.Tensor(%15, 1.5)
        %17: float32[s0, 32] = aten.cat([%11, %16], -1)
        return (%17)
    """
    text = made.program.to_text()
    assert text.split() == golden.split(), f"the program is now\n{text}"
    (group,) = made.program.kv_groups
    assert (group.kind, group.window, group.layers, group.bytes_per_token) == ("window", 3, (0,), 1 * 2 * 2 * 4 * 4)
    check_paged(made, before)
    assert fuse_rope_kv_write(made.program) == 1
    verify(made.program)
    ropes = [target_name(node.target) for node in made.program.graph.nodes if "rope" in target_name(node.target)]
    assert ropes == ["inferc.rope_kv_write", "inferc.rope"], "the second reader has queries alone"
    check_paged(made, before)


def check_paged(made: Example, expected: torch.Tensor) -> None:
    for chunk_size in (TOKENS, 2, 1):
        torch.testing.assert_close(run_paged(made, chunk_size), expected)


@pytest.mark.parametrize(
    ("masks", "reach"),
    [
        ((("sliding", 2), ("causal", 0)), ("full", 0)),
        ((("causal", 0), ("chunked", 2)), ("full", 0)),
        ((("sliding", 2), ("sliding", 4), ("sliding", 3)), ("window", 4)),
        ((("chunked", 2), ("chunked", 2)), ("chunk", 2)),
        ((("chunked", 2), ("chunked", 3)), ("window", 3)),
        ((("chunked", 4), ("sliding", 2)), ("window", 4)),
    ],
)
def test_shared_k_and_v_stay_as_long_as_the_widest_reader_sees_them(
    masks: tuple[tuple[str, int], ...], reach: tuple[str, int]
) -> None:
    made = sharing(*masks)
    (before,) = made.run()
    assert PageKVCache(block_size=2)(made.program) == len(masks)
    (group,) = made.program.kv_groups
    assert (group.kind, group.window, group.layers) == (*reach, (0,))
    check_paged(made, before)
    tokens = torch.arange(60)
    kept = KINDS[group.kind](8, group.window)
    for mask, window in masks:
        first_seen = visible(tokens, tokens, mask, window).int().argmax(1).tolist()
        assert all(kept.first_key(token) <= first for token, first in enumerate(first_seen))


def test_k_alone_is_not_shared() -> None:
    made = sharing(("causal", 0), ("causal", 0), scale_v=2.0)
    (before,) = made.run()
    PageKVCache(block_size=2)(made.program)
    assert [group.layers for group in made.program.kv_groups] == [(0, 1)]
    check_paged(made, before)


@pytest.mark.slow
def test_layers_that_gemma3n_shares_are_found_in_its_graph() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {**SIZES, "num_hidden_layers": 6, "num_kv_shared_layers": 2, "vocab_size": 96, "sliding_window": 8}
    kinds = ["sliding_attention", "full_attention"] * 3
    small = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 96, "laurel_rank": 4}
    config = transformers.AutoConfig.for_model(
        "gemma3n_text", **sizes, **small, layer_types=kinds, activation_sparsity_pattern=[0.0] * 6
    )
    module = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    stored = stored_kv(export_module(module, "float32"))
    assert [[node.meta["layer"] for node in each.readers] for each in stored] == [[0], [1], [2, 4], [3, 5]]
    assert [each.reach for each in stored] == [("window", 8), ("full", 0)] * 2


def test_leaves_a_program_without_attention_or_with_a_cache() -> None:
    model().check_untouched(PageKVCache(block_size=2))
    made = model(("causal", 0))
    PageKVCache(block_size=2)(made.program)
    text = made.program.to_text()
    assert PageKVCache(block_size=2)(made.program) == 0
    assert made.program.to_text() == text


def test_refuses_k_and_v_of_two_sizes() -> None:
    def graph(token_ids: Any, positions: Any, embed: Any) -> Any:
        heads = aten.view.default(aten.embedding.default(embed, token_ids), [-1, 2, 8])
        return inferc.attention.default(heads, heads, aten.slice.Tensor(heads, -1, 0, 4), None, 0.5, "causal", 0, 0.0)

    made = example(graph, IDS, {"embed": random(7, 16)})
    with pytest.raises(UnsupportedError, match="K has heads of 8, V of 4"):
        PageKVCache(block_size=2)(made.program)


def with_alibi() -> Example:
    def attend(token_ids: Any, positions: Any, embed: Any, slopes: Any) -> Any:
        x = aten.view.default(aten.embedding.default(embed, token_ids), [-1, 2, 4])
        return inferc.attention.default(x, x, x, None, 0.5, "causal", 0, 0.0, slopes)

    return example(attend, IDS, {"embed": random(9, 8), "slopes": torch.tensor([0.5, 0.3])})


def test_alibi_goes_along_to_the_paged_cache_and_a_dense_one_refuses_it() -> None:
    paged = with_alibi()
    assert PageKVCache(block_size=2)(paged.program) == 1
    verify(paged.program)
    assert "None, 0, 0.5, 'causal', 0, 0.0, @slopes)" in paged.program.to_text()
    with pytest.raises(UnsupportedError, match="ALiBi over a dense cache is not built, and so not for onnx"):
        DenseKVCache(16)(with_alibi().program)
