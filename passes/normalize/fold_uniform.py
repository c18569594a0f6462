"""Fold a lookup whose indices are all one number: the row that it finds is a weight, whatever the tokens are.

Encoders that are run as causal models add an embedding of each token's type, whose index they read from a buffer of
zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from inferc.ir import weights as weight_lib
from inferc.ir.program import Program, arguments, name_of
from inferc.passes.rewrite import no_rewrite

aten = torch.ops.aten
# Ops that fill a tensor with one number; None stands for the second argument.
FILLED: dict[Any, int | None] = {
    aten.full.default: None,
    aten.zeros.default: 0,
    aten.zeros_like.default: 0,
    aten.new_zeros.default: 0,
    aten.ones.default: 1,
    aten.ones_like.default: 1,
}
# Ops whose result consists of elements of their first argument.
REARRANGED = (
    aten.expand.default,
    aten.slice.Tensor,
    aten.gather.default,
    aten.view.default,
    aten._to_copy.default,
    aten.select.int,
    aten.unsqueeze.default,
    aten.squeeze.dim,
    aten.repeat.default,
    aten.index_select.default,
)
# Ops that compute the same with one row for all tokens as with a row for each.
BROADCAST = (aten.add.Tensor, aten.mul.Tensor)


@dataclass(frozen=True)
class FoldUniform:
    name: str = "fold_uniform"

    def __call__(self, program: Program) -> int:
        count = 0
        for node in program.graph.find_nodes(op="call_function", target=aten.embedding.default):
            table, ids = node.args[:2]
            index = uniform(program, ids)
            if index is None or table.op != "get_attr":
                continue
            other = next((user for user in node.users if not _broadcasts(user, node)), None)
            if other is not None:
                no_rewrite(self.name, node, f"{name_of(other)} reads it otherwise than to add or to multiply")
                continue
            weight = program.weight(table)
            row = weight_lib.reshape(weight_lib.slice_(weight, 0, index, index + 1), weight.shape[1:])
            node.replace_all_uses_with(program.add_weight(f"{table.target}.{index}", row, before=node))
            count += 1
        if count:
            program.drop_unused()
        return count


def uniform(program: Program, node: Any) -> int | None:
    """Return the integer that all elements of a value equal, whatever its size, or None if that is not known."""
    if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), Tensor):
        return None
    if node.meta["val"].is_floating_point() or node.meta["val"].is_complex():
        return None
    if node.op == "get_attr":
        weight = program.weight(node)
        if not weight.is_constant:
            return None
        values = weight_lib.read_constant(weight).unique()
        return int(values) if values.numel() == 1 else None
    if node.target in FILLED:
        number = FILLED[node.target]
        number = arguments(node)[1] if number is None else number
        return number if isinstance(number, int) else None
    return uniform(program, node.args[0]) if node.target in REARRANGED else None


def _broadcasts(user: fx.Node, node: fx.Node) -> bool:
    """Return whether the user adds or multiplies `node` and a value of the full size of the result."""
    if user.target not in BROADCAST:
        return False
    others = [arg for arg in user.args[:2] if arg is not node]
    if len(others) != 1 or not isinstance(others[0], fx.Node):
        return False
    sizes = [list(map(str, each.meta["val"].shape)) for each in (others[0], user)]
    return sizes[0] == sizes[1]
