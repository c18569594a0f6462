"""The layout of a step's inputs on the device, as one contiguous run of bytes, and the writing of a plan into it.

A layout has room for a number of tokens, sequences and logits rows. A launch that was bound to a layout, alone or in a
graph, serves every step that fits, since kernels read the actual numbers on the device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from inferc.arena import ENGINE_ALIGNMENT, KERNEL_ALIGNMENT, round_up
from inferc.runtime.runners.cuda.capacity import Capacity
from inferc.runtime.runners.cuda.shared_prefixes import SharedPrefixes
from inferc.runtime.step.plan import I32, I64, ROW_DTYPES, SampleRows, StepPlan

ENGINE_INPUTS = ("token_ids", "positions", "logits_rows")
ROW_NUMBERS = ("kept_numbers", "row_numbers")  # which rows a step keeps for a head, and which a head's step reads
NUM_COUNTS = 5  # the numbers of tokens, logits rows and sequences; the index of the first row; the rows of the step

ROW_FIELDS = {
    "seq_slots": "sampled_slots",
    **{name: name for name in ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty")},
    **{name: name for name in ("typical_p", "xtc_probability", "xtc_threshold")},
    **{name: name for name in ("frequency_penalty", "seeds", "counters", "num_logprobs")},
}
"""The fields of `SampleRows` that hold one number per row, and their names in the layout."""
LISTS = {"logit_bias": "bias_starts", "banned": "banned_starts", "allowed": "allowed_starts"}
DTYPES: dict[str, type[np.generic]] = {
    **{field: ROW_DTYPES[name] for name, field in ROW_FIELDS.items()},
    **dict.fromkeys(("mask_rows", "target_ids"), np.int32),
}


@dataclass(frozen=True)
class Field:
    """The place of one input array in the layout."""

    offset: int  # in bytes
    dtype: type[np.generic]
    length: int

    @property
    def end(self) -> int:
        return self.offset + np.dtype(self.dtype).itemsize * self.length


class InputLayout:
    """The layout of the inputs of steps up to a capacity.

    sample_rows: how many logits rows exist at a time; max_blocks: per KV group, the most blocks of a sequence. The
    field `counts` holds the counts of the step; `counts_0`, `counts_1`, … those of each chunk of `sample_rows` logits
    rows. The block tables come last, since only their used part is copied.
    """

    def __init__(
        self, capacity: Capacity, sample_rows: int, max_blocks: Sequence[int], *, has_rows: bool = False
    ) -> None:
        self.capacity, self.sample_rows = capacity, sample_rows
        self.num_chunks = -(-capacity.rows // sample_rows)
        self.fields: dict[str, Field] = {}
        self.num_bytes = 0
        tokens, seqs, rows = capacity.tokens, capacity.seqs, capacity.rows
        for name in ("counts", *(f"counts_{chunk}" for chunk in range(self.num_chunks))):
            self._add(name, np.int32, NUM_COUNTS)
        for name in ("num_late", *(f"max_blocks_{group}" for group in range(len(max_blocks)))):
            self._add(name, np.int32, 1)
        self._add("lists", np.int64, 4)
        self._add("query_start_loc", np.int32, seqs + 1)
        self._add("seq_lens", np.int32, seqs)
        self._add("seq_slots", np.int32, seqs)
        self._add("logits_rows", np.int32, rows)
        for name in (*ROW_FIELDS.values(), "mask_rows", "target_ids"):
            self._add(name, DTYPES[name], rows)
        for name in LISTS.values():
            self._add(name, np.int32, rows + 1)
        for name in ("token_ids", "late_rows", "late_slots", "adapter_ids"):
            self._add(name, np.int32, tokens)
        for name in ROW_NUMBERS if has_rows else ():
            self._add(name, np.int32, max(tokens, rows))
        self._add("positions", np.int64, tokens)
        for group in range(len(max_blocks)):
            self._add(f"slot_mapping_{group}", np.int64, tokens)
            self._add(f"shared_{group}", np.int32, seqs)
            self._add(f"members_{group}", np.int32, seqs)
            self._add(f"member_start_{group}", np.int32, seqs + 1)
            self._add(f"group_keys_{group}", np.int32, seqs)
            self._add(f"group_counts_{group}", np.int32, NUM_COUNTS)
        self.tables_at = self.num_bytes
        for group, blocks in enumerate(max_blocks):
            self._add(f"block_table_{group}", np.int32, seqs * blocks)

    def _add(self, name: str, dtype: type[np.generic], length: int) -> None:
        to = ENGINE_ALIGNMENT if name in ENGINE_INPUTS else KERNEL_ALIGNMENT
        field = self.fields[name] = Field(-(-self.num_bytes // to) * to, dtype, length)
        self.num_bytes = round_up(field.end, KERNEL_ALIGNMENT)

    def views(self, memory: NDArray[np.uint8]) -> dict[str, NDArray[np.generic]]:
        """Return the fields as arrays over `memory`."""
        return {name: memory[each.offset : each.end].view(each.dtype) for name, each in self.fields.items()}

    def write(
        self, plan: StepPlan, views: dict[str, NDArray[np.generic]], prefixes: Mapping[int, SharedPrefixes]
    ) -> list[tuple[int, int]]:
        """Write a plan that fits into `views`; return the byte ranges to copy as (first byte, number of bytes).

        prefixes: by KV group, where sequences share some.
        """
        tokens, seqs, rows = plan.num_tokens, plan.num_seqs, len(plan.logits_rows)
        views["counts"][:] = (tokens, rows, seqs, 0, rows)
        for chunk in range(self.num_chunks):
            first = chunk * self.sample_rows
            views[f"counts_{chunk}"][:] = (tokens, min(self.sample_rows, max(0, rows - first)), seqs, first, rows)
        views["token_ids"][:tokens] = plan.token_ids
        views["positions"][:tokens] = plan.positions
        views["query_start_loc"][: seqs + 1] = plan.query_start_loc
        views["seq_lens"][:seqs] = plan.seq_lens
        views["seq_slots"][:seqs] = plan.seq_slots
        views["logits_rows"][:rows] = plan.logits_rows
        for name, count in zip(ENGINE_INPUTS, (tokens, tokens, rows), strict=True):
            views[name][count:] = 0  # engines in a graph always compute the graph's full number of rows
        late = len(plan.pending_rows)
        views["num_late"][0] = late
        views["late_rows"][:late], views["late_slots"][:late] = plan.pending_rows, plan.pending_slots
        if (ids := plan.adapters_of_tokens) is not None:
            views["adapter_ids"][:tokens] = ids
            views["adapter_ids"][tokens:] = 0
        self._write_sampling(plan.sample, views)
        views["mask_rows"][:rows] = -1 if plan.masks is None else self.sent_masks(plan, plan.masks.mask_rows)
        if plan.wants_logprobs:
            views["num_logprobs"][:rows] = np.maximum(plan.sample.num_logprobs, 1)
        copies = [(0, self.tables_at)]
        for group, (slots, table) in enumerate(zip(plan.slot_mapping, plan.block_tables, strict=True)):
            views[f"slot_mapping_{group}"][:tokens] = slots
            views[f"max_blocks_{group}"][0] = table.shape[1]
            _write_shared(prefixes.get(group), group, seqs, views)
            views[f"block_table_{group}"][: table.size] = table.reshape(-1)
            copies.append((self.fields[f"block_table_{group}"].offset, 4 * table.size))
        if copies[1][1] and len(copies) == 2:
            copies = [(0, self.tables_at + copies[1][1])]  # the only table follows directly, so one copy is enough
        return copies

    def sent_masks(self, plan: StepPlan, mask_rows: I32) -> I32:
        """Return which of the masks that are on the device at a time is each row's, or -1.

        They are sent without gaps: those of a whole step, or of a chunk of rows if tokens were drafted.
        """
        has_mask = mask_rows >= 0
        before: I64 = np.cumsum(has_mask) - has_mask
        if len(plan.num_drafted):
            before -= before[np.arange(len(before)) // self.sample_rows * self.sample_rows]
        return np.where(has_mask, before, -1).astype(np.int32)

    def _write_sampling(self, rows: SampleRows, views: dict[str, NDArray[np.generic]]) -> None:
        count = len(rows)
        for name, field in ROW_FIELDS.items():
            views[field][:count] = getattr(rows, name)
        for name, field in LISTS.items():
            starts = getattr(rows, name).starts
            views[field][: count + 1] = starts if len(starts) else 0


def _write_shared(of: SharedPrefixes | None, group: int, seqs: int, views: dict[str, NDArray[np.generic]]) -> None:
    """Write the prefixes that sequences share in a KV group."""
    counts, shared = views[f"group_counts_{group}"], views[f"shared_{group}"]
    if of is None:
        counts[2] = 0
        shared[:seqs] = 0
        return
    counts[2] = len(of.keys)
    shared[:seqs] = of.shared
    views[f"group_keys_{group}"][: len(of.keys)] = of.keys
    views[f"member_start_{group}"][: len(of.starts)] = of.starts
    views[f"members_{group}"][: len(of.members)] = of.members
