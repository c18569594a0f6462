from typing import Any

import torch
from graphs import example, random, rows
from torch import ops

from inferc.passes.fuse.linear_fp32_out import fuse_linear_wide
from inferc.passes.normalize.fold_weights import FoldWeights

aten = ops.aten


def test_casts_and_views_of_weights_are_weights() -> None:
    def graph(x: Any, weight: Any, bias: Any) -> Any:
        wide = aten._to_copy.default(weight, dtype=torch.float32)
        return aten.add.Tensor(aten.linear.default(x, wide), aten.squeeze.default(bias))

    golden = """
        %x: float32[s0, 8] = input
        %0: float32[s0, 4] = aten.linear(%x, @weight.float32)
        %1: float32[s0, 4] = aten.add.Tensor(%0, @bias.4)
        return (%1)
    """
    weights = {"weight": random(4, 8, dtype=torch.bfloat16), "bias": random(1, 4)}
    example(graph, {"x": rows(8)}, weights).check(FoldWeights(), 2, golden)


def test_a_norm_that_scales_by_one_plus_its_weight_reads_the_sum_as_the_graph_rounds_it() -> None:
    def graph(x: Any, weight: Any, bias: Any) -> Any:
        return aten.layer_norm.default(x, [8], aten.add.Tensor(weight, 1), bias, 1e-5)

    golden = """
        %x: bfloat16[s0, 8] = input
        %0: bfloat16[s0, 8] = aten.layer_norm(%x, [8], @weight.add, @bias, 1e-05)
        return (%0)
    """
    weights = {name: random(8, dtype=torch.bfloat16, seed=seed) for seed, name in enumerate(("weight", "bias"))}
    example(graph, {"x": rows(8, dtype=torch.bfloat16)}, weights).check(FoldWeights(), 1, golden, tolerance=0)


def test_a_single_number_is_rounded_by_its_casts() -> None:
    def graph(x: Any, weight: Any, scale: Any) -> Any:
        number = aten._to_copy.default(aten.view.default(scale, []), dtype=torch.bfloat16)
        return aten.linear.default(x, aten.mul.Tensor(weight, number))

    golden = """
        %x: bfloat16[s0, 8] = input
        %0: bfloat16[s0, 8] = aten.linear(%x, @weight.mul)
        return (%0)
    """
    weights = {"weight": random(8, 8, dtype=torch.bfloat16), "scale": torch.tensor([1.00390625])}  # half between two
    made = example(graph, {"x": rows(8, dtype=torch.bfloat16)}, weights)
    made.check(lambda program: int(bool(FoldWeights()(program))), 1, golden, tolerance=0)


def test_a_mode_of_arithmetic_on_a_weight_is_the_graphs() -> None:
    def graph(x: Any, weight: Any) -> Any:
        return aten.mul.Tensor(x, aten.softplus.default(aten.gelu.default(weight, approximate="tanh")))

    golden = """
        %x: float32[s0, 8] = input
        %0: float32[s0, 8] = aten.mul.Tensor(%x, @weight.gelu.softplus)
        return (%0)
    """
    each = example(graph, {"x": rows(8)}, {"weight": random(8)})
    each.check(FoldWeights(), 2, golden)
    assert "gelu_tanh(x0)" in str(each.program.weights["weight.gelu.softplus"])


def test_arithmetic_orders_parts_and_joints_of_weights_are_weights() -> None:
    def graph(x: Any, first: Any, second: Any, scale: Any) -> Any:
        both = aten.cat.default([aten.neg.default(first), aten.mul.Tensor(second, scale)], -2)
        turned = aten.permute.default(aten.permute.default(both, [1, 0]), [1, 0])
        row = aten.sub.Tensor(aten.slice.Tensor(both, -2, 1, 2), aten.slice.Tensor(both, -2, -1, 4))
        return aten.mul.Tensor(aten.linear.default(x, turned), aten.mul.Tensor(row, 0.5))

    golden = """
        %x: float32[s0, 4] = input
        %0: float32[s0, 4] = aten.linear(%x, @first.neg.joined.1_0.1_0)
        %1: float32[s0, 4] = aten.mul.Tensor(%0, @first.neg.joined.1:2.sub.mul)
        return (%1)
    """
    weights = {"first": random(2, 4), "second": random(2, 4, seed=1), "scale": random(4, seed=2)}
    example(graph, {"x": rows(4)}, weights).check(FoldWeights(), 9, golden, tolerance=0)


def test_equal_names_of_other_arithmetic_are_told_apart() -> None:
    def graph(x: Any, weight: Any) -> Any:
        return aten.mul.Tensor(x, aten.add.Tensor(weight, 1)), aten.mul.Tensor(x, aten.add.Tensor(weight, 2))

    golden = """
        %x: float32[s0, 8] = input
        %0: float32[s0, 8] = aten.mul.Tensor(%x, @weight.add)
        %1: float32[s0, 8] = aten.mul.Tensor(%x, @weight.add.add_tensor_1)
        return (%0, %1)
    """
    example(graph, {"x": rows(8)}, {"weight": random(8)}).check(FoldWeights(), 2, golden, tolerance=0)


def test_keeps_what_is_no_arithmetic_on_elements_and_single_numbers() -> None:
    def graph(x: Any, weight: Any, scale: Any) -> Any:
        summed = aten.mul.Tensor(x, aten.sum.dim_IntList(weight, [-1]))
        return (
            summed,
            aten.mul.Tensor(x, aten.view.default(scale, [])),
            aten.mul.Tensor(x, aten.pow.Tensor_Scalar(scale, 7)),
        )

    weights = {"weight": random(8, 3), "scale": random(1)}
    example(graph, {"x": rows(8)}, weights).check_untouched(FoldWeights())


def router(x: Any, weight: Any) -> Any:
    wide = aten._to_copy.default(weight, dtype=torch.float32)
    return aten.linear.default(aten._to_copy.default(x, dtype=torch.float32), wide)


def test_a_router_in_float32_reads_its_weight_as_it_is_stored() -> None:
    golden = """
        %x: bfloat16[s0, 8] = input
        %0: float32[s0, 4] = inferc.linear_wide(%x, @weight)
        return (%0)
    """
    inputs, weights = {"x": rows(8, dtype=torch.bfloat16)}, {"weight": random(4, 8, dtype=torch.bfloat16)}
    example(router, inputs, weights).check(fuse_linear_wide, 1, golden)


def test_keeps_a_product_that_is_float32_anyway() -> None:
    plain = example(lambda x, weight: aten.linear.default(x, weight), {"x": rows(8)}, {"weight": random(4, 8)})
    plain.check_untouched(fuse_linear_wide)


def test_an_option_of_an_op_on_a_weight_chooses_what_is_computed() -> None:
    def graph(x: Any, weight: Any) -> Any:
        bounded = aten.clamp.default(aten.gelu.default(weight, approximate="tanh"), None, 0.5)
        return aten.mul.Tensor(x, bounded)

    golden = """
        %x: float32[s0, 8] = input
        %0: float32[s0, 8] = aten.mul.Tensor(%x, @weight.gelu.clamp)
        return (%0)
    """
    example(graph, {"x": rows(8)}, {"weight": random(8)}).check(FoldWeights(), 2, golden)
