"""Undo projections that a model packs itself: replace a linear of which only column ranges are read by one per range.

Phi-3 stores q, k and v, and gate and up, as one matrix. Each part is split over the ranks by itself; `pack_projections`
puts a rank's parts side by side again.
"""

from __future__ import annotations

import torch
from torch import fx

from inferc.ir import weights as weight_lib
from inferc.ir.program import Program, arguments, name_of
from inferc.passes.rewrite import infer_types

aten = torch.ops.aten


def split_columns(program: Program) -> int:
    """Split every packed linear of `program`, and return how many there were."""
    found = [node for node in program.graph.nodes if node.target == aten.linear.default and _is_packed(node)]
    for node in found:
        _split(program, node)
    if found:
        program.drop_unused()
    return len(found)


def _is_packed(linear: fx.Node) -> bool:
    """Return whether every use is a slice of columns and the operands are weights."""
    if not all(each is None or each.op == "get_attr" for each in arguments(linear)[1:]):
        return False
    return bool(linear.users) and all(_range(user) is not None for user in linear.users)


def _range(node: fx.Node) -> tuple[int, int] | None:
    if node.target != aten.slice.Tensor:
        return None
    value, dim, start, stop, step = arguments(node)
    width = int(value.meta["val"].shape[-1])
    if dim not in (-1, 1) or step != 1 or value.meta["val"].dim() != 2:
        return None
    stop = width if stop is None else min(int(stop), width)
    return int(start or 0), stop


def _split(program: Program, linear: fx.Node) -> None:
    x, *sources = arguments(linear)
    for user in list(linear.users):
        bounds = _range(user)
        assert bounds is not None
        low, high = bounds
        parts = [
            None
            if each is None
            else program.add_weight(
                f"{each.target}.{low}_{high}", weight_lib.slice_(program.weight(each), 0, low, high), before=linear
            )
            for each in sources
        ]
        with program.graph.inserting_before(linear):
            made = program.graph.call_function(aten.linear.default, (x, *parts))
        made.meta.update(name=name_of(user), layer=linear.meta.get("layer"))
        infer_types(program, [made])
        user.replace_all_uses_with(made)
