"""Check what must hold of a Program after every pass, and which ops it may contain at each checkpoint."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

from inferc.errors import VerifyError
from inferc.ir.program import Program, name_of, target_name
from inferc.passes.rewrite import infer_type

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
        inferc.resize_heads.default,
        inferc.layer_norm.default,
        inferc.rms_norm.default,
        inferc.rms_norm_add.default,
        inferc.rope_table.default,
        inferc.rope.default,
        inferc.dense_write.default,
        inferc.dense_write_attention.default,
        inferc.dense_attention.default,
        inferc.dense_latent_attention.default,
        inferc.kv_write.default,
        inferc.rope_kv_write.default,
        inferc.norm_rope_kv_write.default,
        inferc.qkv_rope_kv_write.default,
        inferc.paged_attention.default,
        inferc.latent_write.default,
        inferc.latent_attention.default,
        inferc.silu_mul.default,
        inferc.gelu_mul.default,
        inferc.pointwise.default,
        inferc.head_linear.default,
        inferc.linear_add.default,
        inferc.linear_silu_mul.default,
        inferc.linear_wide.default,
        inferc.embedding_int8.default,
        inferc.linear_int4.default,
        inferc.linear_int8.default,
        inferc.linear_w8a8.default,
        inferc.linear_fp8.default,
        inferc.linear_w4a8.default,
        inferc.quantize_rows.default,
        inferc.quantize_rows_fp8.default,
        inferc.rms_norm_quantize.default,
        inferc.rms_norm_add_quantize.default,
        inferc.layer_norm_quantize.default,
        inferc.silu_mul_quantize.default,
        inferc.moe_routing.default,
        inferc.moe_experts.default,
        inferc.lm_head.default,
        inferc.lora_shrink.default,
        inferc.lora_lookup.default,
        inferc.lora_expand.default,
        inferc.all_reduce.default,
        inferc.all_gather.default,
        inferc.expert_choose.default,
        inferc.expert_dispatch.default,
        inferc.expert_combine.default,
    }
)
"""The ops of a lowered program, in which every node has a kernel."""

CAPTURED = "captured"
"""The checkpoint behind the frontend: any ATen op, `inferc.attention`, `inferc.moe_experts`, `inferc.moe_routing`."""

SERVABLE = "servable"
"""The checkpoint after which attention reads the KV cache: no other op mixes tokens any more."""

_CAPTURED_OPS = frozenset({inferc.attention.default, inferc.moe_experts.default, inferc.moe_routing.default})


def _allowed(checkpoint: Any, target: Any, own_ops: frozenset[str]) -> bool:
    if target is operator.getitem or (checkpoint != CAPTURED and target_name(target) in own_ops):
        return True
    namespace = target_name(target).split(".")[0]
    if checkpoint == CAPTURED:
        return namespace == "aten" or target in _CAPTURED_OPS
    if checkpoint == SERVABLE:
        return namespace in ("aten", "inferc") and target != inferc.attention.default
    return target in checkpoint


def check_ops(program: Program, checkpoint: Any, own_ops: frozenset[str] = frozenset()) -> None:
    """Raise VerifyError at the first node whose op the checkpoint (CAPTURED, SERVABLE or LOWERED) does not allow.

    own_ops: the ops of a user's kernels, as target_name prints them; they may be there from CAPTURED on.
    """
    for node in program.graph.nodes:
        if node.op == "call_function" and not _allowed(checkpoint, node.target, own_ops):
            name = "lowered" if checkpoint is LOWERED else checkpoint
            raise VerifyError(drawing(program, node, f"{target_name(node.target)} is not an op of a {name} program"))


def verify(program: Program) -> None:
    """Raise VerifyError unless the graph is well formed, typed as its ops say, and reads all its weights and values."""
    _verify_order(program)
    try:
        program.graph.lint()
    except RuntimeError as error:
        raise VerifyError(f"{program.name}: {error}") from error
    for node in program.graph.nodes:
        if node.op == "output":
            continue
        if node.meta.get("val") is None:
            raise VerifyError(drawing(program, node, "has no type"))
        if node.op == "get_attr":
            _verify_weight(program, node)
        elif node.op == "call_function":
            _verify_type(program, node)
    used = {str(node.target) for node in program.graph.nodes if node.op == "get_attr"}
    unused = sorted(set(program.weights) - used)
    if unused:
        raise VerifyError(
            f"{program.name}: weights that nothing reads: {', '.join(unused)}; call program.drop_unused()"
        )


def _verify_order(program: Program) -> None:
    """Check that there is one output, at the end, and that every value is made before it is read, and is read."""
    seen: set[fx.Node] = set()
    nodes = list(program.graph.nodes)
    if [node.op for node in nodes].count("output") != 1 or nodes[-1].op != "output":
        raise VerifyError(drawing(program, nodes[-1], "is the last node; expected one output, at the end"))
    for node in nodes:
        for source in node.all_input_nodes:
            if source not in seen:
                where = "after it" if source in nodes else "nowhere in the graph"
                raise VerifyError(drawing(program, node, f"reads {name_of(source)}, which is {where}"))
        if node.op == "call_function" and not node.users:
            raise VerifyError(drawing(program, node, "is read by nothing; call program.drop_unused()"))
        seen.add(node)


def interface(program: Program) -> dict[str, str]:
    """Describe as text what the frontend, the cache and the runner rely on: inputs, results, KV groups, block size."""
    (results,) = program.output().args
    values = [each.meta.get("val") for each in results]  # type: ignore[union-attr]
    return {
        "inputs": ", ".join(f"{each.name}: {type_text(each.meta.get('val'))}" for each in program.inputs()),
        "results": ", ".join(map(type_text, values)),
        "KV groups": ", ".join(map(str, program.kv_groups)),
        "block size": str(program.block_size),
    }


def verify_interface(program: Program, before: dict[str, str]) -> None:
    """Raise VerifyError if the program's `interface` differs from `before`."""
    for what, now in interface(program).items():
        if now != before[what]:
            fault = f"has other {what} than before: found {now or 'none'}, expected {before[what]}"
            raise VerifyError(drawing(program, program.output(), fault))


def _verify_weight(program: Program, node: fx.Node) -> None:
    weight, value = program.weights.get(str(node.target)), node.meta["val"]
    if weight is None:
        raise VerifyError(drawing(program, node, f"reads weight {node.target}, which the program does not have"))
    if tuple(value.shape) != weight.shape or value.dtype != weight.dtype:
        raise VerifyError(drawing(program, node, f"is {type_text(value)}, its weight {type_text(weight)}"))


def _verify_type(program: Program, node: fx.Node) -> None:
    try:
        value = infer_type(program, node)
    except Exception as error:  # a fake kernel may raise anything; all of it means that the arguments do not fit
        raise VerifyError(drawing(program, node, f"cannot be typed: {error}")) from error
    if value is not node.meta["val"] and type_text(value) != type_text(node.meta["val"]):
        raise VerifyError(
            drawing(program, node, f"is declared {type_text(node.meta['val'])}, its op says {type_text(value)}")
        )


def type_text(value: Any) -> str:
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(type_text(item) for item in value) + ")"
    if isinstance(value, torch.SymInt):
        return str(value.node.expr)
    if not hasattr(value, "shape"):
        return str(value)
    sizes = [str(size.node.expr) if isinstance(size, torch.SymInt) else str(size) for size in value.shape]
    return f"{str(value.dtype).removeprefix('torch.')}[{', '.join(sizes)}]"


def drawing(program: Program, node: fx.Node, fault: str) -> str:
    """Format a fault with the lines of the program around the node, which is marked by an arrow."""
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
