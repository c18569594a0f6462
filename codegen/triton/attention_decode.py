"""Decode attention: sequences of few new tokens, cut over all programs so that they read with all of memory's bandwidth.

Every program does its stretch of the step's tiles (`attention_plan`). Where that cuts a head of a sequence it leaves a
partial result, and the program that comes last to such a head merges them in the order of the keys.
Sources: Dao et al. 2023, "Flash-Decoding for long-context inference"; Osama et al. 2023, arXiv:2301.03598.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.attention_plan import LEAST_TILES, MOST_CELLS, UNIT, seen_tiles
from inferc.codegen.triton.attention_tiles import attend, constants, decode_rows, last_up_to, signature, stack_bytes
from inferc.codegen.triton.source import Source


@triton.jit  # type: ignore[untyped-decorator]
def decode_attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    cache_ptr,
    block_table_ptr,
    query_start_ptr,
    seq_lens_ptr,
    sinks_ptr,
    out_ptr,
    plan_ptr,
    partial_ptr,
    arrived_ptr,
    counts_ptr,
    max_blocks_ptr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASK: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    INT8: tl.constexpr,
    IN_ORDER: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    UNIT: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    MOST_CELLS: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    SEQS: tl.constexpr,
    LOG2_E: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """MOST_CELLS: 0 if a tile of the plan is a cell.

    SLOTS: partial results of a program. The first is of the head that begins in its stretch and ends behind it: there is one
    at most. The others are of the head that began before: one, or one of each cell, since cells are merged one by one.
    """
    SLOT: tl.constexpr = BLOCK_M * (DIM + 2)
    program = tl.program_id(0)
    num_seqs, max_blocks = tl.load(counts_ptr + 2), tl.load(max_blocks_ptr)
    stretch = tl.load(plan_ptr)
    starts_ptr = plan_ptr + 1
    at = program * stretch
    stop = tl.minimum(at + stretch, tl.load(starts_ptr + num_seqs) * KV_HEADS)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_D)
    while at < stop:
        seq = last_up_to(starts_ptr, num_seqs, at // KV_HEADS, 0, SEQS)
        before = tl.load(starts_ptr + seq)
        tiles = tl.load(starts_ptr + seq + 1) - before
        begin = tl.load(query_start_ptr + seq)
        num_new = tl.load(query_start_ptr + seq + 1) - begin
        seq_len = tl.load(seq_lens_ptr + seq)
        kv_head = (at - before * KV_HEADS) // tiles
        start = before * KV_HEADS + kv_head * tiles  # the head's tiles are [start, start + tiles)
        origin, width = seen_tiles(seq_len, num_new, MASK, WINDOW, UNIT, LEAST_TILES, MOST_CELLS)
        cells = (tiles + width - 1) // width
        first = (at - start + width - 1) // width  # of the cells that start in this stretch: [first, last)
        last = tl.minimum((stop - start + width - 1) // width, cells)
        at = tl.minimum(start + tiles, stop)
        if first < last:
            new = m // GROUP
            head = kv_head * GROUP + m % GROUP
            is_row = new < num_new
            there = is_row[:, None] & (d < DIM)[None, :]
            token = (begin + new).to(tl.int64)
            q = tl.load(q_ptr + (token * Q_STRIDE + head * DIM)[:, None] + d[None, :], mask=there, other=0.0)
            if WIDE_DOT:
                q = q.to(tl.float32)
            lowest = seq_len - num_new
            position = tl.minimum(lowest + new, seq_len - 1)
            table_ptr = block_table_ptr + seq.to(tl.int64) * max_blocks
            head_ptr = cache_ptr + kv_head * (2 * PART)
            slots_ptr = partial_ptr + program * (SLOTS * SLOT)
            top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            total = tl.zeros((BLOCK_M,), tl.float32)
            sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            if HAS_SINKS:
                has_sink = is_row & (first == 0)
                top = tl.load(sinks_ptr + head, mask=has_sink, other=float("-inf")).to(tl.float32) * LOG2_E
                total = has_sink.to(tl.float32)
            step = last - first
            if MOST_CELLS != 0:
                step = 1
            for cell in range(first, last, step):
                cell_top, cell_total, cell_sums = top, total, sums
                if MOST_CELLS != 0:
                    cell_top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
                    cell_total = tl.zeros((BLOCK_M,), tl.float32)
                    cell_sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
                key = origin + cell * (width * UNIT)
                cell_top, cell_total, cell_sums = attend(
                    *(q, cell_top, cell_total, cell_sums, head_ptr, table_ptr, position, lowest, seq_len - 1),
                    *(key, tl.minimum(key + step * (width * UNIT), seq_len)),
                    *(DIM, PART, BLOCK_STRIDE, BLOCK_SIZE, SCALE, SOFTCAP, MASK, WINDOW, INT8),
                    *(IN_ORDER, TILE, STAGES, LOG2_E, WIDE_DOT),
                )
                if MOST_CELLS == 0:
                    top, total, sums = cell_top, cell_total, cell_sums
                elif first == 0:
                    top, total, sums = merge(top, total, sums, cell_top, cell_total, cell_sums)
                else:
                    slot_ptr = slots_ptr + (1 + cell - first) * SLOT
                    store_partial(slot_ptr, cell_top, cell_total, cell_sums, m, d, is_row, there, DIM)
            is_whole = (first == 0) & (last == cells)
            is_last = is_whole
            if not is_whole:
                home = start // stretch  # the program in whose stretch the head begins
                if first == 0:
                    store_partial(slots_ptr, top, total, sums, m, d, is_row, there, DIM)
                elif MOST_CELLS == 0:
                    store_partial(slots_ptr + SLOT, top, total, sums, m, d, is_row, there, DIM)
                # One thread adds, for all: their partial results are there before it, and they read others' after it.
                tl.debug_barrier()
                arrived = tl.atomic_add(arrived_ptr + home, 1, sem="acq_rel", scope="gpu")
                tl.debug_barrier()
                # A cell or more starts in every stretch that the head touches, unless cells are longer than stretches.
                programs = tl.minimum((start + (cells - 1) * width) // stretch - home, cells - 1) + 1
                is_last = arrived == programs - 1
                if is_last:
                    tl.store(arrived_ptr + home, 0)  # for the next launch
                    top, total, sums = load_partial(partial_ptr + home * (SLOTS * SLOT), m, d, is_row, there, DIM)
                    apart = stretch
                    if MOST_CELLS != 0:
                        apart = 1
                    others = ((home + 1) * stretch - start + width - 1) // width
                    for cell in tl.range(others, cells, apart, loop_unroll_factor=4):  # four are loaded together
                        owner = (start + cell * width) // stretch
                        slot = 1 + cell - (owner * stretch - start + width - 1) // width
                        slot_ptr = partial_ptr + (owner * SLOTS + slot) * SLOT
                        cell_top, cell_total, cell_sums = load_partial(slot_ptr, m, d, is_row, there, DIM)
                        top, total, sums = merge(top, total, sums, cell_top, cell_total, cell_sums)
            if is_last:
                out_at = out_ptr + (token * OUT_STRIDE + head * DIM)[:, None] + d[None, :]
                tl.store(out_at, (sums / total[:, None]).to(out_ptr.dtype.element_ty), mask=there)


@triton.jit
def merge(top, total, sums, other_top, other_total, other_sums):  # type: ignore[no-untyped-def]
    """Two softmaxes over different keys as one; rounded in the same way wherever it is compiled."""
    higher = tl.maximum(top, other_top)
    base = tl.where(higher == float("-inf"), 0.0, higher)
    factor, other_factor = tl.exp2(top - base), tl.exp2(other_top - base)
    total = tl.fma(total, factor, other_total * other_factor)
    sums = tl.fma(sums, tl.broadcast_to(factor[:, None], sums.shape), other_sums * other_factor[:, None])
    return higher, total, sums


@triton.jit  # type: ignore[untyped-decorator]
def store_partial(at, top, total, sums, m, d, is_row, there, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """A partial result: sums of values [rows][dim], then the largest scores [rows], then the totals [rows]."""
    tl.store(at + m[:, None] * DIM + d[None, :], sums, mask=there)
    tl.store(at + m.shape[0] * DIM + m, top, mask=is_row)
    tl.store(at + m.shape[0] * (DIM + 1) + m, total, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def load_partial(at, m, d, is_row, there, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """What `store_partial` left, past the cache of this multiprocessor, which knows nothing of the others' stores."""
    sums = tl.load(at + m[:, None] * DIM + d[None, :], mask=there, other=0.0, cache_modifier=".cg")
    top = tl.load(at + m.shape[0] * DIM + m, mask=is_row, other=0.0, cache_modifier=".cg")
    total = tl.load(at + m.shape[0] * (DIM + 1) + m, mask=is_row, other=1.0, cache_modifier=".cg")
    return top, total, sums


def decode_attention(
    dtype: str,
    heads: int,
    kv_heads: int,
    dim: int,
    strides: tuple[int, int],
    layers: int,
    block_size: int,
    scale: float,
    softcap: float,
    mask: str,
    window: int,
    has_sinks: bool,
    num_programs: int,
    int8_kv: bool = False,
    deterministic: bool = False,
) -> Source:
    """`inferc.paged_attention` of the sequences of at most `query_limit` new tokens; other rows of out are left alone.

    q and out [tokens, heads * dim], `strides` elements from row to row. cache_ptr: as `rope_kv_write` has it; block_table
    [seqs, max_blocks], query_start [seqs + 1], seq_lens [seqs], max_blocks [1] i32; sinks [heads]. plan: what
    `attention_plan` made of the same num_programs and deterministic. partial: see `partial_bytes`. arrived
    [num_programs] i32: zeros, which it is left as.
    """
    rows = decode_rows(heads // kv_heads)
    # Of K and V, one to two tiles are on their way to a program, of which two or three fit a multiprocessor.
    wide = dim <= 64 and (int8_kv or not deterministic)  # else registers are short
    tile = 16 if dtype == "float32" else 128 if wide else 64 if dim <= 128 else 32
    shape = (heads, kv_heads, dim, strides, layers, block_size, scale, softcap, mask, window, has_sinks, int8_kv)
    return Source(
        function=decode_attention_kernel,
        signature=signature(dtype, int8_kv, {"plan_ptr": "int32", "partial_ptr": "float32", "arrived_ptr": "int32"}),
        constants={
            **constants(*shape),
            "IN_ORDER": int(rows < 64),  # from where on products take their operands from shared memory
            "BLOCK_M": rows,
            "NUM_PROGRAMS": num_programs,
            "UNIT": UNIT,
            "LEAST_TILES": LEAST_TILES,
            "MOST_CELLS": MOST_CELLS if deterministic else 0,
            "SLOTS": slots(deterministic),
            "TILE": tile,
            "STAGES": 3,
        },
        grid=("NUM_PROGRAMS", "1", "1"),
        num_warps=4 if rows < 64 else 8,
        stack_bytes=stack_bytes(dtype, dim, int8_kv),
    )


def slots(deterministic: bool) -> int:
    """Partial results of a program: a head has MOST_CELLS at most, of which the first is not in a stretch with others."""
    return MOST_CELLS if deterministic else 2


def partial_bytes(heads: int, kv_heads: int, dim: int, num_programs: int, deterministic: bool = False) -> int:
    """What `partial_ptr` has room for, in any step."""
    return 4 * num_programs * slots(deterministic) * decode_rows(heads // kv_heads) * (dim + 2)
