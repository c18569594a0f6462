"""The attention that blocks of keys get, computed plainly."""

from __future__ import annotations

import torch
from torch import Tensor

ONE = 2.0**32  # a mass of 1, as compiled steps count it


def stored_rows(canonical: Tensor, dim: int) -> Tensor:
    """Return float64 rows [..., dim] of a canonical cache, in which int8 rows end with their scale's four bytes."""
    if canonical.dtype != torch.int8:
        return canonical.double()
    scale = canonical[..., dim:].contiguous().view(torch.float32)
    return canonical[..., :dim].double() * scale.double()


def masses_of(
    q: Tensor,
    keys: Tensor,
    first: int,
    block_size: int,
    scale: float,
    softcap: float = 0.0,
    sinks: Tensor | None = None,
    slopes: Tensor | None = None,
) -> Tensor:
    """[blocks]: the sum over rows and heads of the probabilities of each block's keys.

    q [rows, heads, dim], keys [tokens, kv_heads, dim]; row i is at position first + i and sees the keys up to it.
    """
    rows, heads, _ = q.shape
    keys = keys.double().repeat_interleave(heads // keys.shape[1], dim=1)
    scores = torch.einsum("rhd,khd->rhk", q.double(), keys) * scale
    if softcap:
        scores = torch.tanh(scores / softcap) * softcap
    at, of = torch.arange(first, first + rows)[:, None], torch.arange(len(keys))
    if slopes is not None:
        scores = scores + slopes.double()[None, :, None] * (of - at)[:, None]
    scores = scores.masked_fill((of > at)[:, None], float("-inf"))
    if sinks is not None:
        scores = torch.cat((scores, sinks.double()[None, :, None].expand(rows, heads, 1)), dim=-1)
    weights = scores.softmax(-1)[..., : len(keys)].sum((0, 1))
    padded = torch.nn.functional.pad(weights, (0, -len(weights) % block_size))
    return padded.view(-1, block_size).sum(1)
