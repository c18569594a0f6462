"""At INFERC_DEBUG=2 every pass says what it left alone and why, in one form; below, nothing."""

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import Example, example, random, rows
from torch import ops

from inferc.ir.program import Program
from inferc.passes.attention.absorb_latent import AbsorbLatent
from inferc.passes.attention.ungroup_heads import UngroupHeads
from inferc.passes.fuse.linear_add import fuse_linear_add
from inferc.passes.fuse.pack_projections import PackProjections
from inferc.passes.fuse.pointwise import FusePointwise
from inferc.passes.lower.select_rows import SelectRows
from inferc.passes.normalize.fold_weights import FoldWeights

aten, inferc = ops.aten, ops.inferc
QKV = {"qkv": random(12, 8)}


def heads(x: Any, qkv: Any) -> Any:
    return aten.view.default(aten.linear.default(x, qkv), [-1, 2, 6])


def part(view: Any, start: int, stop: int) -> Any:
    return aten.slice.Tensor(view, -1, start, stop)


def overlapping() -> Example:
    def graph(x: Any, qkv: Any) -> Any:
        view = heads(x, qkv)
        return part(view, 0, 4), part(view, 2, 6)

    return example(graph, {"x": rows(8)}, QKV)


def whole_too() -> Example:
    def graph(x: Any, qkv: Any) -> Any:
        view = heads(x, qkv)
        return part(view, 0, 4), aten.relu.default(view)

    return example(graph, {"x": rows(8)}, QKV)


def one_bias() -> Example:
    def graph(x: Any, a: Any, b: Any, bias: Any) -> Any:
        return aten.linear.default(x, a, bias), aten.linear.default(x, b)

    return example(graph, {"x": rows(8)}, {"a": random(6, 8), "b": random(6, 8), "bias": random(6)})


def tied() -> Example:
    def graph(x: Any, a: Any) -> Any:
        w = a
        return aten.linear.default(x, w), aten.linear.default(x, w)

    return example(graph, {"x": rows(8)}, {"a": random(6, 8)})


def fourth_power() -> Example:
    return example(lambda token_ids, x: aten.pow.Tensor_Scalar(x, 4), {"token_ids": torch.arange(5), "x": rows(6)})


def two_latents() -> Example:
    def graph(x: Any, c: Any, rotated: Any, k_weight: Any, v_weight: Any) -> Any:
        nope = aten.view.default(aten.linear.default(c, k_weight), [-1, 2, 4])
        v = aten.view.default(aten.linear.default(aten.relu.default(c), v_weight), [-1, 2, 4])
        k = aten.cat.default([nope, aten.expand.default(rotated, [-1, 2, -1])], -1)
        q = aten.cat.default([part(x, 0, 4), part(x, 4, 6)], -1)
        return inferc.attention.default(q, k, v, None, 1.0, "causal", 0, 0.0)

    inputs = {"x": rows(2, 6), "c": rows(8), "rotated": rows(1, 2)}
    return example(graph, inputs, {"k_weight": random(8, 8), "v_weight": random(8, 8)})


def of_a_weight() -> Example:
    return example(lambda x, w: aten.add.Tensor(x, aten.sum.dim_IntList(w, [-1])), {"x": rows(6)}, {"w": random(6, 2)})


def narrow_residual() -> Example:
    def graph(x: Any, w: Any, residual: Any) -> Any:
        return aten.add.Tensor(residual, aten.linear.default(x, w))

    return example(graph, {"x": rows(8), "residual": rows(1)}, {"w": random(6, 8)})


def unknown_op() -> Example:
    def graph(token_ids: Any, logits_rows: Any, x: Any) -> Any:
        return (aten.relu.default(x),)

    inputs = {"token_ids": torch.arange(5), "logits_rows": torch.arange(3), "x": rows(6)}
    return example(graph, inputs)


CASES: tuple[tuple[Callable[[Program], int], Callable[[], Example], str], ...] = (
    (UngroupHeads(), overlapping, "reads from element 2 of each head, which another part has up to 4"),
    (UngroupHeads(), whole_too, "relu_default reads otherwise than one part of each head"),
    (PackProjections(), one_bias, "it is alone with a bias and in float32, of 2 that read x"),
    (PackProjections(), tied, "weight a is read by 2 nodes, expected this one alone"),
    (FusePointwise(), fourth_power, "its exponent is 4, expected one of 2.0, 3.0, 0.5, -0.5, -1.0"),
    (AbsorbLatent(), two_latents, "k is made of c, v of relu_default: expected one latent"),
    (FoldWeights(), of_a_weight, "aten.sum.dim_IntList of weights is no arithmetic on their elements"),
    (fuse_linear_add, narrow_residual, "the residual is torch.float32"),
    (SelectRows(), unknown_op, "aten.relu is not known to work row by row"),
)


@pytest.mark.parametrize(("each", "made", "reason"), CASES, ids=[made.__name__ for _, made, _ in CASES])
def test_a_pass_says_why_not(
    each: Any,
    made: Callable[[], Example],
    reason: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "inferc")
    monkeypatch.setenv("INFERC_DEBUG", "1")
    each(made().program)
    assert "no rewrite" not in caplog.text
    monkeypatch.setenv("INFERC_DEBUG", "2")
    each(made().program)
    told = [record.getMessage() for record in caplog.records if "no rewrite" in record.getMessage()]
    assert any(line.startswith(f"{each.name}: no rewrite at ") and reason in line for line in told), told
