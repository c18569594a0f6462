"""The kernel that gathers rows of an int8 table by index, and multiplies each by its scale."""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import COUNTS, POINTERS, Source

BLOCK = 1024  # columns of one program


@triton.jit  # type: ignore[untyped-decorator]
def embedding_int8_kernel(  # type: ignore[no-untyped-def]
    table_ptr,
    scale_ptr,
    index_ptr,
    out_ptr,
    counts_ptr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(counts_ptr + COUNT):
        source = tl.load(index_ptr + row).to(tl.int64)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = columns < WIDTH
        values = tl.load(table_ptr + source * WIDTH + columns, mask=mask, other=0).to(tl.float32)
        values *= tl.load(scale_ptr + source)
        tl.store(out_ptr + row * OUT_STRIDE + columns, values.to(out_ptr.dtype.element_ty), mask=mask)


def embedding_int8(dtype: str, index_dtype: str, rows: str, width: int, out_stride: int) -> Source:
    """Return the kernel of `inferc.embedding_int8`, which gathers rows of an int8 table and scales them.

    It reads table [any, width] int8, scale [any] float32 and index [rows], and writes out [rows, width] in `dtype`.
    """
    return Source(
        function=embedding_int8_kernel,
        signature={
            "table_ptr": POINTERS["int8"],
            "scale_ptr": POINTERS["float32"],
            "index_ptr": POINTERS[index_dtype],
            "out_ptr": POINTERS[dtype],
            "counts_ptr": POINTERS["int32"],
        },
        constants={
            "COUNT": COUNTS[rows],
            "WIDTH": width,
            "OUT_STRIDE": out_stride,
            "BLOCK": min(BLOCK, triton.next_power_of_2(width)),
        },
        grid=(f"num_{rows}", "ceil_div(WIDTH, BLOCK)", "1"),
        num_warps=4,
    )
