"""The kernel of rotary embedding for heads that are not written to the cache at once, one program per head."""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import COUNTS, POINTERS, Source
from inferc.ir.ops.rope import PAIRS

# The values of the constant PAIRS: which elements of a head form a pair, before and after its rotation.
HALVES, NEIGHBOURS, NEIGHBOURS_TO_HALVES = map(tl.constexpr, range(3))
assert PAIRS == ("halves", "neighbours", "neighbours_to_halves")


@triton.jit  # type: ignore[untyped-decorator]
def rope_apply_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    table_ptr,
    out_ptr,
    counts_ptr,
    COUNT: tl.constexpr,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    X_STRIDE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    ROTATED_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if row < tl.load(counts_ptr + COUNT):
        dtype = out_ptr.dtype.element_ty
        source, target = x_ptr + row * X_STRIDE + head * DIM, out_ptr + row * OUT_STRIDE + head * DIM
        i = tl.arange(0, ROTATED_BLOCK)
        mask = i < HALF
        first_at, second_at = i, HALF + i
        if PAIRS != HALVES:
            first_at, second_at = 2 * i, 2 * i + 1
        first = tl.load(source + first_at, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + second_at, mask=mask, other=0.0).to(tl.float32)
        cos = tl.load(table_ptr + row * TABLE_STRIDE + i, mask=mask, other=0.0)
        sin = tl.load(table_ptr + row * TABLE_STRIDE + HALF + i, mask=mask, other=0.0)
        if PAIRS == NEIGHBOURS_TO_HALVES:
            first_at, second_at = i, HALF + i
        tl.store(target + first_at, (first * cos - second * sin).to(dtype), mask=mask)
        tl.store(target + second_at, (second * cos + first * sin).to(dtype), mask=mask)
        if DIM != 2 * HALF:
            j = 2 * HALF + tl.arange(0, REST_BLOCK)
            tl.store(target + j, tl.load(source + j, mask=j < DIM), mask=j < DIM)


def rope_apply(
    dtype: str,
    rows: str,
    heads: int,
    dim: int,
    half: int,
    pairs: str,
    strides: tuple[int, int, int],
    unaligned: tuple[str, ...] = (),
) -> Source:
    """Return the kernel of `inferc.rope`: it rotates x [rows, heads * dim] by a table [rows, 2 * half] float32.

    out has the shape of x. `strides` are the elements from row to row of x, the table and out. Source: Su et al. 2021,
    arXiv:2104.09864.
    """
    return Source(
        function=rope_apply_kernel,
        signature={
            "x_ptr": POINTERS[dtype],
            "table_ptr": POINTERS["float32"],
            "out_ptr": POINTERS[dtype],
            "counts_ptr": POINTERS["int32"],
        },
        constants={
            "COUNT": COUNTS[rows],
            "HEADS": heads,
            "DIM": dim,
            "HALF": half,
            "PAIRS": PAIRS.index(pairs),
            **dict(zip(("X_STRIDE", "TABLE_STRIDE", "OUT_STRIDE"), strides, strict=True)),
            "ROTATED_BLOCK": triton.next_power_of_2(half),
            "REST_BLOCK": triton.next_power_of_2(max(1, dim - 2 * half)),
        },
        grid=(f"num_{rows}", "HEADS", "1"),
        num_warps=1,
        unaligned=unaligned,
    )
