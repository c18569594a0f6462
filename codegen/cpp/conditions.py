"""The conditions under which a C++ kernel runs a node: the limits of the headers in kernels/."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from inferc.codegen.conditions import (
    at_most,
    cache_fits,
    cached_dim,
    dtype_of,
    head_dim_fits,
    is_tied,
    joined,
    multiple,
    shape_of,
)
from inferc.codegen.cpp.values import CPP_TYPES
from inferc.codegen.kernel import OTHER_CASE
from inferc.codegen.pointwise import parts
from inferc.ir.ops.quantize import int4_group
from inferc.ir.program import argument
from inferc.targets import Target


def latents_fit(node: fx.Node) -> str:
    """Check the limits of attention.h: latents of at most 1024 elements and V of at most 512, in steps of 16."""
    block_size, dim = shape_of(node, "kv_cache")[3], cached_dim(node)
    v_dim = argument(node, "v_dim")
    steps = joined(multiple("the latent's size", dim, 16), multiple("its values' size", v_dim, 16))
    most = joined(at_most("the latent's size", dim, 1024), at_most("its values' size", v_dim, 512))
    return joined(steps, most, multiple("block_size", block_size, 16))


def _experts_fit(node: fx.Node) -> str:
    """Check the limits of moe.h: at most 1024 experts, and an inner size in whole panels of 16."""
    num_experts, both, _ = shape_of(node, "gate_up")
    return joined(at_most("num_experts", num_experts, 1024), multiple("the experts' intermediate_size", both // 2, 16))


def float_experts_fit(node: fx.Node) -> str:
    return _experts_fit(node) if dtype_of(node, "down") == dtype_of(node, "x") else OTHER_CASE


def int8_experts_fit(node: fx.Node) -> str:
    return OTHER_CASE if dtype_of(node, "x") == torch.int8 else _experts_fit(node)


def w8a8_experts_fit(node: fx.Node) -> str:
    if dtype_of(node, "x") != torch.int8:
        return OTHER_CASE
    hidden, inter = shape_of(node, "down")[1:]
    return joined(
        _experts_fit(node),
        at_most("hidden_size", hidden, INT32_HOLDS),
        at_most("the experts' intermediate_size", inter, INT32_HOLDS),
    )


def w4a8_experts_fit(node: fx.Node) -> str:
    if dtype_of(node, "x") != torch.int8:
        return OTHER_CASE
    hidden, inter = shape_of(node, "gate_up")[2] * 2, shape_of(node, "down")[2] * 2  # two to a byte
    return joined(
        _experts_fit(node),
        _group_fits(node, "gate_up", "gate_up_group_scale"),
        _group_fits(node, "down", "down_group_scale"),
        at_most("hidden_size", hidden, INT4_LONGEST),
        at_most("the experts' intermediate_size", inter, INT4_LONGEST),
    )


def ranks_fit(node: fx.Node) -> str:
    """Check the limit of exchange.h on ranks: it keeps the ranks of a token as the bits of one 64-bit word."""
    return at_most("--ep", argument(node, "size"), 64)


INT32_HOLDS = (2**31 - 1) // 127**2
"""The number of products of magnitude at most 127 x 127 that a sum of Dot<i8> in simd.h holds without overflow."""
INT4_LONGEST = 1 << 16
"""The largest k of weights in four bits: group scales then have at least five bits.

See `ops.quantize.largest_group_scale`.
"""


def int32_holds(node: fx.Node) -> str:
    return at_most("in_features", shape_of(node, "weight")[1], INT32_HOLDS)


def _heads_are_panels(node: fx.Node) -> str:
    """Check the limits of kv.h: a head is whole panels, and its rotary dimension fits a buffer on the stack."""
    head_dim = cached_dim(node)
    return joined(head_dim_fits(head_dim), at_most("rotary dimension", shape_of(node, "table")[-1], head_dim))


def without_scale(node: fx.Node) -> str:
    return "" if argument(node, "scale") is None else OTHER_CASE


def float_qkv_fits(node: fx.Node) -> str:
    return _heads_are_panels(node) if argument(node, "scale") is None else OTHER_CASE


def int8_qkv_fits(node: fx.Node) -> str:
    return _heads_are_panels(node) if argument(node, "x_scale") is None else OTHER_CASE


def w8a8_qkv_fits(node: fx.Node) -> str:
    return OTHER_CASE if argument(node, "x_scale") is None else joined(_heads_are_panels(node), int32_holds(node))


def w4a8_qkv_fits(node: fx.Node) -> str:
    return joined(_heads_are_panels(node), four_bits_fit(node))


def packed_lookup(node: fx.Node) -> str:
    return "" if is_tied(node) else OTHER_CASE


def four_bits_fit(node: fx.Node) -> str:
    return joined(_group_fits(node, "weight", "group_scale"), at_most("k", shape_of(node, "x")[1], INT4_LONGEST))


def _group_fits(node: fx.Node, weight: str, group_scale: str) -> str:
    group = int4_group(argument(node, weight).meta["val"], argument(node, group_scale).meta["val"])
    return "" if group in (32, 64, 128) else f"weights in groups of {group}: expected 32, 64 or 128"


@dataclass(frozen=True)
class ForCpp:
    """The reason why a cpp kernel cannot run a node: `argument` must have `dtype`, and `check` must find no reason.

    int8_cache: for an op that uses the KV cache, whether the kernel is for a cache in int8 instead of `dtype`; None for
    other ops.
    """

    argument: str
    dtype: torch.dtype
    check: Callable[[fx.Node], str] | None = None
    int8_cache: bool | None = None

    def __call__(self, node: fx.Node, target: Target) -> str:
        if dtype_of(node, self.argument) != self.dtype:
            return OTHER_CASE
        reason = "" if self.int8_cache is None else cache_fits(node, self.dtype, self.int8_cache)
        return reason or ("" if self.check is None else self.check(node))


@dataclass(frozen=True)
class ForCppIntegers:
    """The reason why a cpp kernel cannot run a node with integer weights.

    The argument `weight` must be `stored`, and the result, or the first of several results, must have `dtype`.
    """

    weight: str
    dtype: torch.dtype
    check: Callable[[fx.Node], str] | None = None
    stored: torch.dtype = torch.int8
    int8_cache: bool | None = None

    def __call__(self, node: fx.Node, target: Target) -> str:
        result = node.meta["val"]
        first = result if isinstance(result, Tensor) else result[0]
        if dtype_of(node, self.weight) != self.stored or first.dtype != self.dtype:
            return OTHER_CASE
        reason = "" if self.int8_cache is None else cache_fits(node, self.dtype, self.int8_cache)
        return reason or ("" if self.check is None else self.check(node))


def cat_fits(node: fx.Node) -> str:
    parts: Any = node.args[0]
    rank = node.meta["val"].dim()
    if (argument(node, "dim") % rank) != rank - 1:
        return f"a concatenation along axis {argument(node, 'dim')}: expected the last"
    dtypes = {each.meta["val"].dtype for each in parts}
    return "" if dtypes <= {torch.float32, torch.bfloat16} and len(dtypes) == 1 else OTHER_CASE


def pointwise_fits(node: fx.Node) -> str:
    inputs: Any = node.args[0]
    strange = [each.meta["val"].dtype for each in (*inputs, node) if each.meta["val"].dtype not in CPP_TYPES]
    if strange:
        return f"elementwise arithmetic on {strange[0]}: expected {', '.join(map(str, CPP_TYPES))}"
    return "" if parts(node) else "elementwise arithmetic whose operands repeat in two ways"
