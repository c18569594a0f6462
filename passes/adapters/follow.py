"""Follow a weight's expression back to the checkpoint's tensors, to find which row and column each of its elements is.

Passes pad, cut, pack and reorder weights. An adapter was made for the checkpoint's own matrices, so its A and B must be
arranged in the same way before they are added to what a compiled product computes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from inferc.ir.weights import Weight

ABSENT = -1  # the index of a row or column that a pass added, filled with zeros


@dataclass(frozen=True)
class Followed:
    """A weight, or a part of its rows, that has each element at one row and one column of one stored tensor.

    rows, columns: the index of the stored axis 0 and 1 (i64), with the shape of the weight where the axis counts and 1
    elsewhere; from_rows: for each axis of the weight, whether it comes from the stored axis 0.
    """

    source: str
    stored_shape: tuple[int, ...]
    rows: Tensor
    columns: Tensor
    from_rows: tuple[bool, ...]

    @property
    def is_transposed(self) -> bool:
        return self.from_rows == (False, True)

    @property
    def outputs(self) -> list[int]:
        """The stored index of each output of the weight [n, k]."""
        return (self.columns if self.is_transposed else self.rows).flatten().tolist()

    @property
    def inputs(self) -> list[int]:
        """The stored index of each input of the weight [n, k]."""
        return (self.rows if self.is_transposed else self.columns).flatten().tolist()


def follow(weight: Weight) -> list[tuple[int, int, Followed | None]]:
    """Return the parts of a weight [n, k] by their first and last + 1 output, each with where it comes from.

    A part is None if its elements are computed from several stored ones, or from none.
    """
    while weight.op in ("cast", "pack"):
        weight = weight.args[0]
    if weight.op == "concat" and weight.dim == 0:
        found, begin = [], 0
        for each in weight.args:
            found += [(begin + first, begin + last, part) for first, last, part in follow(each)]
            begin += each.shape[0]
        return found
    part = _followed(weight)
    is_matrix = part is not None and part.from_rows in ((True, False), (False, True))
    return [(0, weight.shape[0], part if is_matrix else None)]


def _followed(weight: Weight) -> Followed | None:
    if weight.op == "source":
        if len(weight.shape) != 2:
            return None
        n, k = weight.shape
        return Followed(weight.name, weight.shape, torch.arange(n)[:, None], torch.arange(k)[None], (True, False))
    if weight.op == "concat":
        return _padded(weight)
    if weight.op not in ("cast", "slice", "permute", "reshape"):
        return None
    inner = _followed(weight.args[0])
    if inner is None or weight.op == "cast":
        return inner
    if weight.op == "permute":
        return replace(
            inner,
            rows=inner.rows.permute(weight.perm),
            columns=inner.columns.permute(weight.perm),
            from_rows=tuple(inner.from_rows[axis] for axis in weight.perm),
        )
    if weight.op == "slice":
        size = weight.shape[weight.dim]
        if inner.from_rows[weight.dim]:
            return replace(inner, rows=inner.rows.narrow(weight.dim, weight.start, size))
        return replace(inner, columns=inner.columns.narrow(weight.dim, weight.start, size))
    return _reshaped(inner, weight.args[0].shape, weight.shape)


def _padded(weight: Weight) -> Followed | None:
    """Follow a concatenation of one part that can be followed and zeros before or after it."""
    parts = [_followed(each) if each.op != "zeros" else None for each in weight.args]
    followed = [each for each in parts if each is not None]
    if len(followed) != 1 or any(part is None and each.op != "zeros" for part, each in zip(parts, weight.args)):
        return None
    (inner,) = followed
    index = inner.rows if inner.from_rows[weight.dim] else inner.columns
    pieces = []
    for part, each in zip(parts, weight.args, strict=True):
        shape = [*index.shape]
        shape[weight.dim] = each.shape[weight.dim]
        pieces.append(index if part is not None else torch.full(shape, ABSENT))
    joined = torch.cat(pieces, weight.dim)
    return replace(inner, rows=joined) if inner.from_rows[weight.dim] else replace(inner, columns=joined)


def _reshaped(inner: Followed, old: tuple[int, ...], new: tuple[int, ...]) -> Followed | None:
    """Follow a reshape in which no new axis holds both rows and columns."""
    owners: list[bool] = []
    at, left, owner = 0, 1, True
    for size in new:
        while left == 1 and at < len(old):
            left, owner = old[at], inner.from_rows[at]
            at += 1
        taken = size
        while taken > left:
            if at == len(old) or taken % left or inner.from_rows[at] != owner:
                return None
            taken //= left
            left = old[at]
            at += 1
        if left % taken:
            return None
        left //= taken
        owners.append(owner)

    def shape(of_rows: bool) -> list[int]:
        return [size if owner == of_rows else 1 for size, owner in zip(new, owners, strict=True)]

    if math.prod(shape(True)) != inner.rows.numel() or math.prod(shape(False)) != inner.columns.numel():
        return None
    return replace(
        inner,
        rows=inner.rows.reshape(shape(True)),
        columns=inner.columns.reshape(shape(False)),
        from_rows=tuple(owners),
    )
