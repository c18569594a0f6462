"""The table of the `reference` target, whose ops are computed by their references: all ops that other targets have."""

from __future__ import annotations

from inferc.codegen.cpp import table as cpp
from inferc.codegen.kernel import Fits, Kernel

_OTHERS = ("inferc.quantize_rows_fp8", "inferc.linear_fp8", "inferc.attention")
_OPS = sorted({kernel.op for kernel in cpp.KERNELS}.union(_OTHERS))

KERNELS = tuple(Kernel("reference", op, f"reference.{op}", Fits()) for op in _OPS)
