"""Why a node cannot be written as the ONNX ops of a kernel: what the standard's ops and onnxruntime's own take."""

from __future__ import annotations

import torch
from torch import fx

from inferc.codegen.conditions import dtype_of, is_tied
from inferc.codegen.kernel import OTHER_CASE
from inferc.ir.program import argument


def nbits_block(k: int) -> int:
    """How many neighbours along k are a block of onnxruntime's MatMulNBits: the largest power of two that divides, to 128."""
    return min(128, k & -k)


def is_multiplied_as_integers(node: fx.Node) -> str:
    """Of a table in int8: a product of rows in integers reads it too."""
    return "" if is_tied(node, by=("inferc.linear_w8a8",)) else OTHER_CASE


def blocks_fit(node: fx.Node) -> str:
    """Of int8 weights [n, k]: for kernels that take k in blocks, of 16 at least."""
    return "" if nbits_block(int(argument(node, "weight").meta["val"].shape[1])) >= 16 else OTHER_CASE


def float_experts(node: fx.Node) -> str:
    is_float = all(argument(node, name) is None for name in ("gate_up_scale", "down_scale", "x_scale"))
    return "" if is_float else OTHER_CASE


def _is_swiglu(node: fx.Node) -> bool:
    """As onnxruntime's MoE and QMoE: SwiGLU of gate and up, no scaled input."""
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
    """Groups that are whole: QMoE reads no padding."""
    if reason := int4_experts(node):
        return reason
    k = (int(argument(node, "gate_up").meta["val"].shape[1]) // 2, int(node.meta["val"].shape[1]))
    packed = (argument(node, name).meta["val"] for name in ("down", "gate_up"))
    are_whole = all(2 * int(each.shape[2]) == size for each, size in zip(packed, k, strict=True))
    return "" if are_whole and _is_swiglu(node) else OTHER_CASE
