"""The reasons why a Triton kernel cannot run a node."""

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
    last_axis,
    plain_lookup,
    routing_fits,
    shape_of,
)
from inferc.codegen.kernel import OTHER_CASE
from inferc.codegen.pointwise import parts
from inferc.ir.program import argument, named_arguments, target_name
from inferc.targets import Target


def concat_fits(node: fx.Node) -> str:
    """Check that two rows of floats are put side by side."""
    values = [each.meta["val"] for each in argument(node, "tensors")]
    dtypes = {value.dtype for value in values}
    if len(dtypes) > 1 or not dtypes <= set(FLOATS):
        return OTHER_CASE
    if len(values) != 2 or {value.dim() for value in values} != {2}:
        return f"a concatenation of {len(values)} values of {values[0].dim()} axes: expected two of rows"
    return last_axis(node)


def common_routing_fits(node: fx.Node) -> str:
    """Return why a kernel for the common scores cannot route a node: its score, or its number of experts."""
    return joined(routing_fits(node), is_common_score(node))


@dataclass(frozen=True)
class ForTriton:
    """A check that tells why a Triton kernel cannot run a node.

    It wants floats in `argument` and all weights in the dtype of `argument`, and then asks `check`, which may have
    another reason. With `uses_cache`, K and V must be stored in that dtype too. With `mixed`, weights may have other
    dtypes.
    """

    argument: str
    check: Callable[[fx.Node], str] | None = None
    uses_cache: bool = False
    mixed: bool = False

    def __call__(self, node: fx.Node, target: Target) -> str:
        dtype = dtype_of(node, self.argument)
        if dtype not in FLOATS:
            return OTHER_CASE
        slopes = named_arguments(node).get("alibi")  # float32 in every model, whatever the dtype of the rest
        for weight in (each for each in node.all_input_nodes if each.op == "get_attr" and each is not slopes):
            if not self.mixed and (found := weight.meta["val"].dtype) != dtype:
                return f"weight {weight.target} in {found}: expected {dtype}, as {self.argument}"
        reason = cache_fits(node, dtype, dtype_of(node, "kv_cache") == torch.int8) if self.uses_cache else ""
        return reason or ("" if self.check is None else self.check(node))


def one_row_each(node: fx.Node) -> str:
    """Check that a norm is of whole rows, not of the heads in them."""
    rank = len(shape_of(node, "x"))
    return "" if rank == 2 else OTHER_CASE


def heads_of_rows(node: fx.Node) -> str:
    """Check that a norm is of the heads in rows."""
    rank = len(shape_of(node, "x"))
    return OTHER_CASE if rank == 2 else "" if rank == 3 else f"rank {rank}: expected rows, or heads of rows"


def lookup_by_position(node: fx.Node) -> str:
    """Check that a lookup is by positions, which are int64 where token ids are int32."""
    return plain_lookup(node) if dtype_of(node, "indices") == torch.int64 else OTHER_CASE


def sum_is_unread(node: fx.Node) -> str:
    """Check that nothing reads the second result, the sum, which then has no place in memory."""
    read = any(target_name(user.target) == "getitem" and user.args[1] == 1 for user in node.users)
    return OTHER_CASE if read else ""


def gated_fits(node: fx.Node) -> str:
    """Check the dtypes of a gated projection's weights and biases.

    Weights have the dtype of the rows, or are int8 with a scale for each output. Biases have the dtype of the rows.
    """
    stored, rows, bias = dtype_of(node, "weight"), dtype_of(node, "x"), dtype_of(node, "bias")
    if stored != (rows if argument(node, "scale") is None else torch.int8) or bias not in (None, rows):
        return f"gate and up in {stored}, a bias in {bias}: expected {rows}, as rows are, or weights in int8"
    return ""


def qkv_fits(node: fx.Node) -> str:
    """Check the dtypes of a fused projection of q, k and v, and its head sizes.

    Weights have the dtype of the rows, or are int8 with a scale for each output. K and V are stored in the dtype of the
    rows.
    """
    stored, rows, cache = dtype_of(node, "weight"), dtype_of(node, "x"), dtype_of(node, "kv_cache")
    if argument(node, "x_scale") is not None or stored not in (rows, torch.int8):
        return f"a projection in {stored}, of rows in {rows}: expected both alike, or int8"
    return rope_dims_fit(node) if cache == rows else f"a KV cache of {cache}: expected {rows}, as rows are"


def rope_dims_fit(node: fx.Node) -> str:
    """Check that head_dim is even, and that no more of a head is rotated than it has."""
    dim = int(argument(node, "kv_cache").meta["val"].shape[-1])
    return (
        f"head_dim {dim}: expected an even one"
        if dim % 2
        else at_most("rotary dimension", shape_of(node, "table")[-1], dim)
    )


def grouped_experts_fit(node: fx.Node) -> str:
    """Check the dtypes of the experts' weights and biases, and the number of experts.

    Weights have the dtype of the rows, or are all int8. Biases have the dtype of the rows.
    """
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
