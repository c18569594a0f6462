"""The kernel of the projection of q, k and v, fused with all that comes between it and attention.

A program makes the same pairs of one head for a tile of tokens. A thread holds the sums of both of a pair, and rotates
them. If heads are normalised, a program makes whole heads.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import POINTERS, Source
from inferc.codegen.triton.kernels.gemm import pairs_of, product, tile, tile_of
from inferc.codegen.triton.kernels.rms_norm import NO_WEIGHT, normed
from inferc.codegen.triton.kernels.rope_apply import HALVES, NEIGHBOURS_TO_HALVES
from inferc.ir.ops.rope import PAIRS


@triton.jit  # type: ignore[untyped-decorator]
def qkv_rope_kv_write_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    weight_ptr,
    scale_ptr,
    bias_ptr,
    q_weight_ptr,
    k_weight_ptr,
    table_ptr,
    cache_ptr,
    slots_ptr,
    out_ptr,
    counts_ptr,
    HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    HALF: tl.constexpr,
    PAIRS: tl.constexpr,
    K: tl.constexpr,
    X_STRIDE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    HOW: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    FEW: tl.constexpr,
    WIDE_DOT: tl.constexpr,
):
    PARTS: tl.constexpr = (DIM + BLOCK_N - 1) // BLOCK_N  # parts of a head
    WIDTH: tl.constexpr = BLOCK_N // 2
    COLUMN_TILES: tl.constexpr = (HEADS + 2 * KV_HEADS) * PARTS
    tl.static_assert((HOW == NO_WEIGHT) | (PARTS == 1), "a norm needs its head in one program")
    tokens = tl.load(counts_ptr)
    if tl.program_id(0) < tl.cdiv(tokens, BLOCK_M) * COLUMN_TILES:
        token_tile, column_tile = tile_of(tokens, COLUMN_TILES, BLOCK_M, FEW)
        head, part = column_tile // PARTS, column_tile % PARTS
        token = (token_tile * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)
        is_token = token < tokens
        is_q, is_v = head < HEADS, head >= HEADS + KV_HEADS

        both = tl.arange(0, BLOCK_N)
        column = column_of(part * WIDTH + both // 2, both % 2, HALF, PAIRS)
        is_column = (part * BLOCK_N + both < DIM) | (DIM % BLOCK_N == 0)
        total = product(
            x_ptr,
            weight_ptr,
            scale_ptr,
            bias_ptr,
            token,
            is_token,
            head * DIM + column,
            is_column,
            K,
            X_STRIDE,
            HAS_BIAS,
            BLOCK_K,
            WIDE_DOT,
        )
        dtype = out_ptr.dtype.element_ty
        first, second = pairs_of(total.to(dtype))
        first, second = first.to(tl.float32), second.to(tl.float32)

        pair = part * WIDTH + tl.arange(0, WIDTH)
        first_at, second_at = column_of(pair, 0, HALF, PAIRS), column_of(pair, 1, HALF, PAIRS)
        is_pair = pair < DIM // 2
        if HOW != NO_WEIGHT:
            is_normed = is_pair & (head < HEADS + KV_HEADS)
            weights = tl.where(is_q, q_weight_ptr, k_weight_ptr)
            squares = tl.sum(first * first + second * second, 1)[:, None]
            weight = tl.load(weights + first_at, mask=is_normed, other=0.0).to(tl.float32)[None, :]
            first_normed = normed(first, squares, weight, DIM, EPS, OFFSET, HOW, dtype).to(dtype).to(tl.float32)
            weight = tl.load(weights + second_at, mask=is_normed, other=0.0).to(tl.float32)[None, :]
            second_normed = normed(second, squares, weight, DIM, EPS, OFFSET, HOW, dtype).to(dtype).to(tl.float32)
            first = tl.where(is_normed[None, :], first_normed, first)
            second = tl.where(is_normed[None, :], second_normed, second)
        turns = is_token[:, None] & ((pair < HALF) & (head < HEADS + KV_HEADS))[None, :]
        angle_at = table_ptr + token[:, None] * TABLE_STRIDE + pair[None, :]
        cos, sin = tl.load(angle_at, mask=turns, other=1.0), tl.load(angle_at + HALF, mask=turns, other=0.0)
        turned = first * cos - second * sin
        second = tl.where(turns, second * cos + first * sin, second)
        first = tl.where(turns, turned, first)
        if PAIRS == NEIGHBOURS_TO_HALVES:
            first_at = tl.where(is_v, first_at, column_of(pair, 0, HALF, HALVES))
            second_at = tl.where(is_v, second_at, column_of(pair, 1, HALF, HALVES))

        slot = tl.load(slots_ptr + token, mask=is_token & (head >= HEADS), other=0)
        part_of_block = 2 * ((head - HEADS) % KV_HEADS) + tl.where(is_v, 1, 0)
        block = cache_ptr + slot // BLOCK_SIZE * BLOCK_STRIDE + part_of_block.to(tl.int64) * (BLOCK_SIZE * DIM)
        target = tl.where(is_q, out_ptr + token * OUT_STRIDE + head * DIM, block + slot % BLOCK_SIZE * DIM)
        mask = is_token[:, None] & is_pair[None, :]
        tl.store(target[:, None] + first_at[None, :], first.to(dtype), mask=mask)
        tl.store(target[:, None] + second_at[None, :], second.to(dtype), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def column_of(pair, which, HALF: tl.constexpr, PAIRS: tl.constexpr):  # type: ignore[no-untyped-def]
    """Return the column within a head of the first (`which` 0) or second (`which` 1) element of a rotated pair.

    Elements that are not rotated form pairs of neighbours.
    """
    if PAIRS == HALVES:
        return tl.where(pair < HALF, pair + which * HALF, 2 * pair + which)
    else:
        return 2 * pair + which


def qkv_rope_kv_write(
    dtype: str,
    heads: int,
    kv_heads: int,
    dim: int,
    half: int,
    pairs: str,
    k: int,
    strides: tuple[int, int, int],
    layers: int,
    block_size: int,
    has_bias: bool,
    up_to: int | None,
    int8: bool = False,
    eps: float = 0.0,
    offset: float = 0.0,
    how: int = 0,
    unaligned: tuple[str, ...] = (),
) -> Source:
    """Return the kernel of `inferc.qkv_rope_kv_write` for rows in `dtype`, with weights in that dtype or in int8.

    It reads x [tokens, k], weight [(heads + 2 * kv_heads) * dim, k], bias [(heads + 2 * kv_heads) * dim] and table
    [tokens, 2 * half] float32, and writes out [tokens, heads * dim]. `strides` are the elements from row to row of x,
    the table and out. cache_ptr and slots_ptr are those of `rope_kv_write`; `eps`, `offset` and `how` are those of
    `rms_norm`; `up_to` and `int8` are those of `linear`. `dim` is even.
    """
    whole = triton.next_power_of_2(dim)
    cut = tile((heads + 2 * kv_heads) * dim, k, dtype, int8, up_to, (whole if how else 16, whole))
    return Source(
        function=qkv_rope_kv_write_kernel,
        signature={
            "x_ptr": POINTERS[dtype],
            "weight_ptr": POINTERS["int8" if int8 else dtype],
            "scale_ptr": POINTERS["float32"],
            **dict.fromkeys(("bias_ptr", "q_weight_ptr", "k_weight_ptr"), POINTERS[dtype]),
            "table_ptr": POINTERS["float32"],
            "cache_ptr": POINTERS[dtype],
            "slots_ptr": POINTERS["int64"],
            "out_ptr": POINTERS[dtype],
            "counts_ptr": POINTERS["int32"],
        },
        constants={
            "HEADS": heads,
            "KV_HEADS": kv_heads,
            "DIM": dim,
            "HALF": half,
            "PAIRS": PAIRS.index(pairs),
            "K": k,
            **dict(zip(("X_STRIDE", "TABLE_STRIDE", "OUT_STRIDE"), strides, strict=True)),
            "BLOCK_STRIDE": layers * kv_heads * 2 * block_size * dim,
            "BLOCK_SIZE": block_size,
            "HAS_BIAS": int(has_bias),
            "EPS": eps,
            "OFFSET": offset,
            "HOW": how,
            **cut.constants,
        },
        grid=cut.grid("(HEADS + 2 * KV_HEADS) * ceil_div(DIM, BLOCK_N)", "tokens"),
        num_warps=cut.num_warps,
        num_stages=cut.num_stages,
        stack_bytes=cut.stack_bytes,
        unaligned=unaligned,
    )
