"""The kernel that puts the ids sampled by the step before among this step's token ids, without the host."""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import POINTERS, Source


@triton.jit  # type: ignore[untyped-decorator]
def fill_late_ids_kernel(  # type: ignore[no-untyped-def]
    token_ids_ptr, late_rows_ptr, late_slots_ptr, last_ids_ptr, num_late_ptr, BLOCK: tl.constexpr
):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    late = i < tl.load(num_late_ptr)
    row = tl.load(late_rows_ptr + i, mask=late, other=0)
    slot = tl.load(late_slots_ptr + i, mask=late, other=0)
    tl.store(token_ids_ptr + row, tl.load(last_ids_ptr + slot, mask=late, other=0), mask=late)


def fill_late_ids() -> Source:
    """Return the kernel of token_ids[late_rows[i]] = last_ids[late_slots[i]] for i < num_late[0].

    num_late[0] is at most the number of tokens of the step. All tensors are i32.
    """
    names = ("token_ids_ptr", "late_rows_ptr", "late_slots_ptr", "last_ids_ptr", "num_late_ptr")
    return Source(
        function=fill_late_ids_kernel,
        signature=dict.fromkeys(names, POINTERS["int32"]),
        constants={"BLOCK": 128},
        grid=("ceil_div(num_tokens, BLOCK)", "1", "1"),
        num_warps=4,
    )
