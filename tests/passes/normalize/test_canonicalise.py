import textwrap
from typing import Any

import pytest
import torch
from graphs import example, random, rows
from torch import ops

from inferc.passes.normalize.canonicalise import Canonicalise

aten = ops.aten


def test_removes_what_computes_nothing() -> None:
    def noisy(x: Any) -> Any:
        x = aten.alias.default(aten.clone.default(x))
        x = aten.dropout.default(aten.mul.Tensor(x, 1.0), 0.5, False)
        x = aten._to_copy.default(x, dtype=torch.float32)
        x = aten.slice.Tensor(x, 1, 0, 2**63 - 1)
        x = aten.cat.default([x, aten.slice.Tensor(x, 1, 6, 9)], -1)
        return aten.neg.default(aten.transpose.int(aten.transpose.int(x, 0, 1), 0, 1))

    golden = """
        %x: float32[s0, 6] = input
        %0: float32[s0, 6] = aten.neg(%x)
        return (%0)
    """
    example(noisy, {"x": rows(6)}).check(Canonicalise(), 10, golden)


def test_one_spelling_for_views_softmax_splits_and_axes() -> None:
    def spelled(x: Any) -> Any:
        x = aten.reshape.default(aten._unsafe_view.default(x, [-1, 2, 3]), [-1, 6])
        first, second = aten.split.Tensor(x, 3, 1)
        top = aten._softmax.default(aten.unsqueeze.default(first, 1), 2, False)
        return aten.mean.dim(top, [2], True), aten.cat.default([second, second], 1)

    golden = """
        %x: float32[s0, 6] = input
        %0: float32[s0, 3] = aten.slice.Tensor(%x, -1, 0, 3)
        %1: float32[s0, 3] = aten.slice.Tensor(%x, -1, 3, 6)
        %2: float32[s0, 1, 3] = aten.unsqueeze(%0, -2)
        %3: float32[s0, 1, 3] = aten.softmax.int(%2, -1)
        %4: float32[s0, 1, 1] = aten.mean.dim(%3, [-1], True)
        %5: float32[s0, 6] = aten.cat([%1, %1], -1)
        return (%4, %5)
    """
    example(spelled, {"x": rows(6)}).check(Canonicalise(), 9, golden)


def test_the_smaller_and_the_larger_of_two_have_one_name() -> None:
    golden = """
        %x: float32[s0, 4] = input
        %y: float32[s0, 4] = input
        %0: float32[s0, 4] = aten.minimum(%x, %y)
        %1: float32[s0, 4] = aten.maximum(%0, %y)
        return (%1)
    """
    both = example(lambda x, y: aten.max.other(aten.min.other(x, y), y), {"x": rows(4), "y": rows(4, seed=1)})
    both.check(Canonicalise(), 2, golden)


def test_a_power_of_minus_a_half_is_a_reciprocal_root() -> None:
    golden = """
        %x: float32[s0, 4] = input
        %0: float32[s0, 4] = aten.square(%x)
        %1: float32[s0, 4] = aten.rsqrt(%0)
        return (%1)
    """
    norm = example(lambda x: aten.pow.Tensor_Scalar(aten.square.default(x), -0.5), {"x": rows(4)})
    norm.check(Canonicalise(), 1, golden)


def test_a_softmax_that_names_its_dtype_gets_a_cast() -> None:
    golden = """
        %x: bfloat16[s0, 4] = input
        %0: float32[s0, 4] = aten._to_copy(%x, dtype=float32)
        %1: float32[s0, 4] = aten.softmax.int(%0, -1)
        return (%1)
    """
    softmax = example(lambda x: aten.softmax.int(x, -1, torch.float32), {"x": rows(4, dtype=torch.bfloat16)})
    softmax.check(Canonicalise(), 1, golden)


def test_a_widening_cast_and_its_inverse_cancel_but_a_narrowing_one_stays() -> None:
    def there_and_back(wide: torch.dtype, narrow: torch.dtype) -> Any:
        return lambda x: aten.neg.default(aten._to_copy.default(aten._to_copy.default(x, dtype=wide), dtype=narrow))

    widened = example(there_and_back(torch.float32, torch.bfloat16), {"x": rows(4, dtype=torch.bfloat16)})
    assert Canonicalise()(widened.program) == 1
    assert "_to_copy" not in widened.program.to_text()
    example(there_and_back(torch.bfloat16, torch.float32), {"x": rows(4)}).check_untouched(Canonicalise())


def test_type_as_becomes_a_cast() -> None:
    golden = """
        %x: float32[s0, 4] = input
        %y: bfloat16[s0, 4] = input
        %0: bfloat16[s0, 4] = aten._to_copy(%x, dtype=bfloat16)
        return (%0)
    """
    inputs = {"x": rows(4), "y": rows(4, dtype=torch.bfloat16)}
    example(lambda x, y: aten.type_as.default(x, y), inputs).check(Canonicalise(), 1, golden)


@pytest.mark.parametrize("factor", [2.0, -1.0])
def test_keeps_what_computes_something(factor: float) -> None:
    def graph(x: Any) -> Any:
        return aten.mul.Tensor(aten.slice.Tensor(x, -1, 0, 3), factor)

    example(graph, {"x": random(4, 6)}).check_untouched(Canonicalise())


def test_addmm_is_a_linear_of_the_transposed_weight() -> None:
    def graph(x: Any, weight: Any, bias: Any) -> Any:
        return aten.addmm.default(bias, x, weight)

    golden = """
        %x: float32[s0, 8] = input
        %0: float32[s0, 4] = aten.linear(%x, @weight.1_0, @bias)
        return (%0)
    """
    example(graph, {"x": rows(8)}, {"weight": random(8, 4), "bias": random(4)}).check(Canonicalise(), 1, golden)


def test_positions_that_start_later_look_into_a_shorter_table() -> None:
    def graph(positions: Any, table: Any) -> Any:
        return aten.embedding.default(table, aten.add.Tensor(positions, 2))

    golden = """
        %positions: int64[s0] = input
        %0: float32[s0, 4] = aten.embedding(@table.2, %positions)
        return (%0)
    """
    example(graph, {"positions": torch.arange(5)}, {"table": random(9, 4)}).check(Canonicalise(), 1, golden)


def test_a_tensor_that_is_filled_part_by_part_is_a_concatenation() -> None:
    def graph(x: Any, y: Any) -> Any:
        whole = aten.new_empty.default(x, [6, 7])
        part = aten.copy.default(aten.slice.Tensor(whole, 1, 0, 4), x)
        whole = aten.slice_scatter.default(whole, part, 1, 0, 4)
        part = aten.copy.default(aten.slice.Tensor(whole, 1, 4, 7), y)
        return aten.slice_scatter.default(whole, part, 1, 4, 2**63 - 1)

    golden = """
        %x: float32[6, 4] = input
        %y: float32[6, 3] = input
        %0: float32[6, 7] = aten.cat([%x, %y], -1)
        return (%0)
    """
    made = example(graph, {"x": random(6, 4), "y": random(6, 3, seed=1)})
    assert Canonicalise()(made.program) > 0
    assert made.program.to_text() == textwrap.dedent(golden).lstrip("\n")
    torch.testing.assert_close(made.run()[0], torch.cat((made.inputs["x"], made.inputs["y"]), -1))


def test_parts_that_are_selected_of_heads_are_ranges_of_them() -> None:
    """The ranges are of one view, so that the projection before it can be divided by heads."""

    def packed(x: Any) -> Any:
        parts = aten.view.default(x, [-1, 2, 3, 4])
        return aten.select.int(parts, -2, 0), aten.select.int(parts, 2, 2)

    golden = """
        %x: float32[s0, 24] = input
        %0: float32[s0, 2, 12] = aten.view(%x, [-1, 2, 12])
        %1: float32[s0, 2, 4] = aten.slice.Tensor(%0, -1, 0, 4)
        %2: float32[s0, 2, 4] = aten.slice.Tensor(%0, -1, 8, 12)
        return (%1, %2)
    """
    example(packed, {"x": rows(24)}).check(Canonicalise(), 2, golden)
    of_heads = example(lambda x: aten.select.int(aten.view.default(x, [-1, 2, 3, 4]), -3, 0), {"x": rows(24)})
    of_heads.check_untouched(Canonicalise())


def test_a_product_with_a_weight_is_a_linear() -> None:
    golden = """
        %x: float32[s0, 6] = input
        %0: float32[s0, 4] = aten.linear(%x, @w.1_0)
        return (%0)
    """
    made = example(lambda x, w: aten.matmul.default(x, w), {"x": rows(6)}, {"w": random(6, 4)})
    made.check(Canonicalise(), 1, golden)
    example(lambda x, y: aten.matmul.default(x, y), {"x": rows(5), "y": rows(5)}).check_untouched(Canonicalise())
