from typing import Any

import pytest
import torch
from graphs import example, random, rows
from torch import ops

from inferc.passes.fuse.rms_norm import fuse_rms_norm, fuse_rms_norm_wide
from inferc.passes.fuse.rms_norm_add import fuse_rms_norm_add

aten, inferc = ops.aten, ops.inferc
BF16 = torch.bfloat16


def normalised(x: Any) -> Any:
    variance = aten.mean.dim(aten.pow.Tensor_Scalar(x, 2), [-1], True)
    return aten.mul.Tensor(x, aten.rsqrt.default(aten.add.Tensor(variance, 1e-6)))


def wide(x: Any) -> Any:
    return aten._to_copy.default(x, dtype=torch.float32)


def narrow(x: Any) -> Any:
    return aten._to_copy.default(x, dtype=BF16)


def test_llama_in_float32() -> None:
    golden = """
        %x: float32[s0, 8] = input
        %0: float32[s0, 8] = inferc.rms_norm(%x, @w, 1e-06)
        return (%0)
    """
    made = example(lambda x, w: aten.mul.Tensor(w, normalised(x)), {"x": rows(8)}, {"w": random(8, seed=1)})
    made.check_untouched(fuse_rms_norm_wide)
    made.check(fuse_rms_norm, 1, golden)


def test_llama_in_bfloat16_rounds_before_the_weight() -> None:
    golden = """
        %x: bfloat16[s0, 8] = input
        %0: bfloat16[s0, 8] = inferc.rms_norm(%x, @w, 1e-06)
        return (%0)
    """
    inputs, weights = {"x": rows(8, dtype=BF16)}, {"w": random(8, dtype=BF16, seed=1)}
    made = example(lambda x, w: aten.mul.Tensor(w, narrow(normalised(wide(x)))), inputs, weights)
    made.check_untouched(fuse_rms_norm_wide)
    made.check(fuse_rms_norm, 1, golden, tolerance=0)


@pytest.mark.parametrize("cast", [True, False])
def test_gpt_oss_rounds_after_the_weight(cast: bool) -> None:
    def graph(x: Any, w: Any) -> Any:
        return narrow(aten.mul.Tensor(normalised(wide(x)), wide(w) if cast else w))

    golden = """
        %x: bfloat16[s0, 8] = input
        %0: bfloat16[s0, 8] = inferc.rms_norm(%x, @w, 1e-06, 0.0, False)
        return (%0)
    """
    inputs, weights = {"x": rows(8, dtype=BF16)}, {"w": random(8, dtype=BF16, seed=1)}
    example(graph, inputs, weights).check(fuse_rms_norm_wide, 1, golden, tolerance=0)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_gemma_adds_one_to_the_weight(dtype: torch.dtype) -> None:
    def graph(x: Any, w: Any) -> Any:
        if dtype == torch.float32:
            return aten.mul.Tensor(normalised(x), aten.add.Tensor(w, 1.0))
        return narrow(aten.mul.Tensor(normalised(wide(x)), aten.add.Tensor(wide(w), 1.0)))

    name = str(dtype).removeprefix("torch.")
    golden = f"""
        %x: {name}[s0, 8] = input
        %0: {name}[s0, 8] = inferc.rms_norm(%x, @w, 1e-06, 1.0, False)
        return (%0)
    """
    inputs, weights = {"x": rows(8, dtype=dtype)}, {"w": random(8, dtype=dtype, seed=1)}
    example(graph, inputs, weights).check(fuse_rms_norm_wide, 1, golden, tolerance=1e-6 if dtype != BF16 else 0)


def test_keeps_a_norm_over_part_of_the_row_and_one_read_elsewhere() -> None:
    def other_axis(x: Any, w: Any) -> Any:
        variance = aten.mean.dim(aten.pow.Tensor_Scalar(x, 2), [0], True)
        return aten.mul.Tensor(w, aten.mul.Tensor(x, aten.rsqrt.default(aten.add.Tensor(variance, 1e-6))))

    def read_elsewhere(x: Any, w: Any) -> Any:
        middle = normalised(x)
        return aten.mul.Tensor(w, middle), middle

    weights = {"w": random(8, seed=1)}
    example(other_axis, {"x": random(4, 8)}, weights).check_untouched(fuse_rms_norm)
    example(read_elsewhere, {"x": rows(8)}, weights).check_untouched(fuse_rms_norm)
    one_weight = example(lambda x, w: aten.mul.Tensor(w, normalised(x)), {"x": rows(8)}, {"w": random(1)})
    one_weight.check_untouched(fuse_rms_norm)


def test_the_residual_joins_its_norm() -> None:
    def graph(x: Any, residual: Any, w: Any) -> Any:
        total = aten.add.Tensor(residual, x)
        return inferc.rms_norm.default(total, w, 1e-5), total

    golden = """
        %x: float32[s0, 8] = input
        %residual: float32[s0, 8] = input
        %0: (float32[s0, 8], float32[s0, 8]) = inferc.rms_norm_add(%x, %residual, @w, 1e-05, 0.0, True)
        %1: float32[s0, 8] = getitem(%0, 0)
        %2: float32[s0, 8] = getitem(%0, 1)
        return (%1, %2)
    """
    inputs, weights = {"x": rows(8), "residual": rows(8, seed=2)}, {"w": random(8, seed=1)}
    example(graph, inputs, weights).check(fuse_rms_norm_add, 1, golden)


def test_an_addition_of_a_bias_is_no_residual() -> None:
    def graph(x: Any, w: Any, b: Any) -> Any:
        return inferc.rms_norm.default(aten.add.Tensor(x, b), w, 1e-5)

    example(graph, {"x": rows(8)}, {"w": random(8), "b": random(8)}).check_untouched(fuse_rms_norm_add)
