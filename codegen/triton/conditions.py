"""Why a Triton kernel cannot run a node."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from inferc.codegen.conditions import (
    FLOATS,
    INTEGERS,
    at_most,
    cache_fits,
    dtype_of,
    is_common_score,
    joined,
    plain_lookup,
    routing_fits,
    shape_of,
)
from inferc.codegen.kernel import OTHER_CASE
from inferc.codegen.pointwise import parts
from inferc.ir.program import argument, named_arguments, target_name
from inferc.targets import Target


def common_routing_fits(node: fx.Node) -> str:
    """Why a kernel with the scores that most models use cannot route so: the score, or how many experts there are."""
    return joined(routing_fits(node), is_common_score(node))


@dataclass(frozen=True)
class ForTriton:
    """Why not, of a Triton kernel: `argument` is of floats, all weights are in its dtype, and `check`
    has no reason either.

    uses_cache: K and V are stored in that dtype too. mixed: weights may be in other dtypes.
    """

    argument: str
    check: Callable[[fx.Node], str] | None = None
    uses_cache: bool = False
    mixed: bool = False

    def __call__(self, node: fx.Node, target: Target) -> str:
        dtype = dtype_of(node, self.argument)
        if dtype not in FLOATS:
            return OTHER_CASE
        slopes = named_arguments(node).get("alibi")  # are float32 in every model
        for weight in (each for each in node.all_input_nodes if each.op == "get_attr" and each is not slopes):
            if not self.mixed and (found := weight.meta["val"].dtype) != dtype:
                return f"weight {weight.target} in {found}: expected {dtype}, as {self.argument}"
        reason = cache_fits(node, dtype, dtype_of(node, "kv_cache") == torch.int8) if self.uses_cache else ""
        return reason or ("" if self.check is None else self.check(node))


def one_row_each(node: fx.Node) -> str:
    """A norm of whole rows, not of the heads in them."""
    rank = len(shape_of(node, "x"))
    return "" if rank == 2 else OTHER_CASE


def heads_of_rows(node: fx.Node) -> str:
    """A norm of the heads of rows."""
    rank = len(shape_of(node, "x"))
    return OTHER_CASE if rank == 2 else "" if rank == 3 else f"rank {rank}: expected rows, or heads of rows"


def lookup_by_position(node: fx.Node) -> str:
    """A lookup by positions, which are wider than token ids."""
    return plain_lookup(node) if dtype_of(node, "indices") == torch.int64 else OTHER_CASE


def sum_is_unread(node: fx.Node) -> str:
    """Whether nothing takes the second result, which then has no place."""
    read = any(target_name(user.target) == "getitem" and user.args[1] == 1 for user in node.users)
    return OTHER_CASE if read else ""


def gated_fits(node: fx.Node) -> str:
    """Weights as rows have them, or in int8 with a scale for each output; biases as rows have them."""
    stored, rows, bias = dtype_of(node, "weight"), dtype_of(node, "x"), dtype_of(node, "bias")
    if stored != (rows if argument(node, "scale") is None else torch.int8) or bias not in (None, rows):
        return f"gate and up in {stored}, a bias in {bias}: expected {rows}, as rows are, or weights in int8"
    return ""


def qkv_fits(node: fx.Node) -> str:
    """Weights as rows have them, or in int8 with a scale for each output; K and V are stored as rows are."""
    stored, rows, cache = dtype_of(node, "weight"), dtype_of(node, "x"), dtype_of(node, "kv_cache")
    if argument(node, "x_scale") is not None or stored not in (rows, torch.int8):
        return f"a projection in {stored}, of rows in {rows}: expected both alike, or int8"
    return rope_dims_fit(node) if cache == rows else f"a KV cache of {cache}: expected {rows}, as rows are"


def rope_dims_fit(node: fx.Node) -> str:
    """An even head, of which no more than all is rotated."""
    dim = int(argument(node, "kv_cache").meta["val"].shape[-1])
    return (
        f"head_dim {dim}: expected an even one"
        if dim % 2
        else at_most("rotary dimension", shape_of(node, "table")[-1], dim)
    )


def grouped_experts_fit(node: fx.Node) -> str:
    """Weights as rows have them, or all in int8; biases as rows have them."""
    rows, stored = dtype_of(node, "x"), dtype_of(node, "down")
    of_biases = {dtype_of(node, name) for name in ("gate_up_bias", "down_bias")} - {None, rows}
    if stored not in (rows, torch.int8) or dtype_of(node, "gate_up") != stored or of_biases:
        return f"experts in {dtype_of(node, 'gate_up')} and {stored}: expected {rows}, as the rows, or int8"
    return at_most("num_experts", shape_of(node, "down")[0], 1024)


def pointwise_fits(node: fx.Node) -> str:
    inputs: Any = node.args[0]
    strange = [each.meta["val"].dtype for each in inputs if each.meta["val"].dtype not in (*FLOATS, *INTEGERS)]
    if strange or node.meta["val"].dtype not in FLOATS:
        return f"elementwise arithmetic on {(*strange, node.meta['val'].dtype)[0]}: expected floats"
    too_many = at_most("inputs of elementwise arithmetic:", len(inputs), 8)
    return too_many or ("" if parts(node) else "elementwise arithmetic whose operands repeat in two ways")
