from typing import Any

import torch
from graphs import example, random, rows
from torch import ops

from inferc.passes.fuse.linear_add import fuse_linear_add, fuse_parallel_residual

aten = ops.aten
INPUTS = {"x": rows(8), "y": rows(6, seed=1), "residual": rows(4, seed=2)}
WEIGHTS = {"o": random(4, 8), "down": random(4, 6, seed=1), "bias": random(4, seed=2)}


def test_the_residual_is_added_where_the_product_is_written() -> None:
    def graph(x: Any, residual: Any, o: Any, bias: Any) -> Any:
        return aten.add.Tensor(aten.linear.default(x, o, bias), residual)

    golden = """
        %x: float32[s0, 8] = input
        %residual: float32[s0, 4] = input
        %0: float32[s0, 4] = inferc.linear_add(%x, @o, @bias, %residual)
        return (%0)
    """
    inputs = {name: INPUTS[name] for name in ("x", "residual")}
    weights = {name: WEIGHTS[name] for name in ("o", "bias")}
    example(graph, inputs, weights).check(fuse_linear_add, 1, golden)


def test_a_parallel_residual_is_added_to_one_after_the_other() -> None:
    def graph(x: Any, y: Any, residual: Any, o: Any, down: Any, bias: Any) -> Any:
        both = aten.add.Tensor(aten.linear.default(x, o), aten.linear.default(y, down, bias))
        return aten.add.Tensor(both, residual)

    golden = """
        %x: float32[s0, 8] = input
        %y: float32[s0, 6] = input
        %residual: float32[s0, 4] = input
        %0: float32[s0, 4] = inferc.linear_add(%x, @o, None, %residual)
        %1: float32[s0, 4] = inferc.linear_add(%y, @down, @bias, %0)
        return (%1)
    """
    example(graph, INPUTS, WEIGHTS).check(fuse_parallel_residual, 1, golden)


def test_keeps_a_product_that_is_read_elsewhere_and_a_residual_of_another_kind() -> None:
    def used_twice(x: Any, residual: Any, o: Any) -> Any:
        product = aten.linear.default(x, o)
        return aten.add.Tensor(product, residual), product

    def sum_only(x: Any, residual: Any, o: Any) -> Any:
        return aten.add.Tensor(aten.linear.default(x, o), residual)

    weights = {"o": WEIGHTS["o"]}
    example(used_twice, {"x": rows(8), "residual": rows(4)}, weights).check_untouched(fuse_linear_add)
    example(sum_only, {"x": rows(8), "residual": rows(1)}, weights).check_untouched(fuse_linear_add)
    wide = {"x": rows(8, dtype=torch.bfloat16), "residual": rows(4)}
    example(sum_only, wide, {"o": WEIGHTS["o"].bfloat16()}).check_untouched(fuse_linear_add)
