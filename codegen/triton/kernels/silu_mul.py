"""The kernel of `silu(gate) * up` in one pass over memory, which reads and writes each element once.

It computes in float32 and rounds once, as the op's reference does. gate and up may be the halves of one packed
projection, so that every tensor has its own row stride.
"""

from __future__ import annotations

import triton
import triton.language as tl

from inferc.codegen.triton.aot.source import COUNTS, POINTERS, Source

# Columns of one program. With 4 warps that is 8 elements per thread: one 16-byte access in bfloat16.
BLOCK = 1024
NUM_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def silu_mul_kernel(  # type: ignore[no-untyped-def]
    gate_ptr,
    up_ptr,
    out_ptr,
    counts_ptr,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    GATE_STRIDE: tl.constexpr,
    UP_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    if row < tl.load(counts_ptr + COUNT):
        columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
        mask = columns < WIDTH
        gate = tl.load(gate_ptr + row * GATE_STRIDE + columns, mask=mask, other=0.0).to(tl.float32)
        up = tl.load(up_ptr + row * UP_STRIDE + columns, mask=mask, other=0.0).to(tl.float32)
        out = gate / (1.0 + tl.exp(-gate)) * up
        tl.store(out_ptr + row * OUT_STRIDE + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(
    dtype: str, rows: str, width: int, strides: tuple[int, int, int], unaligned: tuple[str, ...] = ()
) -> Source:
    """Return the kernel of `silu(gate) * up` for gate, up and out [rows, width].

    `strides` are the elements from row to row of each.
    """
    return Source(
        function=silu_mul_kernel,
        signature={
            **dict.fromkeys(("gate_ptr", "up_ptr", "out_ptr"), POINTERS[dtype]),
            "counts_ptr": POINTERS["int32"],
        },
        constants={
            "COUNT": COUNTS[rows],
            "WIDTH": width,
            **dict(zip(("GATE_STRIDE", "UP_STRIDE", "OUT_STRIDE"), strides, strict=True)),
            "BLOCK": BLOCK,
        },
        grid=(f"num_{rows}", "ceil_div(WIDTH, BLOCK)", "1"),
        num_warps=NUM_WARPS,
        unaligned=unaligned,
    )
