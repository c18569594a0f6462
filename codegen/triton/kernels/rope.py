"""The kernels of rotary embedding: the table of a step, and rotation fused with head norms and the write of K and V."""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import POINTERS, Source
from inferc.codegen.triton.kernels.rms_norm import NO_WEIGHT, normed
from inferc.codegen.triton.kernels.rope_apply import HALVES, NEIGHBOURS_TO_HALVES
from inferc.ir.ops.rope import PAIRS
from inferc.kv_groups import SCALE_BYTES


@triton.jit  # type: ignore[untyped-decorator]
def rope_table_kernel(  # type: ignore[no-untyped-def]
    positions_ptr,
    inv_freq_ptr,
    out_ptr,
    counts_ptr,
    HALF: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SCALING: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(counts_ptr):
        i = tl.arange(0, BLOCK)
        mask = i < HALF
        angle = tl.load(positions_ptr + row).to(tl.float32) * tl.load(inv_freq_ptr + i, mask=mask, other=0.0)
        tl.store(out_ptr + row * OUT_STRIDE + i, tl.cos(angle) * SCALING, mask=mask)
        tl.store(out_ptr + row * OUT_STRIDE + HALF + i, tl.sin(angle) * SCALING, mask=mask)


def rope_table(half: int, out_stride: int, scaling: float) -> Source:
    """Return the kernel that computes a step's table of cosines and sines.

    It reads positions [tokens] i64 and inv_freq [half] float32, and writes out [tokens, 2 * half] float32: cosines,
    then sines.
    """
    return Source(
        function=rope_table_kernel,
        signature={
            "positions_ptr": POINTERS["int64"],
            "inv_freq_ptr": POINTERS["float32"],
            "out_ptr": POINTERS["float32"],
            "counts_ptr": POINTERS["int32"],
        },
        constants={
            "HALF": half,
            "OUT_STRIDE": out_stride,
            "SCALING": scaling,
            "BLOCK": triton.next_power_of_2(half),
        },
        grid=("num_tokens", "1", "1"),
        num_warps=1,
        stack_bytes=32,  # the library's cosine spills them for angles beyond 100,000
    )


@triton.jit  # type: ignore[untyped-decorator]
def rope_kv_write_kernel(  # type: ignore[no-untyped-def]
    q_ptr,
    k_ptr,
    v_ptr,
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
    Q_STRIDE: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    TABLE_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    PART: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    INT8: tl.constexpr,
    EPS: tl.constexpr,
    OFFSET: tl.constexpr,
    HOW: tl.constexpr,
    ROTATED_BLOCK: tl.constexpr,
    REST_BLOCK: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if token < tl.load(counts_ptr):
        dtype = out_ptr.dtype.element_ty
        is_q, is_v = head < HEADS, head >= HEADS + KV_HEADS
        kv_head = tl.where(is_q, 0, (head - HEADS) % KV_HEADS)
        slot = tl.load(slots_ptr + token, mask=head >= HEADS, other=0)
        part = cache_ptr + (slot // BLOCK_SIZE) * BLOCK_STRIDE + kv_head.to(tl.int64) * (2 * PART)
        source = q_ptr + token * Q_STRIDE + head * DIM
        weights = q_weight_ptr
        target = out_ptr + token * OUT_STRIDE + head * DIM
        if not is_q:
            source = k_ptr + token * K_STRIDE + kv_head * DIM
            weights = k_weight_ptr
            if is_v:
                part += PART
                source = v_ptr + token * V_STRIDE + kv_head * DIM
            if INT8 == 0:
                target = part + (slot % BLOCK_SIZE) * DIM
        i = tl.arange(0, ROTATED_BLOCK)
        mask = i < HALF
        first_at, second_at = i, HALF + i
        if PAIRS != HALVES:
            first_at, second_at = 2 * i, 2 * i + 1
        first = tl.load(source + first_at, mask=mask, other=0.0).to(tl.float32)
        second = tl.load(source + second_at, mask=mask, other=0.0).to(tl.float32)
        j = 2 * HALF + tl.arange(0, REST_BLOCK)
        rest = tl.load(source + j, mask=j < DIM, other=0.0).to(tl.float32)
        if HOW != NO_WEIGHT:  # noqa: SIM102  a condition at compile time, which `is_v` is not
            if not is_v:
                squares = tl.sum(first * first) + tl.sum(second * second) + tl.sum(rest * rest)
                first_weight = tl.load(weights + first_at, mask=mask, other=0.0).to(tl.float32)
                second_weight = tl.load(weights + second_at, mask=mask, other=0.0).to(tl.float32)
                rest_weight = tl.load(weights + j, mask=j < DIM, other=0.0).to(tl.float32)
                first = normed(first, squares, first_weight, DIM, EPS, OFFSET, HOW, dtype).to(dtype).to(tl.float32)
                second = normed(second, squares, second_weight, DIM, EPS, OFFSET, HOW, dtype).to(dtype).to(tl.float32)
                rest = normed(rest, squares, rest_weight, DIM, EPS, OFFSET, HOW, dtype).to(dtype).to(tl.float32)
        to_first, to_second = first_at, second_at
        if not is_v:
            cos = tl.load(table_ptr + token * TABLE_STRIDE + i, mask=mask, other=0.0)
            sin = tl.load(table_ptr + token * TABLE_STRIDE + HALF + i, mask=mask, other=0.0)
            first, second = first * cos - second * sin, second * cos + first * sin
            if PAIRS == NEIGHBOURS_TO_HALVES:
                to_first, to_second = i, HALF + i
        first, second, rest = first.to(dtype), second.to(dtype), rest.to(dtype)
        if INT8:  # noqa: SIM102  a condition at compile time, which `is_q` is not
            if not is_q:
                scale = int8_scale(first.to(tl.float32), second.to(tl.float32), rest.to(tl.float32))
                values = part + (slot % BLOCK_SIZE) * DIM
                tl.store(values + to_first, to_int8(first.to(tl.float32), scale), mask=mask)
                tl.store(values + to_second, to_int8(second.to(tl.float32), scale), mask=mask)
                tl.store(values + j, to_int8(rest.to(tl.float32), scale), mask=j < DIM)
                tl.store((part + BLOCK_SIZE * DIM).to(tl.pointer_type(tl.float32)) + slot % BLOCK_SIZE, scale)
        if (INT8 == 0) | is_q:
            tl.store(target + to_first, first, mask=mask)
            tl.store(target + to_second, second, mask=mask)
            tl.store(target + j, rest, mask=j < DIM)


@triton.jit
def int8_scale(first, second, rest):  # type: ignore[no-untyped-def]
    """Return the scale of a row's int8 values, as `quantize_rows` does, for a row in three pieces.

    It is NaN if the row has a number that is not finite.
    """
    largest = tl.maximum(tl.max(tl.abs(first), 0), tl.maximum(tl.max(tl.abs(second), 0), tl.max(tl.abs(rest), 0)))
    scale = tl.div_rn(largest, 127.0)
    nothing = tl.sum(first - first, 0) + tl.sum(second - second, 0) + tl.sum(rest - rest, 0)
    return tl.where(scale == 0.0, 1.0, scale) + nothing


@triton.jit
def to_int8(x, scale):  # type: ignore[no-untyped-def]
    """Divide by the scale and round to int8, to nearest, ties to even.

    Adding 12582912.0 and subtracting it again leaves no bits for a fraction.
    """
    rounded = tl.div_rn(x, tl.broadcast_to(scale, x.shape)) + 12582912.0 - 12582912.0
    rounded = tl.where(rounded == rounded, rounded, 0.0)  # noqa: PLR0124  only a NaN differs from itself
    return tl.minimum(tl.maximum(rounded, -127.0), 127.0).to(tl.int8)


def rope_kv_write(
    dtype: str,
    heads: int,
    kv_heads: int,
    dim: int,
    half: int,
    pairs: str,
    strides: tuple[int, int, int, int, int],
    layers: int,
    block_size: int,
    eps: float = 0.0,
    offset: float = 0.0,
    how: int = 0,
    unaligned: tuple[str, ...] = (),
    int8_kv: bool = False,
) -> Source:
    """Return the kernel of `inferc.rope_kv_write` and, with norms of heads, `inferc.norm_rope_kv_write`.

    It reads q [tokens, heads * dim], k and v [tokens, kv_heads * dim] and table [tokens, 2 * half] float32; out has the
    shape of q. `strides` are the elements from row to row of q, k, v, the table and out. cache_ptr is the layer's part
    of block 0 of a pool [block][layer][kv head][k, v][block_size][dim]. slots is [tokens] i64. With `int8_kv`, k and v
    are stored in int8, and behind the block_size rows of each come their scales, one float32 per row.
    """
    part = block_size * (dim + (SCALE_BYTES if int8_kv else 0))
    names = ("Q_STRIDE", "K_STRIDE", "V_STRIDE", "TABLE_STRIDE", "OUT_STRIDE")
    inputs = ("q_ptr", "k_ptr", "v_ptr", "q_weight_ptr", "k_weight_ptr")
    return Source(
        function=rope_kv_write_kernel,
        signature={
            **dict.fromkeys(inputs, POINTERS[dtype]),
            "table_ptr": POINTERS["float32"],
            "cache_ptr": POINTERS["int8" if int8_kv else dtype],
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
            **dict(zip(names, strides, strict=True)),
            "PART": part,
            "BLOCK_STRIDE": layers * kv_heads * 2 * part,
            "BLOCK_SIZE": block_size,
            "INT8": int(int8_kv),
            "EPS": eps,
            "OFFSET": offset,
            "HOW": how,
            "ROTATED_BLOCK": triton.next_power_of_2(half),
            "REST_BLOCK": triton.next_power_of_2(max(1, dim - 2 * half)),
        },
        grid=("num_tokens", "HEADS + KV_HEADS + KV_HEADS", "1"),
        num_warps=1,
        unaligned=unaligned,
    )
