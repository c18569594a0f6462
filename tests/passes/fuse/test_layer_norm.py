from typing import Any

import torch
from graphs import example, random, rows
from torch import ops

from inferc.passes.fuse.layer_norm import fuse_layer_norm

aten = ops.aten


def spelled_out(x: Any, weight: Any, dtype: torch.dtype) -> Any:
    wide = aten._to_copy.default(x, dtype=torch.float32) if dtype != torch.float32 else x
    mean = aten.mean.dim(wide, [-1], True)
    variance = aten.mean.dim(aten.pow.Tensor_Scalar(aten.sub.Tensor(wide, mean), 2), [-1], True)
    scale = aten.rsqrt.default(aten.add.Tensor(variance, 1e-5))
    normed = aten.mul.Tensor(aten.sub.Tensor(wide, mean), scale)
    if dtype == torch.float32:
        return aten.mul.Tensor(weight, normed)
    scaled = aten.mul.Tensor(aten._to_copy.default(weight, dtype=torch.float32), normed)
    return aten._to_copy.default(scaled, dtype=dtype)


def test_torchs_own() -> None:
    def graph(x: Any, weight: Any, bias: Any) -> Any:
        return aten.layer_norm.default(x, [6], weight, bias, 1e-5, False), aten.layer_norm.default(x, [6])

    golden = """
        %x: float32[s0, 6] = input
        %0: float32[s0, 6] = inferc.layer_norm(%x, @weight, @bias, 1e-05)
        %1: float32[s0, 6] = inferc.layer_norm(%x, None, None, 1e-05)
        return (%0, %1)
    """
    example(graph, {"x": rows(6)}, {"weight": random(6), "bias": random(6, seed=1)}).check(fuse_layer_norm, 2, golden)


def test_spelled_out_for_rows_and_for_heads() -> None:
    golden = """
        %x: float32[s0, 6] = input
        %0: float32[s0, 6] = inferc.layer_norm(%x, @weight, None, 1e-05)
        return (%0)
    """
    each = example(lambda x, weight: spelled_out(x, weight, torch.float32), {"x": rows(6)}, {"weight": random(6)})
    each.check(fuse_layer_norm, 1, golden)
    golden = """
        %x: bfloat16[s0, 2, 6] = input
        %0: bfloat16[s0, 2, 6] = inferc.layer_norm(%x, @weight, None, 1e-05)
        return (%0)
    """
    inputs, weights = {"x": rows(2, 6, dtype=torch.bfloat16)}, {"weight": random(2, 6, dtype=torch.bfloat16)}
    heads = example(lambda x, weight: spelled_out(x, weight, torch.bfloat16), inputs, weights)
    heads.check(fuse_layer_norm, 1, golden)


def test_keeps_a_norm_over_two_axes() -> None:
    def graph(x: Any) -> Any:
        return aten.layer_norm.default(x, [2, 6])

    example(graph, {"x": rows(2, 6)}).check_untouched(fuse_layer_norm)
