"""The kernels that keep hidden rows on the device for a head, and that make the head's input of rows that were kept.

A step writes rows to places that the host names by numbers, and a later step reads them by these numbers. So rows of a
large model reach its head, in whatever order and whatever later step it reads them, without a copy to the host.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import COUNTS, POINTERS, Source

BLOCK = 1024  # columns that a program computes at a time


@triton.jit  # type: ignore[untyped-decorator]
def keep_rows_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    numbers_ptr,
    kept_ptr,
    place_ptr,
    counts_ptr,
    rows_ptr,
    COUNT: tl.constexpr,
    HAS_ROWS: tl.constexpr,
    KEPT_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    at = tl.program_id(0).to(tl.int64)
    if at < tl.load(counts_ptr + COUNT):
        number = tl.load(numbers_ptr + at).to(tl.int64)
        if number >= 0:
            row = tl.load(rows_ptr + at).to(tl.int64) if HAS_ROWS else at
            source = x_ptr + row * tl.load(place_ptr)
            target = kept_ptr + number * KEPT_STRIDE + tl.load(place_ptr + 1)
            width = tl.load(place_ptr + 2)
            for begin in range(0, width, BLOCK):
                columns = begin + tl.arange(0, BLOCK)
                mask = columns < width
                tl.store(target + columns, tl.load(source + columns, mask=mask), mask=mask)


def keep_rows(dtype: str, rows: str, kept_stride: int, *, has_rows: bool = False) -> Source:
    """Return the kernel of kept[numbers[i], column : column + width] = x[i] for the `rows` of a step.

    x [any, width] and kept [any, kept_stride] are of `dtype`; numbers is [rows] i32, and a row whose number is negative
    is not kept. place [3] i32 has the elements from row to row of x, the column and the width: what keeps rows is
    compiled without knowing whose. has_rows: row rows[i] of x is meant, not row i.
    """
    return Source(
        function=keep_rows_kernel,
        signature={
            "x_ptr": POINTERS[dtype],
            "numbers_ptr": POINTERS["int32"],
            "kept_ptr": POINTERS[dtype],
            **dict.fromkeys(("place_ptr", "counts_ptr"), POINTERS["int32"]),
            **({"rows_ptr": POINTERS["int32"]} if has_rows else {}),
        },
        constants={
            "COUNT": COUNTS[rows],
            "HAS_ROWS": int(has_rows),
            "KEPT_STRIDE": kept_stride,
            "BLOCK": BLOCK,
        },
        grid=(f"num_{rows}", "1", "1"),
        num_warps=4,
        unaligned=("x_ptr", "place_ptr"),
    )


@triton.jit  # type: ignore[untyped-decorator]
def head_input_kernel(  # type: ignore[no-untyped-def]
    given_ptr,
    own_ptr,
    numbers_ptr,
    out_ptr,
    counts_ptr,
    COUNT: tl.constexpr,
    GIVEN: tl.constexpr,
    OWN: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(counts_ptr + COUNT):
        number = tl.load(numbers_ptr + row).to(tl.int64)
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        behind = columns - GIVEN
        is_given, is_own = columns < GIVEN, (behind >= 0) & (behind < OWN)
        given = tl.load(given_ptr + number * GIVEN + columns, mask=is_given & (number >= 0), other=0.0)
        own = tl.load(own_ptr + (-1 - number) * OWN + behind, mask=is_own & (number < 0), other=0.0)
        tl.store(out_ptr + row * OUT_STRIDE + columns, tl.where(is_given, given, own), mask=is_given | is_own)


def head_input(dtype: str, given: int, own: int, out_stride: int) -> Source:
    """Return the kernel that makes the input [tokens, given + own] of a head: [row of the model | 0] or [0 | own row].

    numbers [tokens] i32: row n of given [any, given] for n >= 0, row -1 - n of own [any, own] for n < 0.
    """
    return Source(
        function=head_input_kernel,
        signature={
            **dict.fromkeys(("given_ptr", "own_ptr"), POINTERS[dtype]),
            "numbers_ptr": POINTERS["int32"],
            "out_ptr": POINTERS[dtype],
            "counts_ptr": POINTERS["int32"],
        },
        constants={
            "COUNT": COUNTS["tokens"],
            "GIVEN": given,
            "OWN": own,
            "OUT_STRIDE": out_stride,
            "BLOCK": min(BLOCK, triton.next_power_of_2(given + own)),
        },
        grid=("num_tokens", "ceil_div(GIVEN + OWN, BLOCK)", "1"),
        num_warps=4,
    )
