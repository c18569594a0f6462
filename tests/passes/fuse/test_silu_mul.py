from typing import Any

import torch
from graphs import example, rows
from torch import ops

from inferc.passes.fuse.silu_mul import fuse_silu_mul

aten = ops.aten


def up_first(gate: Any, up: Any) -> Any:
    return aten.mul.Tensor(up, aten.silu.default(gate))


def test_fuses_in_either_order() -> None:
    golden = """
        %gate: float32[s0, 6] = input
        %up: float32[s0, 6] = input
        %0: float32[s0, 6] = inferc.silu_mul(%gate, %up)
        return (%0)
    """
    example(up_first, {"gate": rows(6), "up": rows(6, seed=1)}).check(fuse_silu_mul, 1, golden)


def test_keeps_an_activation_that_is_read_elsewhere() -> None:
    def used_twice(gate: Any, up: Any) -> Any:
        activated = aten.silu.default(gate)
        return aten.mul.Tensor(activated, up), activated

    example(used_twice, {"gate": rows(6), "up": rows(6)}).check_untouched(fuse_silu_mul)


def test_keeps_broadcasts_and_mixed_dtypes() -> None:
    example(up_first, {"gate": rows(6), "up": rows(1)}).check_untouched(fuse_silu_mul)
    example(up_first, {"gate": rows(6), "up": rows(6, dtype=torch.bfloat16)}).check_untouched(fuse_silu_mul)
