"""The capture of attention with packed q, k and v whose code repeats K and V before it rotates them (Falcon).

The code repeats each KV head for all query heads of its group, and treats the copies the same. So K and V are taken
before they are repeated, and the cache holds a KV head once.
"""

from __future__ import annotations

import types
from typing import Any

import torch
from torch import Tensor

from inferc.errors import UnsupportedError
from inferc.frontend.trace import interfaces

PARTS = ("query_key_value", "dense", "new_decoder_architecture", "multi_query", "num_kv_heads", "inv_norm_factor")


def use(model: Any) -> None:
    """Replace the forward pass of every packed attention in `model`."""
    for module in model.modules():
        if all(hasattr(module, name) for name in PARTS):
            module.forward = types.MethodType(_forward, module)


def _forward(
    self: Any,
    hidden_states: Tensor,
    alibi: Tensor | None,
    attention_mask: Any,
    position_embeddings: tuple[Tensor, Tensor] | None = None,
    **_others: Any,
) -> tuple[Tensor, None]:
    if alibi is not None or position_embeddings is None:
        raise UnsupportedError(
            f"{type(self).__name__}: its ALiBi is rounded to bfloat16 at every position, whatever the model's dtype;"
            " expected slopes times distances, or rope"
        )
    heads, dim = self.num_heads, self.head_dim
    kv_heads = self.num_kv_heads if self.new_decoder_architecture or self.multi_query else heads
    group = heads // kv_heads  # the query heads of a group, which lie in front of its K and V
    q, k, v = (
        _projected(self.query_key_value, hidden_states, (kv_heads, group + 2, dim), part)
        for part in ((0, group), (group, group + 1), (group + 1, group + 2))
    )
    cos, sin = (each.unsqueeze(1) for each in position_embeddings)
    q, k = (each * cos + _half_turned(each) * sin for each in (q, k))
    out, _ = interfaces.attention(self, q, k, v, attention_mask, scaling=self.inv_norm_factor)
    return self.dense(out.reshape(1, -1, heads * dim)), None


def _half_turned(x: Tensor) -> Tensor:
    """Return each head with its second half, negated, in front of its first half."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _projected(packed: torch.nn.Linear, x: Tensor, shape: tuple[int, int, int], part: tuple[int, int]) -> Tensor:
    """Project x to [1, heads, T, dim] by some rows of a packed weight [groups, heads, dim].

    The rows are those of heads [start, stop) of each group, which `part` gives.
    """

    def rows(each: Tensor) -> Tensor:
        return each.view(*shape, *each.shape[1:])[:, slice(*part)].reshape(-1, *each.shape[1:])

    bias = None if packed.bias is None else rows(packed.bias)
    made = torch.nn.functional.linear(x, rows(packed.weight), bias)
    return made.view(1, -1, shape[0] * (part[1] - part[0]), shape[2]).transpose(1, 2)
