"""The facts of a node that several backends read: dtype and rank of its value, and the activation of its gate."""

from __future__ import annotations

import torch
from torch import fx

from inferc.ir.program import arguments


def dtype_of(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def rank_of(node: fx.Node) -> int:
    rank: int = node.meta["val"].dim()
    return rank


def gate_of(node: fx.Node) -> tuple[fx.Node, fx.Node, str]:
    """Return the gate, what it multiplies, and the activation of a silu_mul or a gelu_mul."""
    gate, up, *approximate = arguments(node)
    if not approximate:
        return gate, up, "silu"
    return gate, up, "gelu_tanh" if approximate == ["tanh"] else "gelu"
