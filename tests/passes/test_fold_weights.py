from typing import Any

import torch
from graphs import example, random, rows
from torch import ops

from inferc.passes.fold_weights import FoldWeights
from inferc.passes.fuse_linear_wide import fuse_linear_wide

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


def test_keeps_arithmetic_and_single_numbers() -> None:
    def graph(x: Any, weight: Any, scale: Any) -> Any:
        return aten.mul.Tensor(x, aten.neg.default(weight)), aten.mul.Tensor(x, aten.view.default(scale, []))

    example(graph, {"x": rows(8)}, {"weight": random(8), "scale": random(1)}).check_untouched(FoldWeights())


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
