"""The kernel that gathers rows of a table by index: embeddings, and the rows whose logits are asked for."""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import COUNTS, POINTERS, Source

BLOCK = 1024  # columns of one program


@triton.jit  # type: ignore[untyped-decorator]
def gather_rows_kernel(  # type: ignore[no-untyped-def]
    table_ptr,
    index_ptr,
    out_ptr,
    counts_ptr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(counts_ptr + COUNT):
        source = tl.load(index_ptr + row).to(tl.int64)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = columns < WIDTH
        values = tl.load(table_ptr + source * TABLE_STRIDE + columns, mask=mask)
        tl.store(out_ptr + row * OUT_STRIDE + columns, values, mask=mask)


def gather_rows(dtype: str, rows: str, width: int, table_stride: int, out_stride: int) -> Source:
    """Return the kernel of out[i] = table[index[i]] for the `rows` ("tokens" or "rows") of a step.

    table [any, width] and out [rows, width] are of `dtype`. Their rows are `table_stride` and `out_stride` elements
    apart. index is [rows] i32.
    """
    return Source(
        function=gather_rows_kernel,
        signature={
            **dict.fromkeys(("table_ptr", "index_ptr", "out_ptr"), POINTERS[dtype]),
            "index_ptr": POINTERS["int32"],
            "counts_ptr": POINTERS["int32"],
        },
        constants={
            "COUNT": COUNTS[rows],
            "WIDTH": width,
            "TABLE_STRIDE": table_stride,
            "OUT_STRIDE": out_stride,
            "BLOCK": min(BLOCK, triton.next_power_of_2(width)),
        },
        grid=(f"num_{rows}", "ceil_div(WIDTH, BLOCK)", "1"),
        num_warps=4,
    )
