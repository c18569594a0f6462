"""The kernels of LoRA adapters: what the adapter of each row adds to a product, B (A x), where A and B are small.

The table of adapters is rows of int64, one for each number: the address of the adapter's matrices, then for each site
its rank, where A begins, and where the transposed B begins, both in elements. Row 0 stands for no adapter; in place of
ranks and begins it has, for each site, the first column of y that it adds to, and how many. A row of the step is
computed by itself, so its bits depend on nothing else. Source: Chen et al. 2023, arXiv:2310.18547 (Punica).
"""

from __future__ import annotations

from collections.abc import Mapping

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import COUNTS, POINTERS, Source

BLOCK_K, BLOCK_RANKS, BLOCK_COLUMNS = 256, 16, 256
FIRST_ROW = 3  # the index into `counts_ptr` of the first logits row


@triton.jit  # type: ignore[untyped-decorator]
def adapter_of(ids_ptr, tokens_ptr, counts_ptr, row, HAS_TOKENS: tl.constexpr, FIRST_ROW: tl.constexpr):  # type: ignore[no-untyped-def]
    """Load the number of a row's adapter."""
    token = row
    if HAS_TOKENS:
        token = tl.load(tokens_ptr + tl.load(counts_ptr + FIRST_ROW) + row).to(tl.int64)
    return tl.load(ids_ptr + token).to(tl.int64)


@triton.jit  # type: ignore[untyped-decorator]
def lora_shrink_kernel(  # type: ignore[no-untyped-def]
    x_ptr,
    table_ptr,
    site_ptr,
    ids_ptr,
    tokens_ptr,
    out_ptr,
    counts_ptr,
    COUNT: tl.constexpr,
    K: tl.constexpr,
    NUM_SITES: tl.constexpr,
    MOST: tl.constexpr,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    FIRST_ROW: tl.constexpr,
    SITES: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(counts_ptr + COUNT):
        entry = adapter_of(ids_ptr, tokens_ptr, counts_ptr, row, HAS_TOKENS, FIRST_ROW) * (1 + 3 * NUM_SITES)
        site = tl.program_id(1)
        ranks = tl.program_id(2) * BLOCK_RANKS + tl.arange(0, BLOCK_RANKS)
        rank = tl.where(entry != 0, tl.load(site_ptr + entry + site), 0)
        if tl.program_id(2) * BLOCK_RANKS < rank:
            data = tl.load(table_ptr + entry).to(tl.pointer_type(x_ptr.dtype.element_ty))
            a_ptr = data + tl.load(site_ptr + entry + NUM_SITES + site)
            sums = tl.zeros((BLOCK_RANKS, BLOCK_K), tl.float32)
            for k in range(0, K, BLOCK_K):
                columns = k + tl.arange(0, BLOCK_K)
                x = tl.load(x_ptr + row * X_STRIDE + columns, mask=columns < K, other=0.0).to(tl.float32)
                mask = (ranks < rank)[:, None] & (columns < K)[None, :]
                a = tl.load(a_ptr + ranks[:, None] * K + columns[None, :], mask=mask, other=0.0).to(tl.float32)
                sums += a * x[None, :]
            tl.store(out_ptr + row * OUT_STRIDE + site * MOST + ranks, tl.sum(sums, 1), mask=ranks < rank)


@triton.jit  # type: ignore[untyped-decorator]
def lora_lookup_kernel(  # type: ignore[no-untyped-def]
    token_ids_ptr,
    table_ptr,
    site_ptr,
    ids_ptr,
    out_ptr,
    counts_ptr,
    COUNT: tl.constexpr,
    NUM_SITES: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    IS_BF16: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(counts_ptr + COUNT):
        entry = tl.load(ids_ptr + row).to(tl.int64) * (1 + 3 * NUM_SITES)
        rank = tl.where(entry != 0, tl.load(site_ptr + entry), 0)
        ranks = tl.arange(0, BLOCK_RANKS)
        if rank > 0:
            at = tl.load(site_ptr + entry + NUM_SITES) + tl.load(token_ids_ptr + row).to(tl.int64) * rank
            if IS_BF16:
                data = tl.load(table_ptr + entry).to(tl.pointer_type(tl.bfloat16))
                values = tl.load(data + at + ranks, mask=ranks < rank, other=0.0).to(tl.float32)
            else:
                data = tl.load(table_ptr + entry).to(tl.pointer_type(tl.float32))
                values = tl.load(data + at + ranks, mask=ranks < rank, other=0.0)
            tl.store(out_ptr + row * OUT_STRIDE + ranks, values, mask=ranks < rank)


@triton.jit  # type: ignore[untyped-decorator]
def lora_expand_kernel(  # type: ignore[no-untyped-def]
    shrunk_ptr,
    table_ptr,
    site_ptr,
    ids_ptr,
    tokens_ptr,
    y_ptr,
    counts_ptr,
    COUNT: tl.constexpr,
    NUM_SITES: tl.constexpr,
    MOST: tl.constexpr,
    SHRUNK_STRIDE: tl.constexpr,
    Y_STRIDE: tl.constexpr,
    HAS_TOKENS: tl.constexpr,
    FIRST_ROW: tl.constexpr,
    IS_BF16: tl.constexpr,
    SITES: tl.constexpr,
    WIDEST: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(counts_ptr + COUNT):
        entry = adapter_of(ids_ptr, tokens_ptr, counts_ptr, row, HAS_TOKENS, FIRST_ROW) * (1 + 3 * NUM_SITES)
        site = tl.program_id(1)
        rank = tl.where(entry != 0, tl.load(site_ptr + entry + site), 0)
        begin, width = tl.load(site_ptr + site), tl.load(site_ptr + NUM_SITES + site)
        columns = tl.program_id(2) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)
        if (rank > 0) & (tl.program_id(2) * BLOCK_COLUMNS < width):
            data = tl.load(table_ptr + entry)
            b_at = tl.load(site_ptr + entry + 2 * NUM_SITES + site)
            at = y_ptr + row * Y_STRIDE + begin + columns
            sums = tl.load(at, mask=columns < width, other=0.0).to(tl.float32)
            for first in range(0, MOST, BLOCK_RANKS):
                if first < rank:
                    ranks = first + tl.arange(0, BLOCK_RANKS)
                    mask = (ranks < rank)[:, None] & (columns < width)[None, :]
                    places = b_at + ranks[:, None] * width + columns[None, :]
                    if IS_BF16:
                        b = tl.load(data.to(tl.pointer_type(tl.bfloat16)) + places, mask=mask, other=0.0).to(tl.float32)
                    else:
                        b = tl.load(data.to(tl.pointer_type(tl.float32)) + places, mask=mask, other=0.0)
                    h = tl.load(shrunk_ptr + row * SHRUNK_STRIDE + site * MOST + ranks, mask=ranks < rank, other=0.0)
                    sums += tl.sum(b * h[:, None], 0)
            tl.store(at, sums.to(y_ptr.dtype.element_ty), mask=columns < width)


TABLES = {
    **dict.fromkeys(("table_ptr", "site_ptr"), POINTERS["int64"]),
    **dict.fromkeys(("ids_ptr", "tokens_ptr", "counts_ptr"), POINTERS["int32"]),
}


def _source(
    function: object, signature: Mapping[str, str], rows: str, grid: tuple[str, str], **constants: int
) -> Source:
    known = {**TABLES, **signature}
    names = [name for name in function.arg_names if name in known]  # type: ignore[attr-defined]
    return Source(
        function=function,
        signature={name: known[name] for name in names},
        constants={"COUNT": COUNTS[rows], **constants},
        grid=(f"num_{rows}", *grid),
        num_warps=4,
        unaligned=("site_ptr",),
    )


def lora_shrink(
    dtype: str, rows: str, k: int, sites: int, num_sites: int, most: int, strides: tuple[int, int], has_tokens: bool
) -> Source:
    """Return the kernel of A x for each row and each of `sites` sites that read x.

    x [rows, k] of `dtype`, out [rows, sites * most] f32, with rows `strides` elements apart; num_sites: those of the
    table; most: the largest rank. has_tokens: the token of each row is read from `tokens_ptr`.
    """
    return _source(
        lora_shrink_kernel,
        {"x_ptr": POINTERS[dtype], "out_ptr": POINTERS["float32"]},
        rows,
        ("SITES", "ceil_div(MOST, BLOCK_RANKS)"),
        K=k,
        NUM_SITES=num_sites,
        MOST=most,
        X_STRIDE=strides[0],
        OUT_STRIDE=strides[1],
        HAS_TOKENS=has_tokens,
        FIRST_ROW=FIRST_ROW,
        SITES=sites,
        BLOCK_K=min(BLOCK_K, triton.next_power_of_2(k)),
        BLOCK_RANKS=min(BLOCK_RANKS, triton.next_power_of_2(most)),
    )


def lora_lookup(dtype: str, num_sites: int, most: int, out_stride: int) -> Source:
    """Return the kernel of the row of A of each token, which is stored by tokens, as out [tokens, most] f32."""
    return _source(
        lora_lookup_kernel,
        {"token_ids_ptr": POINTERS["int32"], "out_ptr": POINTERS["float32"]},
        "tokens",
        ("1", "1"),
        NUM_SITES=num_sites,
        OUT_STRIDE=out_stride,
        IS_BF16=dtype == "bfloat16",
        BLOCK_RANKS=triton.next_power_of_2(most),
    )


def lora_expand(
    dtype: str,
    y_dtype: str,
    rows: str,
    sites: int,
    widest: int,
    num_sites: int,
    most: int,
    strides: tuple[int, int],
    has_tokens: bool,
) -> Source:
    """Return the kernel of y += B h for each row and each of `sites` sites.

    dtype: that of B; h [rows, sites * most] f32, y of `y_dtype`, with rows `strides` elements apart; widest: the most
    columns of a site.
    """
    return _source(
        lora_expand_kernel,
        {"shrunk_ptr": POINTERS["float32"], "y_ptr": POINTERS[y_dtype]},
        rows,
        ("SITES", "ceil_div(WIDEST, BLOCK_COLUMNS)"),
        NUM_SITES=num_sites,
        MOST=most,
        SHRUNK_STRIDE=strides[0],
        Y_STRIDE=strides[1],
        HAS_TOKENS=has_tokens,
        FIRST_ROW=FIRST_ROW,
        IS_BF16=dtype == "bfloat16",
        SITES=sites,
        WIDEST=widest,
        BLOCK_RANKS=min(BLOCK_RANKS, triton.next_power_of_2(most)),
        BLOCK_COLUMNS=min(BLOCK_COLUMNS, triton.next_power_of_2(widest)),
    )
