from collections.abc import Callable
from typing import Any

import pytest
import torch
from graphs import example, random, rows
from torch import ops

from inferc.backends.lower import LowerConfig, build_pipeline
from inferc.passes.fuse.linear_silu_mul import fuse_linear_silu_mul, fuse_linear_silu_mul_int8
from inferc.targets import Target

aten, inferc = ops.aten, ops.inferc
INPUTS = {"x": rows(8)}
WEIGHTS = {"gate_up": random(64, 8), "bias": random(64, seed=1)}
OF_INT8 = {
    "gate_up": random(64, 8).mul(40).clamp(-127, 127).to(torch.int8),
    "scale": random(64, seed=2).abs() / 40,
    "bias": WEIGHTS["bias"],
}


def gated(middle: int, end: int, **slices: int) -> Callable[..., Any]:
    def graph(x: Any, gate_up: Any, bias: Any) -> Any:
        both = aten.linear.default(x, gate_up, bias)
        gate = aten.slice.Tensor(both, -1, slices.get("start", 0), middle)
        return inferc.silu_mul.default(gate, aten.slice.Tensor(both, -1, slices.get("up", middle), end))

    return graph


def test_the_activation_is_computed_where_the_products_are_written() -> None:
    golden = """
        %x: float32[s0, 8] = input
        %0: float32[s0, 32] = inferc.linear_silu_mul(%x, @gate_up, @bias)
        return (%0)
    """
    example(gated(32, 64), INPUTS, WEIGHTS).check(fuse_linear_silu_mul, 1, golden)


def test_keeps_what_is_no_half_of_whole_panels() -> None:
    example(gated(16, 32), INPUTS, WEIGHTS).check_untouched(fuse_linear_silu_mul)
    example(gated(48, 64, start=16, up=32), INPUTS, WEIGHTS).check_untouched(fuse_linear_silu_mul)
    narrow = {"gate_up": random(48, 8), "bias": random(48, seed=1)}
    example(gated(24, 48), INPUTS, narrow).check_untouched(fuse_linear_silu_mul)


def test_keeps_products_that_are_read_elsewhere() -> None:
    def used_twice(x: Any, gate_up: Any) -> Any:
        both = aten.linear.default(x, gate_up)
        gate, up = aten.slice.Tensor(both, -1, 0, 32), aten.slice.Tensor(both, -1, 32, 64)
        return inferc.silu_mul.default(gate, up), gate

    example(used_twice, INPUTS, {"gate_up": WEIGHTS["gate_up"]}).check_untouched(fuse_linear_silu_mul)


def test_weights_in_int8_bring_their_scales() -> None:
    def graph(x: Any, gate_up: Any, scale: Any, bias: Any) -> Any:
        both = inferc.linear_int8.default(x, gate_up, scale, bias)
        gate, up = aten.slice.Tensor(both, -1, 0, 32), aten.slice.Tensor(both, -1, 32, 64)
        return inferc.silu_mul.default(gate, up)

    golden = """
        %x: float32[s0, 8] = input
        %0: float32[s0, 32] = inferc.linear_silu_mul(%x, @gate_up, @bias, @scale)
        return (%0)
    """
    example(graph, INPUTS, OF_INT8).check(fuse_linear_silu_mul_int8, 1, golden)


def test_keeps_an_int8_product_with_a_residual() -> None:
    def graph(x: Any, y: Any, gate_up: Any, scale: Any) -> Any:
        both = inferc.linear_int8.default(x, gate_up, scale, None, y)
        gate, up = aten.slice.Tensor(both, -1, 0, 32), aten.slice.Tensor(both, -1, 32, 64)
        return inferc.silu_mul.default(gate, up)

    weights = {name: OF_INT8[name] for name in ("gate_up", "scale")}
    example(graph, {**INPUTS, "y": rows(64)}, weights).check_untouched(fuse_linear_silu_mul_int8)


@pytest.mark.parametrize(
    ("target", "scheme", "runs"), [("cuda:sm_90", "int8", True), ("cuda:sm_90", None, False), ("cpu", "int8", False)]
)
def test_int8_is_fused_where_there_is_a_kernel(target: str, scheme: str | None, runs: bool) -> None:
    names = [each.name for each in build_pipeline(LowerConfig(Target.parse(target), quantize=scheme))]
    assert ("fuse_linear_silu_mul_int8" in names) == runs
