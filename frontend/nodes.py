"""Helpers that add typed and named calls to a captured program, and that read its constants."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from inferc.ir import weights as weight_lib
from inferc.ir.program import Program, name_of, target_name


@dataclass(frozen=True)
class Calls:
    """An adder of calls in front of the node `before`, whose module and layer they take."""

    program: Program
    before: fx.Node

    def add(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """Add a call of `target` and return its node."""
        with self.program.graph.inserting_before(self.before):
            node = self.program.graph.call_function(target, args, kwargs)
        operands, options = fx.map_arg((args, kwargs), lambda each: each.meta["val"])
        with self.program.fake_mode:
            value = target(*operands, **options)
        name = f"{name_of(self.before).rpartition('.')[0]}.{target_name(target).split('.')[1].lstrip('_')}"
        node.meta.update(val=value, name=name.lstrip("."), layer=self.before.meta.get("layer"))
        return node


def retype(program: Program, changed: fx.Node) -> None:
    """Infer the types again of all nodes that depend on `changed`, whose memory layout is a new one."""
    todo = list(changed.users)
    while todo:
        node = todo.pop(0)
        value = node.meta.get("val")
        if not isinstance(value, Tensor) or not isinstance(node.target, torch._ops.OpOverload):
            continue
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
        with program.fake_mode:
            found = node.target(*args, **kwargs)
        if str(found.stride()) != str(value.stride()):
            node.meta["val"] = found
            todo += node.users


def constant_value(program: Program, node: fx.Node) -> Tensor | None:
    """Return the value of a constant of the model's code, or None for another node."""
    if node.op != "get_attr" or not program.weight(node).is_constant:
        return None
    return weight_lib.read_constant(program.weight(node))
