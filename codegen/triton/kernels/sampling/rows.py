"""What the kernels of this package read of a row's parameters."""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import COUNTS, POINTERS

ROWS = tl.constexpr(COUNTS["rows"])  # where `counts_ptr` has the rows of the chunk
FIRST = tl.constexpr(3)  # and which row of the step is its first
STACK_BYTES = 32  # what ptxas may park of a row's parameters, which are read once: for some vocabularies it does

# What `is_changed` reads: f32 [rows], CSR starts i32 [rows + 1], i32 [rows], and the addresses of slots' counts, i64.
CHANGED_BY = {
    **dict.fromkeys(("repetition_ptr", "presence_ptr", "frequency_ptr"), POINTERS["float32"]),
    **dict.fromkeys(("bias_starts_ptr", "banned_starts_ptr", "allowed_starts_ptr", "slots_ptr"), POINTERS["int32"]),
    "count_table_ptr": POINTERS["int64"],
}


@triton.jit
def has_list(starts_ptr, row):  # type: ignore[no-untyped-def]
    return tl.load(starts_ptr + row) < tl.load(starts_ptr + row + 1)


@triton.jit
def counts_of(count_table_ptr, slots_ptr, row):  # type: ignore[no-untyped-def]
    """The address of the row's counts [vocab] of tokens, 0 if there are none."""
    return tl.load(count_table_ptr + tl.load(slots_ptr + row))


@triton.jit
def has_penalties(  # type: ignore[no-untyped-def]
    repetition_ptr, presence_ptr, frequency_ptr, slots_ptr, count_table_ptr, row
):
    neutral = tl.load(repetition_ptr + row) == 1.0
    neutral = neutral & (tl.load(presence_ptr + row) == 0.0) & (tl.load(frequency_ptr + row) == 0.0)
    return (counts_of(count_table_ptr, slots_ptr, row) != 0) & (neutral == 0)


@triton.jit
def is_changed(  # type: ignore[no-untyped-def]
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    bias_starts_ptr,
    banned_starts_ptr,
    allowed_starts_ptr,
    slots_ptr,
    count_table_ptr,
    row,
):
    """Whether the choice is made from other numbers than the logits: penalties, a bias, masks."""
    penalties = has_penalties(repetition_ptr, presence_ptr, frequency_ptr, slots_ptr, count_table_ptr, row)
    lists = has_list(bias_starts_ptr, row) | has_list(banned_starts_ptr, row) | has_list(allowed_starts_ptr, row)
    return penalties | lists


@triton.jit  # type: ignore[untyped-decorator]
def load_row(values_ptr, i, VOCAB: tl.constexpr):  # type: ignore[no-untyped-def]
    """Numbers i of a row: -inf behind its last, and for NaN, which is never the largest and never drawn."""
    x = tl.load(values_ptr + i, mask=i < VOCAB, other=float("-inf"))
    return tl.where(x > float("-inf"), x, float("-inf"))
