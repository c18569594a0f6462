"""The division of the rows of a fused elementwise expression into parts, for targets that compute it row by row."""

from __future__ import annotations

import math
from typing import Any

from torch import fx


def parts(node: fx.Node) -> tuple[int, int] | None:
    """Return (parts, width): the number of parts of a row and their width, or None if no division suits all inputs.

    In each part an input is whole, or repeated, or one number.
    """
    sizes = [int(size) for size in node.meta["val"].shape[1:]]
    inputs: Any = node.args[0]
    shapes = [padded_sizes(each, len(sizes)) for each in inputs]
    for split in range(len(sizes) + 1):
        outer, inner = sizes[:split], sizes[split:]
        fits = all(
            shape[:split] in (outer, [1] * split) and shape[split:] in (inner, [1] * (len(sizes) - split))
            for shape in shapes
        )
        if fits:
            return math.prod(outer), math.prod(inner)
    return None


def padded_sizes(node: fx.Node, count: int) -> list[int]:
    """Return an input's sizes without the axis of tokens, padded with 1 in front to `count` axes.

    A weight has no axis of tokens.
    """
    shape = list(node.meta["val"].shape)
    if node.op != "get_attr":
        shape = shape[1:]
    sizes = [int(size) for size in shape]
    return [1] * (count - len(sizes)) + sizes
