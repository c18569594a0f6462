from typing import Any

from graphs import example, random, rows
from torch import ops

from inferc.passes.fuse.pack_projections import PackProjections

aten, inferc = ops.aten, ops.inferc


def test_packs_linears_that_share_their_input() -> None:
    def projections(x: Any, layers__0__q__weight: Any, layers__0__k__weight: Any, layers__0__o__weight: Any) -> Any:
        q, k = aten.linear.default(x, layers__0__q__weight), aten.linear.default(x, layers__0__k__weight)
        return q, k, aten.linear.default(q, layers__0__o__weight)

    golden = """
        %x: float32[s0, 8] = input
        %0: float32[s0, 8] = aten.linear(%x, @layers.0.q+k.weight)
        %1: float32[s0, 6] = aten.slice.Tensor(%0, -1, 0, 6)
        %2: float32[s0, 2] = aten.slice.Tensor(%0, -1, 6, 8)
        %3: float32[s0, 8] = aten.linear(%1, @layers.0.o.weight)
        return (%1, %2, %3)
    """
    sizes = {"layers.0.q.weight": (6, 8), "layers.0.k.weight": (2, 8), "layers.0.o.weight": (8, 6)}
    weights = {name: random(*size, seed=seed) for seed, (name, size) in enumerate(sizes.items())}
    made = example(projections, {"x": rows(8)}, weights)
    made.check(PackProjections(), 1, golden)
    assert str(made.program.weights["layers.0.q+k.weight"]) == "concat(layers.0.q.weight, layers.0.k.weight, dim=0)"


def test_packs_biases_too() -> None:
    def biased(x: Any, q: Any, k: Any, q_bias: Any, k_bias: Any) -> Any:
        return aten.linear.default(x, q, q_bias), aten.linear.default(x, k, k_bias)

    golden = """
        %x: float32[s0, 8] = input
        %0: float32[s0, 8] = aten.linear(%x, @q+k, @q_bias+k_bias)
        %1: float32[s0, 6] = aten.slice.Tensor(%0, -1, 0, 6)
        %2: float32[s0, 2] = aten.slice.Tensor(%0, -1, 6, 8)
        return (%1, %2)
    """
    weights = {"q": random(6, 8), "k": random(2, 8, seed=1), "q_bias": random(6, seed=2), "k_bias": random(2, seed=3)}
    example(biased, {"x": rows(8)}, weights).check(PackProjections(), 1, golden)


def test_keeps_linears_of_other_inputs_routers_and_tied_weights() -> None:
    def other_inputs(x: Any, y: Any, a: Any, b: Any) -> Any:
        return aten.linear.default(x, a), aten.linear.default(y, b)

    def one_bias(x: Any, a: Any, b: Any, bias: Any) -> Any:
        return aten.linear.default(x, a, bias), aten.linear.default(x, b)

    def router(x: Any, a: Any, b: Any) -> Any:
        return inferc.moe_routing.default(aten.linear.default(x, a), None, 2, True)[0], aten.linear.default(x, b)

    def tied(x: Any, a: Any) -> Any:
        return aten.linear.default(x, a), aten.linear.default(x, a)

    weights = {"a": random(6, 8), "b": random(6, 8), "bias": random(6)}
    used = {"a": weights["a"], "b": weights["b"]}
    example(other_inputs, {"x": rows(8), "y": rows(8)}, used).check_untouched(PackProjections())
    example(one_bias, {"x": rows(8)}, weights).check_untouched(PackProjections())
    example(router, {"x": rows(8)}, used).check_untouched(PackProjections())
    example(tied, {"x": rows(8)}, {"a": weights["a"]}).check_untouched(PackProjections())
