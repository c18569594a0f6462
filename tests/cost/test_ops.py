"""Tests of the costs of ops, against numbers worked out by hand; fusing never moves more bytes."""

import json
import operator
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from lowered import Builder, Shape
from torch import Tensor

from inferc.compiler.explain import explain_model
from inferc.config import CompileConfig
from inferc.cost.formulas import OpCost, PassCost, Step
from inferc.cost.ops import COSTS, Sizes, op_cost, program_costs
from inferc.cost.recorder import CostRecorder
from inferc.ir.program import new_program

aten, inferc = torch.ops.aten, torch.ops.inferc
BF16 = Shape(dtype=torch.bfloat16)


class Small(Builder):
    """A program with a step's inputs: T tokens, S rows, B sequences."""

    def __init__(self) -> None:
        super().__init__(BF16)
        self.tokens, self.seqs, self.rows, self.blocks, self.most = (
            self.program.new_symbol(hint) for hint in (23, 11, 13, 17, 19)
        )
        self.ids = self.input("token_ids", (self.tokens,), torch.int32)
        self.starts = self.input("query_start_loc", (self.seqs + 1,), torch.int32)
        self.lengths = self.input("seq_lens", (self.seqs,), torch.int32)
        self.logits_rows = self.input("logits_rows", (self.rows,), torch.int32)
        self.slots = self.input("slot_mapping_0", (self.tokens,), torch.int64)
        self.table_ids = self.input("block_table_0", (self.seqs, self.most), torch.int32)
        self.cache = self.input("kv_cache_0", (self.blocks, 1, 2, 16, 2, 16), torch.bfloat16)

    def activation(self, *sizes: int, dtype: torch.dtype = torch.bfloat16) -> Any:
        return self.input(f"x{len(self.program.graph.nodes)}", (self.tokens, *sizes), dtype)

    def cost(self, target: Any, *args: Any) -> OpCost | None:
        return op_cost(self(target, *args), Sizes(self.program))


def test_a_lookup_reads_rows_and_not_the_table() -> None:
    b = Small()
    found = b.cost(aten.embedding.default, b.weight("embed", 1000, 64), b.ids)
    # 64 x 2 bytes of the table for each token; ids of 4 bytes, and the rows written.
    assert found == OpCost("aten.embedding", "bfloat16", (("T", 128),), (), (("T", 4 + 128),))


def test_a_norm() -> None:
    b = Small()
    found = b.cost(inferc.rms_norm.default, b.activation(64), b.weight("norm", 64), 1e-5)
    assert found == OpCost("inferc.rms_norm", "bfloat16", (("1", 128),), (), (("T", 256),), (("T", 4 * 64),))


@pytest.mark.parametrize("bias", [False, True])
def test_a_product_with_a_weight(bias: bool) -> None:
    b = Small()
    more = (b.weight("bias", 96),) if bias else ()
    found = b.cost(aten.linear.default, b.activation(64), b.weight("up", 96, 64), *more)
    weights = 96 * 64 * 2 + (96 * 2 if bias else 0)
    flops = (("T", 2 * 96 * 64),)
    assert found == OpCost("aten.linear", "bfloat16", (("1", weights),), (), (("T", 128 + 192),), flops)


def test_the_head_runs_on_rows() -> None:
    b = Small()
    chosen = b(aten.index_select.default, b.activation(64), 0, b.logits_rows)
    assert op_cost(chosen, Sizes(b.program)) == OpCost(
        "aten.index_select", "bfloat16", activations=(("S", 4 + 128 + 128),)
    )
    found = b.cost(inferc.lm_head.default, chosen, b.weight("head", 90, 64), None)
    flops = (("S", 2 * 90 * 64),)
    assert found == OpCost("inferc.lm_head", "bfloat16", (("1", 90 * 128),), (), (("S", 128 + 90 * 4),), flops)


@torch.library.custom_op("inferc_tests::per_head", mutates_args=())
def per_head(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    return residual + torch.einsum("thk,hnk->thn", x, weight)


@per_head.register_fake
def _per_head_fake(x: Tensor, weight: Tensor, residual: Tensor) -> Tensor:
    return torch.empty_like(residual)


def test_a_product_of_an_op_without_a_row() -> None:
    b = Small()
    op = torch.ops.inferc_tests.per_head.default
    found = b.cost(op, b.activation(4, 16), b.weight("each", 4, 8, 16), b.activation(4, 8))
    assert found is not None
    assert found.weights == (("1", 4 * 8 * 16 * 2),)
    assert found.activations == (("T", (4 * 16 + 2 * 4 * 8) * 2),)
    assert found.flops == (("T", 2 * 4 * 8 * 16),)


@pytest.mark.parametrize(
    ("op", "sizes", "expected"),
    [
        (aten.mm.default, ((64, 96), (96, 80)), 2 * 64 * 96 * 80),
        (aten.bmm.default, ((3, 64, 96), (3, 96, 80)), 2 * 3 * 64 * 96 * 80),
        (aten.addmm.default, ((80,), (64, 96), (96, 80)), 2 * 64 * 96 * 80),
    ],
)
def test_products_of_activations(op: Any, sizes: tuple[tuple[int, ...], ...], expected: int) -> None:
    b = Small()
    found = b.cost(op, *(b.input(f"m{index}", size, torch.bfloat16) for index, size in enumerate(sizes)))
    assert found is not None
    assert found.flops == (("1", expected),)


def test_a_product_over_the_tokens() -> None:
    b = Small()
    left, right = b.input("left", (3, b.tokens), torch.bfloat16), b.input("right", (b.tokens, 4), torch.bfloat16)
    found = b.cost(aten.mm.default, left, right)
    assert found is not None
    assert found.flops == (("T", 2 * 3 * 4),)
    assert found.activations == (("1", 3 * 4 * 2), ("T", (3 + 4) * 2))


def test_attention_over_the_cache() -> None:
    b = Small()
    args = (b.cache, b.table_ids, b.starts, b.lengths, None, 0, 0.25)
    found = b.cost(inferc.paged_attention.default, b.activation(4, 16), *args, "sliding", 8, 0.0)
    # 2 heads of 16, K and V, 2 bytes; 4 query heads, 16 for QK and for PV, two operations each.
    assert found == OpCost(
        "inferc.paged_attention",
        "bfloat16",
        cache=(("keys:window:8", 2 * (16 + 16) * 2),),
        activations=(("1", 4), ("B", 4 + 4), ("T", 2 * 4 * 16 * 2)),
        flops=(("pairs:window:8", 2 * 4 * (16 + 16)),),
    )


@pytest.mark.parametrize("batched", [True, False])
def test_attention_as_captured_counts_as_over_a_cache(batched: bool) -> None:
    b = Small()
    if batched:
        q, k, v = (b.input(f"x{n}{d}", (1, n, b.tokens, d), torch.bfloat16) for n, d in ((4, 16), (2, 16), (2, 8)))
    else:
        q, k, v = (b.activation(n, d) for n, d in ((4, 16), (2, 16), (2, 8)))
    found = b.cost(inferc.attention.default, q, k, v, None, 0.25, "causal", 0, 0.0)
    assert found == OpCost(
        "inferc.attention",
        "bfloat16",
        cache=(("keys:full:0", 2 * (16 + 8) * 2),),
        activations=(("T", 4 * 16 * 2 + 4 * 8 * 2),),
        flops=(("pairs:full:0", 2 * 4 * (16 + 8)),),
    )


def test_writing_the_cache() -> None:
    b = Small()
    k, v = b.activation(2, 16), b.activation(2, 16)
    found = b.cost(inferc.kv_write.default, b.cache, k, v, b.slots, 0)
    # K and V of the new tokens are read from activations and written to the cache; a slot has 8 bytes.
    assert found == OpCost("inferc.kv_write", "bfloat16", (), (("T", 128),), (("T", 128 + 8),))
    q, table = b.activation(4, 16), b.activation(16, dtype=torch.float32)
    both = b.cost(inferc.rope_kv_write.default, q, k, v, table, b.cache, b.slots, 0)
    activations = 128 + 128 + 64 + 8 + 128  # q, k and v, table, slots, and q again
    flops = (("T", 3 * (4 * 16 + 2 * 16)),)
    assert both == OpCost("inferc.rope_kv_write", "bfloat16", (), (("T", 128),), (("T", activations),), flops)


def test_a_cache_in_int8_moves_its_integers_and_scales() -> None:
    b = Small()
    cache = b.input("kv_cache_1", (b.blocks, 1, 2, 16, 2, 16 + 4), torch.int8)
    k, v = b.activation(2, 16), b.activation(2, 16)
    found = b.cost(inferc.kv_write.default, cache, k, v, b.slots, 0)
    cached, rounding = 2 * 2 * (16 + 4), 3 * 2 * 2 * 16
    written = (("T", cached),)
    assert found == OpCost("inferc.kv_write", "bfloat16", (), written, (("T", 128 + 8),), (("T", rounding),))
    where = (cache, b.table_ids, b.starts, b.lengths, None, 0)
    read = b.cost(inferc.paged_attention.default, b.activation(4, 16), *where, 0.25, "causal", 0, 0.0)
    assert read is not None and read.cache == (("keys:full:0", cached),)
    assert read.flops == (("pairs:full:0", 2 * 4 * (16 + 16)),)


def test_a_projection_in_the_write_saves_its_result_written_and_read() -> None:
    b = Small()
    x, table = b.activation(32), b.activation(16, dtype=torch.float32)
    weight = b.weight("qkv", 128, 32)
    norms = (None, None, 0.0, 0.0, False)
    where = (table, b.cache, b.slots, 0)
    found = b.cost(inferc.qkv_rope_kv_write.default, x, weight, None, *norms, *where, 4, "halves")
    # x, table, slots and q; the product has 128 columns of 32, the rotation three operations an element of q and k.
    activations = 32 * 2 + 64 + 8 + 4 * 16 * 2
    flops = (("T", 2 * 128 * 32 + 3 * (4 * 16 + 2 * 16)),)
    read = (("1", 128 * 32 * 2),)
    assert found == OpCost("inferc.qkv_rope_kv_write", "bfloat16", read, (("T", 128),), (("T", activations),), flops)


def test_a_projection_by_four_bits_in_the_write_multiplies_every_element() -> None:
    b = Small()
    x, x_scale = b.activation(32, dtype=torch.int8), b.activation(dtype=torch.float32)
    table = b.activation(16, dtype=torch.float32)
    weight, of_groups = b.weight("qkv", 128, 16, dtype=torch.uint8), b.weight("groups", 128, 1, dtype=torch.int8)
    scale = b.weight("scale", 128, dtype=torch.float32)
    where = (None, None, None, 0.0, 0.0, False, table, b.cache, b.slots, 0, 4, "halves")
    integers = (x_scale, scale, of_groups, torch.bfloat16)
    found = b.cost(inferc.qkv_rope_kv_write.default, x, weight, *where, *integers)
    activations = 32 + 4 + 64 + 8 + 4 * 16 * 2  # x and its scale, table, slots and q
    flops = (("T", 2 * 128 * 32 + 3 * (4 * 16 + 2 * 16)),)
    read = (("1", 128 * (16 + 1 + 4)),)
    assert found == OpCost("inferc.qkv_rope_kv_write", "int8", read, (("T", 128),), (("T", activations),), flops)


def test_experts_are_those_that_are_touched() -> None:
    b = Small()
    ids, shares = b.activation(2, dtype=torch.int32), b.activation(2, dtype=torch.float32)
    experts = (b.weight("gate_up", 8, 96, 64), b.weight("down", 8, 64, 48))
    found = b.cost(inferc.moe_experts.default, b.activation(64), ids, shares, *experts)
    of_one = 96 * 64 + 64 * 48
    assert found == OpCost(
        "inferc.moe_experts",
        "bfloat16",
        weights=(("experts:8:2:T", 2 * of_one),),
        activations=(("T", 128 + 8 + 8 + 128),),
        flops=(("T", 2 * 2 * of_one),),
    )


def test_an_unknown_op_reads_writes_and_counts_its_largest_value() -> None:
    b = Small()
    x = b.activation(64)
    assert b.cost(aten.tanh.default, x) == OpCost(
        "aten.tanh", "bfloat16", activations=(("T", 256),), flops=(("T", 64),)
    )
    # A sum is an operation for each element that it reads.
    assert b.cost(aten.sum.dim_IntList, x, [-1]) == OpCost(
        "aten.sum.dim_IntList", "bfloat16", activations=(("T", 128 + 2),), flops=(("T", 64),)
    )
    assert b.cost(aten._to_copy.default, x) == OpCost("aten._to_copy", "bfloat16", activations=(("T", 256),))


def test_a_value_that_is_read_twice_moves_once() -> None:
    b = Small()
    x = b.activation(64)
    assert b.cost(aten.mul.Tensor, x, x) == OpCost(
        "aten.mul.Tensor", "bfloat16", activations=(("T", 256),), flops=(("T", 64),)
    )


def test_views_are_free_and_read_what_they_show() -> None:
    b = Small()
    x = b.activation(64)
    part = b(aten.slice.Tensor, x, -1, 0, 16)
    assert op_cost(part, Sizes(b.program)) is None
    assert op_cost(b(aten.view.default, x, [-1, 4, 16]), Sizes(b.program)) is None
    assert b.cost(aten.neg.default, part) == OpCost(
        "aten.neg", "bfloat16", activations=(("T", 2 * 32),), flops=(("T", 16),)
    )
    row = b(aten.unsqueeze.default, b(aten.slice.Tensor, x, -1, 0, 1), -1)
    wide = b(aten.expand.default, row, [-1, 1, 8])
    assert b.cost(aten.clone.default, wide) == OpCost("aten.clone", "bfloat16", activations=(("T", 2 + 16),))


def test_sizes_that_are_sums() -> None:
    b = Small()
    found = b.cost(aten.neg.default, b.input("longer", (b.tokens + 1, 8), torch.bfloat16))
    assert found is not None
    assert found.activations == (("1", 32), ("T", 32))
    square = b.cost(aten.neg.default, b.input("square", (b.tokens, b.tokens), torch.bfloat16))
    assert square is not None
    assert square.activations == (("T*T", 4),)


def test_a_program_adds_up_by_hand() -> None:
    b = Small()
    x = b(aten.embedding.default, b.weight("embed", 90, 64), b.ids)
    up = b.weight("up", 96, 64)
    first = b(aten.linear.default, x, up)
    b(inferc.silu_mul.default, first, b(aten.linear.default, x, up))
    costs = program_costs(b.program)
    assert {op.op: count for op, count in costs.items()} == {
        "aten.embedding": 1,
        "aten.linear": 2,
        "inferc.silu_mul": 1,
    }
    step = Step.prefill(10)
    moved = sum(
        count * step.evaluate(of) for op, count in costs.items() for of in (op.weights, op.cache, op.activations)
    )
    # rows and ids; twice a weight, 64 in and 96 out; two read and one written of 96.
    assert moved == 10 * (128 + 4 + 128) + 2 * (96 * 64 * 2 + 10 * (128 + 192)) + 10 * 3 * 192
    assert sum(count * step.evaluate(op.flops) for op, count in costs.items()) == 10 * (2 * 2 * 96 * 64 + 2 * 96)


def test_every_op_of_the_cache_has_its_cost() -> None:
    """The default cannot know how much of a cache an op reads."""
    schemas = [schema for schema in torch._C._jit_get_all_schemas() if schema.name.startswith("inferc::")]
    names = {
        schema.name.replace("::", ".")
        for schema in schemas
        if any(re.search("cache", argument.name) for argument in schema.arguments)
    }
    assert {"inferc.paged_attention", "inferc.kv_write"} <= names
    assert names <= set(COSTS)


def test_the_recorder_keeps_what_a_pass_without_rewrites_left() -> None:
    b = Small()
    x = b(aten.neg.default, b.activation(64))
    recorder = CostRecorder()
    recorder(0, "captured", 0, b.program)
    recorder(1, "idle", 0, b.program)
    b(operator.getitem, b(inferc.rms_norm_add.default, x, x, b.weight("norm", 64), 1e-5), 0)
    recorder(2, "grow", 1, b.program)
    captured, idle, grown = recorder.rows
    assert idle == PassCost("idle", 0, 1, 1, captured.ops)
    assert (grown.nodes_before, grown.nodes_after, sum(grown.ops.values())) == (1, 3, 2)


def test_a_program_without_symbols_has_constants() -> None:
    program = new_program()
    x = program.graph.placeholder("x")
    x.meta["val"] = program.fake((3, 4), torch.float32)
    y = program.graph.call_function(aten.neg.default, (x,))
    y.meta["val"] = program.fake((3, 4), torch.float32)
    assert program_costs(program) == {OpCost("aten.neg", "float32", activations=(("1", 96),), flops=(("1", 12),)): 1}


SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 256,
    "dtype": "bfloat16",
}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "more"),
    [("llama", {}), pytest.param("qwen3", {"tie_word_embeddings": True}, marks=pytest.mark.slow), ("mixtral", EXPERTS)],
)
def test_the_lowered_program_never_moves_more_than_the_captured(
    family: str, more: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": family, **SIZES, **more}))
    found = explain_model(tmp_path, CompileConfig(), lambda stage, done, total: None)
    assert found.refusal is None
    for step in (Step.prefill(1), Step.prefill(200), Step.decode(1, 256), Step.decode(64, 128)):
        captured, lowered = (
            sum(
                count * step.evaluate(of)
                for op, count in row.ops.items()
                for of in (op.weights, op.cache, op.activations)
            )
            for row in (found.costs.captured, found.costs.last)
        )
        assert lowered < captured, step
        flops = [
            sum(count * step.evaluate(op.flops) for op, count in row.ops.items())
            for row in (found.costs.captured, found.costs.last)
        ]
        assert flops[1] <= 1.01 * flops[0]  # fused ops are counted as the ops they replace


def test_a_product_with_int8_weights_reads_their_bytes_and_computes_in_the_rows_dtype() -> None:
    b = Small()
    weight, scale = b.weight("up", 96, 64, dtype=torch.int8), b.weight("scale", 96, dtype=torch.float32)
    found = b.cost(inferc.linear_int8.default, b.activation(64), weight, scale)
    flops = (("T", 2 * 96 * 64),)
    read = (("1", 96 * 64 + 96 * 4),)
    assert found == OpCost("inferc.linear_int8", "bfloat16", read, (), (("T", 128 + 192),), flops)
    rows, of_rows = b.activation(64, dtype=torch.int8), b.activation(dtype=torch.float32)
    found = b.cost(inferc.linear_w8a8.default, rows, of_rows, weight, scale, torch.bfloat16)
    assert found == OpCost("inferc.linear_w8a8", "int8", read, (), (("T", 64 + 4 + 192),), flops)


def test_experts_with_int8_weights() -> None:
    b = Small()
    ids, chosen = b.activation(2, dtype=torch.int32), b.activation(2, dtype=torch.float32)
    stored = b.weight("gu", 8, 64, 32, dtype=torch.int8), b.weight("down", 8, 32, 32, dtype=torch.int8)
    scales = b.weight("gu_s", 8, 64, dtype=torch.float32), b.weight("down_s", 8, 32, dtype=torch.float32)
    call = (b.activation(32), ids, chosen, *stored, None, None, "silu", 1.0, 0.0, False, *scales)
    found = b.cost(inferc.moe_experts.default, *call)
    assert found is not None and found.dtype == "bfloat16"
    assert found.weights == (("experts:8:2:T", 64 * 32 + 32 * 32 + 4 * (64 + 32)),)


def test_experts_in_four_bits() -> None:
    b = Small()
    ids, chosen = b.activation(2, dtype=torch.int32), b.activation(2, dtype=torch.float32)
    stored = b.weight("gu", 8, 64, 48, dtype=torch.uint8), b.weight("down", 8, 96, 16, dtype=torch.uint8)
    scales = b.weight("gu_s", 8, 64, 3, dtype=torch.float16), b.weight("down_s", 8, 96, 1, dtype=torch.float16)
    rows = b.activation(96, dtype=torch.int8), b.activation(dtype=torch.float32)
    call = (rows[0], ids, chosen, *stored, None, None, "silu", 1.0, 0.0, False, *scales, rows[1], torch.bfloat16)
    found = b.cost(inferc.moe_experts.default, *call)
    assert found == OpCost(
        "inferc.moe_experts",
        "int8",
        weights=(("experts:8:2:T", 64 * 48 + 96 * 16 + 2 * (64 * 3 + 96)),),
        activations=(("T", 96 + 4 + 8 + 8 + 2 * 96),),
        flops=(("T", 2 * 2 * 3 * 32 * 96),),
    )


def test_quantizing_where_rows_are_normalised_moves_less() -> None:
    b = Small()
    x, norm = b.activation(64), b.weight("norm", 64)
    fused = b.cost(inferc.rms_norm_quantize.default, x, norm, 1e-5)
    assert fused is not None and fused.activations == (("T", 128 + 64 + 4),)
    normed = b(inferc.rms_norm.default, x, norm, 1e-5)
    after = b.cost(inferc.quantize_rows.default, normed)
    assert after is not None and after.activations == (("T", 128 + 64 + 4),)  # and the norm has written 128 before


def test_a_lookup_in_an_int8_table_reads_its_rows_and_their_scales() -> None:
    b = Small()
    table, scale = b.weight("embed", 1000, 64, dtype=torch.int8), b.weight("scale", 1000, dtype=torch.float32)
    found = b.cost(inferc.embedding_int8.default, table, scale, b.ids, torch.bfloat16)
    assert found == OpCost("inferc.embedding_int8", "float32", (("T", 64 + 4),), (), (("T", 4 + 128),))
