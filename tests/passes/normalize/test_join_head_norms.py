from typing import Any

from graphs import example, random, rows
from torch import ops

from inferc.passes.normalize.join_head_norms import JoinHeadNorms

aten, inferc = ops.aten, ops.inferc


def normed(x: Any, weights: list[Any], biases: list[Any], order: tuple[int, ...] = (0, 1), eps: float = 1e-5) -> Any:
    heads = [aten.slice.Tensor(x, -2, index, index + 1) for index in order]
    norms = [inferc.layer_norm.default(*each, eps) for each in zip(heads, weights, biases, strict=True)]
    return aten.cat.default(norms, -2)


def test_a_norm_for_each_head_is_one_over_all() -> None:
    def graph(x: Any, norms__0__weight: Any, norms__1__weight: Any) -> Any:
        weights = [norms__0__weight, norms__1__weight]
        return normed(x, weights, [None, None]), normed(x, weights, weights[::-1], eps=1e-3)

    golden = """
        %x: float32[s0, 2, 6] = input
        %0: float32[s0, 2, 6] = inferc.layer_norm(%x, @norms.0.weight.stacked, None, 1e-05)
        %1: float32[s0, 2, 6] = inferc.layer_norm(%x, @norms.0.weight.stacked, @norms.1.weight.stacked, 0.001)
        return (%0, %1)
    """
    weights = {f"norms.{index}.weight": random(6, seed=index) for index in range(2)}
    example(graph, {"x": rows(2, 6)}, weights).check(JoinHeadNorms(), 2, golden)


def test_keeps_heads_in_another_order_some_of_them_and_norms_of_other_values() -> None:
    def graph(x: Any, y: Any, first: Any, second: Any) -> Any:
        third = inferc.layer_norm.default(aten.slice.Tensor(y, -2, 0, 1), first, None, 1e-5)
        fourth = inferc.layer_norm.default(aten.slice.Tensor(x, -2, 1, 2), second, None, 1e-5)
        mixed = aten.cat.default([third, fourth], -2)
        half = normed(y, [first, second], [None, None])
        return normed(x, [first, second], [None, None], (1, 0)), mixed, half, normed(x, [first, second], [None, first])

    inputs = {"x": rows(2, 6), "y": rows(3, 6, seed=1)}
    example(graph, inputs, {"first": random(6), "second": random(6, seed=1)}).check_untouched(JoinHeadNorms())
