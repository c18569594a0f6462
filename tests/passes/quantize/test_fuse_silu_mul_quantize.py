import operator
from typing import Any

import torch
from graphs import example, rows
from torch import ops

from inferc.passes.quantize.fuse_silu_mul_quantize import fuse_silu_mul_quantize

aten, inferc = ops.aten, ops.inferc


def test_fuses_the_activation_with_the_rounding() -> None:
    def graph(both: Any) -> Any:
        gate, up = aten.slice.Tensor(both, -1, 0, 6), aten.slice.Tensor(both, -1, 6, 12)
        quantized = inferc.quantize_rows.default(inferc.silu_mul.default(gate, up))
        return operator.getitem(quantized, 0), operator.getitem(quantized, 1)

    golden = """
        %both: bfloat16[s0, 12] = input
        %0: bfloat16[s0, 6] = aten.slice.Tensor(%both, -1, 0, 6)
        %1: bfloat16[s0, 6] = aten.slice.Tensor(%both, -1, 6, 12)
        %2: (int8[s0, 6], float32[s0]) = inferc.silu_mul_quantize(%0, %1)
        %3: int8[s0, 6] = getitem(%2, 0)
        %4: float32[s0] = getitem(%2, 1)
        return (%3, %4)
    """
    example(graph, {"both": rows(12, dtype=torch.bfloat16)}).check(fuse_silu_mul_quantize, 1, golden, tolerance=0)


def test_an_activation_that_something_else_reads_stays() -> None:
    def graph(gate: Any, up: Any) -> Any:
        active = inferc.silu_mul.default(gate, up)
        quantized = inferc.quantize_rows.default(active)
        return operator.getitem(quantized, 0), operator.getitem(quantized, 1), active

    example(graph, {"gate": rows(6), "up": rows(6, seed=1)}).check_untouched(fuse_silu_mul_quantize)
