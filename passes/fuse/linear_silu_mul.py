"""Fuse `silu(gate) * up` into the epilogue of the packed projection that computes gate and up.

Each fusion saves one write and one read of a [num_tokens, 2 * intermediate_size] activation.
"""

from __future__ import annotations

from torch import Tensor, ops

from inferc.passes.rewrite import Rewrite

aten, inferc = ops.aten, ops.inferc

# The number of outputs in a panel of a packed weight: a panel of gate and one of up go through a product together.
PANEL = 16


def pattern(x: Tensor, weight: Tensor, bias: Tensor | None, middle: int, end: int) -> Tensor:
    both = aten.linear.default(x, weight, bias)
    gate, up = aten.slice.Tensor(both, -1, 0, middle), aten.slice.Tensor(both, -1, middle, end)
    return inferc.silu_mul.default(gate, up)


def replacement(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return inferc.linear_silu_mul.default(x, weight, bias)


def check(weight: Tensor, middle: int, end: int) -> str | None:
    outputs = int(weight.shape[0])
    if (2 * middle, end) != (outputs, outputs):
        return f"gate and up are columns 0 to {middle} and to {end} of {outputs}, expected its halves"
    if middle % PANEL:
        return f"intermediate_size {middle} is no multiple of {PANEL}"
    return None


def int8_pattern(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None, middle: int, end: int) -> Tensor:
    both = inferc.linear_int8.default(x, weight, scale, bias)
    gate, up = aten.slice.Tensor(both, -1, 0, middle), aten.slice.Tensor(both, -1, middle, end)
    return inferc.silu_mul.default(gate, up)


def int8_replacement(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor | None) -> Tensor:
    return inferc.linear_silu_mul.default(x, weight, bias, scale)


fuse_linear_silu_mul = Rewrite("fuse_linear_silu_mul", pattern, replacement, (check,))
fuse_linear_silu_mul_int8 = Rewrite("fuse_linear_silu_mul_int8", int8_pattern, int8_replacement, (check,))
