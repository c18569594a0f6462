"""The kernel that reports log-probabilities and ranks of the chosen tokens, and the most likely tokens.

They are those of the logits before any processing. There is one program per row, which reads the row twice: first for
the largest number at each of many places, among which is a lower bound of the last number that is wanted, and then for
the numbers that reach it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import POINTERS, Source
from inferc.codegen.triton.kernels.sampling.choose import list_stride
from inferc.codegen.triton.kernels.sampling.rows import FIRST, ROWS, STACK_BYTES, load_row
from inferc.codegen.triton.kernels.sampling.search import append, odds, threshold

TILE = 1024  # numbers of a list that are searched at a time
BLOCK = 2048  # tokens that are read at a time
MOST = tl.constexpr(64)  # the most tokens that are reported for a row


@triton.jit  # type: ignore[untyped-decorator]
def keep_largest(list_values_ptr, list_ids_ptr, count, wanted, least, top, TILE: tl.constexpr):  # type: ignore[no-untyped-def]
    """Move the `wanted` largest of a list's numbers to its start, in the list's order.

    They are at least `least`. Of equal numbers, those that come first are kept.
    """
    cut, above = threshold(list_values_ptr, count, wanted.to(tl.float64), least, top, False, top, 1.0, TILE)
    ties = wanted - above.to(tl.int32)
    left = tl.full((), 0, tl.int32)
    for start in range(0, count, TILE):
        i = start + tl.arange(0, TILE)
        x = tl.load(list_values_ptr + i, mask=i < count, other=float("-inf"))
        token = tl.load(list_ids_ptr + i, mask=i < count, other=0)
        tl.debug_barrier()  # `append` may overwrite what was read here
        equal = ((x == cut) & (i < count)).to(tl.int32)
        wins = (x > cut) | ((equal != 0) & (tl.cumsum(equal, 0) <= ties))
        left = append(list_values_ptr, list_ids_ptr, left, x, token, wins)
        ties -= tl.sum(equal)
    tl.debug_barrier()


@triton.jit  # type: ignore[untyped-decorator]
def report_logprobs_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    token_ids_ptr,
    num_logprobs_ptr,
    list_values_ptr,
    list_ids_ptr,
    logprobs_ptr,
    ranks_ptr,
    top_ids_ptr,
    top_logprobs_ptr,
    counts_ptr,
    VOCAB: tl.constexpr,
    LOGITS_STRIDE: tl.constexpr,
    LIST_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(counts_ptr + ROWS):
        at = tl.load(counts_ptr + FIRST) + row
        num_logprobs, chosen = tl.load(num_logprobs_ptr + at), tl.load(token_ids_ptr + at)
        if (num_logprobs > 0) & (chosen >= 0):
            wanted = tl.minimum(num_logprobs, min(MOST, VOCAB))
            values = logits_ptr + row * LOGITS_STRIDE
            list_values, list_ids = list_values_ptr + row * LIST_STRIDE, list_ids_ptr + row * LIST_STRIDE
            place = tl.arange(0, BLOCK)
            tops = tl.full((BLOCK,), float("-inf"), tl.float32)
            for start in range(0, VOCAB, BLOCK):
                tops = tl.maximum(tops, load_row(values, start + place, VOCAB))
            top = tl.max(tops)
            tl.store(list_values + place, tops, mask=place < VOCAB)
            tl.debug_barrier()
            places = min(BLOCK, VOCAB)
            least = tl.full((), float("-inf"), tl.float32)
            least, _ = threshold(list_values, places, wanted.to(tl.float64), least, top, False, top, 1.0, TILE)
            tl.debug_barrier()
            own = tl.load(values + chosen)
            mass = tl.zeros((BLOCK,), tl.float32)
            larger = tl.zeros((BLOCK,), tl.int32)
            count = tl.full((), 0, tl.int32)
            for start in range(0, VOCAB, BLOCK):
                i = start + place
                x = load_row(values, i, VOCAB)
                mass += odds(x, top, 1.0)
                larger += (x > own).to(tl.int32)
                if tl.max(x) >= least:
                    count = append(list_values, list_ids, count, x, i, (x >= least) & (i < VOCAB))
            tl.debug_barrier()
            keep_largest(list_values, list_ids, count, wanted, least, top, TILE)
            norm = tl.log(tl.sum(mass.to(tl.float64)))
            tl.store(logprobs_ptr + at, ((own - top).to(tl.float64) - norm).to(tl.float32))
            tl.store(ranks_ptr + at, 1 + tl.sum(larger))
            i = tl.arange(0, MOST)
            x = tl.load(list_values + i, mask=i < wanted, other=float("-inf"))
            before = (x[:, None] > x[None, :]) | ((x[:, None] == x[None, :]) & (i[:, None] < i[None, :]))
            out = at * MOST + tl.sum(before.to(tl.int32), 0)
            tl.store(top_ids_ptr + out, tl.load(list_ids + i, mask=i < wanted, other=0), mask=i < wanted)
            tl.store(top_logprobs_ptr + out, ((x - top).to(tl.float64) - norm).to(tl.float32), mask=i < wanted)


def report_logprobs(vocab: int, logits_stride: int, block: int = BLOCK, tile: int = TILE) -> Source:
    """Return the kernel that reports log-probabilities of the rows with num_logprobs i32 [rows] above 0 and a token.

    It writes logprobs f32 [rows] and ranks i32 [rows], from 1, of token_ids i32 [rows]. It also writes the first
    num_logprobs entries of top_ids i32 and top_logprobs f32 [rows, 64], in descending order, equal ones by ascending
    id.

    `block` and `tile` are powers of two. list_values and list_ids are scratch memory as for `choose`.
    """
    return Source(
        function=report_logprobs_kernel,
        signature={
            "logits_ptr": POINTERS["float32"],
            **dict.fromkeys(("token_ids_ptr", "num_logprobs_ptr"), POINTERS["int32"]),
            "list_values_ptr": POINTERS["float32"],
            "list_ids_ptr": POINTERS["int32"],
            "logprobs_ptr": POINTERS["float32"],
            **dict.fromkeys(("ranks_ptr", "top_ids_ptr"), POINTERS["int32"]),
            "top_logprobs_ptr": POINTERS["float32"],
            "counts_ptr": POINTERS["int32"],
        },
        constants={
            "VOCAB": vocab,
            "LOGITS_STRIDE": logits_stride,
            "LIST_STRIDE": list_stride(vocab),
            "BLOCK": min(block, triton.next_power_of_2(vocab)),
            "TILE": tile,
        },
        grid=("num_rows", "1", "1"),
        num_warps=16,
        stack_bytes=STACK_BYTES,
    )
