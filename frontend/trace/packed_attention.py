"""Attention of packed q, k and v whose code repeats K and V for every query head before it rotates them (Falcon).

What it makes of one KV head is the same for all query heads of its group, so K and V are caught before they are repeated:
the cache then holds a KV head once.
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
    """Replace the forward pass of every such attention of `model`."""
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
    group = heads // kv_heads  # queries, in front of their K and V
    q, k, v = (
        _projected(self.query_key_value, hidden_states, (kv_heads, group + 2, dim), part)
        for part in ((0, group), (group, group + 1), (group + 1, group + 2))
    )
    cos, sin = (each.unsqueeze(1) for each in position_embeddings)
    q, k = (each * cos + _half_turned(each) * sin for each in (q, k))
    out, _ = interfaces.attention(self, q, k, v, attention_mask, scaling=self.inv_norm_factor)
    return self.dense(out.reshape(1, -1, heads * dim)), None


def _half_turned(x: Tensor) -> Tensor:
    """The second half of each head, negative, before the first."""
    first, second = x.chunk(2, -1)
    return torch.cat((-second, first), -1)


def _projected(packed: torch.nn.Linear, x: Tensor, shape: tuple[int, int, int], part: tuple[int, int]) -> Tensor:
    """[1, heads, T, dim] by those rows of a weight [groups, heads, dim] that are heads [start, stop) of each group."""

    def rows(each: Tensor) -> Tensor:
        return each.view(*shape, *each.shape[1:])[:, slice(*part)].reshape(-1, *each.shape[1:])

    bias = None if packed.bias is None else rows(packed.bias)
    made = torch.nn.functional.linear(x, rows(packed.weight), bias)
    return made.view(1, -1, shape[0] * (part[1] - part[0]), shape[2]).transpose(1, 2)
