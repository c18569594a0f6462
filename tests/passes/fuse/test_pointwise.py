from typing import Any

import pytest
import torch
from graphs import Example, example, random, rows
from torch import ops

from inferc.ir import weights as weight_lib
from inferc.passes.fuse.pointwise import FusePointwise

aten = ops.aten


def per_token(function: Any, inputs: dict[str, Any], weights: dict[str, Any] | None = None) -> Example:
    """An example whose first input is named as the step's tokens are: rows are told by its axis."""
    return example(function, {"token_ids": torch.arange(5), **inputs}, weights)


def test_a_softcap_is_one_op() -> None:
    def graph(token_ids: Any, x: Any) -> Any:
        return aten.mul.Tensor(aten.tanh.default(aten.div.Tensor(x, 30.0)), 30.0)

    golden = """
        %token_ids: int64[s0] = input
        %x: float32[s0, 6] = input
        %0: float32[s0, 6] = inferc.pointwise([%x], 'tanh((x0 / 30.0)) * 30.0', float32)
        return (%0)
    """
    per_token(graph, {"x": rows(6)}).check(FusePointwise(), 1, golden)


def test_a_gate_for_each_token_and_a_weight_for_each_column() -> None:
    def graph(token_ids: Any, x: Any, gate: Any, weight: Any, residual: Any) -> Any:
        gated = aten.mul.Tensor(aten.sigmoid.default(gate), x)
        return aten.add.Tensor(residual, aten.mul.Tensor(gated, weight))

    golden = """
        %token_ids: int64[s0] = input
        %x: float32[s0, 6] = input
        %gate: float32[s0, 1] = input
        %residual: float32[s0, 6] = input
        %0: float32[s0, 6] = inferc.pointwise([%gate, %x, @weight, %residual], 'x3 + ((sigmoid(x0) * x1) * x2)', \
float32)
        return (%0)
    """
    inputs = {"x": rows(6), "gate": rows(1, seed=1), "residual": rows(6, seed=2)}
    per_token(graph, inputs, {"weight": random(6)}).check(FusePointwise(), 1, golden)


def test_what_is_read_twice_is_named() -> None:
    def graph(token_ids: Any, x: Any) -> Any:
        squared = aten.square.default(aten.relu.default(x))
        return aten.add.Tensor(squared, aten.neg.default(squared))

    golden = """
        %token_ids: int64[s0] = input
        %x: float32[s0, 6] = input
        %0: float32[s0, 6] = inferc.pointwise([%x], 't0 = max(x0, 0.0); t1 = (t0 * t0); t1 + (-t1)', float32)
        return (%0)
    """
    per_token(graph, {"x": rows(6)}).check(FusePointwise(), 1, golden)


def test_a_constant_of_one_element_stands_in_the_expression() -> None:
    def graph(token_ids: Any, x: Any, scale: Any) -> Any:
        return aten.mul.Tensor(x, aten.view.default(scale, []))

    each = per_token(graph, {"x": rows(6)}, {"scale": torch.tensor([8.0])})
    each.program.weights["scale"] = weight_lib.constant(torch.tensor([8.0]))
    golden = """
        %token_ids: int64[s0] = input
        %x: float32[s0, 6] = input
        %0: float32[s0, 6] = inferc.pointwise([%x], 'x0 * 8.0', float32)
        return (%0)
    """
    each.check(FusePointwise(), 1, golden)


def test_choices_and_steps_in_bfloat16() -> None:
    def graph(token_ids: Any, x: Any) -> Any:
        wide = aten._to_copy.default(x, dtype=torch.float32)
        chosen = aten.where.self(
            aten.gt.Scalar(wide, 0.5), aten.exp.default(wide), aten.clamp.default(wide, -1.0, None)
        )
        return aten._to_copy.default(chosen, dtype=torch.bfloat16)

    golden = """
        %token_ids: int64[s0] = input
        %x: bfloat16[s0, 6] = input
        %0: bfloat16[s0, 6] = inferc.pointwise([%x], 'where((x0 > 0.5), exp(x0), max(x0, -1.0))', bfloat16)
        return (%0)
    """
    per_token(graph, {"x": rows(6, dtype=torch.bfloat16)}).check(FusePointwise(), 1, golden)


def test_two_chains_stay_two_where_the_first_is_read_elsewhere() -> None:
    def graph(token_ids: Any, x: Any) -> Any:
        first = aten.tanh.default(x)
        return aten.exp.default(first), first

    each = per_token(graph, {"x": rows(6)})
    before = each.run()
    assert FusePointwise()(each.program) == 2
    torch.testing.assert_close(each.run(), before)


def test_keeps_what_has_a_kernel_of_its_own_or_is_no_row() -> None:
    def graph(token_ids: Any, x: Any, y: Any, weight: Any) -> Any:
        scaled = aten.tanh.default(weight)  # of no token: a weight's arithmetic
        return aten.add.Tensor(x, y), aten.mul.Tensor(x, 0.5), scaled

    per_token(graph, {"x": rows(6), "y": rows(6, seed=1)}, {"weight": random(7)}).check_untouched(FusePointwise())


def test_integers_are_left_alone() -> None:
    def graph(token_ids: Any, x: Any) -> Any:
        return aten.mul.Tensor(aten.add.Tensor(token_ids, 2), 3), x

    per_token(graph, {"x": rows(6)}).check_untouched(FusePointwise())


def test_a_chain_with_many_inputs_is_cut() -> None:
    def graph(token_ids: Any, a: Any, b: Any, c: Any, d: Any, e: Any, f: Any, g: Any, h: Any, i: Any) -> Any:
        out = aten.tanh.default(a)
        for each in (b, c, d, e, f, g, h, i):
            out = aten.add.Tensor(out, each)
        return out

    each = per_token(graph, {name: rows(3, seed=at) for at, name in enumerate("abcdefghi")})
    before = each.run()
    assert FusePointwise()(each.program) == 2
    assert max(len(node.args[0]) for node in each.program.graph.nodes if node.op == "call_function") == 8
    torch.testing.assert_close(each.run(), before)


@pytest.mark.parametrize(
    ("approximate", "text"), [({"approximate": "tanh"}, "gelu_tanh(x0) * 2.0"), ({}, "gelu(x0) * 2.0")]
)
def test_an_option_of_an_op_chooses_what_it_computes(approximate: dict[str, str], text: str) -> None:
    def graph(token_ids: Any, x: Any) -> Any:
        return aten.mul.Tensor(aten.gelu.default(x, **approximate), 2.0)

    golden = f"""
        %token_ids: int64[s0] = input
        %x: float32[s0, 6] = input
        %0: float32[s0, 6] = inferc.pointwise([%x], '{text}', float32)
        return (%0)
    """
    per_token(graph, {"x": rows(6)}).check(FusePointwise(), 1, golden)


def test_a_soft_gate_with_options() -> None:
    def graph(token_ids: Any, x: Any) -> Any:
        return aten.add.Tensor(aten.softplus.default(x), aten.softplus.default(aten.tanh.default(x), 2.0, 1.5))

    plain = "where((x0 > 20), x0, log(1.0 + exp(min(x0, 20))))"
    steep = "where(((t0 * 2.0) > 1.5), t0, (log(1.0 + exp(min((t0 * 2.0), 1.5))) / 2.0))"
    golden = f"""
        %token_ids: int64[s0] = input
        %x: float32[s0, 6] = input
        %0: float32[s0, 6] = inferc.pointwise([%x], 't0 = tanh(x0); {plain} + {steep}', float32)
        return (%0)
    """
    each = per_token(graph, {"x": 30 * rows(6)})
    each.check(FusePointwise(), 1, golden)


def test_a_comparison_as_a_number_is_one_or_zero() -> None:
    def graph(token_ids: Any, x: Any) -> Any:
        positive = aten._to_copy.default(aten.gt.Scalar(x, 0.5), dtype=torch.float32)
        return aten.mul.Tensor(positive, aten.mul.Tensor(aten.lt.Scalar(x, 1.0), 3.0))

    golden = """
        %token_ids: int64[s0] = input
        %x: float32[s0, 6] = input
        %0: float32[s0, 6] = inferc.pointwise([%x], \
'where((x0 > 0.5), 1.0, 0.0) * (where((x0 < 1.0), 1.0, 0.0) * 3.0)', float32)
        return (%0)
    """
    per_token(graph, {"x": rows(6)}).check(FusePointwise(), 1, golden)


def test_a_comparison_that_two_choices_read_stands_in_both() -> None:
    def graph(token_ids: Any, x: Any, y: Any) -> Any:
        compared = aten.gt.Scalar(aten.tanh.default(x), 0.5)
        return aten.add.Tensor(aten.where.self(compared, x, y), aten.where.self(compared, y, x))

    golden = """
        %token_ids: int64[s0] = input
        %x: float32[s0, 6] = input
        %y: float32[s0, 6] = input
        %0: float32[s0, 6] = inferc.pointwise([%x, %y], \
't0 = tanh(x0); where((t0 > 0.5), x0, x1) + where((t0 > 0.5), x1, x0)', float32)
        return (%0)
    """
    per_token(graph, {"x": rows(6), "y": rows(6, seed=1)}).check(FusePointwise(), 1, golden)


def test_what_an_expression_cannot_say_is_left_alone() -> None:
    def graph(token_ids: Any, x: Any) -> Any:
        is_any = aten._to_copy.default(x, dtype=torch.bool)
        return aten.clamp.default(x, float("-inf"), 1.0), is_any, aten._to_copy.default(x, dtype=torch.int64)

    per_token(graph, {"x": rows(6)}).check_untouched(FusePointwise())
