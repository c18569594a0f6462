"""The kernel of the gate and up projections with `silu(gate) * up` (SwiGLU), neither of which goes through memory."""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import COUNTS, POINTERS, Source
from inferc.codegen.triton.kernels.gemm import pairs_of, product, tile, tile_of


@triton.jit  # type: ignore[untyped-decorator]
def linear_silu_mul_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    out_ptr,
    counts_ptr,
    COUNT: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FEW: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    WIDTH: tl.constexpr = BLOCK_N // 2  # columns of the result; weight rows alternate between gate and up
    COLUMN_TILES: tl.constexpr = (N + WIDTH - 1) // WIDTH
    rows = tl.load(counts_ptr + COUNT)
    if tl.program_id(0) < tl.cdiv(rows, BLOCK_M) * COLUMN_TILES:
        row_tile, column_tile = tile_of(rows, COLUMN_TILES, BLOCK_M, FEW)
        row = row_tile * BLOCK_M + tl.arange(0, BLOCK_M)
        both = tl.arange(0, BLOCK_N)
        half_column = column_tile * WIDTH + both // 2
        is_row, is_column = row < rows, (half_column < N) | (N % WIDTH == 0)
        total = product(
            x_ptr,
            weight_ptr,
            scale_ptr,
            bias_ptr,
            row,
            is_row,
            half_column + both % 2 * N,
            is_column,
            K,
            X_STRIDE,
            HAS_BIAS,
            BLOCK_K,
            WIDE_DOT,
        )
        dtype = out_ptr.dtype.element_ty
        gate, up = pairs_of(total.to(dtype).to(tl.float32))
        out = gate / (1.0 + tl.exp(-gate)) * up
        column = column_tile * WIDTH + tl.arange(0, WIDTH)
        mask = is_row[:, None] & (column < N)[None, :]
        tl.store(out_ptr + row.to(tl.int64)[:, None] * OUT_STRIDE + column[None, :], out.to(dtype), mask=mask)


def linear_silu_mul(
    dtype: str,
    rows: str,
    n: int,
    k: int,
    strides: tuple[int, int],
    has_bias: bool,
    up_to: int | None,
    int8: bool = False,
    unaligned: tuple[str, ...] = (),
) -> Source:
    """Return the kernel of out [rows, n] = silu(gate) * up.

    gate and up are the two halves of x [rows, k] @ weight [2 * n, k].T plus bias [2 * n], each rounded. `strides` are
    the elements from row to row of x and out. `up_to` and `int8` are those of `linear`.
    """
    cut = tile(2 * n, k, dtype, int8, up_to)
    return Source(
        function=linear_silu_mul_kernel,
        signature={
            "x_ptr": POINTERS[dtype],
            "weight_ptr": POINTERS["int8" if int8 else dtype],
            "scale_ptr": POINTERS["float32"],
            "bias_ptr": POINTERS[dtype],
            "out_ptr": POINTERS[dtype],
            "counts_ptr": POINTERS["int32"],
        },
        constants={
            "COUNT": COUNTS[rows],
            "N": n,
            "K": k,
            **dict(zip(("X_STRIDE", "OUT_STRIDE"), strides, strict=True)),
            "HAS_BIAS": int(has_bias),
            **cut.constants,
        },
        grid=cut.grid("ceil_div(2 * N, BLOCK_N)", rows),
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        stack_bytes=cut.stack_bytes,
        unaligned=unaligned,
    )
