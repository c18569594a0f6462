"""The launches of norms."""

from __future__ import annotations

from typing import Any

from torch import fx

from inferc.codegen.triton.calls.builder import ROWS, Builder, Call
from inferc.codegen.triton.kernels import (
    layer_norm,
    rms_norm,
)
from inferc.codegen.values import Operand, Values
from inferc.ir.program import dtype_name


def rms_norm_(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, out = b.read("x_ptr", "x"), b.write("out_ptr")
    return _rms_norm(b, (x, x, out, out), False)


def rms_norm_add(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    x, residual = b.read("x_ptr", "x"), b.read("residual_ptr", "residual")
    out, total = b.write("out_ptr", 0), b.write("sum_ptr", 1)
    return _rms_norm(b, (x, residual, out, total), True)


def _rms_norm(b: Builder, operands: tuple[Operand, Operand, Operand, Operand], adds: bool) -> Call:
    out = operands[2]
    weighs = b.weight("weight_ptr", "weight")
    x, residual, _, total = (operand.stride for operand in operands)
    source = rms_norm.rms_norm(
        dtype_name(out.dtype),
        ROWS[out.pool],
        out.width,
        (x, residual, out.stride, total),
        float(b.arg("eps")),
        float(b.arg("weight_offset")),
        rms_norm.weight_order(weighs, bool(b.arg("round_before_scale"))),
        adds,
    )
    return b.done("rms_norm", out, source)


def layer_norm_(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    how = rms_norm.weight_order(b.weight("weight_ptr", "weight"), round_before_scale=False)
    return _norm_parts(b, "layer_norm", how, {"centers": True, "has_bias": b.weight("bias_ptr", "bias")})


def rms_norm_heads(node: fx.Node, values: Values) -> Call:
    b = Builder(node, values)
    how = rms_norm.weight_order(b.weight("weight_ptr", "weight"), bool(b.arg("round_before_scale")))
    return _norm_parts(b, "rms_norm_heads", how, {"offset": float(b.arg("weight_offset"))})


def rms_norm_of_sum(node: fx.Node, values: Values) -> Call:
    """Return the call of an `inferc.rms_norm_add` whose sum nothing reads, so that it has no place in memory."""
    b = Builder(node, values)
    how = rms_norm.weight_order(b.weight("weight_ptr", "weight"), bool(b.arg("round_before_scale")))
    more = {"offset": float(b.arg("weight_offset")), "adds": True}
    return _norm_parts(b, "rms_norm_of_sum", how, more, b.read("residual_ptr", "residual"))


def _norm_parts(b: Builder, name: str, how: int, more: dict[str, Any], residual: Operand | None = None) -> Call:
    x, out = b.read("x_ptr", "x"), b.write("out_ptr", None if residual is None else 0)
    added = out if residual is None else residual
    weight = b.arg("weight")
    width = int(b.arg("x").meta["val"].shape[-1])
    of_parts = weight is not None and weight.meta["val"].dim() > 1
    source = layer_norm.norm_parts(
        dtype_name(out.dtype),
        ROWS[out.pool],
        (out.width // width, width),
        (x.stride, added.stride, out.stride, width if of_parts else 0),
        float(b.arg("eps")),
        how,
        **more,
        unaligned=b.unaligned(),
    )
    return b.done(name, out, source)
