"""The kernel that chooses the token of each row: the most likely one, or a draw after filters.

It has one program per row, which starts from what `row_parts` found. A greedy row reads none of its numbers again. A
row with only a temperature reads the part that the draw falls in. A row with filters reads the parts that reach a lower
bound of what the filters keep.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import POINTERS, Source
from inferc.codegen.triton.kernels.sampling.draw import draw_filtered, draw_of_part
from inferc.codegen.triton.kernels.sampling.philox import uniform
from inferc.codegen.triton.kernels.sampling.row_parts import PART, part_of
from inferc.codegen.triton.kernels.sampling.rows import (
    ALL_ROWS,
    CHANGED_BY,
    FIRST,
    ROWS,
    STACK_BYTES,
    is_behind_draft,
    is_changed,
)
from inferc.codegen.triton.kernels.sampling.search import PLACES, odds, scale_of

TILE = 1024  # numbers of a list that are searched at a time
XTC_STREAM = tl.constexpr(1)  # of a row's random numbers: 0 has those of the draw


@triton.jit  # type: ignore[untyped-decorator]
def choose_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    x_ptr,
    tops_ptr,
    first_ptr,
    mass_ptr,
    list_values_ptr,
    list_ids_ptr,
    temperature_ptr,
    top_k_ptr,
    top_p_ptr,
    min_p_ptr,
    typical_p_ptr,
    xtc_probability_ptr,
    xtc_threshold_ptr,
    seeds_ptr,
    counters_ptr,
    repetition_ptr,
    presence_ptr,
    frequency_ptr,
    bias_starts_ptr,
    banned_starts_ptr,
    allowed_starts_ptr,
    mask_rows_ptr,
    slots_ptr,
    count_table_ptr,
    token_ids_ptr,
    last_ids_ptr,
    counts_ptr,
    VOCAB: tl.constexpr,
    LOGITS_STRIDE: tl.constexpr,
    X_STRIDE: tl.constexpr,
    LIST_STRIDE: tl.constexpr,
    PART: tl.constexpr,
    PARTS: tl.constexpr,
    PARTS_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rows = tl.load(counts_ptr + ROWS)
    if row < rows:
        at = tl.load(counts_ptr + FIRST) + row
        own_tops = tops_ptr + row * (PARTS * PLACES)
        part = tl.arange(0, PARTS_BLOCK)
        place = part[:, None] * PLACES + tl.arange(0, PLACES)[None, :]
        maxima = tl.max(tl.load(own_tops + place, mask=place < PARTS * PLACES, other=float("-inf")), 1)
        top = tl.max(maxima)
        temperature, min_p = tl.load(temperature_ptr + at), tl.load(min_p_ptr + at)
        chosen = tl.full((), -1, tl.int32)
        if (top > float("-inf")) & (top < float("inf")):
            if (temperature > 0.0) & (min_p <= 1.0):
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
                scale = scale_of(temperature)
                seed, counter = tl.load(seeds_ptr + at), tl.load(counters_ptr + at)
                u = uniform(seed, counter)
                mass = tl.load(mass_ptr + row * PARTS + part, mask=part < PARTS, other=0.0)
                top_k, top_p = tl.load(top_k_ptr + at), tl.load(top_p_ptr + at)
                typical_p, xtc_probability = tl.load(typical_p_ptr + at), tl.load(xtc_probability_ptr + at)
                excludes = xtc_probability > 0.0
                if excludes:
                    excludes = uniform(seed, counter, XTC_STREAM) < xtc_probability.to(tl.float64)
                filtered = ((top_k > 0) & (top_k < VOCAB)) | (top_p < 1.0) | (min_p > 0.0)
                if filtered | (typical_p < 1.0) | excludes:
                    own_list = row * LIST_STRIDE
                    total = tl.sum(mass.to(tl.float64) * odds(maxima, top, scale).to(tl.float64))
                    chosen = draw_filtered(
                        values,
                        own_tops,
                        list_values_ptr + own_list,
                        list_ids_ptr + own_list,
                        maxima,
                        total,
                        top,
                        scale,
                        top_k,
                        top_p,
                        min_p,
                        typical_p,
                        excludes,
                        tl.load(xtc_threshold_ptr + at),
                        u,
                        VOCAB,
                        PART,
                        PARTS,
                        PARTS_BLOCK,
                        TILE,
                    )
                else:
                    chosen = draw_of_part(values, mass, maxima, top, scale, u, VOCAB, PART, PARTS_BLOCK)
            else:
                best = tl.min(tl.where(maxima == top, part, PARTS_BLOCK))
                chosen = tl.load(first_ptr + row * PARTS + best)
        tl.store(token_ids_ptr + at, chosen)
        # Of a slot with several rows `keep_chosen` keeps what they chose, when all of them are there.
        slot = tl.load(slots_ptr + at)
        following = tl.load(slots_ptr + at + 1, mask=at + 1 < tl.load(counts_ptr + ALL_ROWS), other=-1)
        if (is_behind_draft(slots_ptr, at) == 0) & (following != slot):
            tl.store(last_ids_ptr + slot, tl.maximum(chosen, 0))
            counts = tl.load(count_table_ptr + slot)
            if (counts != 0) & (chosen >= 0):
                tl.atomic_add(counts.to(tl.pointer_type(tl.int32)) + chosen, 1, sem="relaxed")


def list_stride(vocab: int) -> int:
    """Return the size of a row's list, in numbers.

    The list is the memory that the kernels of this package use as they go; each row has one.
    """
    return -(-vocab // 64) * 64


def choose(vocab: int, logits_stride: int, x_stride: int, part: int = PART, tile: int = TILE) -> Source:
    """Return the kernel that chooses a token for each row.

    It writes token_ids [rows], -1 for a row whose largest number is not finite. Of slots with a single row it writes
    last_ids, by slot, and the slot's counts of tokens.

    `part` is that of `row_parts`. `tile` is the number of list entries searched at a time, a power of two. list_values
    float32 and list_ids i32 [rows of the chunk, list_stride(vocab)] are scratch memory. A min_p above 1 leaves the most
    likely token.
    """
    part = part_of(vocab, part)
    parts = triton.cdiv(vocab, part)
    return Source(
        function=choose_kernel,
        signature={
            **dict.fromkeys(("logits_ptr", "x_ptr", "tops_ptr"), POINTERS["float32"]),
            "first_ptr": POINTERS["int32"],
            **dict.fromkeys(("mass_ptr", "list_values_ptr"), POINTERS["float32"]),
            "list_ids_ptr": POINTERS["int32"],
            "temperature_ptr": POINTERS["float32"],
            "top_k_ptr": POINTERS["int32"],
            **dict.fromkeys(("top_p_ptr", "min_p_ptr", "typical_p_ptr"), POINTERS["float32"]),
            **dict.fromkeys(("xtc_probability_ptr", "xtc_threshold_ptr"), POINTERS["float32"]),
            **dict.fromkeys(("seeds_ptr", "counters_ptr"), POINTERS["int64"]),
            **CHANGED_BY,
            **dict.fromkeys(("token_ids_ptr", "last_ids_ptr", "counts_ptr"), POINTERS["int32"]),
        },
        constants={
            "VOCAB": vocab,
            "LOGITS_STRIDE": logits_stride,
            "X_STRIDE": x_stride,
            "LIST_STRIDE": list_stride(vocab),
            "PART": part,
            "PARTS": parts,
            "PARTS_BLOCK": triton.next_power_of_2(parts),
            "TILE": tile,
        },
        grid=("num_rows", "1", "1"),
        num_warps=8,
        stack_bytes=STACK_BYTES,
    )
