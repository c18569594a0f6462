"""Fold what is done to a weight alone into the weight: casts and views are computed once, when the artifact is written."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from inferc import weights as weight_lib
from inferc.passes.rewrite import no_rewrite
from inferc.program import Program, target_name
from inferc.weights import Weight

aten = torch.ops.aten
VIEWS = (aten.view.default, aten.squeeze.default, aten.squeeze.dim, aten.unsqueeze.default)


@dataclass(frozen=True)
class FoldWeights:
    name: str = "fold_weights"

    def __call__(self, program: Program) -> int:
        count = 0
        for node in list(program.graph.nodes):
            source = node.args[0] if node.op == "call_function" and node.args else None
            if not isinstance(source, fx.Node) or source.op != "get_attr" or not node.meta["val"].dim():
                continue
            folded = _folded(node, program.weight(source))
            if folded is None:
                if len(node.all_input_nodes) == 1:
                    no_rewrite(self.name, node, f"{target_name(node.target)} of a weight is no cast and no view")
                continue
            name, weight = f"{source.target}.{folded[0]}", folded[1]
            node.replace_all_uses_with(program.add_weight(name, weight, before=node))
            count += 1
        if count:
            program.drop_unused()
        return count


def _folded(node: fx.Node, weight: Weight) -> tuple[str, Weight] | None:
    """The name's last part and the expression of an op on a weight, if it is one of those."""
    value = node.meta["val"]
    if node.target == aten._to_copy.default:
        kind = str(value.dtype).removeprefix("torch.")
        return kind, weight_lib.cast(weight, value.dtype)
    if node.target in VIEWS:
        shape = tuple(int(size) for size in value.shape)
        return "x".join(map(str, shape)), weight_lib.reshape(weight, shape)
    return None
