"""`silu(gate) * up` as one pass over memory: each element is read once and written once.

Float32 arithmetic, rounded once, as the op's reference. gate and up may be the halves of one packed projection, so
every tensor has its own row stride.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from torch import fx

from inferc.codegen.target import Target
from inferc.codegen.triton.build import KINDS, Cubin, Source, build
from inferc.program import dtype_name

NAME = "triton.silu_mul"
BLOCK = 1024  # columns of one program; with 4 warps 8 elements a thread: one 16-byte access in bfloat16
NUM_WARPS = 4


@triton.jit  # type: ignore[untyped-decorator]
def silu_mul_kernel(  # type: ignore[no-untyped-def]
    gate_ptr,
    up_ptr,
    out_ptr,
    num_columns,
    gate_stride,
    up_stride,
    out_stride,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = columns < num_columns
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(up_ptr + row * up_stride + columns, mask=mask, other=0.0).to(tl.float32)
    out = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + row * out_stride + columns, out.to(out_ptr.dtype.element_ty), mask=mask)


def source(dtype: str, aligned: bool) -> Source:
    """The kernel for tensors of `dtype`; aligned: their width and row strides are multiples of 16 elements."""
    pointers = ("gate_ptr", "up_ptr", "out_ptr")
    sizes = ("num_columns", "gate_stride", "up_stride", "out_stride")
    return Source(
        function=silu_mul_kernel,
        signature={**dict.fromkeys(pointers, KINDS[dtype]), **dict.fromkeys(sizes, "i32")},
        constants={"BLOCK": BLOCK},
        # `up` starts num_columns after `gate` in a packed projection: its address divides only if the width does.
        divisible_by_16=(*pointers, *sizes) if aligned else (),
        grid=("num_tokens", "ceil_div(num_columns, BLOCK)", "1"),
        num_warps=NUM_WARPS,
    )


@cache
def compiled(dtype: str, aligned: bool, arch: str) -> Cubin:
    """The cubin for one chip; the layers of a model share it."""
    name = f"{NAME}.{dtype}" + ("" if aligned else ".unaligned")
    return build(source(dtype, aligned), name, "inferc.silu_mul", arch)


def emit(node: fx.Node, target: Target) -> Cubin:
    """Compile for one `inferc.silu_mul` node: its dtype, its width, and the strides of the packed projection it reads."""
    gate, up = (arg.meta["val"] for arg in node.args[:2])  # type: ignore[union-attr]
    out: torch.Tensor = node.meta["val"]
    sizes = (int(out.shape[-1]), int(gate.stride(0)), int(up.stride(0)))
    return compiled(dtype_name(out.dtype), all(size % 16 == 0 for size in sizes), target.arch)
