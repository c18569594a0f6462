"""x @ weight.T on tensor cores, by tiles: any number of rows, with a bias and a residual where there are.

Sums run over k in ascending tiles, without split-k, so that a row's bits depend neither on the other rows nor on how many
there are, as long as tiles are cut alike. The compute-bound kernel for Hopper and the one that streams weights for few rows
come beside it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.source import COUNTS, POINTERS, Source


@triton.jit  # type: ignore[untyped-decorator]
def linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
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
    WIDE_DOT: tl.constexpr,
):
    rows = tl.load(counts_ptr + COUNT)
    first = tl.program_id(1) * BLOCK_M
    if first < rows:
        row = first + tl.arange(0, BLOCK_M)
        column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        k = tl.arange(0, BLOCK_K)
        is_row, is_column = row < rows, column < N
        x_at = x_ptr + row.to(tl.int64)[:, None] * X_STRIDE + k[None, :]
        weight_at = weight_ptr + column.to(tl.int64)[None, :] * K + k[:, None]
        total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for start in range(0, K, BLOCK_K):
            if K % BLOCK_K == 0:
                x = tl.load(x_at, mask=is_row[:, None], other=0.0)
                weight = tl.load(weight_at, mask=is_column[None, :], other=0.0)
            else:
                left = k < K - start
                x = tl.load(x_at, mask=is_row[:, None] & left[None, :], other=0.0)
                weight = tl.load(weight_at, mask=is_column[None, :] & left[:, None], other=0.0)
            if WIDE_DOT:
                x, weight = x.to(tl.float32), weight.to(tl.float32)
            total = tl.dot(x, weight, total, input_precision="ieee")
            x_at += BLOCK_K
            weight_at += BLOCK_K
        if HAS_BIAS:
            total += tl.load(bias_ptr + column, mask=is_column, other=0.0).to(tl.float32)[None, :]
        mask = is_row[:, None] & is_column[None, :]
        dtype = out_ptr.dtype.element_ty
        if ADDS:  # to the product as it is rounded
            at = residual_ptr + row.to(tl.int64)[:, None] * RESIDUAL_STRIDE + column[None, :]
            residual = tl.load(at, mask=mask, other=0.0).to(tl.float32)
            total = total.to(dtype).to(tl.float32) + residual
        tl.store(out_ptr + row.to(tl.int64)[:, None] * OUT_STRIDE + column[None, :], total.to(dtype), mask=mask)


def linear(
    dtype: str,
    out_dtype: str,
    rows: str,
    n: int,
    k: int,
    strides: tuple[int, int, int],
    has_bias: bool,
    adds: bool,
    few: bool,
) -> Source:
    """out [rows, n] = x [rows, k] @ weight [n, k].T, plus bias [n], rounded, plus residual [rows, n].

    strides: elements from row to row of x, the residual and out; few: rows in tiles of 16 instead of 64.
    """
    return Source(
        function=linear_kernel,
        signature={
            **dict.fromkeys(("x_ptr", "weight_ptr", "bias_ptr", "residual_ptr"), POINTERS[dtype]),
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
            "BLOCK_M": 16 if few else 64,
            "BLOCK_N": 64 if few or dtype == "float32" else 128,
            "BLOCK_K": 64 if dtype != "float32" else 32,
            "WIDE_DOT": 0,
        },
        grid=("ceil_div(N, BLOCK_N)", f"ceil_div(num_{rows}, BLOCK_M)", "1"),
        num_warps=4,
        num_stages=4 if dtype != "float32" else 3,
    )
