"""The dtype and the rank of the value that a node computes."""

from __future__ import annotations

import torch
from torch import fx


def dtype_of(node: fx.Node) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def rank_of(node: fx.Node) -> int:
    rank: int = node.meta["val"].dim()
    return rank
