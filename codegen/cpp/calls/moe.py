"""The calls of mixtures of experts, on one rank and on several, and the scratch memory that they need."""

from __future__ import annotations

import math

from torch import fx

from inferc.codegen.cpp.calls.builder import Builder, cpp_bool, cpp_float
from inferc.codegen.cpp.calls.ranks import GROUPS
from inferc.codegen.cpp.values import CPP_TYPES, Call, cpp_type, row_count
from inferc.codegen.values import Operand, Values
from inferc.ir.ops.quantize import int4_group
from inferc.ir.program import argument, target_name


def _placement(b: Builder) -> str:
    positions = b.arg("positions")
    where = b.input("positions") if positions.op == "placeholder" else f"{b.read('positions')[0]}.data"
    experts, replicas = b.arg("placement").meta["val"].shape
    return f"Placement{{{{{b.weight('placement')}, {experts}, {replicas}, {where}}}}}"


def _touch_scratch(b: Builder) -> None:
    b.reads.append(("experts", 0, 1))
    b.writes.append(("experts", 0, 1))


def expert_choose(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    ids, operand = b.read("expert_ids")
    where = _placement(b)
    out, _ = b.write()
    _touch_scratch(b)
    sizes = f"{row_count(operand)}, {operand.width}, {where}, {GROUPS['ep']}"
    return b.done(f"expert_choose(t, s, {ids}, {sizes}, {out});")


def _exchange(b: Builder, ids: Operand) -> str:
    _touch_scratch(b)
    how = f"{row_count(ids)}, {ids.width}, {b.arg('size')}, {GROUPS[b.arg('group')]}"
    return f"Exchange{{{{s, {_placement(b)}, {how}}}}}"


def expert_dispatch(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, operand = b.read("x")
    ids, choices = b.read("expert_ids")
    weights, _ = b.read("expert_weights")
    exchange = _exchange(b, choices)
    outs = ", ".join(b.write(index)[0] for index in range(3))
    kind = cpp_type(operand)
    return b.done(f"expert_dispatch<{kind}>(t, {exchange}, {x}, {ids}, {weights}, {operand.width}, {outs});")


def expert_combine(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    y, operand = b.read("y")
    ids, choices = b.read("expert_ids")
    exchange = _exchange(b, choices)
    out, _ = b.write_exchanged()
    return b.done(f"expert_combine<{cpp_type(operand)}>(t, {exchange}, {y}, {ids}, {operand.width}, {out});")


def exchange_work_bytes(node: fx.Node) -> tuple[int, int]:
    """Return the scratch of one node of exchange.h, as (bytes per row, bytes in addition)."""
    top_k = int(argument(node, "expert_ids").meta["val"].shape[1])
    table = math.prod(argument(node, "placement").meta["val"].shape) * 4
    name = {"inferc.expert_dispatch": "x", "inferc.expert_combine": "y"}.get(target_name(node.target))
    if name is None:
        return 0, table + 64
    x, size = argument(node, name).meta["val"], argument(node, "size")
    fan = min(top_k, size)
    # A parcel has the size of the larger message. At most as many rows leave as arrive; `fan` more cover the rounding
    # of a rank's share.
    parcel = int(x.shape[1]) * x.dtype.itemsize + top_k * 8 + 8
    lists, sums = 8 + 4 + 4, int(x.shape[1]) * 4
    return lists + 2 * parcel + sums, table + fan * (parcel + 4) + 8 * size * 6 + 14 * 64


def moe_routing(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, operand = b.read("router_logits")
    ids, _ = b.write(0)
    weights, _ = b.write(1)
    groups = f"{b.arg('group_score').upper()}, {operand.width}, {b.arg('top_k')}, "
    groups += f"{b.arg('num_groups')}, {b.arg('topk_groups')}"
    how = f"{b.arg('score').upper()}, {groups}, {cpp_bool(b.arg('renormalize'))}, "
    how += f"{cpp_float(b.arg('scale'))}, {cpp_float(b.arg('margin'))}"
    bias = b.arg("bias")
    types = f"{cpp_type(operand)}, {cpp_type(operand) if bias is None else CPP_TYPES[bias.meta['val'].dtype]}"
    routing = f"Routing{{{{{how}}}}}"
    return b.done(
        f"moe_routing<{types}>(t, {x}, {b.weight('bias')}, {row_count(operand)}, {routing}, {ids}, {weights});"
    )


def moe_experts(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, operand = b.read("x")
    x_scale = "{{}}" if b.arg("x_scale") is None else b.read("x_scale")[0]
    ids, choices = b.read("expert_ids")
    weights, _ = b.read("expert_weights")
    out, result = b.write()
    experts, both, _ = b.arg("gate_up").meta["val"].shape
    hidden, inter = operand.width, both // 2
    types = f"{cpp_type(result)}, {CPP_TYPES[b.arg('down').meta['val'].dtype]}"
    matrices = (_expert_matrix(b, "gate_up", types, both, hidden), _expert_matrix(b, "down", types, hidden, inter))
    _touch_scratch(b)
    b.ahead = "Ahead{{}}"  # nothing to fetch ahead: the chosen experts are not known before the call
    fields = (
        f"{x}, {x_scale}, {ids}, {weights}, {', '.join(matrices)}, {b.arg('activation').upper()}, "
        f"{cpp_float(b.arg('alpha'))}, {cpp_float(b.arg('limit'))}, {cpp_bool(b.arg('scale_input'))}, "
        f"{row_count(operand)}, {choices.width}, {experts}, {hidden}, {inter}, {out}, s.scratch"
    )
    all_types = f"{types}, {cpp_type(operand)}"
    return b.done(f"moe_experts<{all_types}>(t, Experts<{all_types}>{{{{{fields}}}}});")


def _expert_matrix(b: Builder, name: str, types: str, n: int, k: int) -> str:
    fields = f"{b.weight(name)}, {b.weight(f'{name}_bias')}, {n}, {k}"
    if b.arg(f"{name}_scale") is not None:
        fields += f", {b.weight(f'{name}_scale')}"
    groups = b.arg(f"{name}_group_scale")
    if groups is not None:
        group = int4_group(b.arg(name).meta["val"], groups.meta["val"])
        fields += f", {b.weight(f'{name}_group_scale')}, {group}"
    return f"ExpertMatrix<{types}>{{{{{fields}}}}}"


def moe_work_bytes(node: fx.Node) -> tuple[int, int]:
    """Return the scratch of one moe_experts node, as (bytes per row, bytes in addition); see ExpertWork in moe.h."""
    size = node.meta["val"].dtype.itemsize
    experts, both, _ = (int(size) for size in argument(node, "gate_up").meta["val"].shape)
    hidden, inter = int(node.meta["val"].shape[1]), both // 2
    top_k = int(argument(node, "expert_ids").meta["val"].shape[1])
    of_choice = inter * size + 4
    if argument(node, "x_scale") is not None:
        of_choice += inter + 4
    elif argument(node, "scale_input"):
        of_choice += hidden * size
    return top_k * of_choice + hidden * 4, (experts + 1) * 4 + 7 * 64
