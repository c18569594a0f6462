"""Pad the heads of every attention to one size that its kernels support: a multiple of 16, filled up with zeros.

Heads of 100 (OpenLLaMA 3B) or 120 elements (H2O Danube 3 4B), or of different sizes for K and V, get zero rows in their
projections, so that q, K and V have zeros there; the linear that reads the result gets zero columns. Scores and results
are the same numbers, scaled as for the unpadded size, and the cached heads consist of whole vectors and tiles, as
kernels read them. If a norm or another op stands between the projection and attention, heads are copied instead.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from inferc.ir import weights as weight_lib
from inferc.ir.program import Program, arguments, name_of
from inferc.ir.weights import Weight
from inferc.passes.attention.page_kv_cache import is_latent
from inferc.passes.rewrite import infer_types, short_name

aten, inferc = torch.ops.aten, torch.ops.inferc
ELEMENTWISE = (
    aten.neg.default,
    aten._to_copy.default,
    aten.mul.Tensor,
    aten.div.Tensor,
    aten.clamp.default,
)
"""Ops that map zeros to zeros, if `_keeps_zeros` confirms it for their operands."""


@dataclass(frozen=True)
class PadHeads:
    """A pass that pads heads to multiples of `multiple` elements.

    A head that would have more than `most` elements stays as it is, and is refused later.
    """

    multiple: int = 16
    most: int = 512
    name: str = "pad_heads"

    def __call__(self, program: Program) -> int:
        count = 0
        for node in list(program.graph.find_nodes(op="call_function", target=inferc.attention.default, sort=True)):
            q, k, v, *_ = arguments(node)
            if q.meta["val"].dim() != 3 or is_latent(k, v):
                continue
            largest = max(int(each.meta["val"].shape[2]) for each in (q, k, v))
            size = -(-largest // self.multiple) * self.multiple
            if size <= self.most and any(int(each.meta["val"].shape[2]) != size for each in (q, k, v)):
                _pad(program, node, size)
                count += 1
        if count:
            program.drop_unused()
        return count


def _pad(program: Program, node: fx.Node, size: int) -> None:
    q, k, v, *rest = arguments(node)
    pad = _Padding(program, size)
    v_dim = int(v.meta["val"].shape[2])
    with program.graph.inserting_before(node):
        heads = [pad.heads(each, node) for each in (q, k, v)]
        padded = program.graph.call_function(inferc.attention.default, (*heads, *rest))
    padded.meta.update(name=name_of(node), layer=node.meta.get("layer"))
    infer_types(program, [padded])
    for user in list(node.users):
        linear = _projection(user)
        if linear is not None:
            _pad_columns(program, user, linear, padded)
    if node.users:
        cut = pad.call(node, inferc.resize_heads.default, (padded, v_dim))
        node.replace_all_uses_with(cut)


class _Padding:
    """A builder of values whose heads have `size` elements from values with smaller heads."""

    def __init__(self, program: Program, size: int) -> None:
        self.program, self.size = program, size

    def heads(self, node: fx.Node, before: fx.Node) -> fx.Node:
        """Return heads [num_tokens, heads, size] of [num_tokens, heads, head_dim], padded with zeros at the end."""
        had = int(node.meta["val"].shape[2])
        if had == self.size:
            return node
        args = list(node.args)
        if node.target == inferc.rope.default or (node.target in ELEMENTWISE and _keeps_zeros(node)):
            return self.call(node, node.target, (self.heads(args[0], before), *args[1:]), node.kwargs)  # type: ignore[arg-type]
        if node.target == aten.view.default and isinstance(args[0], fx.Node) and args[0].meta["val"].dim() == 2:
            columns = self.columns(args[0], int(node.meta["val"].shape[1]), had)
            if columns is not None:
                return self.call(node, aten.view.default, (columns, [-1, node.meta["val"].shape[1], self.size]))
        return self.call(node, inferc.resize_heads.default, (node, self.size))

    def columns(self, node: fx.Node, heads: int, had: int) -> fx.Node | None:
        """Return [num_tokens, heads * size] for the columns of `heads` heads, or None if no linear makes them."""
        if node.target in ELEMENTWISE and _keeps_zeros(node):
            inner = self.columns(node.args[0], heads, had)  # type: ignore[arg-type]
            return None if inner is None else self.call(node, node.target, (inner, *node.args[1:]), node.kwargs)
        linear, first = node, 0
        if node.target == aten.slice.Tensor and arguments(node)[1] in (1, -1) and arguments(node)[4] == 1:
            linear, first = node.args[0], int(arguments(node)[2] or 0)  # type: ignore[assignment]
            first += int(linear.meta["val"].shape[-1]) if first < 0 else 0
        if linear.target != aten.linear.default:
            return None
        x, *weights = arguments(linear)
        if any(each is not None and each.op != "get_attr" for each in weights):
            return None
        rows = []
        for each in weights:
            if each is None:
                continue
            weight = weight_lib.slice_(self.program.weight(each), 0, first, first + heads * had)
            padded = _padded_heads(weight, 0, heads, self.size)
            part = "" if linear is node else f".{first}:{first + heads * had}"
            name = f"{each.target}{part}.heads_of_{self.size}"
            rows.append(self.program.add_weight(name, padded, before=node))
        return self.call(node, aten.linear.default, (x, *rows))

    def call(self, node: fx.Node, target: Any, args: tuple[Any, ...], kwargs: Any = None) -> fx.Node:
        """Insert a typed call behind `node`, with the name of `node`."""
        with self.program.graph.inserting_after(node):
            made = self.program.graph.call_function(target, args, dict(kwargs or {}))
        made.meta.update(name=name_of(node), layer=node.meta.get("layer"))
        if target == inferc.resize_heads.default:
            made.meta["name"] = f"{name_of(node)}.{short_name(made)}"
        infer_types(self.program, [made])
        return made


def _keeps_zeros(node: fx.Node) -> bool:
    """Return whether an elementwise op maps zeros to zeros and treats all elements of a head alike.

    `node` is of heads, or of their columns.
    """
    if node.target == aten.clamp.default:
        _, low, high = arguments(node)
        return (low is None or low <= 0) and (high is None or high >= 0)
    if node.target in (aten.mul.Tensor, aten.div.Tensor):
        other = node.args[1]
        if not isinstance(other, fx.Node):
            return True
        return node.target == aten.mul.Tensor and isinstance(node.args[0], fx.Node) and _is_one_a_head(other, node)
    return True


def _is_one_a_head(factor: fx.Node, node: fx.Node) -> bool:
    """Return whether a factor of a value has one number per head of the value."""
    shape = factor.meta["val"].shape
    return (
        factor.op != "get_attr"
        and len(shape) == node.meta["val"].dim()
        and isinstance(shape[-1], int)
        and shape[-1] == 1
    )


def _projection(view: fx.Node) -> fx.Node | None:
    """Return the linear that reads attention's heads side by side through `view` and through nothing else, or None."""
    if view.target != aten.view.default or view.meta["val"].dim() != 2 or len(view.users) != 1:
        return None
    linear = next(iter(view.users))
    weight = arguments(linear)[1] if linear.target == aten.linear.default else None
    return linear if linear.args[0] is view and weight is not None and weight.op == "get_attr" else None


def _pad_columns(program: Program, view: fx.Node, linear: fx.Node, padded: fx.Node) -> None:
    """Let `linear` read the padded heads, with zero columns for their zeros."""
    heads, size = (int(each) for each in padded.meta["val"].shape[1:])
    _, old, *bias = linear.args
    assert isinstance(old, fx.Node)
    weight = _padded_heads(program.weight(old), 1, heads, size)
    new = program.add_weight(f"{old.target}.heads_of_{size}", weight, before=linear)
    with program.graph.inserting_before(view):
        rows = program.graph.call_function(aten.view.default, (padded, [-1, heads * size]))
    rows.meta.update(name=name_of(view), layer=view.meta.get("layer"))
    infer_types(program, [rows])
    linear.args = (rows, new, *bias)
    program.graph.erase_node(view)


def _padded_heads(weight: Weight, dim: int, heads: int, size: int) -> Weight:
    """Return `weight` with each of the `heads` heads of axis `dim` padded with zeros to `size`."""
    before, behind = weight.shape[:dim], weight.shape[dim + 1 :]
    by_head = weight_lib.reshape(weight, (*before, heads, weight.shape[dim] // heads, *behind))
    return weight_lib.reshape(weight_lib.padded(by_head, dim + 1, size), (*before, heads * size, *behind))
