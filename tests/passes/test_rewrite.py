"""The matcher and the rewriting, on patterns made for it."""

import logging
from typing import Any

import pytest
import torch
from graphs import TOKENS, example, random, rows
from torch import Tensor, ops

from inferc.ir.program import new_program
from inferc.passes.rewrite import Rewrite, infer_type, merge_equal, shared
from inferc.passes.verify import type_text

aten = ops.aten


def scaled(x: Tensor, factor: float) -> Any:
    return aten.mul.Tensor(aten.relu.default(x), factor)


def negative(x: Tensor) -> Any:
    return aten.neg.default(x)


scale_to_neg = Rewrite("scale_to_neg", scaled, negative)


def test_a_float_capture_takes_constants_only() -> None:
    inputs = {"x": rows(4), "y": rows(4, seed=1)}
    example(lambda x, y: aten.mul.Tensor(aten.relu.default(x), y), inputs).check_untouched(scale_to_neg)
    made = example(lambda x: aten.mul.Tensor(aten.relu.default(x), 2.0), inputs)
    assert scale_to_neg(made.program) == 1
    assert "aten.neg(%x)" in made.program.to_text()


def type_of(target: Any, *sizes: tuple[int | str, ...], **kwargs: Any) -> str:
    """The type of a call on float32 tensors of these sizes, of which "rows" is any number."""
    made = new_program()
    num_rows = made.new_symbol(TOKENS)
    node = made.graph.call_function(target, kwargs=kwargs)
    for index, each in enumerate(sizes):
        source = made.graph.placeholder(f"x{index}")
        source.meta["val"] = made.fake([num_rows if size == "rows" else size for size in each], torch.float32)  # type: ignore[misc]
        node.args = (*node.args, source)
    return type_text(infer_type(made, node)).replace(type_text(num_rows), "rows")


@pytest.mark.parametrize("bias", [(), ((6,),)])
@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
def test_a_linear_of_any_batch_is_typed(batch: tuple[int, ...], bias: tuple[tuple[int, ...], ...]) -> None:
    sizes = ", ".join(map(str, ("rows", *batch, 6)))
    assert type_of(aten.linear.default, ("rows", *batch, 8), (6, 8), *bias) == f"float32[{sizes}]"


@pytest.mark.parametrize("others", [((6, 9),), ((6, 8), (5,))])
def test_a_linear_that_does_not_fit_is_refused(others: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(RuntimeError, match="must have same reduction dim|expected shape should be"):
        type_of(aten.linear.default, ("rows", 3, 8), *others)


@pytest.mark.parametrize(
    ("left", "right", "product"),
    [
        ((1, 32, 1), (1, 1, "rows"), "1, 32, rows"),
        ((1, "rows", 8), (8, 6), "1, rows, 6"),
        ((2, 1, "rows", 8), (3, 8, "rows"), "2, 3, rows, rows"),
        (("rows", 8), (8,), "rows"),
    ],
)
def test_a_product_of_any_batch_is_typed(
    left: tuple[int | str, ...], right: tuple[int | str, ...], product: str
) -> None:
    assert type_of(aten.matmul.default, left, right) == f"float32[{product}]"


def test_a_product_that_does_not_fit_is_refused() -> None:
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied|must have same reduction dim"):
        type_of(aten.matmul.default, (1, "rows", 8), (7, 6))
    with pytest.raises(RuntimeError, match="broadcast"):
        type_of(aten.matmul.default, (2, "rows", 8), (3, 8, 6))


def test_a_call_that_makes_an_open_size_a_number_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"aten.reshape.default makes the size s\d+ the number 5: give it a type of its own"
    ):
        type_of(aten.reshape.default, ("rows", 4), shape=[TOKENS, 4])


def test_new_nodes_are_typed_and_take_the_old_name_and_layer() -> None:
    made = example(lambda x: aten.mul.Tensor(aten.relu.default(x), 2.0), {"x": rows(4)})
    old = made.program.output().all_input_nodes[0].meta["name"]
    scale_to_neg(made.program)
    (new,) = made.program.output().all_input_nodes
    assert (new.meta["name"], new.meta["layer"]) == (old, 0)
    assert new.meta["val"].shape[1] == 4


def test_one_capture_binds_one_value() -> None:
    def square(x: Tensor) -> Any:
        return aten.mul.Tensor(x, x)

    rewrite = Rewrite("square", square, lambda x: aten.pow.Tensor_Scalar(x, 2))
    inputs = {"x": rows(4), "y": rows(4, seed=1)}
    example(lambda x, y: aten.mul.Tensor(x, y), inputs).check_untouched(rewrite)
    assert rewrite(example(lambda x: aten.mul.Tensor(x, x), inputs).program) == 1


def test_backtracks_over_the_orders_of_commutative_ops() -> None:
    def nested(a: Tensor, b: Tensor, c: Tensor) -> Any:
        return aten.add.Tensor(aten.mul.Tensor(aten.neg.default(a), b), aten.mul.Tensor(b, c))

    rewrite = Rewrite("nested", nested, lambda a, b, c: aten.mul.Tensor(b, aten.sub.Tensor(c, a)))
    inputs = {name: rows(4, seed=seed) for seed, name in enumerate("abc")}

    def turned(a: Any, b: Any, c: Any) -> Any:
        return aten.add.Tensor(aten.mul.Tensor(c, b), aten.mul.Tensor(b, aten.neg.default(a)))

    golden = """
        %a: float32[s0, 4] = input
        %b: float32[s0, 4] = input
        %c: float32[s0, 4] = input
        %0: float32[s0, 4] = aten.sub.Tensor(%c, %a)
        %1: float32[s0, 4] = aten.mul.Tensor(%b, %0)
        return (%1)
    """
    example(turned, inputs).check(rewrite, 1, golden)


def with_cast(x: Tensor, dtype: torch.dtype) -> Any:
    wide = aten._to_copy.default(x, dtype=torch.float32)
    return aten._to_copy.default(aten.exp.default(wide), dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_casts_may_be_absent_where_they_change_nothing(dtype: torch.dtype) -> None:
    def graph(x: Any) -> Any:
        if dtype == torch.float32:
            return aten.exp.default(x)
        return aten._to_copy.default(aten.exp.default(aten._to_copy.default(x, dtype=torch.float32)), dtype=dtype)

    seen = []
    rewrite = Rewrite("cast", with_cast, lambda x: aten.neg.default(x), (lambda dtype: seen.append(dtype),))
    made = example(graph, {"x": rows(4, dtype=dtype)})
    assert rewrite(made.program) == 1
    assert seen == [dtype]
    assert len([node for node in made.program.graph.nodes if node.op == "call_function"]) == 1


def test_shared_values_may_have_other_users() -> None:
    def pattern(x: Tensor, y: Tensor) -> Any:
        return aten.mul.Tensor(x, shared(aten.cos.default(aten.neg.default(y))))

    rewrite = Rewrite("shared", pattern, lambda x, y: aten.mul.Tensor(x, aten.cos.default(y)))

    def graph(x: Any, y: Any) -> Any:
        cos = aten.cos.default(aten.neg.default(y))
        return aten.mul.Tensor(x, cos), cos

    golden = """
        %x: float32[s0, 4] = input
        %y: float32[s0, 4] = input
        %0: float32[s0, 4] = aten.neg(%y)
        %1: float32[s0, 4] = aten.cos(%0)
        %2: float32[s0, 4] = aten.cos(%y)
        %3: float32[s0, 4] = aten.mul.Tensor(%x, %2)
        return (%3, %1)
    """
    example(graph, {"x": rows(4), "y": rows(4, seed=1)}).check(rewrite, 1, golden)


def test_several_results_some_beside_the_root() -> None:
    def pattern(x: Tensor, k: int) -> Any:
        top = aten.topk.default(x, k)
        return top[1], aten.neg.default(top[0])

    def replacement(x: Tensor, k: int) -> Any:
        top = aten.topk.default(aten.neg.default(aten.neg.default(x)), k)
        return top[1], aten.neg.default(top[0])

    rewrite = Rewrite("top", pattern, replacement)

    def graph(x: Any) -> Any:
        top = aten.topk.default(x, 2)
        values, ids = top[0], top[1]
        return aten.neg.default(values), aten.add.Tensor(ids, 1)

    golden = """
        %x: float32[s0, 6] = input
        %0: float32[s0, 6] = aten.neg(%x)
        %1: float32[s0, 6] = aten.neg(%0)
        %2: (float32[s0, 2], int64[s0, 2]) = aten.topk(%1, 2)
        %3: int64[s0, 2] = getitem(%2, 1)
        %4: float32[s0, 2] = getitem(%2, 0)
        %5: float32[s0, 2] = aten.neg(%4)
        %6: int64[s0, 2] = aten.add.Tensor(%3, 1)
        return (%5, %6)
    """
    example(graph, {"x": rows(6)}).check(rewrite, 1, golden)


def test_a_refusal_is_explained_at_debug_level_2(monkeypatch: pytest.MonkeyPatch, caplog: Any) -> None:
    monkeypatch.setenv("INFERC_DEBUG", "2")
    caplog.set_level(logging.INFO, "inferc")
    refuse = Rewrite("refuse", scaled, negative, (lambda factor: f"{factor} is not 3" if factor != 3 else None,))
    example(lambda x: aten.mul.Tensor(aten.relu.default(x), 2.0), {"x": rows(4)}).check_untouched(refuse)
    assert "refuse: no rewrite at mul_tensor: 2.0 is not 3" in caplog.text

    def used_twice(x: Any) -> Any:
        inner = aten.relu.default(x)
        return aten.mul.Tensor(inner, 2.0), inner

    caplog.clear()
    kept = example(used_twice, {"x": rows(4)})
    kept.check_untouched(refuse)
    assert "relu_default is also used by output" in caplog.text


def test_merge_equal_keeps_the_first() -> None:
    def graph(x: Any) -> Any:
        return aten.add.Tensor(aten.mul.Tensor(aten.cos.default(x), aten.cos.default(x)), aten.cos.default(x))

    made = example(graph, {"x": rows(4)})
    before = made.run()
    assert merge_equal(made.program, aten.cos.default) == 2
    assert made.program.to_text().count("aten.cos") == 1
    torch.testing.assert_close(made.run(), before)


def test_equal_calls_are_typed_once() -> None:
    made = example(lambda a, b: aten.add.Tensor(aten.cos.default(a), aten.cos.default(b)), {"a": rows(4), "b": rows(4)})
    first, second = (node for node in made.program.graph.nodes if node.target == aten.cos.default)
    assert infer_type(made.program, first) is infer_type(made.program, second)
    other = example(lambda x: aten.sum.dim_IntList(x, [-1], True), {"x": random(3, 4)})
    assert list(other.program.output().all_input_nodes[0].meta["val"].shape) == [3, 1]
