"""The kernel that copies heads to heads of another size, cut or padded with zeros, one program per head."""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import COUNTS, POINTERS, Source


@triton.jit  # type: ignore[untyped-decorator]
def resize_heads_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    out_ptr,
    counts_ptr,
    COUNT: tl.constexpr,
    HEADS: tl.constexpr,
    HAD: tl.constexpr,
    DIM: tl.constexpr,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if row < tl.load(counts_ptr + COUNT):
        i = tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * X_STRIDE + head * HAD + i, mask=i < HAD, other=0.0)
        tl.store(out_ptr + row * OUT_STRIDE + head * DIM + i, x, mask=i < DIM)


def resize_heads(
    dtype: str, rows: str, heads: int, sizes: tuple[int, int], strides: tuple[int, int], unaligned: tuple[str, ...] = ()
) -> Source:
    """Return the kernel of `inferc.resize_heads`: x [rows, heads * sizes[0]] to out [rows, heads * sizes[1]].

    `strides` are the elements from row to row of x and out.
    """
    return Source(
        function=resize_heads_kernel,
        signature={"x_ptr": POINTERS[dtype], "out_ptr": POINTERS[dtype], "counts_ptr": POINTERS["int32"]},
        constants={
            "COUNT": COUNTS[rows],
            "HEADS": heads,
            "HAD": sizes[0],
            "DIM": sizes[1],
            "X_STRIDE": strides[0],
            "OUT_STRIDE": strides[1],
            "BLOCK": triton.next_power_of_2(sizes[1]),
        },
        grid=(f"num_{rows}", "HEADS", "1"),
        num_warps=1,
        unaligned=unaligned,
    )
