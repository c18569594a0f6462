"""The reference ops of quantization: integers with their scales, and the matrix products of quantized operands."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from inferc.ir.ops.elementwise import silu_mul
from inferc.ir.ops.norms import layer_norm, rms_norm, rms_norm_add
from inferc.ir.ops.registry import define

LARGEST = 127  # the largest magnitude of int8; -128 is not used, so that the negative of every value is a value too
LARGEST_FP8 = 448.0  # the largest float8_e4m3fn (four bits of exponent, three of mantissa)
# The integer that a group's element of largest magnitude gets, whatever its sign, so that all sixteen values are used.
LARGEST_INT4 = -8
INT32_MOST = 2**31 - 1


_unrounded: ContextVar[bool] = ContextVar("unrounded", default=False)


@contextmanager
def unrounded() -> Iterator[None]:
    """Let quantization return the numbers before they are rounded, in float32, in place of integers.

    Scales stay as they are, up to float32, so what reads values with their scales computes the unquantized result.
    """
    token = _unrounded.set(True)
    try:
        yield
    finally:
        _unrounded.reset(token)


def _rows_fake(x: Tensor, *_args: object) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[:1], dtype=torch.float32)


@define("quantize_rows(Tensor x) -> (Tensor, Tensor)", _rows_fake)
def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row to int8 with a scale of its own.

    x [rows, k]; result [rows, k] int8 and [rows] float32, with x = int8 * scale. The scale is the row's largest
    magnitude over 127, or 1 for a row of zeros; numbers round to nearest, ties to even. A row with a NaN or an infinity
    gets a scale that is not finite, so that the error shows in later results.
    """
    within, scale = _within(x, LARGEST)
    return (within if _unrounded.get() else within.round_().to(torch.int8)), scale


def row_scales(x: Tensor, largest: float) -> Tensor:
    """Return the scale of each row, float32 [rows]: its largest magnitude over `largest`, or 1 for a row of zeros."""
    scale = torch.maximum(x.amax(-1), -x.amin(-1)).float() / largest
    return scale.masked_fill_(scale == 0, 1.0)


def _within(x: Tensor, largest: float) -> tuple[Tensor, Tensor]:
    """Divide each row by its scale; return new rows in float32, from -largest to largest, and the scales.

    A quotient that is not a number becomes 0.
    """
    scale, wide = row_scales(x, largest), x.float()
    quotient = wide / scale[:, None] if wide is x else wide.div_(scale[:, None])
    return quotient.nan_to_num_(0.0).clamp_(-largest, largest), scale


def _embedding_int8_fake(weight: Tensor, scale: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    return weight.new_empty((*indices.shape, weight.shape[1]), dtype=dtype)


@define("embedding_int8(Tensor weight, Tensor scale, Tensor indices, ScalarType dtype) -> Tensor", _embedding_int8_fake)
def embedding_int8(weight: Tensor, scale: Tensor, indices: Tensor, dtype: torch.dtype) -> Tensor:
    """Return rows of an int8 embedding table, dequantized to `dtype`.

    weight [vocab_size, size] int8; scale [vocab_size] float32; result [..., size].
    """
    return (weight[indices].float() * scale[indices][..., None]).to(dtype)


def _linear_int8_fake(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


@define(
    "linear_int8(Tensor x, Tensor weight, Tensor scale, Tensor? bias=None, Tensor? residual=None,"
    " ScalarType? dtype=None) -> Tensor",
    _linear_int8_fake,
)
def linear_int8(
    x: Tensor,
    weight: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `linear` with int8 weights (W8A16): the integers are multiplied as they are, each sum by its row's scale.

    x [num_tokens, k]; weight [n, k] int8; scale [n] float32; bias [n]; residual, result [num_tokens, n]. The product
    with its bias is rounded to `dtype` (by default x's), then the residual is added, as in `linear_add`.
    """
    product = torch.nn.functional.linear(x.float(), weight.float()) * scale
    return _finish(product, bias, residual, dtype or x.dtype)


def _linear_w8a8_fake(
    x: Tensor, _x_scale: Tensor, weight: Tensor, _scale: Tensor, dtype: torch.dtype, *_args: object
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


_OF_ROUNDED = (  # the part of a schema after its name, for matrix products whose rows have 8 bits
    "(Tensor x, Tensor x_scale, Tensor weight, Tensor scale, ScalarType dtype, Tensor? bias=None,"
    " Tensor? residual=None) -> Tensor"
)


@define("linear_w8a8" + _OF_ROUNDED, _linear_w8a8_fake)
def linear_w8a8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute `linear` of int8 rows and weights (W8A8): int32 sums are exact, then scaled by row and by output.

    x [num_tokens, k] int8; x_scale [num_tokens] float32; the rest as in `linear_int8`, the result in `dtype`.
    """
    # float64 holds every int32 sum exactly, and PyTorch has a fast matrix product for it.
    exact = torch.float32 if _unrounded.get() else torch.float64  # which holds every sum of integers
    sums = torch.nn.functional.linear(x.to(exact), weight.to(exact)).float()
    return _finish(sums * x_scale[:, None] * scale, bias, residual, dtype)


def _rows_fp8_fake(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape, dtype=torch.float8_e4m3fn), x.new_empty(x.shape[:1], dtype=torch.float32)


@define("quantize_rows_fp8(Tensor x) -> (Tensor, Tensor)", _rows_fp8_fake)
def quantize_rows_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row to float8_e4m3fn with a scale of its own.

    x [rows, k]; result [rows, k] and [rows] float32. The scale is the row's largest magnitude over 448, or 1 for a row
    of zeros; numbers round to nearest, ties to even. A row with a NaN or an infinity gets a scale that is not finite.
    The format is E4M3 of "FP8 Formats for Deep Learning" (https://arxiv.org/abs/2209.05433).
    """
    within, scale = _within(x, LARGEST_FP8)
    return (within if _unrounded.get() else within.to(torch.float8_e4m3fn)), scale


@define("linear_fp8" + _OF_ROUNDED, _linear_w8a8_fake)
def linear_fp8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute `linear` of float8_e4m3fn rows and weights, with exact products and sums in float32.

    The sums are scaled as in `linear_w8a8`.
    """
    sums = torch.nn.functional.linear(x.float(), weight.float())
    return _finish(sums * x_scale[:, None] * scale, bias, residual, dtype)


def largest_group_scale(k: int) -> int:
    """Return the largest integer scale of a group in a row of k elements.

    With it int32 holds every sum over k of an int8 value times a weight from -8 to 7 times a group's scale.
    """
    return max(1, min(LARGEST, INT32_MOST // (LARGEST * -LARGEST_INT4 * k)))


def quantize_int4(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize rows x [rows, k] to four bits: values uint8, group scales int8, row scales float32.

    The three results are those of `weights.int4_values`, `int4_group_scales` and `int4_scales`. A group's exact scale
    is rounded to the nearest integer multiple of its row's scale, which is the row's largest group scale over
    `largest_group_scale(k)` (127 or less).
    """
    wide, exact, scales = _int4_groups(x, group)
    rows = len(x)
    if _unrounded.get():
        return (wide / exact.masked_fill(exact == 0, 1.0)).view(rows, -1), *_int4_divisors(exact, scales)
    of_groups, of_rows = _int4_divisors(exact, scales)
    by = (of_groups[..., None] * scales).masked_fill_(of_groups[..., None] == 0, 1.0)
    values = (wide / by).round_().nan_to_num_(0.0).clamp_(-8, 7).add_(8).to(torch.uint8).view(rows, -1, 2, 4)
    packed = (values[:, :, 0] | values[:, :, 1] << 4).reshape(rows, -1)
    return packed, of_groups, of_rows


def int4_divisors(x: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """Return the second and the third result of `quantize_int4`, which it would compute the values beside."""
    _, exact, scales = _int4_groups(x, group)
    return _int4_divisors(exact, scales)


def _int4_groups(x: Tensor, group: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return x in groups, float32 [rows, groups, group], each group's exact scale, and each row's scale of these."""
    rows, k = x.shape
    groups = -(-k // group)
    wide = torch.nn.functional.pad(x.float(), (0, groups * group - k)).view(rows, groups, group)
    exact = wide.gather(-1, wide.abs().argmax(-1, keepdim=True)) / LARGEST_INT4
    scales = exact.abs().amax(1, keepdim=True) / largest_group_scale(k)
    return wide, exact, scales.masked_fill(scales == 0, 1.0)


def _int4_divisors(exact: Tensor, scales: Tensor) -> tuple[Tensor, Tensor]:
    if _unrounded.get():
        return (exact / scales).squeeze(-1), scales.view(-1)
    of_groups = (exact / scales).round()
    of_groups = torch.where(of_groups == 0, exact.sign(), of_groups).nan_to_num(0.0)
    return of_groups.to(torch.int8).squeeze(-1), scales.view(-1)


def int4_group(values: Tensor, group_scale: Tensor) -> int:
    """Return how many neighbours share a scale in the result of `quantize_int4`.

    values [..., size], two to a byte unless they are `unrounded`; group_scale [..., groups].
    """
    a_byte = 1 if values.is_floating_point() else 2
    return a_byte * int(values.shape[-1]) // int(group_scale.shape[-1])


def unpack_int4(values: Tensor, k: int) -> Tensor:
    """Unpack bytes [rows, size] of `quantize_int4` to their integers, -8 to 7: [rows, k] int8."""
    if values.is_floating_point():  # `unrounded`
        return values[:, :k]
    pairs = values.view(len(values), -1, 1, 4)
    both = torch.cat((pairs & 15, pairs >> 4), -2)
    return both.reshape(len(values), -1)[:, :k].to(torch.int8) - 8


def _linear_int4_fake(
    x: Tensor, weight: Tensor, _group_scale: Tensor, scale: Tensor, *args: Any, **named: Any
) -> Tensor:
    return _linear_int8_fake(x, weight, scale, *args, **named)


@define(
    "linear_int4(Tensor x, Tensor weight, Tensor group_scale, Tensor scale, Tensor? bias=None, Tensor? residual=None,"
    " ScalarType? dtype=None) -> Tensor",
    _linear_int4_fake,
)
def linear_int4(
    x: Tensor,
    weight: Tensor,
    group_scale: Tensor,
    scale: Tensor,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Compute `linear_int8` with four-bit weights (W4A16): x is not rounded; weight and scales as in `linear_w4a8`."""
    return linear_int8(x, _with_group_scales(weight, group_scale, x.shape[1]), scale, bias, residual, dtype)


def _linear_w4a8_fake(
    x: Tensor,
    _x_scale: Tensor,
    weight: Tensor,
    _group_scale: Tensor,
    _scale: Tensor,
    dtype: torch.dtype,
    *_args: object,
) -> Tensor:
    return x.new_empty((x.shape[0], weight.shape[0]), dtype=dtype)


@define(
    "linear_w4a8(Tensor x, Tensor x_scale, Tensor weight, Tensor group_scale, Tensor scale, ScalarType dtype,"
    " Tensor? bias=None, Tensor? residual=None) -> Tensor",
    _linear_w4a8_fake,
)
def linear_w4a8(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    group_scale: Tensor,
    scale: Tensor,
    dtype: torch.dtype,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """Compute `linear` of int8 rows and four-bit weights (W4A8), exactly as `linear_w8a8` does with scaled integers.

    A four-bit integer times its group's scale takes the place of the weight's integer in `linear_w8a8`.
    x [num_tokens, k] int8; x_scale [num_tokens] float32; weight [n, groups * group / 2] uint8, group_scale [n, groups]
    int8 and scale [n] float32 as `weights.int4_values`, `int4_group_scales` and `int4_scales` make them; the rest as in
    `linear_w8a8`, whose sums are exact here too.
    """
    wide = _with_group_scales(weight, group_scale, x.shape[1])
    return linear_w8a8(x, x_scale, wide, scale, dtype, bias, residual)


def _with_group_scales(weight: Tensor, group_scale: Tensor, k: int) -> Tensor:
    """Return four-bit integers times their group's scale, which need 11 bits: [n, k] int16."""
    dtype = torch.float32 if weight.is_floating_point() else torch.int16
    group = int4_group(weight, group_scale)
    return unpack_int4(weight, k).to(dtype) * group_scale.to(dtype).repeat_interleave(group, 1)[:, :k]


def _finish(product: Tensor, bias: Tensor | None, residual: Tensor | None, dtype: torch.dtype) -> Tensor:
    result = (product if bias is None else product + bias.float()).to(dtype)
    return result if residual is None else residual + result


@define(
    "rms_norm_quantize(Tensor x, Tensor? weight, float eps, float weight_offset=0.0, bool round_before_scale=True)"
    " -> (Tensor, Tensor)",
    _rows_fake,
)
def rms_norm_quantize(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, round_before_scale: bool = True
) -> tuple[Tensor, Tensor]:
    """Return `quantize_rows` of `rms_norm`; x [num_tokens, size]."""
    return quantize_rows(rms_norm(x, weight, eps, weight_offset, round_before_scale))


def _rms_norm_add_quantize_fake(x: Tensor, residual: Tensor, *_args: object) -> tuple[Tensor, Tensor, Tensor]:
    return *_rows_fake(x), residual.new_empty(residual.shape)


@define(
    "rms_norm_add_quantize(Tensor x, Tensor residual, Tensor weight, float eps, float weight_offset=0.0,"
    " bool round_before_scale=True) -> (Tensor, Tensor, Tensor)",
    _rms_norm_add_quantize_fake,
)
def rms_norm_add_quantize(
    x: Tensor,
    residual: Tensor,
    weight: Tensor,
    eps: float,
    weight_offset: float = 0.0,
    round_before_scale: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return `quantize_rows` of the normalised result of `rms_norm_add`, and its sum: (int8, scales, sum)."""
    normed, total = rms_norm_add(x, residual, weight, eps, weight_offset, round_before_scale)
    return *quantize_rows(normed), total


@define("layer_norm_quantize(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)", _rows_fake)
def layer_norm_quantize(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Return `quantize_rows` of `layer_norm`; x [num_tokens, size]."""
    return quantize_rows(layer_norm(x, weight, bias, eps))


@define("silu_mul_quantize(Tensor gate, Tensor up) -> (Tensor, Tensor)", _rows_fake)
def silu_mul_quantize(gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
    """Return `quantize_rows` of `silu_mul`; gate, up [num_tokens, size]."""
    return quantize_rows(silu_mul(gate, up))
