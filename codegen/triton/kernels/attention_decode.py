"""The decode attention kernels for sequences with few new tokens, cut over all programs to use all memory bandwidth.

Every program processes its stretch of the step's tiles (see `attention_plan`). Where a stretch cuts a head of a
sequence, the program stores a partial result. The program that finishes such a head last merges its partial results in
the order of the keys.

Sequences that share a prefix form a group. `prefix_attention` reads the prefix's keys once for the queries of all
members, and stores a partial result for each. Decode starts from these. Sources: Dao et al. 2023, "Flash-Decoding for
long-context inference"; Osama et al. 2023, arXiv:2301.03598; Juravsky et al. 2024, arXiv:2402.05099.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import Source
from inferc.codegen.triton.kernels.attention_plan import (
    LEAST_TILES,
    TILES,
    UNIT,
    Cells,
    cell_at,
    cell_start,
    line_start,
)
from inferc.codegen.triton.kernels.attention_tiles import (
    AttentionShape,
    attend,
    decode_rows,
    last_up_to,
    merge,
    stack_bytes,
)

PREFIX_ROWS = 64  # the rows of `prefix_attention`, which may also have half as many: see `prefix_rows`
DECODE_STAGES = 3
# Bytes of a thread's registers that ptxas may spill in the invariant order. It spills 72 on sm_80, with eight query
# heads per kv head.
CELLS_STACK_BYTES = 96
# Bytes of a thread's registers that ptxas may spill for a prefix in int8. It spills 64 on sm_120, with heads of 128
# elements and one query head per kv head.
PREFIX_STACK_BYTES = 64


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
    members_ptr,
    member_start_ptr,
    shared_ptr,
    prefix_ptr,
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
    OF_PREFIX: tl.constexpr,
    HAS_SHARED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_D: tl.constexpr,
    NUM_PROGRAMS: tl.constexpr,
    UNIT: tl.constexpr,
    LEAST_TILES: tl.constexpr,
    CELL: tl.constexpr,
    GROW: tl.constexpr,
    MOST_CELLS: tl.constexpr,
    SLOTS: tl.constexpr,
    TILE: tl.constexpr,
    STAGES: tl.constexpr,
    SEQS: tl.constexpr,
    LOG2_E: tl.constexpr,
    PTX: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    """Compute the attention of a step's decode sequences over the tiles in this program's stretch of the plan.

    MOST_CELLS is 0 if each tile is a cell; the tiles of a stretch are then summed at once.

    SLOTS is the number of partial results of a program. The first is for the head that begins in its stretch and ends
    after it; there is one such head at most. The others are for the head that began before the stretch: one slot, or in
    the invariant order one per cell, since cells are merged one by one.

    With OF_PREFIX, rows are the queries of a group's members, one token of each. `seq` is then the group, and seq_lens
    has the number of keys that its members share.
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
        first_new_ptr = query_start_ptr
        if OF_PREFIX:
            first_new_ptr = member_start_ptr
        begin = tl.load(first_new_ptr + seq)
        num_new = tl.load(first_new_ptr + seq + 1) - begin
        seq_len = tl.load(seq_lens_ptr + seq)
        shared = 0
        if HAS_SHARED:
            shared = tl.load(shared_ptr + seq)
        kv_head = (at - before * KV_HEADS) // tiles
        start = before * KV_HEADS + kv_head * tiles  # the head's tiles in the line are [start, start + tiles)
        origin = line_start(seq_len - num_new, shared, MASK, WINDOW, CELL, GROW)
        begin_cell, end_cell = cell_at(origin, CELL, GROW), cell_at(seq_len - 1, CELL, GROW) + 1
        first = cell_at(origin + (at - start) * UNIT - 1, CELL, GROW) + 1
        at = tl.minimum(start + tiles, stop)
        last = cell_at(tl.minimum(origin + (at - start) * UNIT, seq_len) - 1, CELL, GROW) + 1
        if first < last:  # [first, last) are the cells that start in this stretch
            new = m // GROUP
            head = kv_head * GROUP + m % GROUP
            is_row = new < num_new
            there = is_row[:, None] & (d < DIM)[None, :]
            lowest, member = seq_len - num_new, seq
            token = (begin + new).to(tl.int64)
            if OF_PREFIX:
                lowest, member = seq_len - 1, tl.load(members_ptr + begin)
                members = tl.load(members_ptr + begin + new, mask=is_row, other=0).to(tl.int64)
                token = tl.load(query_start_ptr + members, mask=is_row, other=0).to(tl.int64)
            q = tl.load(q_ptr + (token * Q_STRIDE + head * DIM)[:, None] + d[None, :], mask=there, other=0.0)
            if WIDE_DOT:
                q = q.to(tl.float32)
            position = tl.minimum(lowest + new, seq_len - 1)
            slope = position
            if ALIBI:
                slope = tl.load(alibi_ptr + head, mask=is_row, other=0.0)
            table_ptr = block_table_ptr + member.to(tl.int64) * max_blocks
            head_ptr = cache_ptr + kv_head * (2 * PART)
            slots_ptr = partial_ptr + program * (SLOTS * SLOT)
            m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
            l_i = tl.zeros((BLOCK_M,), tl.float32)
            acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
            is_first = first == begin_cell
            if HAS_SINKS and not OF_PREFIX:
                has_sink = is_row & is_first
                m_i = tl.load(sinks_ptr + head, mask=has_sink, other=float("-inf")).to(tl.float32) * LOG2_E
                l_i = has_sink.to(tl.float32)
            if HAS_SHARED:
                has_prefix = is_row & is_first & (shared > 0)
                of_row = prefix_ptr + (seq.to(tl.int64) * (KV_HEADS * GROUP) + head) * (DIM + 2)
                of_prefix = tl.load(of_row[:, None] + d[None, :], mask=has_prefix[:, None] & there, other=0.0)
                prefix_m = tl.load(of_row + DIM, mask=has_prefix, other=float("-inf"))
                prefix_l = tl.load(of_row + DIM + 1, mask=has_prefix, other=0.0)
                m_i, l_i, acc = merge(m_i, l_i, acc, prefix_m, prefix_l, of_prefix)
            step = last - first
            if MOST_CELLS != 0:
                step = 1
            for cell in range(first, last, step):
                cell_m, cell_l, cell_acc = m_i, l_i, acc
                if MOST_CELLS != 0:
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
                    seq_len - 1,
                    cell_start(cell, CELL, GROW),
                    tl.minimum(cell_start(cell + step, CELL, GROW), seq_len),
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
                if MOST_CELLS == 0:
                    m_i, l_i, acc = cell_m, cell_l, cell_acc
                elif is_first:
                    m_i, l_i, acc = merge(m_i, l_i, acc, cell_m, cell_l, cell_acc)
                else:
                    slot_ptr = slots_ptr + (1 + cell - first) * SLOT
                    store_partial(slot_ptr, cell_m, cell_l, cell_acc, m, d, is_row, there, DIM)
            is_whole = is_first & (last == end_cell)
            is_last = is_whole
            if not is_whole:
                home = start // stretch  # the program in whose stretch the head begins
                if is_first:
                    store_partial(slots_ptr, m_i, l_i, acc, m, d, is_row, there, DIM)
                elif MOST_CELLS == 0:
                    store_partial(slots_ptr + SLOT, m_i, l_i, acc, m, d, is_row, there, DIM)
                # One thread adds for the whole program. All threads have stored their partial results before, and read
                # those of other programs after it.
                tl.debug_barrier()
                arrived = tl.atomic_add(arrived_ptr + home, last - first, sem="acq_rel", scope="gpu")
                tl.debug_barrier()
                is_last = arrived + last - first == end_cell - begin_cell
                if is_last:
                    tl.store(arrived_ptr + home, 0)  # zero again for the next launch
                    m_i, l_i, acc = load_partial(partial_ptr + home * (SLOTS * SLOT), m, d, is_row, there, DIM)
                    apart = stretch
                    if MOST_CELLS != 0:
                        apart = 1
                    others = cell_at(origin + ((home + 1) * stretch - start) * UNIT - 1, CELL, GROW) + 1
                    for cell in tl.range(others, end_cell, apart, loop_unroll_factor=4):  # four loads together
                        owner = (start + (cell_start(cell, CELL, GROW) - origin) // UNIT) // stretch
                        first_of_owner = cell_at(origin + (owner * stretch - start) * UNIT - 1, CELL, GROW) + 1
                        slot_ptr = partial_ptr + (owner * SLOTS + 1 + cell - first_of_owner) * SLOT
                        cell_m, cell_l, cell_acc = load_partial(slot_ptr, m, d, is_row, there, DIM)
                        m_i, l_i, acc = merge(m_i, l_i, acc, cell_m, cell_l, cell_acc)
            if is_last:
                if OF_PREFIX:
                    of_row = prefix_ptr + (members * (KV_HEADS * GROUP) + head) * (DIM + 2)
                    tl.store(of_row[:, None] + d[None, :], acc, mask=there)
                    tl.store(of_row + DIM, m_i, mask=is_row)
                    tl.store(of_row + DIM + 1, l_i, mask=is_row)
                else:
                    out_at = out_ptr + (token * OUT_STRIDE + head * DIM)[:, None] + d[None, :]
                    tl.store(out_at, (acc / l_i[:, None]).to(out_ptr.dtype.element_ty), mask=there)


@triton.jit  # type: ignore[untyped-decorator]
def store_partial(at, m_i, l_i, acc, m, d, is_row, there, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Store a partial result: sums of values [rows][dim], then the largest scores [rows], then the totals [rows]."""
    tl.store(at + m[:, None] * DIM + d[None, :], acc, mask=there)
    tl.store(at + m.shape[0] * DIM + m, m_i, mask=is_row)
    tl.store(at + m.shape[0] * (DIM + 1) + m, l_i, mask=is_row)


@triton.jit  # type: ignore[untyped-decorator]
def load_partial(at, m, d, is_row, there, DIM: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load a partial result that `store_partial` stored, perhaps from another program.

    The load bypasses the cache of this multiprocessor, which does not see the stores of others.
    """
    acc = tl.load(at + m[:, None] * DIM + d[None, :], mask=there, other=0.0, cache_modifier=".cg")
    m_i = tl.load(at + m.shape[0] * DIM + m, mask=is_row, other=0.0, cache_modifier=".cg")
    l_i = tl.load(at + m.shape[0] * (DIM + 1) + m, mask=is_row, other=1.0, cache_modifier=".cg")
    return m_i, l_i, acc


def decode_attention(
    shape: AttentionShape, num_programs: int, cells: Cells = TILES, has_shared: bool = False
) -> Source:
    """Return the kernel of `inferc.paged_attention` for the sequences of at most `query_limit` new tokens.

    It leaves the other rows of out alone. Its arguments are:

    - q and out: [tokens, heads * dim].
    - cache_ptr: as in `rope_kv_write`.
    - block_table [seqs, max_blocks], query_start [seqs + 1], seq_lens [seqs] and max_blocks [1]: i32.
    - sinks: [heads].
    - alibi: [heads] float32.
    - plan: what `attention_plan` made with the same `num_programs` and `cells`.
    - partial: see `partial_bytes`.
    - arrived: [num_programs] i32, zeros, which the kernel leaves as zeros.
    - shared: [seqs] i32, how many keys of each sequence `prefix_attention` has processed: a multiple of UNIT, and 0 for
      sequences of several new tokens.
    - prefix: the partial results of `prefix_attention`.
    """
    return _source(shape, decode_rows(shape.group), num_programs, cells, of_prefix=False, shared=has_shared)


def prefix_attention(shape: AttentionShape, num_programs: int) -> Source:
    """Return the kernel that attends to the keys which groups of sequences share, for one new token of each member.

    It stores its results in prefix, see `prefix_bytes`; out is not written.

    A group has at most `prefix_members` sequences, members[member_start[group] ...]. seq_lens [groups] is the number of
    keys that its members share, a multiple of UNIT. counts_ptr has the number of groups where it has that of sequences
    otherwise, and the plan is one of groups, too. The other arguments are those of `decode_attention`.

    Attention must be causal and without ALiBi, for which a key is at a different distance from each member's query.
    """
    assert shape.mask == "causal" and not shape.has_alibi, shape
    rows = prefix_rows(shape.group, shape.dim, shape.int8_kv)
    return _source(shape, rows, num_programs, TILES, of_prefix=True, shared=False)


def _source(
    shape: AttentionShape, rows: int, num_programs: int, cells: Cells, *, of_prefix: bool, shared: bool
) -> Source:
    names = ("members_ptr", "member_start_ptr", "shared_ptr")
    of_plan = {"plan_ptr": "int32", "partial_ptr": "float32", "arrived_ptr": "int32"}
    scratch = {**of_plan, **dict.fromkeys(names, "int32"), "prefix_ptr": "float32"}
    return Source(
        function=decode_attention_kernel,
        signature=shape.signature(scratch),
        constants={
            **shape.constants(),
            "IN_ORDER": takes_in_order(rows),
            "OF_PREFIX": int(of_prefix),
            "HAS_SHARED": int(shared),
            "BLOCK_M": rows,
            "NUM_PROGRAMS": num_programs,
            "UNIT": UNIT,
            "LEAST_TILES": LEAST_TILES,
            **cells.constants,
            "SLOTS": slots(cells),
            "TILE": decode_tile(shape.dtype, shape.dim, rows, shape.int8_kv, cells),
            "STAGES": DECODE_STAGES,
        },
        grid=("NUM_PROGRAMS", "1", "1"),
        num_warps=decode_warps(rows, shape.dim),
        stack_bytes=max(
            stack_bytes(shape.dtype, shape.dim, shape.int8_kv),
            CELLS_STACK_BYTES if cells != TILES and shape.dim > 64 else 0,
            PREFIX_STACK_BYTES if of_prefix and shape.int8_kv else 0,
        ),
    )


def takes_in_order(rows: int) -> int:
    """Return 1 if products take their operands from registers, else 0.

    Hopper's tensor cores take operands from shared memory for products of 64 rows and more.
    """
    return int(rows < 64)


def decode_warps(rows: int, dim: int) -> int:
    """Return enough warps for registers to hold a program's sums, and those of another program while they merge."""
    return 4 if rows < 64 and rows * dim < 64 * 128 else 8


def decode_tile(dtype: str, dim: int, rows: int, int8_kv: bool, cells: Cells) -> int:
    """Return the number of keys of one product.

    One or two tiles of K and V are in flight for each program, and two or three programs fit on a multiprocessor.
    """
    wide = dim <= 64 and rows < 64 and (int8_kv or cells == TILES)  # otherwise there are too few registers
    return 16 if dtype == "float32" else 128 if wide else 64 if dim <= 128 else 32


def slots(cells: Cells) -> int:
    """Return the number of partial results of a program.

    Slot 0 is for the head that begins in its stretch. The other slots hold cells of a head that began before it, and
    the first cell of a head is never among those: so `cells.most` slots are enough.
    """
    return max(2, cells.most)


def partial_bytes(rows: int, dim: int, num_programs: int, cells: Cells = TILES) -> int:
    """Return the bytes of `partial_ptr`, enough for any step; `rows` is BLOCK_M of the kernel."""
    return 4 * num_programs * slots(cells) * rows * (dim + 2)


def prefix_bytes(heads: int, dim: int) -> int:
    """Return the bytes of a sequence in `prefix_ptr`.

    They hold for each head the sum of values [dim], the largest score and the total, in float32.
    """
    return 4 * heads * (dim + 2)


def prefix_rows(group: int, dim: int, int8_kv: bool) -> int:
    """Return the rows of a product of `prefix_attention`: as many as did not spill registers.

    With K and V in int8, 64 rows of heads of at most 64 elements spilled on all chips but sm_90.
    """
    fits = dim <= 128 and not (int8_kv and dim <= 64)
    return max(PREFIX_ROWS if fits else PREFIX_ROWS // 2, decode_rows(group))


def prefix_members(group: int, dim: int, int8_kv: bool) -> int:
    """Return the most sequences of a group; `group` is the number of query heads per kv head."""
    return prefix_rows(group, dim, int8_kv) // group
