"""The kernel that writes K and V unchanged into their slots of the cache, one program per head."""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import POINTERS, Source


@triton.jit  # type: ignore[untyped-decorator]
def kv_write_kernel(  # type: ignore[no-untyped-def]
    k_ptr,
    v_ptr,
    cache_ptr,
    slots_ptr,
    counts_ptr,
    KV_HEADS: tl.constexpr,
    DIM: tl.constexpr,
    K_STRIDE: tl.constexpr,
    V_STRIDE: tl.constexpr,
    BLOCK_STRIDE: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    token, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if token < tl.load(counts_ptr):
        i = tl.arange(0, BLOCK)
        mask = i < DIM
        slot = tl.load(slots_ptr + token)
        target = cache_ptr + slot // BLOCK_SIZE * BLOCK_STRIDE + head * (2 * BLOCK_SIZE * DIM) + slot % BLOCK_SIZE * DIM
        k = tl.load(k_ptr + token * K_STRIDE + head * DIM + i, mask=mask)
        v = tl.load(v_ptr + token * V_STRIDE + head * DIM + i, mask=mask)
        tl.store(target + i, k, mask=mask)
        tl.store(target + BLOCK_SIZE * DIM + i, v, mask=mask)


def kv_write(
    dtype: str,
    kv_heads: int,
    dim: int,
    strides: tuple[int, int],
    layers: int,
    block_size: int,
    unaligned: tuple[str, ...] = (),
) -> Source:
    """Return the kernel of `inferc.kv_write`: k and v [tokens, kv_heads * dim] go to a cache in their dtype.

    `strides` are the elements from row to row of k and v. cache_ptr is the layer's part of block 0 of a pool
    [block][layer][kv head][k, v][block_size][dim]. slots is [tokens] i64.
    """
    return Source(
        function=kv_write_kernel,
        signature={
            **dict.fromkeys(("k_ptr", "v_ptr", "cache_ptr"), POINTERS[dtype]),
            "slots_ptr": POINTERS["int64"],
            "counts_ptr": POINTERS["int32"],
        },
        constants={
            "KV_HEADS": kv_heads,
            "DIM": dim,
            **dict(zip(("K_STRIDE", "V_STRIDE"), strides, strict=True)),
            "BLOCK_STRIDE": layers * kv_heads * 2 * block_size * dim,
            "BLOCK_SIZE": block_size,
            "BLOCK": triton.next_power_of_2(dim),
        },
        grid=("num_tokens", "KV_HEADS", "1"),
        num_warps=1,
        unaligned=unaligned,
    )
