"""Compute at compile time what a model's code computes from constants alone: rope frequencies, position tables.

Such a value depends on no input and on no tensor of the checkpoint, and becomes a constant of the program.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from inferc.ir import weights as weight_lib
from inferc.ir.program import Program, name_of
from inferc.passes.rewrite import no_rewrite

aten = torch.ops.aten
# The largest constant that is folded, in bytes, because the artifact holds constants as text too.
MOST_BYTES = 1 << 22
KEPT = (aten.expand.default, aten.view.default, aten._to_copy.default, aten.unsqueeze.default, aten.transpose.int)


@dataclass(frozen=True)
class FoldConstants:
    name: str = "fold_constants"

    def __call__(self, program: Program) -> int:
        known: dict[fx.Node, Tensor] = {}
        for node in program.graph.nodes:
            value = _value(program, node, known)
            if value is not None:
                known[node] = value
        count = 0
        for node, value in known.items():
            read = [user for user in node.users if user not in known]
            if node.op != "call_function" or not read or not _computes(node):
                continue
            if value.numel() * value.itemsize > MOST_BYTES:
                no_rewrite(self.name, node, f"it has {value.numel()} elements")
                continue
            if value.dim() == 0 or value.dtype == torch.bool:
                continue
            made = program.add_weight(f"{name_of(node)}.constant", weight_lib.constant(value.contiguous()), before=node)
            for user in read:
                user.replace_input_with(node, made)
            count += 1
        if count:
            program.drop_unused()
        return count


def _value(program: Program, node: fx.Node, known: dict[fx.Node, Tensor]) -> Tensor | None:
    """Return a node's value if it depends on constants alone and is a tensor of known size, or None."""
    fake = node.meta.get("val")
    if not isinstance(fake, Tensor) or any(isinstance(size, torch.SymInt) for size in fake.shape):
        return None
    if node.op == "get_attr":
        weight = program.weight(node)
        return weight_lib.read_constant(weight) if weight.is_constant and weight.num_bytes <= MOST_BYTES else None
    if node.op != "call_function" or node.target is operator.getitem or _namespace(node) != "aten":
        return None
    if any(source not in known for source in node.all_input_nodes) or _is_random(node):
        return None
    args, kwargs = fx.map_arg((node.args, dict(node.kwargs)), known.__getitem__)
    made: Any = node.target(*args, **kwargs)  # type: ignore[operator]
    return made if isinstance(made, Tensor) and made.dtype == fake.dtype and made.shape == fake.shape else None


def _computes(node: fx.Node) -> bool:
    """Return whether a value is the result of arithmetic.

    A constant that is only rearranged is not folded, because other passes read it in that form.
    """
    while node.op == "call_function" and node.target in KEPT:
        node = node.all_input_nodes[0]
    return node.op == "call_function"


def _namespace(node: fx.Node) -> str:
    return node.target.namespace if isinstance(node.target, torch._ops.OpOverload) else ""


def _is_random(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in node.target.tags
