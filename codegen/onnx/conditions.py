"""The conditions under which a node can be written as a kernel's ONNX ops."""

from __future__ import annotations

import torch
from torch import fx

from inferc.codegen.conditions import dtype_of, is_tied
from inferc.codegen.kernel import OTHER_CASE
from inferc.ir.program import argument


def nbits_block(k: int) -> int:
    """Return the block size of onnxruntime's MatMulNBits: the largest power of two that divides k, up to 128."""
    return min(128, k & -k)


def is_multiplied_as_integers(node: fx.Node) -> str:
    """Check that an int8 embedding table is also the weight of a product of integer rows (`linear_w8a8`)."""
    return "" if is_tied(node, by=("inferc.linear_w8a8",)) else OTHER_CASE


def blocks_fit(node: fx.Node) -> str:
    """Check that int8 weights [n, k] can be cut along k into blocks of at least 16, as MatMulNBits needs."""
    return "" if nbits_block(int(argument(node, "weight").meta["val"].shape[1])) >= 16 else OTHER_CASE


def float_experts(node: fx.Node) -> str:
    is_float = all(argument(node, name) is None for name in ("gate_up_scale", "down_scale", "x_scale"))
    return "" if is_float else OTHER_CASE


def _is_swiglu(node: fx.Node) -> bool:
    """Tell whether onnxruntime's MoE and QMoE compute these experts: SwiGLU of gate and up, no scaled input."""
    is_its = argument(node, "activation") in ("silu", "swiglu_clamped") and not argument(node, "scale_input")
    return is_its and dtype_of(node, "x") in (torch.float32, torch.float16)


def moe_fits(node: fx.Node) -> str:
    return float_experts(node) or ("" if _is_swiglu(node) else OTHER_CASE)


def int8_experts(node: fx.Node) -> str:
    return "" if dtype_of(node, "gate_up") == torch.int8 and argument(node, "x_scale") is None else OTHER_CASE


def int4_experts(node: fx.Node) -> str:
    return "" if dtype_of(node, "gate_up") == torch.uint8 and argument(node, "x_scale") is None else OTHER_CASE


def qmoe_int8_fits(node: fx.Node) -> str:
    return int8_experts(node) or ("" if _is_swiglu(node) else OTHER_CASE)


def qmoe_int4_fits(node: fx.Node) -> str:
    """Check for int4 experts whose groups are whole, since QMoE reads no padding."""
    if reason := int4_experts(node):
        return reason
    k = (int(argument(node, "gate_up").meta["val"].shape[1]) // 2, int(node.meta["val"].shape[1]))
    packed = (argument(node, name).meta["val"] for name in ("down", "gate_up"))
    are_whole = all(2 * int(each.shape[2]) == size for each, size in zip(packed, k, strict=True))
    return "" if are_whole and _is_swiglu(node) else OTHER_CASE
