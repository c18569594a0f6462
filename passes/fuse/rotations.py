"""Determine which rotation a piece of a graph applies to the elements of a head, whatever ops it is spelled with.

Models write rotary embedding as halves or neighbours, with cat, stack, chunk, strided slices or repeat_interleave, on
the whole head or a part of it, or as complex numbers. All of it is linear in the head: an output element is a sum of
terms `coefficient * trig(angle of a frequency) * input element`. Terms are followed through the ops as arrays, so two
spellings of one rotation are equal.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, fx

from inferc.ir.program import arguments

aten = torch.ops.aten
# What multiplies an element: an angle itself, its cosine, its sine, or nothing.
ANGLE, COS, SIN, ONE = 0, 1, 2, 3


@dataclass(frozen=True)
class Table:
    """The source of a rotation's angles, which are positions times frequencies."""

    positions: fx.Node
    inv_freq: fx.Node


@dataclass(frozen=True)
class Terms:
    """A value as sums of terms: arrays [num_terms, *sizes of the value without its token axis].

    The coefficient is 0 where there is no term. `element` is a flat index into the source without its token axis; it is
    -1 if the value depends on the table alone. Complex numbers have one more axis, the last, for their real and
    imaginary parts.
    """

    source: fx.Node | None
    table: Table | None
    coefficient: NDArray[np.float64]
    trig: NDArray[np.int8]
    frequency: NDArray[np.int32]
    element: NDArray[np.int32]

    def arrays(self) -> tuple[NDArray[Any], ...]:
        return self.coefficient, self.trig, self.frequency, self.element

    def rearranged(self, change: Callable[[NDArray[Any]], NDArray[Any]]) -> Terms:
        return Terms(self.source, self.table, *(change(each) for each in self.arrays()))

    def scaled(self, factor: float) -> Terms:
        return Terms(self.source, self.table, self.coefficient * factor, self.trig, self.frequency, self.element)


@dataclass(frozen=True)
class Rotation:
    """A rotation of the elements [start, stop) of the source's heads; the first 2 * len(inv_freq) of them are rotated.

    pairs: how the elements are paired, as in `rope`.
    is_backwards: whether it rotates by the negative of the table's angles.
    """

    source: fx.Node
    table: Table
    start: int
    stop: int
    pairs: str
    scaling: float
    is_backwards: bool = False


def _rest(node: fx.Node) -> tuple[int, ...] | None:
    """Return a value's sizes without its token axis, or None if they are not all numbers."""
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or value.dim() < 1:
        return None
    sizes = tuple(value.shape[1:])
    return sizes if all(isinstance(size, int) for size in sizes) else None


class Interpreter:
    """An interpreter that computes the terms of every node that has them, in graph order."""

    def __init__(self, graph: fx.Graph) -> None:
        self.known: dict[fx.Node, Terms] = {}
        self.views: dict[Any, fx.Node] = {}  # the first of equal views stands for all of them
        for node in graph.nodes:
            if node.op == "call_function":
                terms = self._call(node)
                if terms is not None:
                    self.known[node] = terms

    def _call(self, node: fx.Node) -> Terms | None:
        angle = _angle(node)
        if angle is not None:
            return angle
        inputs = [arg for arg in node.all_input_nodes if arg in self.known]
        if not inputs:
            return None
        rule = RULES.get(node.target)
        if rule is None or (node.target in NOT_COMPLEX and _is_complex(node)):
            return None
        return rule(self, node)

    def operand(self, arg: Any) -> Terms | None:
        """Return the terms of an argument; a value that has none is its own source."""
        if not isinstance(arg, fx.Node):
            return None
        if arg in self.known:
            return self.known[arg]
        rule = REARRANGEMENTS.get(arg.target)
        rest = _rest(arg)
        if rest is None or len(rest) < 2 or arg.op == "get_attr":
            return None
        source = arg.args[0] if arg.args else None
        if rule is not None and isinstance(source, fx.Node) and len(_rest(source) or ()) >= 2:
            inner = self.operand(source)
            terms = None if inner is None else rule(arg, inner)
            if terms is not None:
                self.known[arg] = terms
                return terms
        if arg.target in SIGNED:
            terms = RULES[arg.target](self, arg)
            if terms is not None:
                self.known[arg] = terms
                return terms
        # A value that is written in place (a clamp) is viewed anew by each reader.
        if arg.target == aten.view.default:
            arg = self.views.setdefault((arg.args[0], str(arg.args[1])), arg)
        shape = (1, *rest)
        elements = np.arange(int(np.prod(rest)), dtype=np.int32).reshape(shape)
        return Terms(arg, None, np.ones(shape), np.full(shape, ONE, np.int8), np.full(shape, -1, np.int32), elements)


def _angle(node: fx.Node) -> Terms | None:
    """Match `positions * inv_freq`, [num_tokens, frequencies]."""
    if node.target != aten.mul.Tensor:
        return None
    for row, column in (node.args, node.args[::-1]):
        if not isinstance(row, fx.Node) or not isinstance(column, fx.Node):
            continue
        if column.op != "get_attr" or column.meta["val"].dim() != 1:
            continue
        positions = _through(row, (aten._to_copy.default, aten.unsqueeze.default, aten.view.default))
        if positions.op != "placeholder" or _rest(row) != (1,):
            continue
        count = int(column.meta["val"].shape[0])
        shape = (1, count)
        return Terms(
            None,
            Table(positions, column),
            np.ones(shape),
            np.full(shape, ANGLE, np.int8),
            np.arange(count, dtype=np.int32).reshape(shape),
            np.full(shape, -1, np.int32),
        )
    return None


def _through(node: fx.Node, targets: tuple[Any, ...]) -> fx.Node:
    while node.target in targets and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


# ----------------------------------------------------------------------------------------------- arithmetic


def _trig(kind: int) -> Callable[[Interpreter, fx.Node], Terms | None]:
    def rule(terms: Interpreter, node: fx.Node) -> Terms | None:
        x = terms.operand(node.args[0])
        if x is None or len(x.trig) != 1 or (x.trig != ANGLE).any() or (x.coefficient != 1.0).any():
            return None
        return Terms(x.source, x.table, x.coefficient, np.full_like(x.trig, kind), x.frequency, x.element)

    return rule


def _polar(terms: Interpreter, node: fx.Node) -> Terms | None:
    """Match complex numbers of length 1, whose parts are cosines and sines."""
    length, angle = node.args
    x = terms.operand(angle)
    is_one = isinstance(length, fx.Node) and length.target == aten.ones_like.default
    if not is_one or x is None or len(x.trig) != 1 or (x.trig != ANGLE).any() or (x.coefficient != 1.0).any():
        return None
    trig = np.stack([np.full_like(x.trig, COS), np.full_like(x.trig, SIN)], -1)
    doubled: list[NDArray[Any]] = [np.stack([each, each], -1) for each in (x.coefficient, x.frequency, x.element)]
    return Terms(x.source, x.table, doubled[0], trig, doubled[1], doubled[2])


def _neg(terms: Interpreter, node: fx.Node) -> Terms | None:
    x = terms.operand(node.args[0])
    return None if x is None else x.scaled(-1.0)


def _same(terms: Interpreter, node: fx.Node) -> Terms | None:
    return terms.operand(node.args[0])


def _mul(terms: Interpreter, node: fx.Node) -> Terms | None:
    left, right = node.args
    if isinstance(right, (int, float)):
        x = terms.operand(left)
        return None if x is None else x.scaled(float(right))
    a, b = terms.operand(left), terms.operand(right)
    if a is None or b is None:
        return None
    if a.source is None:
        a, b = b, a
    if not _is_complex(node):
        return _product(a, b)
    real, imaginary = (a.rearranged(lambda each, at=at: each[..., at]) for at in (0, 1))  # type: ignore[misc]
    cosine, sine = (b.rearranged(lambda each, at=at: each[..., at]) for at in (0, 1))  # type: ignore[misc]
    parts = [
        _sum(_product(real, cosine), _product(imaginary, sine), -1.0),
        _sum(_product(real, sine), _product(imaginary, cosine), 1.0),
    ]
    if parts[0] is None or parts[1] is None:
        return None
    arrays = [np.stack(pair, -1) for pair in zip(parts[0].arrays(), parts[1].arrays(), strict=True)]
    return Terms(a.source, b.table, *arrays)


def _product(a: Terms, b: Terms) -> Terms | None:
    """Multiply elements of a source by cosines and sines."""
    if b.source is not None or a.table is not None or len(a.trig) != 1 or len(b.trig) != 1:
        return None
    if (a.trig != ONE).any() or (b.trig == ANGLE).any():
        return None
    coefficient, trig, frequency, element = np.broadcast_arrays(
        a.coefficient * b.coefficient, b.trig, b.frequency, a.element
    )
    return Terms(a.source, b.table, coefficient, trig, frequency, element)


def _add(sign: float) -> Callable[[Interpreter, fx.Node], Terms | None]:
    def rule(terms: Interpreter, node: fx.Node) -> Terms | None:
        a, b = terms.operand(node.args[0]), terms.operand(node.args[1])
        return _sum(a, b, sign) if arguments(node)[2] == 1 else None

    return rule


def _sum(a: Terms | None, b: Terms | None, sign: float) -> Terms | None:
    if a is None or b is None or a.source is not b.source or a.table != b.table:
        return None
    b = b.scaled(sign)
    shape = np.broadcast_shapes(a.trig.shape[1:], b.trig.shape[1:])
    parts = [
        np.concatenate([np.broadcast_to(each, (len(each), *shape)) for each in pair])
        for pair in zip(a.arrays(), b.arrays(), strict=True)
    ]
    return Terms(a.source, a.table, *parts)


def _join(stack: bool) -> Callable[[Interpreter, fx.Node], Terms | None]:
    def rule(terms: Interpreter, node: fx.Node) -> Terms | None:
        nodes: Any = node.args[0]
        parts = [terms.operand(each) for each in nodes]
        dim = arguments(node)[1]
        if any(part is None for part in parts) or dim >= 0:
            return None
        found = [part for part in parts if part is not None]
        sources, tables = {part.source for part in found}, {part.table for part in found} - {None}
        if len(sources) != 1 or len(tables) > 1:
            return None
        most = max(len(part.trig) for part in found)
        joined = np.stack if stack else np.concatenate
        arrays = [
            joined([_padded(each, most) for each in column], axis=dim) for column in zip(*(p.arrays() for p in found))
        ]
        return Terms(found[0].source, next(iter(tables), None), *arrays)

    return rule


def _padded(array: NDArray[Any], count: int) -> NDArray[Any]:
    """Pad to `count` terms; the added terms have coefficient 0."""
    missing = [(0, count - len(array))] + [(0, 0)] * (array.ndim - 1)
    return np.pad(array, missing)


# ------------------------------------------------------------------------------------------- rearrangements


def _slice(node: fx.Node, x: Terms) -> Terms | None:
    _, dim, start, end, step = arguments(node)
    if dim >= 0:
        return None
    place: Any = (..., slice(start, end, step), *[slice(None)] * (-dim - 1))
    return x.rearranged(lambda each: each[place])


def _view(node: fx.Node, x: Terms) -> Terms | None:
    rest = _rest(node)
    return None if rest is None else x.rearranged(lambda each: each.reshape(len(each), *rest))


def _is_complex(node: fx.Node) -> bool:
    return bool(node.meta["val"].is_complex())


def _unsqueeze(node: fx.Node, x: Terms) -> Terms | None:
    dim = int(node.args[1]) - _is_complex(node)  # type: ignore[arg-type]
    if dim >= 0:
        return None
    return x.rearranged(lambda each: np.expand_dims(each, each.ndim + 1 + dim))


def _expand(node: fx.Node, x: Terms) -> Terms | None:
    rest = _rest(node)
    return None if rest is None else x.rearranged(lambda each: np.broadcast_to(each, (len(each), *rest)))


def _permute(node: fx.Node, x: Terms) -> Terms | None:
    order = [axis % node.meta["val"].dim() for axis in node.args[1]]  # type: ignore[union-attr]
    return x.rearranged(lambda each: each.transpose(order)) if order[0] == 0 else None


def _repeat(node: fx.Node, x: Terms) -> Terms | None:
    _, repeats, dim, _ = arguments(node)
    if dim is None or dim >= 0:
        return None
    return x.rearranged(lambda each: np.repeat(each, repeats, axis=dim))


def _select(node: fx.Node, x: Terms) -> Terms | None:
    _, dim, index = arguments(node)
    return x.rearranged(lambda each: np.take(each, index, axis=dim)) if dim < 0 else None


REARRANGEMENTS: dict[Any, Callable[[fx.Node, Terms], Terms | None]] = {
    aten.slice.Tensor: _slice,
    aten.view.default: _view,
    aten.unsqueeze.default: _unsqueeze,
    aten.expand.default: _expand,
    aten.permute.default: _permute,
    aten.repeat_interleave.self_int: _repeat,
    aten.select.int: _select,
    aten._to_copy.default: lambda node, x: x if node.meta["val"].is_floating_point() else None,
    aten.view_as_complex.default: lambda node, x: x,
    aten.view_as_real.default: lambda node, x: x,
}
NOT_COMPLEX = (aten.slice.Tensor, aten.view.default, aten.expand.default, aten.permute.default, aten.select.int)


# Ops that may be applied to a head before it is multiplied.
SIGNED = (aten.neg.default, aten.cat.default, aten.stack.default)


def _rearrange(terms: Interpreter, node: fx.Node) -> Terms | None:
    x = terms.operand(node.args[0])
    return None if x is None else REARRANGEMENTS[node.target](node, x)


RULES: dict[Any, Callable[[Interpreter, fx.Node], Terms | None]] = {
    **dict.fromkeys(REARRANGEMENTS, _rearrange),
    aten.cos.default: _trig(COS),
    aten.sin.default: _trig(SIN),
    aten.polar.default: _polar,
    aten.neg.default: _neg,
    aten.mul.Tensor: _mul,
    aten.add.Tensor: _add(1.0),
    aten.sub.Tensor: _add(-1.0),
    aten.cat.default: _join(stack=False),
    aten.stack.default: _join(stack=True),
}


# ----------------------------------------------------------------------------------------------- recognising


def rotation(terms: Terms, heads: int, dim: int) -> Rotation | str:
    """Return which rotation of its source's heads a value [num_tokens, heads, dim] is, or why it is none."""
    source, table = terms.source, terms.table
    if source is None or table is None:
        return "it rotates nothing"
    rest = _rest(source)
    if rest is None or len(rest) < 2 or rest[0] != heads:
        return f"it rotates {rest}, expected heads"
    local = terms.element - np.arange(heads, dtype=np.int32)[:, None] * math.prod(rest[1:])
    used = terms.coefficient != 0.0
    columns = [np.where(used, each, 0) for each in (terms.coefficient, terms.trig, terms.frequency, local)]
    if any((each != each[:, :1]).any() for each in columns):
        return "its heads differ"
    head = [
        sorted(
            (int(t), float(c), int(f), int(e))
            for c, t, f, e in zip(*(each[:, 0, at] for each in columns), strict=True)
            if c != 0.0
        )
        for at in range(dim)
    ]
    count = int(table.inv_freq.meta["val"].shape[0])
    plain = [row[0][3] for row in head[2 * count :] if len(row) == 1 and row[0][:2] == (ONE, 1.0)]
    start = min(element for row in head for *_, element in row) if all(head) else 0
    if 2 * count > dim or plain != list(range(start + 2 * count, start + dim)):
        return f"it does not rotate the first {2 * count} elements of {dim}"
    scaling = abs(head[0][0][1])
    for (pairs, inputs, outputs), sign in itertools.product(_PAIRS, (1.0, -1.0)):
        wanted: list[list[tuple[int, float, int, int]]] = [[] for _ in range(2 * count)]
        for at in range(count):
            first, second = (start + element for element in inputs(at, count))
            low, high = outputs(at, count)
            wanted[low] = [(COS, scaling, at, first), (SIN, -sign * scaling, at, second)]
            wanted[high] = [(COS, scaling, at, second), (SIN, sign * scaling, at, first)]
        if head[: 2 * count] == wanted:
            return Rotation(source, table, start, start + dim, pairs, scaling, sign < 0)
    return "its pairs are no halves and no neighbours"


def _halves(at: int, count: int) -> tuple[int, int]:
    return at, at + count


def _neighbours(at: int, _count: int) -> tuple[int, int]:
    return 2 * at, 2 * at + 1


_PAIRS = (
    ("halves", _halves, _halves),
    ("neighbours", _neighbours, _neighbours),
    ("neighbours_to_halves", _neighbours, _halves),
)
