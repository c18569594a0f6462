"""The kernel that puts the rows of two values side by side."""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import COUNTS, POINTERS, Source

BLOCK = 1024  # columns of one program


@triton.jit  # type: ignore[untyped-decorator]
def concat_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    other_ptr,
    out_ptr,
    counts_ptr,
    COUNT: tl.constexpr,
    X_WIDTH: tl.constexpr,
    OTHER_WIDTH: tl.constexpr,
    X_STRIDE: tl.constexpr,
    OTHER_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(counts_ptr + COUNT):
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        behind = columns - X_WIDTH
        is_x, is_other = columns < X_WIDTH, (behind >= 0) & (behind < OTHER_WIDTH)
        x = tl.load(x_ptr + row * X_STRIDE + columns, mask=is_x, other=0.0)
        other = tl.load(other_ptr + row * OTHER_STRIDE + behind, mask=is_other, other=0.0)
        tl.store(out_ptr + row * OUT_STRIDE + columns, tl.where(is_x, x, other), mask=is_x | is_other)


def concat(
    dtype: str, rows: str, widths: tuple[int, int], strides: tuple[int, int, int], unaligned: tuple[str, ...] = ()
) -> Source:
    """Return the kernel of out [rows, widths] = [x | other].

    `strides` are the elements from row to row of x, of other and of out.
    """
    return Source(
        function=concat_kernel,
        signature={
            **dict.fromkeys(("x_ptr", "other_ptr", "out_ptr"), POINTERS[dtype]),
            "counts_ptr": POINTERS["int32"],
        },
        constants={
            "COUNT": COUNTS[rows],
            **dict(zip(("X_WIDTH", "OTHER_WIDTH"), widths, strict=True)),
            **dict(zip(("X_STRIDE", "OTHER_STRIDE", "OUT_STRIDE"), strides, strict=True)),
            "BLOCK": min(BLOCK, triton.next_power_of_2(sum(widths))),
        },
        grid=(f"num_{rows}", "ceil_div(X_WIDTH + OTHER_WIDTH, BLOCK)", "1"),
        num_warps=4,
        unaligned=unaligned,
    )
