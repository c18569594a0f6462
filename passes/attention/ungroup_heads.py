"""Give each part of a packed projection a projection of its own.

GPT-NeoX packs q, k and v head by head, and DeepSeek a head's parts with and without rope. Slices of such a [num_tokens,
heads, size] value are no ranges of columns, so each use would copy. Here the rows of the weight are regrouped instead,
once, when the weight is written, and each part becomes a projection; `pack_projections` then packs them side by side.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from inferc.ir import weights as weight_lib
from inferc.ir.program import Program, arguments, name_of
from inferc.ir.weights import Weight
from inferc.passes.rewrite import infer_types, no_rewrite

aten = torch.ops.aten


@dataclass(frozen=True)
class UngroupHeads:
    name: str = "ungroup_heads"

    def __call__(self, program: Program) -> int:
        count = 0
        for view in list(program.graph.nodes):
            if not _parts_heads(view):
                continue
            reason = _why_not(view)
            if reason:
                no_rewrite(self.name, view, reason)
                continue
            _ungroup(program, view)
            count += 1
        if count:
            program.drop_unused()
        return count


def _parts_heads(view: fx.Node) -> bool:
    """Return whether this is a [num_tokens, heads, size] view of a linear, of which a part of each head is read."""
    if view.target != aten.view.default or view.meta["val"].dim() != 3 or view.meta["val"].shape[1] == 1:
        return False
    linear = view.args[0]
    if not isinstance(linear, fx.Node) or linear.target != aten.linear.default:
        return False
    return any(_range(user) not in ((-1, -1), (0, view.meta["val"].shape[2])) for user in view.users)


def _why_not(view: fx.Node) -> str:
    """Return why the parts cannot get rows of their own, or "" if they can.

    They can if the view is the linear's only reader and the parts are disjoint.
    """
    linear, size = view.args[0], view.meta["val"].shape[2]
    assert isinstance(linear, fx.Node)
    if len(linear.users) > 1:
        return f"{name_of(linear)} is read by {len(linear.users)} nodes, expected this one alone"
    if any(each is not None and each.op != "get_attr" for each in linear.args[1:]):  # type: ignore[union-attr]
        return f"{name_of(linear)} multiplies by something that is no weight"
    end = 0
    for (start, stop), part in sorted((_range(part), part) for part in view.users):
        if (start, stop) in ((-1, -1), (0, size)):
            return f"{name_of(part)} reads otherwise than one part of each head"
        if start < end:
            return f"{name_of(part)} reads from element {start} of each head, which another part has up to {end}"
        end = stop
    return ""


def _range(part: fx.Node) -> tuple[int, int]:
    """Return the elements of each head that a slice takes, or (-1, -1) for another op."""
    if part.target != aten.slice.Tensor:
        return (-1, -1)
    value, dim, start, stop, step = arguments(part)
    if dim != -1 or step != 1:
        return (-1, -1)
    return int(start or 0), min(int(stop), int(value.meta["val"].shape[-1]))


def _ungroup(program: Program, view: fx.Node) -> None:
    linear = view.args[0]
    assert isinstance(linear, fx.Node)
    heads, size = int(view.meta["val"].shape[1]), int(view.meta["val"].shape[2])
    for part in list(view.users):
        start, stop = _range(part)
        operands: list[fx.Node | None] = [linear.args[0]]  # type: ignore[list-item]
        for source in linear.args[1:]:
            if source is None:
                operands.append(None)
                continue
            assert isinstance(source, fx.Node)
            weight = _rows_of(program.weight(source), heads, size, start, stop)
            operands.append(program.add_weight(f"{source.target}.{start}_{stop}", weight, before=part))
        with program.graph.inserting_before(part):
            made = program.graph.call_function(aten.linear.default, tuple(operands))
            shaped = program.graph.call_function(aten.view.default, (made, [-1, heads, stop - start]))
        infer_types(program, [made, shaped])
        made.meta.update(name=f"{name_of(linear)}.{start}_{stop}", layer=linear.meta.get("layer"))
        shaped.meta.update(name=name_of(part), layer=part.meta.get("layer"))
        part.replace_all_uses_with(shaped)
        for copied in [user for user in shaped.users if user.target == aten.clone.default]:
            copied.replace_all_uses_with(shaped)  # the copy was needed to view a part of each head in another shape


def _rows_of(weight: Weight, heads: int, size: int, start: int, stop: int) -> Weight:
    """Return output rows [start, stop) of every head of `size` rows."""
    by_head = weight_lib.reshape(weight, (heads, size, *weight.shape[1:]))
    part = weight_lib.slice_(by_head, 1, start, stop)
    return weight_lib.reshape(part, (heads * (stop - start), *weight.shape[1:]))
