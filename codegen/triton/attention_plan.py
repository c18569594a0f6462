"""How a step's decode attention is shared out between programs: once a step and kind of KV group, on the device.

The keys that a sequence's new tokens see go in tiles; all tiles of all sequences and kv heads, in this order, are one line,
of which each program does an equal stretch, whatever the lengths are. So decode needs scratch for two partial results of a
program, and none that grows with tokens or sequences.

    sequence 0                       sequence 1
    head 0       head 1       ...    head 0               head 1
    [0 ... n0)   [0 ... n0)          [0 ......... n1)     [0 ......... n1)
    |  program 0   |  program 1   |  program 2   |  ...

A sequence's sums then depend on where it is cut, and so on the batch. `deterministic` cuts each sequence by its own length
alone, into cells whose sums are made one by one: a program does the cells that start in its stretch.

plan: [tiles of a program, starts[0], ..., starts[num_seqs]] i32, of which starts are the sums of the tiles, of one kv head,
of the sequences before.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.attention_tiles import MASKS, SEQS, first_key, query_limit
from inferc.codegen.triton.source import POINTERS, Source

UNIT = 64  # keys of a tile
LEAST_TILES = 4  # of a program, or of a cell: what is worth a partial result
MOST_CELLS = 32  # of a sequence


@triton.jit  # type: ignore[untyped-decorator]
def seen_tiles(  # type: ignore[no-untyped-def]
    seq_len,
    num_new,
    MASK: tl.constexpr,
    WINDOW: tl.constexpr,
    UNIT: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    MOST_CELLS: tl.constexpr,
):
    """Where the tiles begin that a sequence's new tokens see, and the tiles of a cell. MOST_CELLS: 0 if each is its own.

    Cells are at multiples of their size, and that is the least power of two, times LEAST_TILES, of which MOST_CELLS do even
    if the first and the last are seen in part.
    """
    first = first_key(seq_len - num_new, MASK, WINDOW)
    cell = seq_len * 0 + 1
    if MOST_CELLS != 0:
        cell = cell * LEAST_TILES
        for _ in tl.static_range(16):
            cell = tl.where(seq_len - first > cell * ((MOST_CELLS - 1) * UNIT), 2 * cell, cell)
    return first // (cell * UNIT) * (cell * UNIT), cell


@triton.jit  # type: ignore[untyped-decorator]
def attention_plan_kernel(  # type: ignore[no-untyped-def]
    query_start_ptr,
    seq_lens_ptr,
    plan_ptr,
    counts_ptr,
    KV_HEADS: tl.constexpr,
    QUERY_LIMIT: tl.constexpr,
    MASK: tl.constexpr,
    WINDOW: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    UNIT: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    MOST_CELLS: tl.constexpr,
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
        start, _ = seen_tiles(seq_len, num_new, MASK, WINDOW, UNIT, LEAST_TILES, MOST_CELLS)
        is_done = (num_new > 0) & (num_new <= QUERY_LIMIT)
        tiles = tl.where(is_done, (seq_len - start + UNIT - 1) // UNIT, 0)
        tl.store(plan_ptr + 1 + seq, total + tl.cumsum(tiles, 0) - tiles, mask=is_seq)
        total += tl.sum(tiles, 0)
    tl.store(plan_ptr + 1 + num_seqs, total)
    tl.store(plan_ptr, tl.maximum(LEAST_TILES, (total * KV_HEADS + NUM_PROGRAMS - 1) // NUM_PROGRAMS))


def attention_plan(
    kv_heads: int, group: int, mask: str, window: int, num_programs: int, deterministic: bool = False
) -> Source:
    """query_start [seqs + 1], seq_lens [seqs] i32 -> plan, see the module and `plan_bytes`.

    Sequences with more new tokens than `query_limit(group)` have no tiles. num_programs and deterministic: those of the
    `decode_attention` that goes by it.
    """
    return Source(
        function=attention_plan_kernel,
        signature=dict.fromkeys(("query_start_ptr", "seq_lens_ptr", "plan_ptr", "counts_ptr"), POINTERS["int32"]),
        constants={
            "KV_HEADS": kv_heads,
            "QUERY_LIMIT": query_limit(group),
            "MASK": MASKS.index(mask),
            "WINDOW": window,
            "NUM_PROGRAMS": num_programs,
            "UNIT": UNIT,
            "LEAST_TILES": LEAST_TILES,
            "MOST_CELLS": MOST_CELLS if deterministic else 0,
            "SEQS": SEQS,
        },
        grid=("1", "1", "1"),
        num_warps=4,
    )


def plan_bytes(max_seqs: int) -> int:
    return 4 * (2 + max_seqs)
