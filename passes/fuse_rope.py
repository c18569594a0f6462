"""Fuse rotary position embedding: one table of cosines and sines a step, one `rope` for each of q and k.

Matches the table back to the positions, so YaRN's attention factor becomes the table's `scaling`; what llama3 and YaRN
do to the frequencies is inside the constant `inv_freq`. Rotation may cover the first part of a head only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, ops

from inferc.passes.rewrite import Rewrite, merge_equal, shared
from inferc.program import Program

aten = ops.aten


def _angle(positions: Any, inv_freq: Any) -> Any:
    rows = aten._to_copy.default(aten.unsqueeze.default(positions, -1), dtype=torch.float32)
    return aten.mul.Tensor(rows, inv_freq)


def _full_table(function: Any, positions: Any, inv_freq: Any, scaling: Any, dtype: Any) -> Any:
    """Each angle twice: [num_tokens, 1, rotary_dim]."""
    angle = _angle(positions, inv_freq)
    values = function(aten.cat.default([angle, angle], -1))
    if scaling is not None:
        values = aten.mul.Tensor(values, scaling)
    return shared(aten.unsqueeze.default(aten._to_copy.default(values, dtype=dtype), -2))


def _rotate_half(x: Any, cos: Any, sin: Any, half: Any, end: Any) -> Any:
    turned = aten.cat.default(
        [aten.neg.default(aten.slice.Tensor(x, -1, half, end)), aten.slice.Tensor(x, -1, 0, half)], -1
    )
    return aten.add.Tensor(aten.mul.Tensor(x, cos), aten.mul.Tensor(turned, sin))


def _rotated(x: Any, positions: Any, inv_freq: Any, scaling: Any, dtype: Any, half: Any, end: Any) -> Any:
    cos = _full_table(aten.cos.default, positions, inv_freq, scaling, dtype)
    sin = _full_table(aten.sin.default, positions, inv_freq, scaling, dtype)
    return _rotate_half(x, cos, sin, half, end)


def whole_head(x: Tensor, positions: Tensor, inv_freq: Tensor, dtype: torch.dtype, half: int, end: int) -> Tensor:
    return _rotated(x, positions, inv_freq, None, dtype, half, end)


def whole_head_scaled(
    x: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype, half: int, end: int
) -> Tensor:
    return _rotated(x, positions, inv_freq, scaling, dtype, half, end)


def part_of_head(
    x: Tensor, positions: Tensor, inv_freq: Tensor, dtype: torch.dtype, half: int, end: int, rest: int
) -> Tensor:
    first = aten.slice.Tensor(x, -1, 0, end)
    out = _rotated(first, positions, inv_freq, None, dtype, half, end)
    return aten.cat.default([out, aten.slice.Tensor(x, -1, end, rest)], -1)


def part_of_head_scaled(
    x: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float, dtype: torch.dtype, half: int, end: int, rest: int
) -> Tensor:
    first = aten.slice.Tensor(x, -1, 0, end)
    out = _rotated(first, positions, inv_freq, scaling, dtype, half, end)
    return aten.cat.default([out, aten.slice.Tensor(x, -1, end, rest)], -1)


def replacement(x: Tensor, positions: Tensor, inv_freq: Tensor, scaling: float = 1.0) -> Tensor:
    return ops.inferc.rope.default(x, ops.inferc.rope_table.default(positions, inv_freq, scaling))


def check(x: Tensor, inv_freq: Tensor, half: int, end: int, rest: int | None = None) -> str | None:
    if x.dim() != 3:
        return f"x has shape {list(x.shape)}, expected [num_tokens, heads, head_dim]"
    if inv_freq.shape[0] != half or 2 * half != end:
        return f"{inv_freq.shape[0]} frequencies for halves [0, {half}) and [{half}, {end})"
    if (end if rest is None else rest) != x.shape[-1]:
        return f"it covers {end if rest is None else rest} of {x.shape[-1]} elements of a head"
    return None


_halves = Rewrite(
    "fuse_rope", (whole_head, part_of_head, whole_head_scaled, part_of_head_scaled), replacement, (check,)
)


@dataclass(frozen=True)
class FuseRope:
    """Rewrites each rotation, then keeps one table for all of them."""

    name: str = "fuse_rope"

    def __call__(self, program: Program) -> int:
        count = _halves(program)
        if count:
            merge_equal(program, ops.inferc.rope_table.default)
            program.drop_unused()
        return count
