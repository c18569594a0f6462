"""The kernels of a mixture of experts: a sort of choices by expert, two grouped products, and a sum.

A choice is a token's k-th expert, numbered token * top_k + k. A tile of a product has choices of one expert only.

Nothing is added by atomics, and each product sums over its inner axis in ascending tiles, so that a token's bits do not
depend on other tokens. Tiles of rows are found from where each expert's choices begin. That takes no table of tiles,
and their number need not be known where the grid is made: expert e has the tiles from begin[e] // BLOCK_M + e on, which
are enough for its choices. Source: Gale et al. 2022, arXiv:2211.15841.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import COUNTS, POINTERS, Source
from inferc.codegen.triton.kernels.elementwise import activated
from inferc.ir.ops.experts import ACTIVATIONS

CHOICES_BLOCK, COLUMNS_BLOCK = 1024, 1024


@triton.jit  # type: ignore[untyped-decorator]
def sort_choices_kernel(  # type: ignore[no-untyped-def]
    ids_ptr,
    begins_ptr,
    order_ptr,
    counts_ptr,
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    EXPERTS: tl.constexpr,
    IDS_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Sort choices by expert, as a counting sort with one program per expert.

    A program counts the choices of the experts before its own, then writes its expert's choices in ascending order.
    """
    expert = tl.program_id(0)
    choices = tl.load(counts_ptr + COUNT) * TOP_K
    each = tl.arange(0, BLOCK)
    lower = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, choices, BLOCK):
        choice = start + each
        at = ids_ptr + choice // TOP_K * IDS_STRIDE + choice % TOP_K
        lower += (tl.load(at, mask=choice < choices, other=EXPERTS) < expert).to(tl.int32)
    place = tl.sum(lower)
    tl.store(begins_ptr + expert, place)
    for start in range(0, choices, BLOCK):
        choice = start + each
        at = ids_ptr + choice // TOP_K * IDS_STRIDE + choice % TOP_K
        own = (tl.load(at, mask=choice < choices, other=EXPERTS) == expert).to(tl.int32)
        tl.store(order_ptr + place + tl.cumsum(own) - own, choice, mask=own == 1)
        place += tl.sum(own)
    if expert == EXPERTS - 1:
        tl.store(begins_ptr + EXPERTS, place)


def sort_choices(rows: str, experts: int, top_k: int, ids_stride: int) -> Source:
    """Return the kernel that sorts choices by expert.

    It reads ids [rows, top_k] i32, whose rows are `ids_stride` elements apart. It writes order [rows * top_k] i32, the
    choices by ascending expert, and ascending within an expert. It also writes begins [experts + 1] i32: where each
    expert's choices begin, and their total number.
    """
    return Source(
        function=sort_choices_kernel,
        signature=dict.fromkeys(("ids_ptr", "begins_ptr", "order_ptr", "counts_ptr"), POINTERS["int32"]),
        constants={
            "COUNT": COUNTS[rows],
            "TOP_K": top_k,
            "EXPERTS": experts,
            "IDS_STRIDE": ids_stride,
            "BLOCK": CHOICES_BLOCK,
        },
        grid=("EXPERTS", "1", "1"),
        num_warps=4,
    )


@triton.jit  # type: ignore[untyped-decorator]
def finished(total, scale_at, bias_at, mask, HAS_SCALE: tl.constexpr, HAS_BIAS: tl.constexpr, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
    """Scale a product of stored weights, add its bias, and round it to `dtype`."""
    if HAS_SCALE:
        total *= tl.load(scale_at, mask=mask, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias_at, mask=mask, other=0.0).to(tl.float32)[None, :]
    return total.to(dtype)


@triton.jit  # type: ignore[untyped-decorator]
def product(x, weight, total, WIDE_DOT: tl.constexpr):  # type: ignore[no-untyped-def]
    if WIDE_DOT:
        x = x.to(tl.float32)
    return tl.dot(x, weight.to(x.dtype), total, input_precision="ieee")


@triton.jit  # type: ignore[untyped-decorator]
def grouped_linear_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    share_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    begins_ptr,
    order_ptr,
    out_ptr,
    counts_ptr,
    COUNT: tl.constexpr,
    EXPERTS: tl.constexpr,
    TOP_K: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    SHARE_STRIDE: tl.constexpr,
    GATED: tl.constexpr,
    ACTIVATION: tl.constexpr,
    ALPHA: tl.constexpr,
    LIMIT: tl.constexpr,
    SCALES_INPUT: tl.constexpr,
    HAS_SCALE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EXPERTS_BLOCK: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """Multiply a tile of one expert's choices by a tile of that expert's weight.

    If GATED, x has one row per token, and a weight has the rows of gate and then those of up. Otherwise x has one row
    per choice, as out always has.
    """
    tile = tl.program_id(1)
    choices = tl.load(counts_ptr + COUNT) * TOP_K
    if tile < choices // BLOCK_M + EXPERTS:
        each = tl.arange(0, EXPERTS_BLOCK)
        begins = tl.load(begins_ptr + 1 + each, mask=each < EXPERTS - 1, other=0)
        before = (each < EXPERTS - 1) & (begins // BLOCK_M + each + 1 <= tile)
        expert = tl.sum(before.to(tl.int32))
        begin, end = tl.load(begins_ptr + expert), tl.load(begins_ptr + expert + 1)
        first = begin + (tile - begin // BLOCK_M - expert) * BLOCK_M
        if first < end:
            place = first + tl.arange(0, BLOCK_M)
            is_row = place < end
            choice = tl.load(order_ptr + place, mask=is_row, other=0).to(tl.int64)
            column = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
            is_column = column < N
            k = tl.arange(0, BLOCK_K)
            row = choice // TOP_K if GATED else choice
            share = tl.full((BLOCK_M,), 1.0, tl.float32)
            if SCALES_INPUT:
                share = tl.load(share_ptr + row * SHARE_STRIDE + choice % TOP_K, mask=is_row, other=0.0)
            x_at = x_ptr + row[:, None] * X_STRIDE + k[None, :]
            start_row = expert.to(tl.int64) * (2 * N if GATED else N)
            weight_at = weight_ptr + (start_row + column)[None, :] * K + k[:, None]
            total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            up_total = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for start in range(0, K, BLOCK_K):
                left = k < K - start
                weight_mask = is_column[None, :] & left[:, None] if K % BLOCK_K else is_column[None, :]
                x_mask = is_row[:, None] & left[None, :] if K % BLOCK_K else is_row[:, None]
                x = tl.load(x_at, mask=x_mask, other=0.0)
                if SCALES_INPUT:
                    x = (x.to(tl.float32) * share[:, None]).to(x.dtype)
                total = product(x, tl.load(weight_at, mask=weight_mask, other=0), total, WIDE_DOT)
                if GATED:
                    up_total = product(x, tl.load(weight_at + N * K, mask=weight_mask, other=0), up_total, WIDE_DOT)
                x_at += BLOCK_K
                weight_at += BLOCK_K
            dtype = out_ptr.dtype.element_ty
            at = start_row + column
            out = finished(total, scale_ptr + at, bias_ptr + at, is_column, HAS_SCALE, HAS_BIAS, dtype)
            if GATED:
                up = finished(up_total, scale_ptr + N + at, bias_ptr + N + at, is_column, HAS_SCALE, HAS_BIAS, dtype)
                out = activated(out.to(tl.float32), up.to(tl.float32), ACTIVATION, ALPHA, LIMIT).to(dtype)
            tl.store(out_ptr + choice[:, None] * N + column[None, :], out, mask=is_row[:, None] & is_column[None, :])


def grouped_linear(
    dtype: str,
    weight_dtype: str,
    rows: str,
    experts: int,
    top_k: int,
    n: int,
    k: int,
    strides: tuple[int, int],
    *,
    gated: bool,
    few: bool,
    activation: str = "silu",
    alpha: float = 1.0,
    limit: float = 0.0,
    scales_input: bool = False,
    has_bias: bool = False,
) -> Source:
    """Return the kernel of one of the two products of `inferc.moe_experts`, for all choices.

    It writes out [rows * top_k, n] in `dtype`, which is also that of x and bias.

    If `gated`, out is the activation of the two halves of the product of x [rows, k] and weight [experts, 2 * n, k].
    Otherwise out is the product of x [rows * top_k, k] and weight [experts, n, k]. An int8 weight has scale [experts,
    …] float32. bias is [experts, …]. `strides` are the elements from row to row of x and of share [rows, top_k]
    float32, which multiplies x if `scales_input`. With `few`, tiles have 16 choices instead of 64.
    """
    wide = dtype == "float32"
    constants: dict[str, Any] = {
        "COUNT": COUNTS[rows],
        "EXPERTS": experts,
        "TOP_K": top_k,
        "N": n,
        "K": k,
        **dict(zip(("X_STRIDE", "SHARE_STRIDE"), strides, strict=True)),
        "GATED": int(gated),
        "ACTIVATION": ACTIVATIONS.index(activation),
        "ALPHA": alpha,
        "LIMIT": limit,
        "SCALES_INPUT": int(scales_input),
        "HAS_SCALE": int(weight_dtype == "int8"),
        "HAS_BIAS": int(has_bias),
        "EXPERTS_BLOCK": triton.next_power_of_2(experts),
        "BLOCK_M": 16 if few else 32 if wide else 64,
        "BLOCK_N": 32 if wide else 64 if few or gated or weight_dtype == "int8" else 128,
        "BLOCK_K": 32 if wide else 64,
        "WIDE_DOT": 0,
    }
    return Source(
        function=grouped_linear_kernel,
        signature={
            "x_ptr": POINTERS[dtype],
            "share_ptr": POINTERS["float32"],
            "weight_ptr": POINTERS[weight_dtype],
            "scale_ptr": POINTERS["float32"],
            "bias_ptr": POINTERS[dtype],
            **dict.fromkeys(("begins_ptr", "order_ptr"), POINTERS["int32"]),
            "out_ptr": POINTERS[dtype],
            "counts_ptr": POINTERS["int32"],
        },
        constants=constants,
        grid=("ceil_div(N, BLOCK_N)", f"num_{rows} * TOP_K // BLOCK_M + EXPERTS", "1"),
        num_warps=4,
        num_stages=3,
        stack_bytes=8,  # for sm_80, ptxas spills a value around the error function after int8 products
    )


@triton.jit  # type: ignore[untyped-decorator]
def sum_choices_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    ids_ptr,
    share_ptr,
    out_ptr,
    counts_ptr,
    COUNT: tl.constexpr,
    TOP_K: tl.constexpr,
    WIDTH: tl.constexpr,
    IDS_STRIDE: tl.constexpr,
    SHARE_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    WEIGHS: tl.constexpr,
    TOP_K_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(counts_ptr + COUNT):
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = columns < WIDTH
        each = tl.arange(0, TOP_K_BLOCK)
        ids = tl.load(ids_ptr + row * IDS_STRIDE + each, mask=each < TOP_K, other=0)
        order = tl.where(each < TOP_K, ids * TOP_K_BLOCK + each, 1 << 30)
        total = tl.zeros((BLOCK,), tl.float32)
        for _ in range(TOP_K):
            lowest = tl.min(order)
            k = lowest % TOP_K_BLOCK
            result = tl.load(x_ptr + (row * TOP_K + k) * WIDTH + columns, mask=mask, other=0.0).to(tl.float32)
            if WEIGHS:
                result *= tl.load(share_ptr + row * SHARE_STRIDE + k)
            total += result
            order = tl.where(order == lowest, 1 << 30, order)
        tl.store(out_ptr + row * OUT_STRIDE + columns, total.to(out_ptr.dtype.element_ty), mask=mask)


def sum_choices(dtype: str, rows: str, top_k: int, width: int, strides: tuple[int, int, int], weighs: bool) -> Source:
    """Return the kernel that sums the results of each token's experts in float32, in ascending expert id.

    It computes out [rows, width] from the top_k rows per token of x [rows * top_k, width]. `strides` are the elements
    from row to row of ids [rows, top_k] i32, of share [rows, top_k] float32, and of out. If it `weighs`, each row of x
    is multiplied by its share.
    """
    block = min(COLUMNS_BLOCK, triton.next_power_of_2(width))
    return Source(
        function=sum_choices_kernel,
        signature={
            "x_ptr": POINTERS[dtype],
            "ids_ptr": POINTERS["int32"],
            "share_ptr": POINTERS["float32"],
            "out_ptr": POINTERS[dtype],
            "counts_ptr": POINTERS["int32"],
        },
        constants={
            "COUNT": COUNTS[rows],
            "TOP_K": top_k,
            "WIDTH": width,
            **dict(zip(("IDS_STRIDE", "SHARE_STRIDE", "OUT_STRIDE"), strides, strict=True)),
            "WEIGHS": int(weighs),
            "TOP_K_BLOCK": triton.next_power_of_2(top_k),
            "BLOCK": block,
        },
        grid=(f"num_{rows}", "ceil_div(WIDTH, BLOCK)", "1"),
        num_warps=max(1, block // 256),
    )
