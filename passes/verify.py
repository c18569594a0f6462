"""What must hold of a Program after every pass, and which ops it may hold at each checkpoint."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from inferc.errors import VerifyError
from inferc.passes.rewrite import infer_type
from inferc.program import Program, target_name

aten, inferc = torch.ops.aten, torch.ops.inferc

LOWERED = frozenset(
    {
        operator.getitem,
        aten.embedding.default,
        aten.cat.default,
        aten.linear.default,
        aten.slice.Tensor,
        aten.view.default,
        aten.add.Tensor,
        aten.mul.Tensor,
        aten.index_select.default,
        inferc.layer_norm.default,
        inferc.rms_norm.default,
        inferc.rms_norm_add.default,
        inferc.rope_table.default,
        inferc.rope.default,
        inferc.kv_write.default,
        inferc.rope_kv_write.default,
        inferc.paged_attention.default,
        inferc.latent_write.default,
        inferc.latent_attention.default,
        inferc.silu_mul.default,
        inferc.gelu_mul.default,
        inferc.pointwise.default,
        inferc.head_linear.default,
        inferc.linear_add.default,
        inferc.linear_wide.default,
        inferc.moe_routing.default,
        inferc.moe_experts.default,
        inferc.lm_head.default,
        inferc.all_reduce.default,
        inferc.all_gather.default,
        inferc.expert_choose.default,
        inferc.expert_dispatch.default,
        inferc.expert_combine.default,
    }
)
"""Every node has a kernel."""

CAPTURED = "captured"
"""Any ATen op, `inferc.attention` and `inferc.moe_experts`: what the frontend makes."""

SERVABLE = "servable"
"""Attention reads the paged cache: nothing mixes tokens any more but `inferc.paged_attention`."""

_CAPTURED_OPS = frozenset({inferc.attention.default, inferc.moe_experts.default})


def _allowed(checkpoint: Any, target: Any) -> bool:
    if target is operator.getitem:
        return True
    namespace = target_name(target).split(".")[0]
    if checkpoint == CAPTURED:
        return namespace == "aten" or target in _CAPTURED_OPS
    if checkpoint == SERVABLE:
        return namespace in ("aten", "inferc") and target != inferc.attention.default
    return target in checkpoint


def check_ops(program: Program, checkpoint: Any) -> None:
    """Raise VerifyError at the first node that the checkpoint (CAPTURED, SERVABLE or LOWERED) does not know."""
    for node in program.graph.nodes:
        if node.op == "call_function" and not _allowed(checkpoint, node.target):
            name = "lowered" if checkpoint is LOWERED else checkpoint
            raise VerifyError(_drawing(program, node, f"{target_name(node.target)} is not an op of a {name} program"))


def verify(program: Program) -> None:
    """Raise VerifyError unless the graph is well formed, typed as its ops say, and reads each of its weights."""
    try:
        program.graph.lint()
    except RuntimeError as error:
        raise VerifyError(f"{program.name}: {error}") from error
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        if node.meta.get("val") is None:
            raise VerifyError(_drawing(program, node, "has no type"))
        if node.op == "get_attr":
            _verify_weight(program, node)
        elif node.op == "call_function":
            _verify_type(program, node)
    used = {str(node.target) for node in program.graph.nodes if node.op == "get_attr"}
    unused = sorted(set(program.weights) - used)
    if unused:
        raise VerifyError(f"{program.name}: weights that nothing reads: {', '.join(unused)}")


def _verify_weight(program: Program, node: fx.Node) -> None:
    weight, value = program.weights.get(str(node.target)), node.meta["val"]
    if weight is None:
        raise VerifyError(_drawing(program, node, f"reads weight {node.target}, which the program does not have"))
    if tuple(value.shape) != weight.shape or value.dtype != weight.dtype:
        raise VerifyError(_drawing(program, node, f"is {_type(value)}, its weight {_type(weight)}"))


def _verify_type(program: Program, node: fx.Node) -> None:
    try:
        value = infer_type(program, node)
    except Exception as error:  # a fake kernel may raise anything; all of it means that the arguments do not fit
        raise VerifyError(_drawing(program, node, f"cannot be typed: {error}")) from error
    if value is not node.meta["val"] and _type(value) != _type(node.meta["val"]):
        raise VerifyError(_drawing(program, node, f"is declared {_type(node.meta['val'])}, its op says {_type(value)}"))


def _type(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(_type(item) for item in value) + ")"
    if isinstance(value, torch.SymInt):
        return str(value.node.expr)
    if not hasattr(value, "shape"):
        return str(value)
    sizes = [str(size.node.expr) if isinstance(size, torch.SymInt) else str(size) for size in value.shape]
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"


def _drawing(program: Program, node: fx.Node, fault: str) -> str:
    """The fault, and the lines around the node with a marker."""
    lines = program.to_text().splitlines()
    calls = [each for each in program.graph.nodes if each.op != "get_attr"]
    name = node.meta.get("name", node.name)
    if node not in calls:
        users = [each for each in calls if each in node.users]
        at = calls.index(users[0]) if users else 0
    else:
        at = calls.index(node)
    around = range(max(0, at - 3), min(len(lines), at + 3))
    drawn = "\n".join(("  --> " if line == at else "      ") + lines[line] for line in around)
    return f"{program.name}: {name} {fault}\n{drawn}"
