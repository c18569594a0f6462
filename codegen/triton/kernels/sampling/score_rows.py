"""The kernel that computes how likely given tokens are, and the most likely token of each row.

It has one program per row, which reads the row twice.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import POINTERS, Source
from inferc.codegen.triton.kernels.sampling.rows import FIRST, ROWS, STACK_BYTES, load_row
from inferc.codegen.triton.kernels.sampling.search import odds

BLOCK = 2048  # tokens that are read at a time


@triton.jit  # type: ignore[untyped-decorator]
def score_rows_kernel(  # type: ignore[no-untyped-def]
    logits_ptr,
    target_ids_ptr,
    logprobs_ptr,
    argmax_ptr,
    counts_ptr,
    VOCAB: tl.constexpr,
    LOGITS_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(counts_ptr + ROWS):
        at = tl.load(counts_ptr + FIRST) + row
        values = logits_ptr + row * LOGITS_STRIDE
        tops = tl.full((BLOCK,), float("-inf"), tl.float32)
        for start in range(0, VOCAB, BLOCK):
            tops = tl.maximum(tops, load_row(values, start + tl.arange(0, BLOCK), VOCAB))
        top = tl.max(tops)
        mass = tl.zeros((BLOCK,), tl.float32)
        first = tl.full((BLOCK,), VOCAB, tl.int32)
        for start in range(0, VOCAB, BLOCK):
            i = start + tl.arange(0, BLOCK)
            x = load_row(values, i, VOCAB)
            mass += odds(x, top, 1.0)
            first = tl.minimum(first, tl.where(x == top, i, VOCAB))
        target = tl.load(values + tl.load(target_ids_ptr + at))
        logprob = (target - top).to(tl.float64) - tl.log(tl.sum(mass.to(tl.float64)))
        tl.store(logprobs_ptr + at, logprob.to(tl.float32))
        tl.store(argmax_ptr + at, tl.min(first))


def score_rows(vocab: int, logits_stride: int, block: int = BLOCK) -> Source:
    """Return the kernel that scores given tokens by the logits alone.

    It writes logprobs f32 [rows], those of target_ids i32 [rows], and argmax i32 [rows], the lowest id of the largest
    logit. logits are float32 [rows of the chunk, vocab], with rows `logits_stride` elements apart. `block` is a power
    of two.
    """
    return Source(
        function=score_rows_kernel,
        signature={
            "logits_ptr": POINTERS["float32"],
            "target_ids_ptr": POINTERS["int32"],
            "logprobs_ptr": POINTERS["float32"],
            **dict.fromkeys(("argmax_ptr", "counts_ptr"), POINTERS["int32"]),
        },
        constants={
            "VOCAB": vocab,
            "LOGITS_STRIDE": logits_stride,
            "BLOCK": min(block, triton.next_power_of_2(vocab)),
        },
        grid=("num_rows", "1", "1"),
        num_warps=8,
        stack_bytes=STACK_BYTES,
    )
