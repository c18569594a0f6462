"""The conditions under which TensorRT can compute a node as a kernel's layers do."""

from __future__ import annotations

import torch
from torch import fx

from inferc.codegen.conditions import dtype_of, multiple, shape_of
from inferc.codegen.kernel import OTHER_CASE
from inferc.ir.program import argument
from inferc.targets import Target

LARGEST_FUSED_HEAD = 256


def experts_fit(node: fx.Node) -> str:
    """Check that experts' weights are floats, or int8 with a scale for each output."""
    special = ("x_scale", "gate_up_group_scale", "down_group_scale")
    return "" if all(argument(node, name) is None for name in special) else OTHER_CASE


def packed_lookup(node: fx.Node) -> str:
    """Check that rows of an int8 table can be read four elements at a time."""
    return multiple("hidden_size", shape_of(node, "weight")[1], 4)


def fp8_fits(_node: fx.Node, target: Target) -> str:
    """Check that the target's chip multiplies in fp8."""
    return "" if "fp8" in target.schemes else OTHER_CASE


def fuses_attention(node: fx.Node) -> str:
    """Check that TensorRT's fused attention can compute the node.

    It takes 16 bits, heads of at most 256 in steps of 8, and keys as large as values, but neither sinks nor a softcap.
    """
    head_dim, v_dim = shape_of(node, "q")[2], shape_of(node, "v_cache")[3]
    is_plain = argument(node, "sinks") is None and not argument(node, "softcap")
    dtype = dtype_of(node, "q")
    in_16_bits = dtype in (torch.bfloat16, torch.float16) and dtype == dtype_of(node, "k_cache")
    fits = head_dim == v_dim and head_dim % 8 == 0 and head_dim <= LARGEST_FUSED_HEAD
    return "" if is_plain and in_16_bits and fits else OTHER_CASE
