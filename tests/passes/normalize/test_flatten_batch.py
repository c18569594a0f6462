"""Captured programs have [1, T, …]; the flattened ones run on [T, …] and give the same rows."""

from typing import Any

import pytest
import torch
from graphs import TOKENS, Example, example, random
from torch import ops

from inferc.errors import UnsupportedError
from inferc.passes.normalize.flatten_batch import FlattenBatch
from inferc.passes.verify import verify

aten, inferc = ops.aten, ops.inferc
IDS = {"token_ids": torch.tensor([[3, 1, 4, 1, 5]]), "positions": torch.arange(TOKENS)[None]}
HEADS = {"embed": random(7, 8), "k_proj": random(4, 8, seed=1)}


def check(made: Example, golden: str) -> None:
    (before,) = made.run()
    assert FlattenBatch()(made.program) > 0
    verify(made.program)
    text = made.program.to_text()
    assert text.split() == golden.split(), f"the program is now\n{text}"
    made.inputs = {name: value[0] for name, value in made.inputs.items()}
    (after,) = made.run()
    torch.testing.assert_close(after, before.reshape(after.shape))
    assert FlattenBatch()(made.program) == 0


def call(like: Any, target: Any, *args: Any, **kwargs: Any) -> Any:
    """A call that reads no tensor, in the graph that `like` is of."""
    return like.tracer.create_proxy("call_function", target, args, kwargs)


def attention_block(token_ids: Any, positions: Any, embed: Any, k_proj: Any) -> Any:
    x = aten.embedding.default(embed, token_ids)
    q = aten.transpose.int(aten.view.default(x, [1, -1, 2, 4]), 1, 2)
    k = aten.transpose.int(aten.view.default(aten.linear.default(x, k_proj), [1, -1, 1, 4]), 1, 2)
    cos = aten.unsqueeze.default(aten.cos.default(aten.unsqueeze.default(positions, 2)), 1)
    q = aten.mul.Tensor(q, cos)
    out = inferc.attention.default(q, k, k, None, 0.5, "causal", 0, 0.0)
    return aten.add.Tensor(x, aten.view.default(out, [1, -1, 8]))


def test_attention_becomes_token_major() -> None:
    golden = """
        %token_ids: int64[s0] = input
        %positions: int64[s0] = input
        %0: float32[s0, 8] = aten.embedding(@embed, %token_ids)
        %1: float32[s0, 2, 4] = aten.view(%0, [-1, 2, 4])
        %2: float32[s0, 4] = aten.linear(%0, @k_proj)
        %3: float32[s0, 1, 4] = aten.view(%2, [-1, 1, 4])
        %4: int64[s0, 1] = aten.view(%positions, [-1, 1])
        %5: float32[s0, 1] = aten.cos(%4)
        %6: float32[s0, 1, 1] = aten.view(%5, [-1, 1, 1])
        %7: float32[s0, 2, 4] = aten.mul.Tensor(%1, %6)
        %8: float32[s0, 2, 4] = inferc.attention(%7, %3, %3, None, 0.5, 'causal', 0, 0.0)
        %9: float32[s0, 8] = aten.view(%8, [-1, 8])
        %10: float32[s0, 8] = aten.add.Tensor(%0, %9)
        return (%10)
    """
    check(example(attention_block, IDS, HEADS), golden)


def test_rows_without_a_batch_and_reductions() -> None:
    def experts(token_ids: Any, positions: Any, embed: Any) -> Any:
        x = aten.embedding.default(embed, token_ids)
        flat = aten.view.default(x, [-1, 8])
        top = aten.topk.default(aten.softmax.int(flat, -1), 2)
        weights = aten.div.Tensor(top[0], aten.sum.dim_IntList(top[0], [-1], True))
        scaled = aten.mul.Tensor(flat, aten.slice.Tensor(weights, 1, 0, 1))
        mean = aten.mean.dim(aten.pow.Tensor_Scalar(x, 2), [-1], True)
        return aten.add.Tensor(aten.view.default(scaled, [1, -1, 8]), mean)

    golden = """
        %token_ids: int64[s0] = input
        %positions: int64[s0] = input
        %0: float32[s0, 8] = aten.embedding(@embed, %token_ids)
        %1: float32[s0, 8] = aten.softmax.int(%0, -1)
        %2: (float32[s0, 2], int64[s0, 2]) = aten.topk(%1, 2)
        %3: float32[s0, 2] = getitem(%2, 0)
        %4: float32[s0, 2] = getitem(%2, 0)
        %5: float32[s0, 1] = aten.sum.dim_IntList(%4, [-1], True)
        %6: float32[s0, 2] = aten.div.Tensor(%3, %5)
        %7: float32[s0, 1] = aten.slice.Tensor(%6, -1, 0, 1)
        %8: float32[s0, 8] = aten.mul.Tensor(%0, %7)
        %9: float32[s0, 8] = aten.pow.Tensor_Scalar(%0, 2)
        %10: float32[s0, 1] = aten.mean.dim(%9, [-1], True)
        %11: float32[s0, 8] = aten.add.Tensor(%8, %10)
        return (%11)
    """
    check(example(experts, IDS, {"embed": random(7, 8)}), golden)


def test_parts_that_lie_side_by_side_are_ranges_of_one_view() -> None:
    def packed(token_ids: Any, positions: Any, embed: Any) -> Any:
        parts = aten.view.default(aten.embedding.default(embed, token_ids), [1, -1, 2, 2, 2])
        return aten.sub.Tensor(aten.select.int(parts, 3, 0), aten.select.int(parts, -2, -1))

    golden = """
        %token_ids: int64[s0] = input
        %positions: int64[s0] = input
        %0: float32[s0, 8] = aten.embedding(@embed, %token_ids)
        %1: float32[s0, 2, 4] = aten.view(%0, [-1, 2, 4])
        %2: float32[s0, 2, 2] = aten.slice.Tensor(%1, -1, 0, 2)
        %3: float32[s0, 2, 2] = aten.slice.Tensor(%1, -1, 2, 4)
        %4: float32[s0, 2, 2] = aten.sub.Tensor(%2, %3)
        return (%4)
    """
    made = example(packed, IDS, {"embed": random(7, 8)})
    made.program.drop_unused()
    check(made, golden)


def test_an_outer_product_with_positions_becomes_a_multiplication() -> None:
    def table(token_ids: Any, positions: Any, inv_freq: Any) -> Any:
        column = aten.expand.default(aten.unsqueeze.default(aten.unsqueeze.default(inv_freq, 0), 2), [1, -1, 1])
        row = aten._to_copy.default(aten.unsqueeze.default(positions, 1), dtype=torch.float32)
        angle = aten.transpose.int(aten.matmul.default(column, row), 1, 2)
        return aten.cat.default([angle, angle], -1)

    golden = """
        %token_ids: int64[s0] = input
        %positions: int64[s0] = input
        %0: int64[s0, 1] = aten.view(%positions, [-1, 1])
        %1: float32[s0, 1] = aten._to_copy(%0, dtype=float32)
        %2: float32[s0, 4] = aten.mul.Tensor(%1, @inv_freq)
        %3: float32[s0, 8] = aten.cat([%2, %2], -1)
        return (%3)
    """
    check(example(table, IDS, {"inv_freq": random(4)}), golden)


def test_heads_in_front_of_tokens_broadcast_to_rows() -> None:
    def biased(token_ids: Any, positions: Any, embed: Any, bias: Any) -> Any:
        heads = aten.transpose.int(aten.view.default(aten.embedding.default(embed, token_ids), [1, -1, 2, 4]), 1, 2)
        return aten.transpose.int(aten.add.Tensor(heads, bias), 1, 2)

    golden = """
        %token_ids: int64[s0] = input
        %positions: int64[s0] = input
        %0: float32[s0, 8] = aten.embedding(@embed, %token_ids)
        %1: float32[s0, 2, 4] = aten.view(%0, [-1, 2, 4])
        %2: float32[2, 4] = aten.view(@bias, [2, 4])
        %3: float32[s0, 2, 4] = aten.add.Tensor(%1, %2)
        return (%3)
    """
    check(example(biased, IDS, {"embed": random(7, 8), "bias": random(2, 1, 4)}), golden)


def times_its_transpose(x: Any) -> Any:
    return aten.mul.Tensor(x, aten.transpose.int(x, 1, 2))


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (
            lambda x: aten.flip.default(x, [2]),
            r"inferc cannot run aten.flip yet \(node flip_default\): this model's family",
        ),
        (
            lambda x: aten.mean.dim(x, [1], True),
            "cannot run aten.mean.dim as this model uses it .*: axis 1 is the batch's or the tokens'",
        ),
        (
            lambda x: aten.add.Tensor(
                x, call(x, aten.zeros.default, [1, aten.sym_size.int(x, 1), 1], dtype=torch.float32)
            ),
            "cannot run aten.zeros yet",
        ),
        (lambda x: aten.view.default(x, [1, 2, -1, 4]), "mixes tokens with the axes before"),
        (lambda x: times_its_transpose(aten.slice.Tensor(x, 2, 0, 1)), "tokens on different axes|no one axis"),
    ],
)
def test_refuses_by_name(function: Any, message: str) -> None:
    def graph(token_ids: Any, positions: Any, embed: Any) -> Any:
        return function(aten.embedding.default(embed, token_ids))

    made = example(graph, IDS, {"embed": random(7, 8)})
    with pytest.raises(UnsupportedError, match=message):
        FlattenBatch()(made.program)
