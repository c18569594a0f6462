"""The kernel of LayerNorm, of RMSNorm of the heads in a row, and of RMSNorm of a sum that nothing else reads.

It has one program per row or head, which reads it once and holds it in registers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import COUNTS, POINTERS, Source
from inferc.codegen.triton.kernels.rms_norm import NO_WEIGHT, normed


@triton.jit  # type: ignore[untyped-decorator]
def norm_parts_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    residual_ptr,
    weight_ptr,
    bias_ptr,
    out_ptr,
    counts_ptr,
    COUNT: tl.constexpr,
    PARTS: tl.constexpr,
    WIDTH: tl.constexpr,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    WEIGHT_STRIDE: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    HOW: tl.constexpr,
    ADDS: tl.constexpr,
    CENTERS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if row < tl.load(counts_ptr + COUNT):
        columns = tl.arange(0, BLOCK)
        mask = columns < WIDTH
        at = part * WIDTH + columns
        wide = tl.load(x_ptr + row * X_STRIDE + at, mask=mask, other=0.0).to(tl.float32)
        dtype = out_ptr.dtype.element_ty
        if ADDS:
            residual = tl.load(residual_ptr + row * RESIDUAL_STRIDE + at, mask=mask, other=0.0).to(tl.float32)
            wide = (wide + residual).to(dtype).to(tl.float32)
        if CENTERS:
            wide = tl.where(mask, wide - tl.sum(wide) / WIDTH, 0.0)
        weight = wide
        if HOW != NO_WEIGHT:
            weight = tl.load(weight_ptr + part * WEIGHT_STRIDE + columns, mask=mask, other=0.0).to(tl.float32)
        out = normed(wide, tl.sum(wide * wide), weight, WIDTH, EPS, OFFSET, HOW, dtype)
        if HAS_BIAS:
            out += tl.load(bias_ptr + part * WEIGHT_STRIDE + columns, mask=mask, other=0.0).to(tl.float32)
        tl.store(out_ptr + row * OUT_STRIDE + at, out.to(dtype), mask=mask)


def norm_parts(
    dtype: str,
    rows: str,
    sizes: tuple[int, int],
    strides: tuple[int, int, int, int],
    eps: float,
    how: int,
    *,
    offset: float = 0.0,
    adds: bool = False,
    centers: bool = False,
    has_bias: bool = False,
    unaligned: tuple[str, ...] = (),
) -> Source:
    """Return the kernel that normalises each part of x [rows, parts * width] by itself.

    It computes `inferc.layer_norm` if it `centers`, else `inferc.rms_norm`. `sizes` is (parts, width). `strides` has
    the elements from row to row of x, of what is added to x first if it `adds`, and of out; last comes the distance
    from the weights of a part to those of the next, 0 if all parts have the same. `offset` and `how` are those of
    `rms_norm`.
    """
    parts, width = sizes
    block = triton.next_power_of_2(width)
    return Source(
        function=norm_parts_kernel,
        signature={
            **dict.fromkeys(("x_ptr", "residual_ptr", "weight_ptr", "bias_ptr", "out_ptr"), POINTERS[dtype]),
            "counts_ptr": POINTERS["int32"],
        },
        constants={
            "COUNT": COUNTS[rows],
            "PARTS": parts,
            "WIDTH": width,
            **dict(zip(("X_STRIDE", "RESIDUAL_STRIDE", "OUT_STRIDE", "WEIGHT_STRIDE"), strides, strict=True)),
            "EPS": eps,
            "OFFSET": offset,
            "HOW": how,
            "ADDS": int(adds),
            "CENTERS": int(centers),
            "HAS_BIAS": int(has_bias),
            "BLOCK": block,
        },
        grid=(f"num_{rows}", "PARTS", "1"),
        num_warps=max(1, min(16, block // 512)),
        unaligned=unaligned,
    )
