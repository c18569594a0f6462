"""The reference ops of LoRA adapters, the low-rank additions to products that a step chooses for each row.

An adapter adds `B (A x)` to a product with `x`, where A [rank, in_features] and B [out_features, rank] are small. The
sequences of a batch may have different adapters: `lora_shrink` computes `A x` of each row with the A of the row's
adapter, and `lora_expand` adds `B` times that. Source: Hu et al. 2021, arXiv:2106.09685; Chen et al. 2023,
arXiv:2310.18547 (Punica), for many adapters in one batch.

`adapters` [num_adapters, …] holds what was loaded, a row for each adapter: for each site (a product, or a part of its
columns) with offset o, `rank * o` elements from the row's start, A as [rank, in_features] and then the transposed B as
[rank, out_features], padded with zeros where an adapter's rank is smaller. Adapter 0 is none, and its row is not read.
Compiled targets get tables of addresses in its place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from inferc.ir.ops.registry import define, like_first


def _of_rows(adapter_ids: Tensor, rows: Tensor | None) -> Iterator[tuple[int, Tensor]]:
    """Yield each adapter of a step and the indices of its rows; `rows` are the tokens, if they are not all."""
    ids = adapter_ids if rows is None else adapter_ids[rows.long()]
    for adapter in ids.unique().tolist():
        if adapter:
            yield adapter, (ids == adapter).nonzero().flatten()


def _shrink_fake(x: Tensor, _ids: Tensor, _rows: object, _adapters: object, sites: Sequence[int], *rest: int) -> Tensor:
    return x.new_empty((x.shape[0], len(sites) * rest[-1]), dtype=torch.float32)


@define(
    "lora_shrink(Tensor x, Tensor adapter_ids, Tensor? rows, Tensor adapters, int[] sites, int[] offsets, int rank)"
    " -> Tensor",
    _shrink_fake,
)
def lora_shrink(
    x: Tensor,
    adapter_ids: Tensor,
    rows: Tensor | None,
    adapters: Tensor,
    sites: Sequence[int],
    offsets: Sequence[int],
    rank: int,
) -> Tensor:
    """Return `A x` for each row and each site that reads it, in float32; zeros for rows without an adapter.

    x [rows, in_features]; adapter_ids [num_tokens] i32, 0 for none; rows [rows] i32: the token of each row, or None if
    it is the row itself; sites: their numbers in the table of sites, consecutive; offsets: those of the sites;
    result [rows, len(sites) * rank].
    """
    out = torch.zeros(x.shape[0], len(sites), rank)
    k = x.shape[1]
    for adapter, chosen in _of_rows(adapter_ids, rows):
        for site, offset in enumerate(offsets):
            a = adapters[adapter, offset * rank : (offset + k) * rank].view(rank, k)
            out[chosen, site] = x[chosen].float() @ a.float().T
    return out.flatten(1)


def _lookup_fake(token_ids: Tensor, _ids: Tensor, _adapters: object, _site: int, _offset: int, rank: int) -> Tensor:
    return token_ids.new_empty((token_ids.shape[0], rank), dtype=torch.float32)


@define(
    "lora_lookup(Tensor token_ids, Tensor adapter_ids, Tensor adapters, int site, int offset, int rank, int vocab_size)"
    " -> Tensor",
    lambda *args: _lookup_fake(*args[:6]),
)
def lora_lookup(
    token_ids: Tensor, adapter_ids: Tensor, adapters: Tensor, site: int, offset: int, rank: int, vocab_size: int
) -> Tensor:
    """Return column `token_ids` of A for each row, in float32: `lora_shrink` of an embedding; zeros without an adapter.

    The site stores the transposed A, [vocab_size, rank]. token_ids, adapter_ids [num_tokens] i32; result
    [num_tokens, rank].
    """
    out = torch.zeros(len(token_ids), rank)
    for adapter, chosen in _of_rows(adapter_ids, None):
        table = adapters[adapter, offset * rank : (offset + vocab_size) * rank].view(vocab_size, rank)
        out[chosen] = table[token_ids[chosen].long()].float()
    return out


@define(
    "lora_expand(Tensor y, Tensor shrunk, Tensor adapter_ids, Tensor? rows, Tensor adapters, int[] sites,"
    " int[] offsets, int[] begins, int[] ends, int rank) -> Tensor",
    like_first,
)
def lora_expand(
    y: Tensor,
    shrunk: Tensor,
    adapter_ids: Tensor,
    rows: Tensor | None,
    adapters: Tensor,
    sites: Sequence[int],
    offsets: Sequence[int],
    begins: Sequence[int],
    ends: Sequence[int],
    rank: int,
) -> Tensor:
    """Return `y` plus `B` times what `lora_shrink` returned, in float32 and rounded once, for rows with an adapter.

    y [rows, out_features], which compiled targets change in place; shrunk [rows, len(sites) * rank]; adapter_ids, rows:
    as in `lora_shrink`; offsets: those of the sites' transposed B; begins, ends: the columns of y that each adds to.
    """
    out = y.clone()
    for adapter, chosen in _of_rows(adapter_ids, rows):
        for site, (offset, begin, end) in enumerate(zip(offsets, begins, ends, strict=True)):
            b = adapters[adapter, offset * rank : (offset + end - begin) * rank].view(rank, end - begin)
            part = shrunk[chosen, site * rank : (site + 1) * rank]
            out[chosen, begin:end] = (y[chosen, begin:end].float() + part @ b.float()).to(y.dtype)
    return out
