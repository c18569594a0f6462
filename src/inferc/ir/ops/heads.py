"""The reference op that gives attention heads another size than the model's."""

from __future__ import annotations

import torch
from torch import Tensor

from inferc.ir.ops.registry import define


def _fake(x: Tensor, size: int) -> Tensor:
    return x.new_empty((*x.shape[:-1], size))


@define("resize_heads(Tensor x, int size) -> Tensor", _fake)
def resize_heads(x: Tensor, size: int) -> Tensor:
    """Return the first `size` elements of every head, with zeros appended to heads that have fewer.

    x [num_tokens, heads, head_dim]; result [num_tokens, heads, size], contiguous.
    """
    return torch.nn.functional.pad(x, (0, size - x.shape[-1])).contiguous()
