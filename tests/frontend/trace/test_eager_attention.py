"""Attention that is spelled out is found by what it computes, and nothing else is taken for it."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import Example, example, random
from torch import Tensor, ops

from inferc.errors import ExportError
from inferc.frontend.trace.eager_attention import capture_eager_attention
from inferc.ir import weights as weight_lib
from inferc.ir.program import named_arguments

aten, inferc = ops.aten, ops.inferc
TOKENS, HEADS, DIM = 5, 2, 8
SLOPES = torch.tensor([0.25, 0.3])


def heads(seed: int = 0) -> Tensor:
    return random(1, HEADS, TOKENS, DIM, seed=seed)


def spelled(
    function: Callable[..., Any], constants: dict[str, Tensor] | None = None, *, with_mask: bool = True
) -> Example:
    """Return a program of `function(mask, q, k, v, **constants)`; the mask is causal, of a trace's sizes, or None."""

    def traced(token_ids: Any, q: Any, k: Any, v: Any, **others: Any) -> Any:
        mask = None
        if with_mask:
            mask = ops.frontend.mask.default(aten.sym_size.int(token_ids, 1), torch.float32, "causal", 0)
        return function(mask, q, k, v, **others)

    names = list(constants or {})
    parameters = ", ".join(("token_ids", "q", "k", "v", *names))
    given = ", ".join(("token_ids", "q", "k", "v", *(f"{name}={name}" for name in names)))
    wrapper = eval(f"lambda {parameters}: traced({given})", {"traced": traced})
    inputs = {"token_ids": torch.zeros(1, TOKENS, dtype=torch.int64)}
    inputs |= {name: heads(seed) for seed, name in enumerate("qkv")}
    made = example(wrapper, inputs, constants)
    for name, value in (constants or {}).items():
        made.program.weights[name] = weight_lib.constant(value)
    return made


def attention(made: Example) -> dict[str, Any]:
    """The arguments of the one attention that `made` is, which computes the same."""
    before = made.run()
    assert capture_eager_attention(made.program) == 1
    torch.testing.assert_close(made.run(), before, rtol=1e-5, atol=1e-5)
    (node,) = made.program.graph.find_nodes(op="call_function", target=inferc.attention.default)
    return named_arguments(node)


def test_scores_with_a_mask_are_attention() -> None:
    def scaled(mask: Any, q: Any, k: Any, v: Any) -> Any:
        scores = aten.div.Tensor(aten.matmul.default(q, aten.transpose.int(k, -1, -2)), math.sqrt(DIM))
        weights = aten.softmax.int(aten.add.Tensor(scores, mask), -1, torch.float32)
        return aten.matmul.default(aten.dropout.default(weights, 0.0, False), v)

    golden = """
        %token_ids: int64[1, s0] = input
        %q: float32[1, 2, s0, 8] = input
        %k: float32[1, 2, s0, 8] = input
        %v: float32[1, 2, s0, 8] = input
        %0: float32[1, s0, 2, 8] = inferc.attention(%q, %k, %v, None, 0.353553390593, 'causal', 0, 0.0)
        %1: float32[1, 2, s0, 8] = aten.transpose.int(%0, 1, 2)
        return (%1)
    """
    made = spelled(scaled)
    made.check(capture_eager_attention, 1, golden, tolerance=1e-5)


def test_heads_in_the_batch_and_a_bias_in_the_product_are_alibi() -> None:
    def with_alibi(_mask: Any, q: Any, k: Any, v: Any, slopes: Any) -> Any:
        batch = [aten.reshape.default(each, [HEADS, -1, DIM]) for each in (q, k, v)]
        positions = aten.arange.start(0, aten.sym_size.int(q, 2))
        distance = aten.sub.Tensor(aten.unsqueeze.default(positions, 0), aten.unsqueeze.default(positions, 1))
        alibi = aten.mul.Tensor(aten.view.default(slopes, [HEADS, 1, 1]), distance)
        scores = aten.baddbmm.default(alibi, batch[0], aten.transpose.int(batch[1], 1, 2), beta=1.0, alpha=0.5)
        scores = aten.add.Tensor(aten.view.default(scores, [1, HEADS, aten.sym_size.int(q, 2), -1]), _mask)
        weights = aten.view.default(aten.softmax.int(scores, -1), [HEADS, aten.sym_size.int(q, 2), -1])
        return aten.view.default(aten.bmm.default(weights, batch[2]), [1, HEADS, -1, DIM])

    found = attention(made := spelled(with_alibi, {"slopes": SLOPES}))
    assert (found["scale"], found["mask"], found["window"]) == (0.5, "causal", 0)
    torch.testing.assert_close(weight_lib.read_whole(made.program.weight(found["alibi"]), made.reader), SLOPES)


def test_a_table_of_all_positions_is_a_window() -> None:
    rows = torch.arange(40)
    local = (rows <= rows[:, None]) & (rows > rows[:, None] - 17)

    def with_table(mask: Any, q: Any, k: Any, v: Any, table: Any) -> Any:
        length = aten.sym_size.int(q, 2)
        seen = aten.slice.Tensor(aten.slice.Tensor(table, 2, 0, length), 3, 0, length)
        scores = aten.matmul.default(q, aten.transpose.int(k, 2, 3))
        scores = aten.where.ScalarOther(seen, scores, torch.finfo(torch.float32).min)
        return aten.matmul.default(aten.softmax.int(aten.add.Tensor(scores, mask), -1), v)

    found = attention(spelled(with_table, {"table": local[None, None]}))
    assert (found["scale"], found["mask"], found["window"]) == (1.0, "sliding", 17)


def test_keys_and_values_of_few_heads_are_not_repeated() -> None:
    def grouped(mask: Any, q: Any, k: Any, v: Any) -> Any:
        def repeated(x: Any) -> Any:
            few = aten.unsqueeze.default(aten.slice.Tensor(x, 1, 0, 1), 2)
            return aten.reshape.default(aten.expand.default(few, [1, 1, HEADS, -1, DIM]), [1, HEADS, -1, DIM])

        scores = aten.matmul.default(q, aten.transpose.int(repeated(k), 2, 3))
        masked = aten.masked_fill.Scalar(scores, aten.ne.Scalar(mask, 0), -1e38)
        return aten.matmul.default(aten.softmax.int(masked, -1), repeated(v))

    found = attention(spelled(grouped))
    assert [found[name].meta["val"].shape[1] for name in "qkv"] == [HEADS, 1, 1]


def test_a_number_for_all_keys_of_a_head_changes_nothing() -> None:
    def shifted(mask: Any, q: Any, k: Any, v: Any, bias: Any) -> Any:
        scores = aten.add.Tensor(aten.matmul.default(q, aten.transpose.int(k, 2, 3)), bias)
        return aten.matmul.default(aten.softmax.int(aten.add.Tensor(scores, mask), -1), v)

    found = attention(spelled(shifted, {"bias": torch.tensor([0.5, -0.5]).view(1, 2, 1, 1)}))
    assert found["alibi"] is None and found["scale"] == 1.0


def _squared(mask: Any, q: Any, k: Any, v: Any) -> Any:
    scores = aten.square.default(aten.matmul.default(q, aten.transpose.int(k, 2, 3)))
    return aten.matmul.default(aten.softmax.int(aten.add.Tensor(scores, mask), -1), v)


def _of_tokens(mask: Any, q: Any, k: Any, v: Any) -> Any:
    product = aten.matmul.default(q, aten.transpose.int(k, 2, 3))
    scores = aten.add.Tensor(product, aten.transpose.int(aten.slice.Tensor(v, 3, 0, 1), 2, 3))
    return aten.matmul.default(aten.softmax.int(aten.add.Tensor(scores, mask), -1), v)


def _by_key(mask: Any, q: Any, k: Any, v: Any) -> Any:
    distance = aten.square.default(
        aten._to_copy.default(aten.arange.default(aten.sym_size.int(q, 2)), dtype=torch.float32)
    )
    scores = aten.add.Tensor(aten.matmul.default(q, aten.transpose.int(k, 2, 3)), distance)
    return aten.matmul.default(aten.softmax.int(aten.add.Tensor(scores, mask), -1), v)


def _distance(q: Any) -> Any:
    positions = aten.arange.default(aten.sym_size.int(q, 2))
    return aten.sub.Tensor(aten.unsqueeze.default(positions, 1), aten.unsqueeze.default(positions, 0))


def _window_by_numbers(mask: Any, q: Any, k: Any, v: Any) -> Any:
    """A window of more tokens than are tried."""
    scores = aten.add.Tensor(aten.matmul.default(q, aten.transpose.int(k, 2, 3)), mask)
    scores = aten.masked_fill.Scalar(scores, aten.gt.Scalar(_distance(q), 15), float("-inf"))
    return aten.matmul.default(aten.softmax.int(scores, -1), v)


def _bias_that_ends(mask: Any, q: Any, k: Any, v: Any) -> Any:
    """ALiBi as far as 100 tokens."""
    bias = aten.mul.Tensor(aten.clamp.default(_distance(q), -100, 100), -0.25)
    scores = aten.add.Tensor(aten.matmul.default(q, aten.transpose.int(k, 2, 3)), bias)
    return aten.matmul.default(aten.softmax.int(aten.add.Tensor(scores, mask), -1), v)


@pytest.mark.parametrize("lowest", [-1e4, torch.finfo(torch.float16).min, torch.finfo(torch.float32).min])
def test_a_mask_is_as_low_as_its_dtype_can_be(lowest: float) -> None:
    """GPT takes 1e4 from hidden scores, and float16 ends at -65504."""

    def hiding(_mask: Any, q: Any, k: Any, v: Any) -> Any:
        seen = aten._to_copy.default(aten.ge.Scalar(_distance(q), 0), dtype=torch.float32)
        hidden = aten.mul.Tensor(aten.rsub.Scalar(seen, 1), lowest)
        scores = aten.mul.Tensor(aten.matmul.default(q, aten.transpose.int(k, 2, 3)), seen)
        return aten.matmul.default(aten.softmax.int(aten.add.Tensor(scores, hidden), -1), v)

    found = attention(spelled(hiding, with_mask=False))
    assert (found["scale"], found["mask"], found["window"]) == (1.0, "causal", 0)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (_window_by_numbers, "gt.* reckons with positions and 15, more than the 13 tokens that are tried"),
        (_bias_that_ends, "clamp.* reckons with positions and -100, more than the 13 tokens that are tried"),
        (_squared, "no softmax of them with a scale, ALiBi and a mask"),
        (_of_tokens, r"its scores depend on transpose_int\S* too"),
        (_by_key, "not linear in the distance of key and query"),
    ],
)
def test_other_arithmetic_is_refused_and_says_why(function: Callable[..., Any], message: str) -> None:
    made = spelled(function)
    with pytest.raises(ExportError, match=message) as caught:
        capture_eager_attention(made.program)
    assert "\n" not in str(caught.value)


def test_a_mask_of_its_own_that_is_not_known_is_refused_too() -> None:
    """Nothing of transformers' mask is left then that would tell of it."""

    def two_sided(_mask: Any, q: Any, k: Any, v: Any) -> Any:
        near = aten.lt.Scalar(aten.abs.default(_distance(q)), 3)
        scores = aten.where.ScalarOther(near, aten.matmul.default(q, aten.transpose.int(k, 2, 3)), -1e9)
        return aten.matmul.default(aten.softmax.int(scores, -1), v)

    with pytest.raises(ExportError, match="attention code of the model's own is not known: .*mask is not causal"):
        capture_eager_attention(spelled(two_sided, with_mask=False).program)


def test_a_softmax_of_something_else_is_left_alone() -> None:
    made = example(lambda token_ids, x: aten.softmax.int(x, -1), {"token_ids": torch.zeros(1, 5), "x": random(1, 5, 8)})
    made.check_untouched(capture_eager_attention)
