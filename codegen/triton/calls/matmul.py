"""The launches of a step's matrix products, fused with what is done to their results.

Each product has a launch for either order of addition. In the fast order, the tiles depend on the number of rows. In
the invariant order, the tiles are the same for any number of rows, so that the bits of a row depend on that row alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from inferc.codegen.triton.aot.source import Source
from inferc.codegen.triton.calls.builder import ROWS, Builder, Call, Choice
from inferc.codegen.triton.kernels import rms_norm
from inferc.codegen.triton.kernels.gemm import ROW_BOUNDS
from inferc.codegen.triton.kernels.linear import linear
from inferc.codegen.triton.kernels.linear_silu_mul import linear_silu_mul
from inferc.codegen.triton.kernels.qkv_rope_kv_write import qkv_rope_kv_write
from inferc.codegen.values import Operand, Values
from inferc.ir.program import dtype_name
from inferc.manifest import FAST, INVARIANT

INVARIANT_ROWS = 64  # rows of a tile in the invariant order
Make = Callable[[int | None], Source]


def linear_(node: fx.Node, values: Values) -> tuple[Call, ...]:
    return _linear(Builder(node, values), "input", "bias")


def linear_wide(node: fx.Node, values: Values) -> tuple[Call, ...]:
    return _linear(Builder(node, values), "x")


def lm_head(node: fx.Node, values: Values) -> tuple[Call, ...]:
    return _linear(Builder(node, values), "hidden", "bias")


def linear_add(node: fx.Node, values: Values) -> tuple[Call, ...]:
    return _linear(Builder(node, values), "x", "bias", "residual")


def linear_int8(node: fx.Node, values: Values) -> tuple[Call, ...]:
    b = Builder(node, values)
    b.weight("scale_ptr", "scale")
    return _linear(b, "x", "bias", "residual" if b.arg("residual") is not None else None)


def _linear(b: Builder, of: str, bias: str | None = None, residual: str | None = None) -> tuple[Call, ...]:
    x, out = b.read("x_ptr", of), b.write("out_ptr")
    b.weight("weight_ptr", "weight")
    has_bias = bias is not None and b.weight("bias_ptr", bias)
    added = None if residual is None else b.read("residual_ptr", residual)
    strides = (x.stride, out.stride if added is None else added.stride, out.stride)

    def source(up_to: int | None) -> Source:
        dtypes = dtype_name(x.dtype), dtype_name(out.dtype)
        return linear(
            *dtypes,
            ROWS[out.pool],
            out.width,
            x.width,
            strides,
            has_bias,
            added is not None,
            up_to=up_to,
            int8=_is_int8(b),
            unaligned=b.unaligned(),
        )

    return _in_both_orders(b, "linear", out, source)


def linear_silu_mul_(node: fx.Node, values: Values) -> tuple[Call, ...]:
    b = Builder(node, values)
    x, out = b.read("x_ptr", "x"), b.write("out_ptr")
    b.weight("weight_ptr", "weight")
    b.weight("scale_ptr", "scale")
    has_bias = b.weight("bias_ptr", "bias")

    def source(up_to: int | None) -> Source:
        shape = (dtype_name(x.dtype), ROWS[out.pool], out.width, x.width, (x.stride, out.stride))
        return linear_silu_mul(*shape, has_bias, up_to, _is_int8(b), b.unaligned())

    return _in_both_orders(b, "linear_silu_mul", out, source)


def qkv_rope_kv_write_(node: fx.Node, values: Values) -> tuple[Call, ...]:
    b = Builder(node, values)
    x, table = b.read("x_ptr", "x"), b.read("table_ptr", "table")
    for name in ("weight", "scale", "q_weight", "k_weight"):
        b.weight(f"{name}_ptr", name)
    has_bias = b.weight("bias_ptr", "bias")
    layers, block_size = b.cache("cache_ptr")
    b.input("slots_ptr", "slot_mapping")
    out = b.write("out_ptr", 0)
    cache, heads = b.arg("kv_cache").meta["val"], int(b.arg("num_heads"))
    how = rms_norm.weight_order(b.arg("q_weight") is not None, bool(b.arg("round_before_scale")))

    def source(up_to: int | None) -> Source:
        return qkv_rope_kv_write(
            dtype_name(x.dtype),
            heads,
            int(cache.shape[4]),
            int(cache.shape[5]),
            table.width // 2,
            str(b.arg("pairs")),
            x.width,
            (x.stride, table.stride, out.stride),
            layers,
            block_size,
            has_bias=has_bias,
            up_to=up_to,
            int8=_is_int8(b),
            eps=float(b.arg("eps")),
            offset=float(b.arg("weight_offset")),
            how=how,
            unaligned=b.unaligned(),
        )

    return _in_both_orders(b, "qkv_rope_kv_write", out, source)


def _is_int8(b: Builder) -> bool:
    return bool(b.arg("weight").meta["val"].dtype == torch.int8)


def _in_both_orders(b: Builder, kernel: str, out: Operand, source: Make) -> tuple[Call, ...]:
    by_rows = [Choice(source(up_to), up_to) for up_to in ROW_BOUNDS]
    fast = b.done(kernel, out, *by_rows, order=FAST)
    return (fast, b.done(kernel, out, invariant(source, ROWS[out.pool]), order=INVARIANT))


def invariant(make: Make, rows: str) -> Source:
    """Return a product for the invariant order: tiles made for INVARIANT_ROWS, as many as the rows need.

    `rows` is the kind of rows: "tokens" or "rows".
    """
    source = make(INVARIANT_ROWS)
    tiles, *_ = source.grid
    if not source.constants["FEW"]:
        return source
    grid = (f"{tiles} * ceil_div(num_{rows}, BLOCK_M)", "1", "1")
    return replace(source, constants={**source.constants, "FEW": 0}, grid=grid)
