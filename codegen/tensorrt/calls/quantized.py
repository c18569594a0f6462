"""The TensorRT layers of products whose rows are quantized at run time, each row by a scale of its own.

Both operands come out of `Dequantize` layers with one scale. TensorRT documents that it computes such products in int8
or fp8; no GPU has confirmed it yet. The scale is a power of two, which rounds nothing and keeps sums within 16 bits.
TensorRT has no product with scales of rows and of outputs, so these multiply the sums in float32.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from inferc.codegen.tensorrt.network import Tensor, TensorRTNetwork
from inferc.ir.ops.quantize import LARGEST, LARGEST_FP8
from inferc.ir.program import arguments, named_arguments

# For each dtype, its largest number, and the value of a 1 between the layers, chosen so that no number exceeds 1.
LARGEST_AND_UNIT = {torch.int8: (float(LARGEST), 2.0**-7), torch.float8_e4m3fn: (LARGEST_FP8, 2.0**-9)}


def quantize_rows(net: TensorRTNetwork, node: fx.Node) -> tuple[Tensor, Tensor]:
    """Quantize each row by its largest magnitude, and return the rounded rows and their scales.

    A row with a NaN or an infinity gets the scale NaN, since TensorRT does not say what a maximum makes of these; so
    does a row whose magnitudes add up to more than float32 holds.
    """
    values, _ = node.meta["val"]
    largest, unit = LARGEST_AND_UNIT[values.dtype]
    wide = net.wide(arguments(node)[0])
    magnitude = net.unary("ABS", wide)
    scale = net.elementwise("DIV", net.reduce("MAX", magnitude, 1), net.number(largest, 2))
    scale = net.where(net.elementwise("EQUAL", scale, net.number(0.0, 2)), net.number(1.0, 2), scale)
    is_finite = net.elementwise("LESS", net.reduce("SUM", magnitude, 1), net.number(math.inf, 2))
    scale = net.where(is_finite, scale, net.number(math.nan, 2))
    within = net.elementwise("DIV", wide, net.times(scale, 1 / unit))
    rounded = net.add("quantize", within, net.number(unit, 0), net.dtype(values.dtype))
    return rounded, net.view(scale, -1)


def linear_w8a8(net: TensorRTNetwork, node: fx.Node) -> Tensor:
    """Multiply quantized rows by a quantized weight.

    The sums are rounded to the result's dtype before they are scaled, once more than in the reference.
    """
    named: dict[str, Any] = named_arguments(node)
    x, weight, dtype = named["x"], named["weight"], node.meta["val"].dtype
    _, unit = LARGEST_AND_UNIT[x.meta["val"].dtype]
    rows = net.add("dequantize", net.value(x), net.number(unit, 0), net.dtype(dtype))
    matrix = net.dequantized_by(weight, unit, dtype)
    sums = net.cast(net.matmul(rows, matrix, transposed=True), torch.float32)
    by_row = net.times(net.view(net.value(named["x_scale"]), -1, 1), unit**-2)
    product = net.mul(net.mul(sums, by_row), net.value(named["scale"]))
    if named["bias"] is not None:
        product = net.plus(product, net.wide(named["bias"]))
    product = net.cast(product, dtype)
    return product if named["residual"] is None else net.plus(product, net.value(named["residual"]))


quantize_rows_fp8, linear_fp8 = quantize_rows, linear_w8a8  # the operands' dtypes select int8 or fp8
