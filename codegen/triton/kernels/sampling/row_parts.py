"""The kernel that summarises the parts of logits rows, many programs per row, from which `choose` starts."""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import POINTERS, Source
from inferc.codegen.triton.kernels.sampling.rows import CHANGED_BY, FIRST, ROWS, STACK_BYTES, is_changed, load_row
from inferc.codegen.triton.kernels.sampling.search import PLACES, odds, scale_of

PART = 4096  # tokens of a part


@triton.jit  # type: ignore[untyped-decorator]
def row_parts_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    x_ptr,
    tops_ptr,
    first_ptr,
    mass_ptr,
    temperature_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    bias_starts_ptr,
    banned_starts_ptr,
    allowed_starts_ptr,
    mask_rows_ptr,
    slots_ptr,
    count_table_ptr,
    counts_ptr,
    VOCAB: tl.constexpr,
    LOGITS_STRIDE: tl.constexpr,
    X_STRIDE: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
):
    part = tl.program_id(0)
    row = tl.program_id(1).to(tl.int64)
    if row < tl.load(counts_ptr + ROWS):
        at = tl.load(counts_ptr + FIRST) + row
        values = logits_ptr + row * LOGITS_STRIDE
        changed = is_changed(
            repetition_ptr,
            presence_ptr,
            frequency_ptr,
            bias_starts_ptr,
            banned_starts_ptr,
            allowed_starts_ptr,
            mask_rows_ptr,
            slots_ptr,
            count_table_ptr,
            at,
        )
        if changed:
            values = x_ptr + row * X_STRIDE
        place = tl.arange(0, PLACES)
        i = part * PART + tl.arange(0, PART // PLACES)[:, None] * PLACES + place[None, :]
        x = load_row(values, i, VOCAB)
        tops = tl.max(x, 0)
        top = tl.max(tops)
        mass = tl.sum(odds(x, tl.where(top > float("-inf"), top, 0.0), scale_of(tl.load(temperature_ptr + at))))
        out = row * PARTS + part
        tl.store(tops_ptr + out * PLACES + place, tops)
        tl.store(first_ptr + out, tl.min(tl.where(x == top, i, VOCAB)))
        tl.store(mass_ptr + out, mass)


def part_of(vocab: int, part: int = PART) -> int:
    """Return the number of tokens of a part: `part`, or fewer if the vocabulary is smaller."""
    return max(int(PLACES.value), min(part, int(triton.next_power_of_2(vocab))))


def row_parts(vocab: int, logits_stride: int, x_stride: int, part: int = PART) -> Source:
    """Return the kernel that summarises each part of each row.

    It writes:

    - tops float32 [rows, parts, 64]: the largest of every 64th token of the part.
    - first i32 [rows, parts]: the lowest id of the part's largest number.
    - mass float32 [rows, parts]: the sum of exp((x - the part's largest) / temperature).

    There are PARTS parts. `part` is a power of two.
    """
    part = part_of(vocab, part)
    parts = triton.cdiv(vocab, part)
    return Source(
        function=row_parts_kernel,
        signature={
            **dict.fromkeys(("logits_ptr", "x_ptr", "tops_ptr"), POINTERS["float32"]),
            "first_ptr": POINTERS["int32"],
            **dict.fromkeys(("mass_ptr", "temperature_ptr"), POINTERS["float32"]),
            **CHANGED_BY,
            "counts_ptr": POINTERS["int32"],
        },
        constants={
            "VOCAB": vocab,
            "LOGITS_STRIDE": logits_stride,
            "X_STRIDE": x_stride,
            "PART": part,
            "PARTS": parts,
        },
        grid=("PARTS", "num_rows", "1"),
        num_warps=4,
        stack_bytes=STACK_BYTES,
    )
