"""Attention of new queries over the paged K and V: ragged, prefill and decode alike, one pass with an online softmax.

A program has the query heads of one kv head, for a few tokens of one sequence, as the rows of its products; keys go by in
tiles at absolute positions. Sources: Dao 2023, arXiv:2307.08691; Kwon et al. 2023, arXiv:2309.06180.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.source import POINTERS, Source

MASKS = ("causal", "sliding", "chunked")
LOG2_E = 1.4426950408889634


@triton.jit  # type: ignore[untyped-decorator]
def paged_attention_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    cache_ptr,
    block_table_ptr,
    query_start_ptr,
    seq_lens_ptr,
    sinks_ptr,
    out_ptr,
    counts_ptr,
    max_blocks_ptr,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    DIM: tl.constexpr,
    Q_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SCALE: tl.constexpr,
    SOFTCAP: tl.constexpr,
    MASK: tl.constexpr,
    WINDOW: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    QUERIES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    TILE: tl.constexpr,
    LOG2_E: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """QUERIES: tokens of a program, of which QUERIES * GROUP rows of BLOCK_M are. Sequence s has the programs from
    query_start[s] // QUERIES + s on: enough for its tokens, and found without a table of them."""
    program, kv_head = tl.program_id(0), tl.program_id(1)
    num_seqs = tl.load(counts_ptr + 2)
    low, high = 0, num_seqs
    while low < high:
        middle = (low + high) // 2
        if tl.load(query_start_ptr + middle) // QUERIES + middle <= program:
            low = middle + 1
        else:
            high = middle
    seq = low - 1
    begin = tl.load(query_start_ptr + seq)
    num_new = tl.load(query_start_ptr + seq + 1) - begin
    first = (program - begin // QUERIES - seq) * QUERIES
    if first < num_new:
        seq_len = tl.load(seq_lens_ptr + seq)
        table = block_table_ptr + seq * tl.load(max_blocks_ptr)
        m = tl.arange(0, BLOCK_M)
        d = tl.arange(0, BLOCK_D)
        new = first + m // GROUP
        head = kv_head * GROUP + m % GROUP
        is_row = (m < QUERIES * GROUP) & (new < num_new)
        is_dim = d < DIM
        at = (begin + new).to(tl.int64)
        mask = is_row[:, None] & is_dim[None, :]
        q = tl.load(q_ptr + at[:, None] * Q_STRIDE + (head * DIM)[:, None] + d[None, :], mask=mask, other=0.0)
        if WIDE_DOT:
            q = q.to(tl.float32)
        position = seq_len - num_new + new
        last_new = tl.minimum(first + QUERIES, num_new) - 1
        end = seq_len - num_new + last_new + 1
        lowest = seq_len - num_new + first  # the position of the first query
        start = 0
        if MASK == 1:
            start = tl.maximum(0, lowest - WINDOW + 1) // TILE * TILE
        if MASK == 2:
            start = lowest // WINDOW * WINDOW // TILE * TILE
        top = tl.full((BLOCK_M,), float("-inf"), tl.float32)
        total = tl.zeros((BLOCK_M,), tl.float32)
        if HAS_SINKS:
            top = tl.load(sinks_ptr + head, mask=is_row, other=0.0).to(tl.float32) * LOG2_E
            total += 1.0
        sums = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
        for tile in range(start, end, TILE):
            key = tile + tl.arange(0, TILE)
            is_key = key < end
            block = tl.load(table + key // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
            k_at = cache_ptr + block * BLOCK_STRIDE + kv_head * (2 * BLOCK_SIZE * DIM) + key % BLOCK_SIZE * DIM
            seen = is_key[None, :] & (key[None, :] <= position[:, None])
            if MASK == 1:
                seen = seen & (key[None, :] > position[:, None] - WINDOW)
            if MASK == 2:
                seen = seen & (key[None, :] // WINDOW == position[:, None] // WINDOW)
            # What no query of this program may see is not read: its block may have been given back.
            is_read = is_key
            if MASK == 1:
                is_read = is_read & (key > lowest - WINDOW)
            if MASK == 2:
                is_read = is_read & (key >= lowest // WINDOW * WINDOW)
            there = is_read[:, None] & is_dim[None, :]
            k = tl.load(k_at[:, None] + d[None, :], mask=there, other=0.0)
            if WIDE_DOT:
                k = k.to(tl.float32)
            scores = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE
            if SOFTCAP != 0.0:
                # tanh by one exponential, which may overflow to infinity and then gives 1
                scores = SOFTCAP * (1.0 - 2.0 / (tl.exp2(scores * (2.0 * LOG2_E / SOFTCAP)) + 1.0))
            scores = tl.where(seen, scores * LOG2_E, float("-inf"))
            higher = tl.maximum(top, tl.max(scores, 1))
            base = tl.where(higher == float("-inf"), 0.0, higher)
            factor = tl.exp2(top - base)
            p = tl.exp2(scores - base[:, None])
            total = total * factor + tl.sum(p, 1)
            v = tl.load(k_at[:, None] + BLOCK_SIZE * DIM + d[None, :], mask=there, other=0.0)
            p = p.to(v.dtype)
            if WIDE_DOT:
                p, v = p.to(tl.float32), v.to(tl.float32)
            sums = tl.dot(p, v, sums * factor[:, None], input_precision="ieee")
            top = higher
        out = sums / total[:, None]
        target = out_ptr + at[:, None] * OUT_STRIDE + (head * DIM)[:, None] + d[None, :]
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=mask)


def paged_attention(
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
) -> Source:
    """`inferc.paged_attention`: q and out [tokens, heads * dim], `strides` elements from row to row.

    cache_ptr: as `rope_kv_write` has it; block_table [seqs, max_blocks], query_start [seqs + 1], seq_lens [seqs], max_blocks [1] i32;
    sinks [heads].
    """
    group = heads // kv_heads
    block_m = max(16, triton.next_power_of_2(group))
    block_d = max(16, triton.next_power_of_2(dim))
    return Source(
        function=paged_attention_kernel,
        signature={
            "q_ptr": POINTERS[dtype],
            "cache_ptr": POINTERS[dtype],
            **dict.fromkeys(("block_table_ptr", "query_start_ptr", "seq_lens_ptr"), POINTERS["int32"]),
            "sinks_ptr": POINTERS[dtype],
            "out_ptr": POINTERS[dtype],
            "counts_ptr": POINTERS["int32"],
            "max_blocks_ptr": POINTERS["int32"],
        },
        constants={
            "KV_HEADS": kv_heads,
            "GROUP": group,
            "DIM": dim,
            "Q_STRIDE": strides[0],
            "OUT_STRIDE": strides[1],
            "BLOCK_STRIDE": layers * kv_heads * 2 * block_size * dim,
            "BLOCK_SIZE": block_size,
            "SCALE": scale,
            "SOFTCAP": softcap,
            "MASK": MASKS.index(mask),
            "WINDOW": window,
            "HAS_SINKS": int(has_sinks),
            "QUERIES": block_m // group,
            "BLOCK_M": block_m,
            "BLOCK_D": block_d,
            "TILE": 64 if block_d <= 128 else 32,
            "LOG2_E": LOG2_E,
            "WIDE_DOT": 0,
        },
        grid=("num_tokens // QUERIES + num_seqs", "KV_HEADS", "1"),
        num_warps=4,
        num_stages=2,
        stack_bytes=16,  # ptxas parks what is computed first and used last, though registers are left
    )
