"""Pack linears that share their input into one: q, k, v, and gate, up.

One wide product keeps the cores busy and reads its input once. The weights (and biases) are concatenated by output row;
each former result becomes a slice of the new one, which costs nothing.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from inferc.ir import weights as weight_lib
from inferc.ir.program import Program, dtype_name, name_of
from inferc.passes.rewrite import infer_type, no_rewrite

aten, inferc = torch.ops.aten, torch.ops.inferc


def _operands(node: fx.Node) -> tuple[fx.Node, fx.Node, fx.Node | None]:
    x, weight, *rest = (*node.args, node.kwargs.get("bias"))
    bias = rest[0] if rest else None
    assert isinstance(x, fx.Node) and isinstance(weight, fx.Node)
    assert bias is None or isinstance(bias, fx.Node)
    return x, weight, bias


def _why_not(node: fx.Node) -> str:
    """Return why a linear must not be packed, or "" if it may be.

    Routers stay apart, because quantizing passes read their few rows in another precision.
    """
    if any(user.target == inferc.moe_routing.default for user in node.users):
        return "it is a router"
    for each in _operands(node)[1:]:
        if each is not None and each.op != "get_attr":
            return f"{name_of(each)} is no weight"
        if each is not None and len(each.users) > 1:
            return f"weight {each.target} is read by {len(each.users)} nodes, expected this one alone"
    return ""


@dataclass(frozen=True)
class PackProjections:
    name: str = "pack_projections"

    def __call__(self, program: Program) -> int:
        readers: dict[fx.Node, list[fx.Node]] = {}
        for node in program.graph.find_nodes(op="call_function", target=aten.linear.default, sort=True):
            readers.setdefault(_operands(node)[0], []).append(node)
        groups = [group for nodes in readers.values() if len(nodes) > 1 for group in self._alike(nodes)]
        for group in groups:
            _pack(program, group)
        if groups:
            program.drop_unused()
        return len(groups)

    def _alike(self, nodes: list[fx.Node]) -> list[list[fx.Node]]:
        """Group the linears of one input that can be packed: all with a bias or all without, and of one dtype."""
        alike: dict[tuple[bool, torch.dtype], list[fx.Node]] = {}
        for node in nodes:
            reason = _why_not(node)
            if reason:
                no_rewrite(self.name, node, reason)
                continue
            _, weight, bias = _operands(node)
            alike.setdefault((bias is not None, weight.meta["val"].dtype), []).append(node)
        for (has_bias, dtype), group in alike.items():
            if len(group) == 1:
                how = f"it is alone {'with' if has_bias else 'without'} a bias and in {dtype_name(dtype)}"
                no_rewrite(self.name, group[0], f"{how}, of {len(nodes)} that read {name_of(_operands(group[0])[0])}")
        return [group for group in alike.values() if len(group) > 1]


def _common_name(names: list[str]) -> str:
    """Join names: `layers.0.attention.q+k+v` from `layers.0.attention.q`, `….k`, `….v`.

    A common suffix is written once.
    """
    split = [name.split(".") for name in names]
    head = 0
    while all(len(parts) > head + 1 and parts[head] == split[0][head] for parts in split):
        head += 1
    tail = 0
    while all(len(parts) > head + tail + 1 and parts[-1 - tail] == split[0][-1 - tail] for parts in split):
        tail += 1
    middles = ["_".join(parts[head : len(parts) - tail]) for parts in split]
    return ".".join([*split[0][:head], "+".join(middles), *split[0][len(split[0]) - tail :]])


def _pack(program: Program, group: list[fx.Node]) -> None:
    first = group[0]
    operands = [_operands(node) for node in group]
    packed: list[fx.Node] = [operands[0][0]]
    for part in (1, 2):
        readers = [node for each in operands if (node := each[part]) is not None]
        if readers:
            name = _common_name([str(node.target) for node in readers])
            weight = weight_lib.concat(tuple(program.weight(node) for node in readers))
            packed.append(program.add_weight(name, weight, before=first))
    graph, layer = program.graph, first.meta.get("layer")
    with graph.inserting_before(first):
        linear = graph.call_function(aten.linear.default, tuple(packed))
        linear.meta.update(name=_common_name([str(node.meta.get("name", node.name)) for node in group]), layer=layer)
        linear.meta["val"] = infer_type(program, linear)
        start = 0
        for node, (_, weight_node, _) in zip(group, operands):
            stop = start + weight_node.meta["val"].shape[0]
            piece = graph.call_function(aten.slice.Tensor, (linear, -1, start, stop))
            piece.meta.update(name=node.meta.get("name", node.name), layer=node.meta.get("layer"))
            piece.meta["val"] = infer_type(program, piece)
            node.replace_all_uses_with(piece)
            start = stop
