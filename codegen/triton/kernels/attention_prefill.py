"""The prefill attention kernel for sequences with more new tokens than decode handles, in tiles that fill tensor cores.

In the invariant order, a token gets the same bits as decode would give it: tiles have as few rows as those of decode,
and keys are summed by the same cells. That reads K and V several times as often.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import Source
from inferc.codegen.triton.kernels.attention_decode import DECODE_STAGES, decode_tile, decode_warps, takes_in_order
from inferc.codegen.triton.kernels.attention_plan import TILES, Cells, cell_at, cell_start
from inferc.codegen.triton.kernels.attention_tiles import (
    AttentionShape,
    attend,
    decode_rows,
    first_key,
    last_up_to,
    merge,
    query_limit,
    stack_bytes,
)


@triton.jit  # type: ignore[untyped-decorator]
def prefill_attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    cache_ptr,
    block_table_ptr,
    query_start_ptr,
    seq_lens_ptr,
    sinks_ptr,
    out_ptr,
    counts_ptr,
    max_blocks_ptr,
    alibi_ptr,
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
    ALIBI: tl.constexpr,
    INT8: tl.constexpr,
    IN_ORDER: tl.constexpr,
    QUERY_LIMIT: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    CELL: tl.constexpr,
    GROW: tl.constexpr,
    MOST_CELLS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    SEQS: tl.constexpr,
    LOG2_E: tl.constexpr,
    PTX: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """Compute the attention of QUERIES new tokens of one sequence, for the query heads of one kv head.

    MOST_CELLS is 0 if all keys are summed at once, without cells. The last programs run first, since a sequence's last
    tokens attend to the most keys.
    """
    program, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    num_seqs = tl.load(counts_ptr + 2)
    seq = last_up_to(query_start_ptr, num_seqs, program, QUERIES, SEQS)
    begin = tl.load(query_start_ptr + seq)
    num_new = tl.load(query_start_ptr + seq + 1) - begin
    first = (program - begin // QUERIES - seq) * QUERIES
    if (num_new > QUERY_LIMIT) & (first < num_new):
        seq_len = tl.load(seq_lens_ptr + seq)
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        new = first + m // GROUP
        head = kv_head * GROUP + m % GROUP
        is_row = (m < QUERIES * GROUP) & (new < num_new)
        there = is_row[:, None] & (d < DIM)[None, :]
        token = (begin + new).to(tl.int64)
        q = tl.load(q_ptr + (token * Q_STRIDE + head * DIM)[:, None] + d[None, :], mask=there, other=0.0)
        if WIDE_DOT:
            q = q.to(tl.float32)
        m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        l_i = tl.zeros((BLOCK_M,), tl.float32)
        if HAS_SINKS:
            m_i = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
            l_i += 1.0
        acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        lowest = seq_len - num_new + first
        highest = tl.minimum(lowest + QUERIES, seq_len) - 1
        position = tl.minimum(seq_len - num_new + new, highest)
        slope = position
        if ALIBI:
            slope = tl.load(alibi_ptr + head, mask=is_row, other=0.0)
        table_ptr = block_table_ptr + seq.to(tl.int64) * tl.load(max_blocks_ptr)
        head_ptr = cache_ptr + kv_head * (2 * PART)
        read_from = first_key(lowest, MASK, WINDOW)
        if MOST_CELLS == 0:
            m_i, l_i, acc = attend(
                q,
                m_i,
                l_i,
                acc,
                head_ptr,
                table_ptr,
                slope,
                position,
                lowest,
                highest,
                read_from // TILE * TILE,
                highest + 1,
                DIM,
                PART,
                BLOCK_STRIDE,
                BLOCK_SIZE,
                SCALE,
                SOFTCAP,
                MASK,
                WINDOW,
                ALIBI,
                INT8,
                IN_ORDER,
                TILE,
                STAGES,
                LOG2_E,
                PTX,
                WIDE_DOT,
            )
        else:
            for cell in range(cell_at(read_from, CELL, GROW), cell_at(highest, CELL, GROW) + 1):
                cell_m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
                cell_l = tl.zeros((BLOCK_M,), tl.float32)
                cell_acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
                cell_m, cell_l, cell_acc = attend(
                    q,
                    cell_m,
                    cell_l,
                    cell_acc,
                    head_ptr,
                    table_ptr,
                    slope,
                    position,
                    lowest,
                    highest,
                    cell_start(cell, CELL, GROW),
                    tl.minimum(cell_start(cell + 1, CELL, GROW), highest + 1),
                    DIM,
                    PART,
                    BLOCK_STRIDE,
                    BLOCK_SIZE,
                    SCALE,
                    SOFTCAP,
                    MASK,
                    WINDOW,
                    ALIBI,
                    INT8,
                    IN_ORDER,
                    TILE,
                    STAGES,
                    LOG2_E,
                    PTX,
                    WIDE_DOT,
                )
                m_i, l_i, acc = merge(m_i, l_i, acc, cell_m, cell_l, cell_acc)
        out_at = out_ptr + (token * OUT_STRIDE + head * DIM)[:, None] + d[None, :]
        tl.store(out_at, (acc / l_i[:, None]).to(out_ptr.dtype.element_ty), mask=there)


def prefill_attention(shape: AttentionShape, cells: Cells = TILES) -> Source:
    """Return the kernel of `inferc.paged_attention` for the sequences of more than `query_limit` new tokens.

    It leaves the other rows of out alone. The arguments and `cells` are those of `decode_attention`.
    """
    dtype, dim, group, int8_kv = shape.dtype, shape.dim, shape.group, shape.int8_kv
    # As many rows as registers hold: int8 needs some registers for its conversion, and float32 needs all of them.
    rows = 128 >> (dim > 128) >> int8_kv if dtype != "float32" else 32
    rows = max(rows, int(triton.next_power_of_2(group)))
    tile = 16 if dtype == "float32" else 32 if dim > 128 or (int8_kv and dim <= 64) else 64
    num_warps, num_stages, in_order = 8, 2, 0
    if cells != TILES:
        rows = decode_rows(group)
        tile = decode_tile(dtype, dim, rows, int8_kv, cells)
        num_warps, num_stages, in_order = decode_warps(rows, dim), DECODE_STAGES, takes_in_order(rows)
    return Source(
        function=prefill_attention_kernel,
        signature=shape.signature({}),
        constants={
            **shape.constants(),
            "IN_ORDER": in_order,
            "QUERY_LIMIT": query_limit(group),
            "QUERIES": rows // group,
            "BLOCK_M": rows,
            **cells.constants,
            "TILE": tile,
            "STAGES": num_stages,
        },
        grid=("num_tokens // QUERIES + num_seqs", "KV_HEADS", "1"),
        num_warps=num_warps,
        stack_bytes=stack_bytes(dtype, dim, int8_kv),
    )
