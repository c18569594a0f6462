"""The parameters of a row as the sampling kernels read them."""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import COUNTS, POINTERS

ROWS = tl.constexpr(COUNTS["rows"])  # the index into `counts_ptr` of the chunk's number of rows
FIRST = tl.constexpr(3)  # the index into `counts_ptr` of the chunk's first row in the step
ALL_ROWS = tl.constexpr(4)  # the index into `counts_ptr` of the step's number of rows
# Bytes of a thread's registers that ptxas may spill. For some vocabularies, most of them of few hundred tokens, it
# spills a row's parameters, which are read once.
STACK_BYTES = 64

# The arguments of `is_changed`: penalties f32 [rows], starts of lists (CSR) i32 [rows + 1], slots i32 [rows], and the
# addresses of the slots' counts of tokens, i64; mask_rows i32 [rows]: which row of the masks is the row's own, or -1.
CHANGED_BY = {
    **dict.fromkeys(("repetition_ptr", "presence_ptr", "frequency_ptr"), POINTERS["float32"]),
    **dict.fromkeys(
        ("bias_starts_ptr", "banned_starts_ptr", "allowed_starts_ptr", "mask_rows_ptr", "slots_ptr"), POINTERS["int32"]
    ),
    "count_table_ptr": POINTERS["int64"],
}


@triton.jit
def has_list(starts_ptr, row):  # type: ignore[no-untyped-def]
    return tl.load(starts_ptr + row) < tl.load(starts_ptr + row + 1)


# The arguments of `drafted`: the ids of the step's tokens, and which of them each row is behind, i32.
INPUTS = dict.fromkeys(("inputs_ptr", "logits_rows_ptr"), POINTERS["int32"])


@triton.jit
def is_behind_draft(slots_ptr, row):  # type: ignore[no-untyped-def]
    """Return whether the row before is of the same slot, so that the row is that of a drafted token."""
    return tl.load(slots_ptr + row - 1, mask=row > 0, other=-1) == tl.load(slots_ptr + row)


@triton.jit
def drafted(inputs_ptr, logits_rows_ptr, row):  # type: ignore[no-untyped-def]
    """Return the drafted token that a row is behind."""
    return tl.load(inputs_ptr + tl.load(logits_rows_ptr + row))


@triton.jit
def counts_of(count_table_ptr, slots_ptr, row):  # type: ignore[no-untyped-def]
    """Return the address of the row's counts [vocab] of tokens, 0 if there are none."""
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
    mask_rows_ptr,
    slots_ptr,
    count_table_ptr,
    row,
):
    """Return whether the choice is made from other numbers than the logits: because of penalties, a bias or masks."""
    penalties = has_penalties(repetition_ptr, presence_ptr, frequency_ptr, slots_ptr, count_table_ptr, row)
    lists = has_list(bias_starts_ptr, row) | has_list(banned_starts_ptr, row) | has_list(allowed_starts_ptr, row)
    return penalties | lists | (tl.load(mask_rows_ptr + row) >= 0)


@triton.jit  # type: ignore[untyped-decorator]
def is_masked_in(masks_ptr, mask_row, token, mask, WORDS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return whether a row's mask has the tokens; a row without one has all."""
    own = masks_ptr + tl.maximum(mask_row, 0).to(tl.int64) * WORDS
    word = tl.load(own + token // 32, mask=mask & (mask_row >= 0), other=-1)
    return ((word >> (token % 32)) & 1) != 0


@triton.jit  # type: ignore[untyped-decorator]
def load_row(values_ptr, i, VOCAB: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load numbers i of a row, with -inf behind its end and in place of NaN.

    A NaN is therefore never the largest number, and never drawn.
    """
    x = tl.load(values_ptr + i, mask=i < VOCAB, other=float("-inf"))
    return tl.where(x > float("-inf"), x, float("-inf"))
