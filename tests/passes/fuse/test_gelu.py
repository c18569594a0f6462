from typing import Any

import torch
from graphs import example, rows
from torch import ops

from inferc.passes.fuse.gelu import fuse_gelu, fuse_gelu_mul

aten = ops.aten


def spelled_out(x: Any, root: float = 0.7978845608028654) -> Any:
    cube = aten.mul.Tensor(aten.pow.Tensor_Scalar(x, 3.0), 0.044715)
    inner = aten.tanh.default(aten.mul.Tensor(aten.add.Tensor(x, cube), root))
    return aten.mul.Tensor(aten.mul.Tensor(x, 0.5), aten.add.Tensor(inner, 1.0))


def test_the_tanh_form() -> None:
    golden = """
        %x: float32[s0, 6] = input
        %0: float32[s0, 6] = aten.gelu(%x, approximate='tanh')
        return (%0)
    """
    example(lambda x: spelled_out(x), {"x": rows(6)}).check(fuse_gelu, 1, golden)


def test_keeps_other_constants() -> None:
    example(lambda x: spelled_out(x, 0.8), {"x": rows(6)}).check_untouched(fuse_gelu)


def test_a_gate_in_either_form() -> None:
    def graph(gate: Any, up: Any) -> Any:
        exact = aten.mul.Tensor(aten.gelu.default(gate), up)
        return exact, aten.mul.Tensor(up, aten.gelu.default(gate, approximate="tanh"))

    golden = """
        %gate: float32[s0, 6] = input
        %up: float32[s0, 6] = input
        %0: float32[s0, 6] = inferc.gelu_mul(%gate, %up, 'none')
        %1: float32[s0, 6] = inferc.gelu_mul(%gate, %up, 'tanh')
        return (%0, %1)
    """
    example(graph, {"gate": rows(6), "up": rows(6, seed=1)}).check(fuse_gelu_mul, 2, golden)


def test_keeps_broadcasts_and_an_activation_that_is_read_elsewhere() -> None:
    def gated(gate: Any, up: Any) -> Any:
        return aten.mul.Tensor(aten.gelu.default(gate), up)

    def used_twice(gate: Any, up: Any) -> Any:
        activated = aten.gelu.default(gate)
        return aten.mul.Tensor(activated, up), activated

    example(gated, {"gate": rows(6), "up": rows(1)}).check_untouched(fuse_gelu_mul)
    example(gated, {"gate": rows(6), "up": rows(6, dtype=torch.bfloat16)}).check_untouched(fuse_gelu_mul)
    example(used_twice, {"gate": rows(6), "up": rows(6)}).check_untouched(fuse_gelu_mul)
