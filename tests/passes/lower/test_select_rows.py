"""Tests of select_rows and split_head: the ops between the last attention and the logits."""

from typing import Any

import pytest
import torch
from graphs import Example, example, random

from inferc.errors import UnsupportedError
from inferc.passes.lower.select_rows import ROW_WISE, SelectRows
from inferc.passes.lower.split_head import AFTER_HEAD, SplitHead
from inferc.passes.verify import LOWERED, verify

aten, inferc = torch.ops.aten, torch.ops.inferc
INPUTS = {
    "token_ids": torch.tensor([3, 1, 4, 1, 5]),
    "query_start_loc": torch.tensor([0, 5], dtype=torch.int32),
    "seq_lens": torch.tensor([5], dtype=torch.int32),
    "logits_rows": torch.tensor([4, 1], dtype=torch.int32),
    "block_table_0": torch.tensor([[1, 2]], dtype=torch.int32),
    "kv_cache_0": random(4, 1, 2, 4, 2, 4, seed=9),
}
WEIGHTS = {  # by the root of what a sum adds up, as in a model: results near 1 are rounded far below what a test allows
    "embed": random(7, 8),
    "norm": random(8),
    "up": random(24, 8) / 8**0.5,
    "down": random(8, 12) / 12**0.5,
    "head": random(7, 8) / 8**0.5,
}


def layer(
    token_ids: Any,
    query_start_loc: Any,
    seq_lens: Any,
    logits_rows: Any,
    block_table_0: Any,
    kv_cache_0: Any,
    embed: Any,
    norm: Any,
    up: Any,
    down: Any,
    head: Any,
) -> Any:
    x = aten.embedding.default(embed, token_ids)
    q = aten.view.default(inferc.rms_norm.default(x, norm, 1e-5), [-1, 2, 4])
    places = (kv_cache_0, block_table_0, query_start_loc, seq_lens)
    out = inferc.paged_attention.default(q, *places, None, 0, 0.5, "causal", 0, 0.0)
    both = inferc.rms_norm_add.default(aten.view.default(out, [-1, 8]), x, norm, 1e-5)
    wide = aten.linear.default(both[0], up)
    mlp = inferc.silu_mul.default(aten.slice.Tensor(wide, -1, 0, 12), aten.slice.Tensor(wide, -1, 12, 24))
    hidden = aten.add.Tensor(aten.linear.default(mlp, down), both[1])
    return aten.linear.default(hidden, head)


def test_selects_just_after_the_last_attention() -> None:
    made = example(layer, INPUTS, WEIGHTS)
    (before,) = made.run()
    assert SelectRows()(made.program) == 2
    verify(made.program)
    golden = """
        %token_ids: int64[s0] = input
        %query_start_loc: int32[2] = input
        %seq_lens: int32[1] = input
        %logits_rows: int32[2] = input
        %block_table_0: int32[1, 2] = input
        %kv_cache_0: float32[4, 1, 2, 4, 2, 4] = input
        %0: float32[s0, 8] = aten.embedding(@embed, %token_ids)
        %1: float32[s0, 8] = inferc.rms_norm(%0, @norm, 1e-05)
        %2: float32[s0, 2, 4] = aten.view(%1, [-1, 2, 4])
        %3: float32[s0, 2, 4] = inferc.paged_attention(%2, %kv_cache_0, %block_table_0, %query_start_loc, %seq_lens,
            None, 0, 0.5, 'causal', 0, 0.0)
        %4: float32[s0, 8] = aten.view(%3, [-1, 8])
        %5: float32[2, 8] = aten.index_select(%4, 0, %logits_rows)
        %6: float32[2, 8] = aten.index_select(%0, 0, %logits_rows)
        %7: (float32[2, 8], float32[2, 8]) = inferc.rms_norm_add(%5, %6, @norm, 1e-05)
        %8: float32[2, 8] = getitem(%7, 0)
        %9: float32[2, 24] = aten.linear(%8, @up)
        %10: float32[2, 12] = aten.slice.Tensor(%9, -1, 0, 12)
        %11: float32[2, 12] = aten.slice.Tensor(%9, -1, 12, 24)
        %12: float32[2, 12] = inferc.silu_mul(%10, %11)
        %13: float32[2, 8] = aten.linear(%12, @down)
        %14: float32[2, 8] = getitem(%7, 1)
        %15: float32[2, 8] = aten.add.Tensor(%13, %14)
        %16: float32[2, 7] = aten.linear(%15, @head)
        return (%16)
    """
    text = made.program.to_text()
    assert text.split() == golden.split(), f"the program is now\n{text}"
    torch.testing.assert_close(made.run()[0], before[[4, 1]])
    made.check_untouched(SelectRows())


def test_only_the_head_runs_on_selected_rows_if_its_input_is_read_of_every_token() -> None:
    made = example(layer, INPUTS, WEIGHTS)
    (before,) = made.run()
    assert SelectRows(head_only=True)(made.program) == 1
    verify(made.program)
    tail = """
        %13: float32[s0, 8] = aten.add.Tensor(%11, %12)
        %14: float32[2, 8] = aten.index_select(%13, 0, %logits_rows)
        %15: float32[2, 7] = aten.linear(%14, @head)
        return (%15)
    """
    text = made.program.to_text()
    assert text.split()[-len(tail.split()) :] == tail.split(), f"the program is now\n{text}"
    torch.testing.assert_close(made.run()[0], before[[4, 1]])
    made.check_untouched(SelectRows(head_only=True))


def test_a_value_that_attention_reads_keeps_all_rows() -> None:
    """The norm in front of attention is row-wise, but attention needs every row of it."""
    made = example(layer, INPUTS, WEIGHTS)
    SelectRows()(made.program)
    (norm,) = made.program.graph.find_nodes(op="call_function", target=inferc.rms_norm.default)
    (mlp,) = made.program.graph.find_nodes(op="call_function", target=inferc.silu_mul.default)
    tokens = made.program.inputs()[0].meta["val"].shape[0]
    assert str(norm.meta["val"].shape[0]) == str(tokens)
    assert mlp.meta["val"].shape[0] == len(INPUTS["logits_rows"])


def head(function: Any = lambda logits: logits, dtype: torch.dtype = torch.float32) -> Example:
    def graph(token_ids: Any, embed: Any, out: Any) -> Any:
        return function(aten.linear.default(aten.embedding.default(embed, token_ids), out))

    weights = {"embed": random(7, 8, dtype=dtype), "out": random(7, 8, dtype=dtype, seed=1)}
    return example(graph, {"token_ids": INPUTS["token_ids"]}, weights)


def test_the_head_becomes_a_second_result_in_float32() -> None:
    golden = """
        %token_ids: int64[s0] = input
        %0: bfloat16[s0, 8] = aten.embedding(@embed, %token_ids)
        %1: float32[s0, 7] = inferc.lm_head(%0, @out, None)
        %2: float32[s0, 7] = aten.mul.Tensor(%1, 0.5)
        return (%0, %2)
    """
    made = head(lambda x: aten._to_copy.default(aten.mul.Tensor(x, 0.5), dtype=torch.float32), torch.bfloat16)
    (before,) = made.run()
    assert SplitHead()(made.program) == 1
    verify(made.program)
    text = made.program.to_text()
    assert text.split() == golden.split(), f"the program is now\n{text}"
    hidden, logits = made.run()
    assert hidden.dtype == torch.bfloat16
    torch.testing.assert_close(logits, before, rtol=0.02, atol=0.02)
    made.check_untouched(SplitHead())


def test_refuses_what_no_kernel_does_to_logits() -> None:
    for function, op in ((aten.relu.default, "aten.relu"), (lambda x: aten.div.Tensor(x, 2.0), "aten.div")):
        with pytest.raises(UnsupportedError, match=f"inferc cannot run {op}.* after the LM head yet"):
            SplitHead()(head(function).program)


def test_every_op_that_runs_on_selected_rows_can_be_lowered() -> None:
    assert not ROW_WISE - LOWERED - {aten._to_copy.default}
    assert not set(AFTER_HEAD) - LOWERED - {aten._to_copy.default}
