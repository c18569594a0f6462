"""The plan that divides a step's decode attention among programs, made on the device once per kind of KV group.

The keys that a sequence's new tokens attend to are cut into tiles. The tiles of all sequences and kv heads, in this
order, form one line. Each program processes an equal stretch of the line, whatever the lengths of the sequences are.
Decode therefore needs scratch memory for two partial results per program, and none that grows with tokens or sequences.

    sequence 0                       sequence 1
    head 0       head 1       ...    head 0               head 1
    [0 ... n0)   [0 ... n0)          [0 ......... n1)     [0 ......... n1)
    |  program 0   |  program 1   |  program 2   |  ...

In the fast order of addition, a sequence's sums depend on where the line is cut, and so on the batch. In the invariant
order, keys are summed cell by cell, and cells are merged one by one in the order of the keys. A cell is a range [first,
end) of positions that depends neither on the sequence's length, nor on the step's new tokens, nor on the number of
programs. So it does not matter either how a prompt is cut into chunks. A program processes the cells that start in its
stretch.

Where sequences share a prefix, the first `shared` keys of each are processed for its whole group, and the line has only
the keys after them.

The plan is [tiles of a program, starts[0], ..., starts[num_seqs]] in i32. starts[i] is the number of tiles of all
sequences before i, for one kv head.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import POINTERS, Source
from inferc.codegen.triton.kernels.attention_tiles import MASKS, SEQS, first_key

UNIT = 64  # keys of a tile
LEAST_TILES = 4  # the least tiles of a program, or of a cell, that are worth a partial result
DOUBLINGS = 12  # how often the size of cells may double: enough for positions that no model has


@dataclass(frozen=True)
class Cells:
    """A division of positions into cells.

    `keys` is the number of positions in a cell. With `grow`, cells that begin at position 16 * keys or later have 2 *
    keys positions, those from 32 * keys on 4 * keys, and so on. `most` is the largest number of cells that a sequence's
    new tokens may attend to.
    """

    keys: int
    grow: bool
    most: int

    @property
    def constants(self) -> dict[str, int]:
        return {"CELL": self.keys, "GROW": int(self.grow), "MOST_CELLS": self.most}


TILES = Cells(UNIT, False, 0)
"""The cells of the fast order of addition: each tile is a cell, and a whole stretch is summed at once."""


def invariant_cells(mask: str, window: int, max_model_len: int) -> Cells:
    """Return the cells of the invariant order, whose number per sequence and whose size are both bounded.

    A sequence has a few dozen cells at most, and no cell has more than an eighth of the keys that are attended to.
    """
    keys = LEAST_TILES * UNIT
    if mask == "causal":
        doublings = sum(max_model_len - 1 >= 16 * keys << each for each in range(DOUBLINGS))
        return Cells(keys, True, 8 * doublings + (max_model_len - 1 >> doublings) // keys + 1)
    while 16 * keys < window:
        keys *= 2
    return Cells(keys, False, -(-window // keys) + 2)


@triton.jit  # type: ignore[untyped-decorator]
def cell_at(key, CELL: tl.constexpr, GROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the cell that holds a position; it is -1 for position -1."""
    if GROW:
        doublings = key * 0
        for doubling in tl.static_range(12):
            doublings += (key >= (16 * CELL << doubling)).to(tl.int32)
        cell = 8 * doublings + ((key >> doublings) + CELL) // CELL - 1
    else:
        cell = (key + CELL) // CELL - 1
    return cell


@triton.jit  # type: ignore[untyped-decorator]
def cell_start(cell, CELL: tl.constexpr, GROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first position of a cell."""
    if GROW:
        doublings = tl.maximum(cell // 8 - 1, 0)
        start = (cell - 8 * doublings) * CELL << doublings
    else:
        start = cell * CELL
    return start


@triton.jit  # type: ignore[untyped-decorator]
def line_start(  # type: ignore[no-untyped-def]
    position, shared, MASK: tl.constexpr, WINDOW: tl.constexpr, CELL: tl.constexpr, GROW: tl.constexpr
):
    """Return the position where a sequence's tiles begin, which is the start of a cell.

    `position` is that of the sequence's first new token. `shared` is the number of keys that its group processes, in
    whole tiles.
    """
    first = tl.maximum(first_key(position, MASK, WINDOW), shared)
    return cell_start(cell_at(first, CELL, GROW), CELL, GROW)


@triton.jit  # type: ignore[untyped-decorator]
def attention_plan_kernel(  # type: ignore[no-untyped-def]
    query_start_ptr,
    seq_lens_ptr,
    shared_ptr,
    plan_ptr,
    counts_ptr,
    KV_HEADS: tl.constexpr,
    QUERY_LIMIT: tl.constexpr,
    MASK: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    UNIT: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    CELL: tl.constexpr,
    GROW: tl.constexpr,
    SEQS: tl.constexpr,
):
    num_seqs = tl.load(counts_ptr + 2)
    total = 0
    for first in range(0, num_seqs, SEQS):
        seq = first + tl.arange(0, SEQS)
        is_seq = seq < num_seqs
        begin = tl.load(query_start_ptr + seq, mask=is_seq, other=0)
        num_new = tl.load(query_start_ptr + seq + 1, mask=is_seq, other=0) - begin
        seq_len = tl.load(seq_lens_ptr + seq, mask=is_seq, other=0)
        shared = seq * 0
        if HAS_SHARED:
            shared = tl.load(shared_ptr + seq, mask=is_seq, other=0)
        start = line_start(seq_len - num_new, shared, MASK, WINDOW, CELL, GROW)
        is_done = (num_new > 0) & (num_new <= QUERY_LIMIT)
        tiles = tl.where(is_done, (seq_len - start + UNIT - 1) // UNIT, 0)
        tl.store(plan_ptr + 1 + seq, total + tl.cumsum(tiles, 0) - tiles, mask=is_seq)
        total += tl.sum(tiles, 0)
    tl.store(plan_ptr + 1 + num_seqs, total)
    tl.store(plan_ptr, tl.maximum(LEAST_TILES, (total * KV_HEADS + NUM_PROGRAMS - 1) // NUM_PROGRAMS))


def attention_plan(
    kv_heads: int,
    most_new: int,
    mask: str,
    window: int,
    num_programs: int,
    cells: Cells = TILES,
    has_shared: bool = False,
) -> Source:
    """Return the kernel that makes the plan from query_start [seqs + 1] and seq_lens [seqs], both i32.

    The plan is described in the module's docstring, its size by `plan_bytes`. Sequences with more than `most_new` new
    tokens get no tiles. shared [seqs] i32 has the number of keys of each sequence that its group processes.
    `num_programs` and `cells` are those of the `decode_attention` that uses the plan.
    """
    names = ("query_start_ptr", "seq_lens_ptr", "shared_ptr", "plan_ptr", "counts_ptr")
    constants = {**cells.constants}
    del constants["MOST_CELLS"]
    return Source(
        function=attention_plan_kernel,
        signature=dict.fromkeys(names, POINTERS["int32"]),
        constants={
            "KV_HEADS": kv_heads,
            "QUERY_LIMIT": most_new,
            "MASK": MASKS.index(mask),
            "WINDOW": window,
            "HAS_SHARED": int(has_shared),
            "NUM_PROGRAMS": num_programs,
            "UNIT": UNIT,
            "LEAST_TILES": LEAST_TILES,
            **constants,
            "SEQS": SEQS,
        },
        grid=("1", "1", "1"),
        num_warps=4,
    )


def plan_bytes(max_seqs: int) -> int:
    return 4 * (2 + max_seqs)
