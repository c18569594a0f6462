import logging
import operator
from typing import Any

import pytest
import torch
from graphs import Example, example, random, rows
from torch import ops

from inferc.passes.quantize.fuse_norm_quantize import (
    fuse_layer_norm_quantize,
    fuse_rms_norm_add_quantize,
    fuse_rms_norm_quantize,
)

aten, inferc = ops.aten, ops.inferc
BF16 = torch.bfloat16


def quantized(x: Any) -> tuple[Any, Any]:
    both = inferc.quantize_rows.default(x)
    return operator.getitem(both, 0), operator.getitem(both, 1)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_rms_norm(dtype: torch.dtype) -> None:
    name = str(dtype).removeprefix("torch.")
    golden = f"""
        %x: {name}[s0, 8] = input
        %0: (int8[s0, 8], float32[s0]) = inferc.rms_norm_quantize(%x, @w, 1e-05, 1.0, False)
        %1: int8[s0, 8] = getitem(%0, 0)
        %2: float32[s0] = getitem(%0, 1)
        return (%1, %2)
    """
    inputs, weights = {"x": rows(8, dtype=dtype)}, {"w": random(8, dtype=dtype)}
    made = example(lambda x, w: quantized(inferc.rms_norm.default(x, w, 1e-5, 1.0, False)), inputs, weights)
    made.check(fuse_rms_norm_quantize, 1, golden, tolerance=0)


def test_a_norm_without_a_weight() -> None:
    golden = """
        %x: float32[s0, 8] = input
        %0: (int8[s0, 8], float32[s0]) = inferc.rms_norm_quantize(%x, None, 1e-05, 0.0, True)
        %1: int8[s0, 8] = getitem(%0, 0)
        %2: float32[s0] = getitem(%0, 1)
        return (%1, %2)
    """
    made = example(lambda x: quantized(inferc.rms_norm.default(x, None, 1e-5)), {"x": rows(8)})
    made.check(fuse_rms_norm_quantize, 1, golden, tolerance=0)


def add_norm_and_two_products(x: Any, residual: Any, w: Any, up: Any, gate: Any, scale: Any) -> Any:
    both = inferc.rms_norm_add.default(x, residual, w, 1e-5)
    normed, total = operator.getitem(both, 0), operator.getitem(both, 1)
    values, of_rows = quantized(normed)
    products = [inferc.linear_w8a8.default(values, of_rows, each, scale, BF16) for each in (up, gate)]
    return aten.add.Tensor(products[0], products[1]), total


def test_the_sum_is_returned_too() -> None:
    golden = """
        %x: bfloat16[s0, 8] = input
        %residual: bfloat16[s0, 8] = input
        %0: (int8[s0, 8], float32[s0], bfloat16[s0, 8]) = inferc.rms_norm_add_quantize(%x, %residual, @w, 1e-05, 0.0, \
True)
        %1: int8[s0, 8] = getitem(%0, 0)
        %2: float32[s0] = getitem(%0, 1)
        %3: bfloat16[s0, 8] = getitem(%0, 2)
        %4: bfloat16[s0, 6] = inferc.linear_w8a8(%1, %2, @up, @scale, bfloat16)
        %5: bfloat16[s0, 6] = inferc.linear_w8a8(%1, %2, @gate, @scale, bfloat16)
        %6: bfloat16[s0, 6] = aten.add.Tensor(%4, %5)
        return (%6, %3)
    """
    inputs = {"x": rows(8, dtype=BF16), "residual": rows(8, dtype=BF16, seed=1)}
    integers = {name: (random(6, 8, seed=at) * 30).to(torch.int8) for at, name in enumerate(("up", "gate"))}
    weights = {"w": random(8, dtype=BF16), **integers, "scale": random(6).abs()}
    example(add_norm_and_two_products, inputs, weights).check(fuse_rms_norm_add_quantize, 1, golden, tolerance=0)


def test_layer_norm() -> None:
    golden = """
        %x: float32[s0, 8] = input
        %0: (int8[s0, 8], float32[s0]) = inferc.layer_norm_quantize(%x, @w, @b, 1e-05)
        %1: int8[s0, 8] = getitem(%0, 0)
        %2: float32[s0] = getitem(%0, 1)
        return (%1, %2)
    """
    weights = {"w": random(8), "b": random(8, seed=1)}
    made = example(lambda x, w, b: quantized(inferc.layer_norm.default(x, w, b, 1e-5)), {"x": rows(8)}, weights)
    made.check(fuse_layer_norm_quantize, 1, golden, tolerance=0)


def norm_read_by_a_router() -> Example:
    def graph(x: Any, w: Any, router: Any) -> Any:
        normed = inferc.rms_norm.default(x, w, 1e-5)
        return *quantized(normed), aten.linear.default(normed, router)

    return example(graph, {"x": rows(8)}, {"w": random(8), "router": random(4, 8)})


def sum_norm_read_by_a_router() -> Example:
    def graph(x: Any, residual: Any, w: Any, router: Any) -> Any:
        both = inferc.rms_norm_add.default(x, residual, w, 1e-5)
        normed, total = operator.getitem(both, 0), operator.getitem(both, 1)
        return *quantized(normed), total, aten.linear.default(normed, router)

    return example(graph, {"x": rows(8), "residual": rows(8, seed=1)}, {"w": random(8), "router": random(4, 8)})


def layer_norm_read_by_the_residual() -> Example:
    def graph(x: Any, w: Any) -> Any:
        normed = inferc.layer_norm.default(x, w, None, 1e-5)
        return *quantized(normed), aten.add.Tensor(x, normed)

    return example(graph, {"x": rows(8)}, {"w": random(8)})


@pytest.mark.parametrize(
    ("each", "made", "reader"),
    [
        (fuse_rms_norm_quantize, norm_read_by_a_router, "linear_default"),
        (fuse_rms_norm_add_quantize, sum_norm_read_by_a_router, "linear_default"),
        (fuse_layer_norm_quantize, layer_norm_read_by_the_residual, "add_tensor"),
    ],
    ids=["rms_norm", "rms_norm_add", "layer_norm"],
)
def test_a_norm_that_something_else_reads_stays_and_says_why(
    each: Any, made: Any, reader: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "inferc")
    monkeypatch.setenv("INFERC_DEBUG", "2")
    made().check_untouched(each)
    told = [record.getMessage() for record in caplog.records]
    assert any(line.startswith(f"{each.name}: no rewrite at ") and f"is also used by {reader}" in line for line in told)


def test_a_layer_norm_whose_heads_have_their_own_weights_stays() -> None:
    made = example(
        lambda x, w: quantized(inferc.layer_norm.default(x, w, None, 1e-5)), {"x": rows(8)}, {"w": random(1, 8)}
    )
    made.check_untouched(fuse_layer_norm_quantize)
