"""The kernel of x @ weight.T on tensor cores, with an optional bias and residual.

Weights are in the dtype of x, or in int8.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.aot.launch import Product
from inferc.codegen.triton.aot.source import COUNTS, POINTERS, Source
from inferc.codegen.triton.kernels.gemm import product, tile, tile_of


@triton.jit  # type: ignore[untyped-decorator]
def linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    residual_ptr,
    out_ptr,
    counts_ptr,
    COUNT: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    RESIDUAL_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FEW: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    COLUMN_TILES: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    rows = tl.load(counts_ptr + COUNT)
    if tl.program_id(0) < tl.cdiv(rows, BLOCK_M) * COLUMN_TILES:
        row_tile, column_tile = tile_of(rows, COLUMN_TILES, BLOCK_M, FEW)
        row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        column = column_tile * BLOCK_N + tl.arange(0, BLOCK_N)
        is_row, is_column = row < rows, (column < N) | (N % BLOCK_N == 0)
        total = product(
            x_ptr,
            weight_ptr,
            scale_ptr,
            bias_ptr,
            row,
            is_row,
            column,
            is_column,
            K,
            X_STRIDE,
            HAS_BIAS,
            BLOCK_K,
            WIDE_DOT,
        )
        mask = is_row[:, None] & is_column[None, :]
        dtype = out_ptr.dtype.element_ty
        out = total.to(dtype)
        if ADDS:
            at = residual_ptr + row.to(tl.int64)[:, None] * RESIDUAL_STRIDE + column[None, :]
            out = (out.to(tl.float32) + tl.load(at, mask=mask, other=0.0).to(tl.float32)).to(dtype)
        tl.store(out_ptr + row.to(tl.int64)[:, None] * OUT_STRIDE + column[None, :], out, mask=mask)


def linear(
    dtype: str,
    out_dtype: str,
    rows: str,
    n: int,
    k: int,
    strides: tuple[int, int, int],
    has_bias: bool,
    adds: bool,
    up_to: int | None,
    int8: bool = False,
    unaligned: tuple[str, ...] = (),
) -> Source:
    """Return the kernel of a matrix product with an optional bias and residual.

    It computes out [rows, n] = x [rows, k] @ weight [n, k].T, plus bias [n], rounded, plus residual [rows, n].
    `strides` are the elements from row to row of x, the residual and out. `up_to` is the most rows of a step, or None
    for any number. With `int8`, the weight is int8 and its rows are multiplied by scale [n] float32.
    """
    cut = tile(n, k, dtype, int8, up_to)
    x_stride, residual_stride, out_stride = strides
    product = Product(n, k, dtype, out_dtype, x_stride, out_stride, has_bias, residual_stride if adds else None)
    # If the dtype of the library's result differs from that of its operands, its bias and residual must have the dtype
    # of the result.
    fits_library = not int8 and not unaligned and (dtype == out_dtype or not (has_bias or adds))
    return Source(
        function=linear_kernel,
        signature={
            "x_ptr": POINTERS[dtype],
            "weight_ptr": POINTERS["int8" if int8 else dtype],
            "scale_ptr": POINTERS["float32"],
            "bias_ptr": POINTERS[dtype],
            "residual_ptr": POINTERS[dtype],
            "out_ptr": POINTERS[out_dtype],
            "counts_ptr": POINTERS["int32"],
        },
        constants={
            "COUNT": COUNTS[rows],
            "N": n,
            "K": k,
            **dict(zip(("X_STRIDE", "RESIDUAL_STRIDE", "OUT_STRIDE"), strides, strict=True)),
            "HAS_BIAS": int(has_bias),
            "ADDS": int(adds),
            **cut.constants,
        },
        grid=cut.grid("ceil_div(N, BLOCK_N)", rows),
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        stack_bytes=cut.stack_bytes,
        unaligned=unaligned,
        product=product if fits_library else None,
    )
