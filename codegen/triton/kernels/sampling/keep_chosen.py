"""The kernel that notes what slots with several rows chose, in steps whose tokens were drafted.

It has one program per row, of which those at the first of several rows of a slot do something.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import POINTERS, Source
from inferc.codegen.triton.kernels.sampling.rows import INPUTS, ROWS, is_behind_draft
from inferc.config import MOST_DRAFTED


@triton.jit  # type: ignore[untyped-decorator]
def keep_chosen_kernel(  # type: ignore[no-untyped-def]
    slots_ptr,
    inputs_ptr,
    logits_rows_ptr,
    token_ids_ptr,
    count_table_ptr,
    last_ids_ptr,
    counts_ptr,
    MOST: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    rows = tl.load(counts_ptr + ROWS)
    if row < rows:
        slot = tl.load(slots_ptr + row)
        if is_behind_draft(slots_ptr, row) == 0:
            place = tl.arange(0, MOST)
            at = row + place
            own = tl.load(slots_ptr + at, mask=at < rows, other=-1) == slot
            following = tl.load(slots_ptr + at + 1, mask=at + 1 < rows, other=-1) == slot
            following = following & (place + 1 < MOST)
            if tl.max(following.to(tl.int32)) > 0:
                chosen = tl.load(token_ids_ptr + at, mask=own, other=-1)
                token = tl.load(logits_rows_ptr + at + 1, mask=following, other=0)
                right = following & (tl.load(inputs_ptr + token, mask=following, other=-1) == chosen) & (chosen >= 0)
                last = tl.min(tl.where(right, MOST, place))  # of the rows that count
                tl.store(last_ids_ptr + slot, tl.max(tl.where(place == last, chosen, 0)))
                counts = tl.load(count_table_ptr + slot)
                kept = (place <= last) & (chosen >= 0) & (counts != 0)
                tl.atomic_add(counts.to(tl.pointer_type(tl.int32)) + chosen, 1, mask=kept, sem="relaxed")


def keep_chosen() -> Source:
    """Return the kernel that writes last_ids, by slot, and the counts of tokens of slots with several rows.

    It runs when all rows of a step are sampled. A row counts if it is the first of its slot, or if the row before it
    counts and chose the token that the row is behind. `counts_ptr` has the counts of the step.
    """
    return Source(
        function=keep_chosen_kernel,
        signature={
            "slots_ptr": POINTERS["int32"],
            **INPUTS,
            "token_ids_ptr": POINTERS["int32"],
            "count_table_ptr": POINTERS["int64"],
            **dict.fromkeys(("last_ids_ptr", "counts_ptr"), POINTERS["int32"]),
        },
        constants={"MOST": MOST_DRAFTED + 1},
        grid=("num_rows", "1", "1"),
        num_warps=1,
    )
