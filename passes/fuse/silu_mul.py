"""Fuse `silu(gate) * up` into one op.

Each fusion saves one write and one read of a [num_tokens, intermediate_size] activation.
"""

from __future__ import annotations

from torch import Tensor, ops

from inferc.passes.rewrite import Rewrite


def pattern(gate: Tensor, up: Tensor) -> Tensor:
    return ops.aten.mul.Tensor(ops.aten.silu.default(gate), up)


def replacement(gate: Tensor, up: Tensor) -> Tensor:
    return ops.inferc.silu_mul.default(gate, up)


def check(gate: Tensor, up: Tensor) -> str | None:
    if gate.dtype != up.dtype:
        return f"gate is {gate.dtype}, up is {up.dtype}"
    if [str(size) for size in gate.shape] != [str(size) for size in up.shape]:
        return f"gate has shape {list(gate.shape)}, up has {list(up.shape)}"
    return None


fuse_silu_mul = Rewrite("fuse_silu_mul", pattern, replacement, (check,))
