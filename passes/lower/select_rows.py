"""Compute only the rows whose logits were asked for, from just after the last attention on.

The selection starts in front of the output and moves up through every op that works row by row, so that the last
layer's projections, experts and norm run on [num_rows, …] and not on [num_tokens, …]. A prefill samples one row per
sequence, whatever its length. Where another program reads what the LM head does, of every token, only the LM head runs
on the selected rows.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass

import torch
from torch import Tensor, fx

from inferc.ir.program import Program, ancestors, target_name
from inferc.passes.rewrite import infer_type, infer_types, no_rewrite

aten, inferc = torch.ops.aten, torch.ops.inferc

VIEWS = (aten.slice.Tensor, aten.view.default)
ROW_WISE = frozenset(
    {
        *VIEWS,
        operator.getitem,
        aten._to_copy.default,
        aten.add.Tensor,
        aten.mul.Tensor,
        aten.cat.default,
        aten.linear.default,
        inferc.layer_norm.default,
        inferc.resize_heads.default,
        inferc.head_linear.default,
        inferc.linear_add.default,
        inferc.linear_wide.default,
        inferc.pointwise.default,
        inferc.rms_norm.default,
        inferc.rms_norm_add.default,
        inferc.silu_mul.default,
        inferc.gelu_mul.default,
        inferc.moe_routing.default,
        inferc.moe_experts.default,
        inferc.all_reduce.default,
        # A gather is of columns; the exchange of experts keeps its rows to itself.
        inferc.all_gather.default,
        inferc.expert_choose.default,
        inferc.expert_dispatch.default,
        inferc.expert_combine.default,
    }
)


@dataclass(frozen=True)
class SelectRows:
    """The pass; see the module. head_only: whether all that the LM head reads stays on the rows of all tokens."""

    head_only: bool = False
    name: str = "select_rows"

    def __call__(self, program: Program) -> int:
        rows = next((node for node in program.inputs() if node.name == "logits_rows"), None)
        selected = any(node.target == aten.index_select.default for node in program.graph.nodes)
        if rows is None or selected:
            return 0
        region = _region(program)
        if self.head_only:
            head = next(node for node in reversed(program.graph.nodes) if node.target == aten.linear.default)
            region -= ancestors(head.all_input_nodes)
        count = _select(program, rows, region)
        infer_types(program, [node for node in program.graph.nodes if node in region])
        return count


def _has_rows(program: Program, node: fx.Node) -> bool:
    """Return whether axis 0 of the value is the step's tokens."""
    tokens = program.inputs()[0].meta["val"].shape[0]
    value = node.meta["val"]
    value = value[0] if isinstance(value, tuple) else value
    return isinstance(value, Tensor) and value.dim() > 0 and str(value.shape[0]) == str(tokens)


def _region(program: Program) -> set[fx.Node]:
    """Return the nodes that can run on selected rows: row-wise ops that only such nodes read."""
    region: set[fx.Node] = set()
    for node in reversed(list(program.graph.nodes)):
        row_wise = node.op == "call_function" and node.target in ROW_WISE and _has_rows(program, node)
        if row_wise and all(user.op == "output" or user in region for user in node.users):
            region.add(node)
    # A view or a part of a tuple stays on all rows if its source does: it costs nothing there.
    for node in program.graph.nodes:
        if node in region and node.target in (*VIEWS, operator.getitem) and node.args[0] not in region:
            region.remove(node)
    return region


def _select(program: Program, rows: fx.Node, region: set[fx.Node]) -> int:
    """Insert an index_select between the region and each value of all tokens that the region reads."""
    chosen: dict[fx.Node, fx.Node] = {}
    edges = [
        (source, node)
        for node in program.graph.nodes
        if node in region or node.op == "output"
        for source in node.all_input_nodes
        if source not in region and _has_rows(program, source)
    ]
    for source, node in edges:
        if source not in chosen:
            with program.graph.inserting_before(node):
                made = program.graph.call_function(aten.index_select.default, (source, 0, rows))
            name = f"{source.meta.get('name', source.name)}.rows"
            made.meta.update(name=name, layer=source.meta.get("layer"), val=infer_type(program, made))
            chosen[source] = made
            if source.op == "call_function" and source.target not in ROW_WISE:
                no_rewrite("select_rows", source, f"{target_name(source.target)} is not known to work row by row")
            elif source.op == "call_function":
                no_rewrite("select_rows", source, "it is also read by what needs all rows")
        node.replace_input_with(source, chosen[source])
    return len(chosen)
