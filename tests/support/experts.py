"""Random experts of every scheme, as arguments of `inferc.moe_experts`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from inferc.ir.ops.quantize import quantize_int4

SCHEMES = {"int8": 0, "w8a8": 0, "int4": 32, "int4-g64": 64, "int4-g128": 128}  # the group


def quantized(*sizes: int) -> tuple[Tensor, Tensor]:
    """Random int8 weights with all of their range, and scales of a size that keeps products near 1."""
    values = torch.randint(-127, 128, sizes, dtype=torch.int8)
    return values, (torch.rand(sizes[:-1]) + 0.5) / (73 * sizes[-1] ** 0.5)


def four_bits(weight: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """A weight of any number of matrices: values, scales of groups, scales."""
    values, of_groups, scale = quantize_int4(weight.flatten(0, -2), group)
    lead = weight.shape[:-1]
    return values.view(*lead, -1), of_groups.view(*lead, -1), scale.view(lead)


def experts_of(
    scheme: str | None, dtype: torch.dtype, experts: int, hidden: int, inter: int, biased: bool = False, **how: Any
) -> dict[str, Any]:
    """Random experts of a scheme, or in `dtype`."""
    made: dict[str, Any] = {**how}
    for name, n, k in (("gate_up", 2 * inter, hidden), ("down", hidden, inter)):
        plain, group = torch.randn(experts, n, k) / k**0.5, SCHEMES[scheme] if scheme else 0
        made[f"{name}_group_scale"] = made[f"{name}_scale"] = None
        if scheme is None:
            made[name] = plain.to(dtype)
        elif group:
            made[name], made[f"{name}_group_scale"], made[f"{name}_scale"] = four_bits(plain, group)
        else:
            made[name], made[f"{name}_scale"] = quantized(experts, n, k)
        made[f"{name}_bias"] = torch.randn(experts, n).to(dtype) if biased else None
    return made


def as_rows(scheme: str, x: Tensor) -> dict[str, Any]:
    if scheme == "int8":
        return {"x": x}
    values, scale = torch.ops.inferc.quantize_rows(x)
    return {"x": values, "x_scale": scale, "dtype": x.dtype}
