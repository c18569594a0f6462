"""The kernel of RMSNorm, and of RMSNorm of a sum that is kept.

It has one program per row, which reads the row once and holds it in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import COUNTS, POINTERS, Source

# The values of HOW: whether a norm has a weight, and when values are rounded to their dtype.
NO_WEIGHT = tl.constexpr(0)
ROUND_BEFORE_WEIGHT = tl.constexpr(1)
ROUND_AFTER_WEIGHT = tl.constexpr(2)


@triton.jit  # type: ignore[untyped-decorator]
def normed(  # type: ignore[no-untyped-def]
    wide,
    square_sum,
    weight,
    WIDTH: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    HOW: tl.constexpr,
    dtype: tl.constexpr,
):
    """Normalise values by the root mean square of their row, and multiply by the weight, if any.

    HOW says whether values are rounded to `dtype` before or after they are multiplied by the weight.
    """
    out = wide * tl.rsqrt(square_sum / WIDTH + EPS)
    if HOW == ROUND_BEFORE_WEIGHT:
        out = out.to(dtype).to(tl.float32) * (weight + OFFSET).to(dtype).to(tl.float32)
    if HOW == ROUND_AFTER_WEIGHT:
        out = out * (weight + OFFSET)
    return out


@triton.jit  # type: ignore[untyped-decorator]
def rms_norm_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    out_ptr,
    sum_ptr,
    counts_ptr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SUM_STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    HOW: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(counts_ptr + COUNT):
        columns = tl.arange(0, BLOCK)
        mask = columns < WIDTH
        dtype = out_ptr.dtype.element_ty
        wide = tl.load(x_ptr + row * X_STRIDE + columns, mask=mask, other=0.0).to(tl.float32)
        if ADDS:
            residual = tl.load(residual_ptr + row * RESIDUAL_STRIDE + columns, mask=mask, other=0.0).to(tl.float32)
            total = (wide + residual).to(dtype)
            tl.store(sum_ptr + row * SUM_STRIDE + columns, total, mask=mask)
            wide = total.to(tl.float32)
        weight = wide
        if HOW != NO_WEIGHT:
            weight = tl.load(weight_ptr + columns, mask=mask, other=0.0).to(tl.float32)
        out = normed(wide, tl.sum(wide * wide), weight, WIDTH, EPS, OFFSET, HOW, dtype)
        tl.store(out_ptr + row * OUT_STRIDE + columns, out.to(dtype), mask=mask)


def weight_order(has_weight: bool, round_before_scale: bool) -> int:
    """Return the HOW of `normed` for a norm with or without a weight."""
    order = ROUND_BEFORE_WEIGHT if round_before_scale else ROUND_AFTER_WEIGHT
    return int((order if has_weight else NO_WEIGHT).value)


def rms_norm(
    dtype: str,
    rows: str,
    width: int,
    strides: tuple[int, int, int, int],
    eps: float,
    offset: float,
    how: int,
    adds: bool,
) -> Source:
    """Return the kernel of `inferc.rms_norm`, or of `inferc.rms_norm_add` if it `adds`.

    `rows` is "tokens" or "rows" of a step. `strides` are the elements from row to row of x, the residual, out and the
    sum; those of tensors that are not there do not matter.
    """
    block = triton.next_power_of_2(width)
    names = ("X_STRIDE", "RESIDUAL_STRIDE", "OUT_STRIDE", "SUM_STRIDE")
    return Source(
        function=rms_norm_kernel,
        signature={
            **dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "out_ptr", "sum_ptr"), POINTERS[dtype]),
            "counts_ptr": POINTERS["int32"],
        },
        constants={
            "COUNT": COUNTS[rows],
            "WIDTH": width,
            **dict(zip(names, strides, strict=True)),
            "EPS": eps,
            "OFFSET": offset,
            "HOW": how,
            "ADDS": int(adds),
            "BLOCK": block,
        },
        grid=(f"num_{rows}", "1", "1"),
        num_warps=max(1, min(16, block // 512)),
        # On Blackwell, ptxas spills a value that is computed first and used last, although registers are free.
        stack_bytes=8,
    )
