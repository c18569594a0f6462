"""The kernels that process logits before the choice: penalties, the row's mask, bias, allowed ids, banned ones.

`penalize` writes every number of a row that needs any processing, with many programs per row. `apply_lists` then
processes the ids of the row's lists. Rows that need no processing are left out: `choose` reads their logits.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.arena import mask_words
from inferc.codegen.triton.aot.source import POINTERS, Source
from inferc.codegen.triton.kernels.sampling.rows import (
    CHANGED_BY,
    FIRST,
    INPUTS,
    ROWS,
    STACK_BYTES,
    counts_of,
    drafted,
    has_list,
    has_penalties,
    is_behind_draft,
    is_masked_in,
)

BLOCK = 2048  # tokens of one program of `penalize`
IDS = 512  # ids of a list that `apply_lists` processes at a time
# The low 31 bits of a token's count say how often it was output. The highest bit says that it is in the prompt.
TIMES = tl.constexpr(0x7FFFFFFF)


@triton.jit
def penalized(x, count, repetition, presence, frequency):  # type: ignore[no-untyped-def]
    times = (count & TIMES).to(tl.float32)
    scaled = tl.where(x > 0.0, tl.div_rn(x, repetition), x * repetition)
    lowered = scaled - (frequency * times + presence)
    return tl.where(count == 0, x, tl.where(times > 0.0, lowered, scaled))


@triton.jit
def with_drafted(count, token, slots_ptr, inputs_ptr, logits_rows_ptr, row):  # type: ignore[no-untyped-def]
    """Return the counts of tokens as if what was drafted before a row had been chosen."""
    while is_behind_draft(slots_ptr, row):
        count += (token == drafted(inputs_ptr, logits_rows_ptr, row)).to(tl.int32)
        row -= 1
    return count


@triton.jit  # type: ignore[untyped-decorator]
def penalize_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    x_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    bias_starts_ptr,
    banned_starts_ptr,
    allowed_starts_ptr,
    mask_rows_ptr,
    slots_ptr,
    count_table_ptr,
    inputs_ptr,
    logits_rows_ptr,
    masks_ptr,
    counts_ptr,
    VOCAB: tl.constexpr,
    LOGITS_STRIDE: tl.constexpr,
    X_STRIDE: tl.constexpr,
    WORDS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(1).to(tl.int64)
    if row < tl.load(counts_ptr + ROWS):
        at = tl.load(counts_ptr + FIRST) + row
        penalties = has_penalties(repetition_ptr, presence_ptr, frequency_ptr, slots_ptr, count_table_ptr, at)
        allowed = has_list(allowed_starts_ptr, at)
        mask_row = tl.load(mask_rows_ptr + at)
        lists = allowed | has_list(bias_starts_ptr, at) | has_list(banned_starts_ptr, at)
        if penalties | lists | (mask_row >= 0):
            i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
            mask = i < VOCAB
            x = tl.full((BLOCK,), float("-inf"), tl.float32)
            if allowed == 0:
                x = tl.load(logits_ptr + row * LOGITS_STRIDE + i, mask=mask, other=0.0)
                if penalties:
                    counts = counts_of(count_table_ptr, slots_ptr, at).to(tl.pointer_type(tl.int32))
                    count = tl.load(counts + i, mask=mask, other=0)
                    count = with_drafted(count, i, slots_ptr, inputs_ptr, logits_rows_ptr, at)
                    presence, frequency = tl.load(presence_ptr + at), tl.load(frequency_ptr + at)
                    x = penalized(x, count, tl.load(repetition_ptr + at), presence, frequency)
                x = tl.where(is_masked_in(masks_ptr, mask_row, i, mask, WORDS), x, float("-inf"))
            tl.store(x_ptr + row * X_STRIDE + i, x, mask=mask)


def penalize(vocab: int, logits_stride: int, x_stride: int, block: int = BLOCK) -> Source:
    """Return the kernel that writes x [rows of the chunk, vocab]: the logits after penalties.

    x is -inf where a row only allows the ids of a list, which `apply_lists` fills in, and where its mask has a 0: masks
    i32 [masks, words] have bit i % 32 of word i // 32 for token i. x and logits are float32; their rows are `x_stride`
    and `logits_stride` elements apart. Rows that need no processing are not written.
    """
    return Source(
        function=penalize_kernel,
        signature={
            **dict.fromkeys(("logits_ptr", "x_ptr"), POINTERS["float32"]),
            **CHANGED_BY,
            **INPUTS,
            **dict.fromkeys(("masks_ptr", "counts_ptr"), POINTERS["int32"]),
        },
        constants={
            "VOCAB": vocab,
            "LOGITS_STRIDE": logits_stride,
            "X_STRIDE": x_stride,
            "WORDS": mask_words(vocab),
            "BLOCK": block,
        },
        grid=("ceil_div(VOCAB, BLOCK)", "num_rows", "1"),
        num_warps=4,
        stack_bytes=STACK_BYTES,
    )


@triton.jit  # type: ignore[untyped-decorator]
def apply_lists_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    x_ptr,
    lists_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    bias_starts_ptr,
    banned_starts_ptr,
    allowed_starts_ptr,
    mask_rows_ptr,
    slots_ptr,
    count_table_ptr,
    inputs_ptr,
    logits_rows_ptr,
    masks_ptr,
    counts_ptr,
    LOGITS_STRIDE: tl.constexpr,
    X_STRIDE: tl.constexpr,
    WORDS: tl.constexpr,
    IDS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(counts_ptr + ROWS):
        at = tl.load(counts_ptr + FIRST) + row
        x = x_ptr + row * X_STRIDE
        ids = tl.load(lists_ptr + 3).to(tl.pointer_type(tl.int32))
        end = tl.load(allowed_starts_ptr + at + 1)
        penalties = has_penalties(repetition_ptr, presence_ptr, frequency_ptr, slots_ptr, count_table_ptr, at)
        counts = counts_of(count_table_ptr, slots_ptr, at).to(tl.pointer_type(tl.int32))
        repetition = tl.load(repetition_ptr + at)
        presence, frequency = tl.load(presence_ptr + at), tl.load(frequency_ptr + at)
        mask_row = tl.load(mask_rows_ptr + at)
        for start in range(tl.load(allowed_starts_ptr + at), end, IDS):
            i = start + tl.arange(0, IDS)
            token = tl.load(ids + i, mask=i < end, other=0)
            value = tl.load(logits_ptr + row * LOGITS_STRIDE + token, mask=i < end, other=0.0)
            count = tl.load(counts + token, mask=(i < end) & penalties, other=0)
            if penalties:
                count = with_drafted(count, token, slots_ptr, inputs_ptr, logits_rows_ptr, at)
            value = penalized(value, count, repetition, presence, frequency)
            value = tl.where(is_masked_in(masks_ptr, mask_row, token, i < end, WORDS), value, float("-inf"))
            tl.store(x + token, value, mask=i < end)
        tl.debug_barrier()
        ids = tl.load(lists_ptr).to(tl.pointer_type(tl.int32))
        values = tl.load(lists_ptr + 1).to(tl.pointer_type(tl.float32))
        end = tl.load(bias_starts_ptr + at + 1)
        for start in range(tl.load(bias_starts_ptr + at), end, IDS):
            i = start + tl.arange(0, IDS)
            token = tl.load(ids + i, mask=i < end, other=0)
            value = tl.load(values + i, mask=i < end, other=0.0)
            value += tl.load(x + token, mask=i < end, other=0.0)
            tl.store(x + token, value, mask=i < end)
        tl.debug_barrier()
        ids = tl.load(lists_ptr + 2).to(tl.pointer_type(tl.int32))
        end = tl.load(banned_starts_ptr + at + 1)
        for start in range(tl.load(banned_starts_ptr + at), end, IDS):
            i = start + tl.arange(0, IDS)
            token = tl.load(ids + i, mask=i < end, other=0)
            tl.store(x + token, tl.full((IDS,), float("-inf"), tl.float32), mask=i < end)


def apply_lists(vocab: int, logits_stride: int, x_stride: int, ids: int = IDS) -> Source:
    """Return the kernel that applies bias, allowed ids and banned ids to what `penalize` wrote.

    lists_ptr is i64 [4]: the addresses of bias ids i32, bias values f32, banned ids i32 and allowed ids i32. Each row
    has the entries between its starts. No list has an id twice.
    """
    return Source(
        function=apply_lists_kernel,
        signature={
            **dict.fromkeys(("logits_ptr", "x_ptr"), POINTERS["float32"]),
            "lists_ptr": POINTERS["int64"],
            **CHANGED_BY,
            **INPUTS,
            **dict.fromkeys(("masks_ptr", "counts_ptr"), POINTERS["int32"]),
        },
        constants={"LOGITS_STRIDE": logits_stride, "X_STRIDE": x_stride, "WORDS": mask_words(vocab), "IDS": ids},
        grid=("num_rows", "1", "1"),
        num_warps=4,
        stack_bytes=STACK_BYTES,
    )
