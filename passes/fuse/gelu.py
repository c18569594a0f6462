"""Fuse GELU in its spelled-out tanh form into one op, and `gelu(gate) * up` (GeGLU) into another.

The tanh form saves seven reads and writes of a [num_tokens, intermediate_size] activation, GeGLU saves one.
"""

from __future__ import annotations

from torch import Tensor, ops

from inferc.passes.rewrite import Rewrite

aten, inferc = ops.aten, ops.inferc


def tanh_form(x: Tensor, root: float, cubic: float) -> Tensor:
    cube = aten.mul.Tensor(aten.pow.Tensor_Scalar(x, 3.0), cubic)
    inner = aten.tanh.default(aten.mul.Tensor(aten.add.Tensor(x, cube), root))
    return aten.mul.Tensor(aten.mul.Tensor(x, 0.5), aten.add.Tensor(inner, 1.0))


def gelu_tanh(x: Tensor) -> Tensor:
    return aten.gelu.default(x, approximate="tanh")


def check_constants(root: float, cubic: float) -> str | None:
    if abs(root - 0.7978845608028654) > 1e-6 or abs(cubic - 0.044715) > 1e-7:
        return f"its constants are {root} and {cubic}, expected sqrt(2 / pi) and 0.044715"
    return None


def gated(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return aten.mul.Tensor(aten.gelu.default(gate, approximate=approximate), up)


def gelu_mul(gate: Tensor, up: Tensor, approximate: str) -> Tensor:
    return inferc.gelu_mul.default(gate, up, approximate)


def check(gate: Tensor, up: Tensor) -> str | None:
    if gate.dtype != up.dtype or [str(size) for size in gate.shape] != [str(size) for size in up.shape]:
        return f"gate is {gate.dtype}{list(gate.shape)}, up is {up.dtype}{list(up.shape)}"
    return None


fuse_gelu = Rewrite("fuse_gelu", tanh_form, gelu_tanh, (check_constants,))
fuse_gelu_mul = Rewrite("fuse_gelu_mul", gated, gelu_mul, (check,))
