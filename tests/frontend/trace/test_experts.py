"""Tests of experts' gates, which are found by what they compute; experts run on every token are caught too."""

from typing import Any

import pytest
import torch
from odd_models import make_odd_model
from random_models import make_random_model
from torch import Tensor

from inferc.errors import UnsupportedError
from inferc.frontend.capture import capture
from inferc.frontend.trace.dense_experts import is_dense
from inferc.frontend.trace.interfaces import Gate, gate_of


class Experts(torch.nn.Module):
    """Experts like those of transformers: a gate, and perhaps the numbers that it uses."""

    alpha: Any = 1.7
    limit = 2.0

    def __init__(self, act_fn: Any) -> None:
        super().__init__()
        self.act_fn = act_fn

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        activated: Tensor = self.act_fn(gate) * up
        return activated


class Interleaved(Experts):
    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up[..., ::2].clamp(max=self.limit), gate_up[..., 1::2].clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.alpha)


class Clamped(Experts):
    """Experts like MiniMax-M3's: the constant has another name, and rows of gate and up do not take turns."""

    alpha, swiglu_alpha = None, 1.7

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return (up + 1) * gate * torch.sigmoid(gate * self.swiglu_alpha)


@pytest.mark.parametrize(
    ("module", "activation", "is_interleaved"),
    [
        (Experts(torch.nn.SiLU()), "silu", False),
        (Experts(torch.nn.GELU()), "gelu", False),
        (Experts(torch.nn.GELU("tanh")), "gelu_tanh", False),
        (Interleaved(None), "swiglu_clamped", True),
        (Clamped(None), "swiglu_clamped", False),
    ],
)
def test_a_gate_is_what_it_computes(module: Experts, activation: str, is_interleaved: bool) -> None:
    assert gate_of(module) == Gate(activation, 1.7, 2.0, is_interleaved)


def test_another_gate_is_refused_by_name() -> None:
    with pytest.raises(
        UnsupportedError, match=r"Experts: experts with a gate of their own \(Tanh\); inferc.moe_experts"
    ):
        gate_of(Experts(torch.nn.Tanh()))


def test_dense_experts_are_told_by_their_parts(tmp_path: Any) -> None:
    sizes: dict[str, Any] = {
        "num_local_experts": 4,
        "num_hidden_layers": 1,
        "attention_chunk_size": 9,
        "intermediate_size_mlp": 96,
    }
    program = capture(
        make_random_model("llama4_text", tmp_path / "m", **sizes), "float32"
    )  # checked against eager code
    experts = [node for node in program.graph.nodes if "moe_experts" in str(node.target)]
    assert [node.args[-1] for node in experts] == [True]
    assert not is_dense(Experts(torch.nn.SiLU()))


@pytest.mark.slow
def test_experts_weighed_among_those_near_are_one_routing(tmp_path: Any) -> None:
    program = capture(make_odd_model("phimoe", tmp_path / "m", num_hidden_layers=1), "float32")
    (routing,) = program.graph.find_nodes(op="call_function", target=torch.ops.inferc.moe_routing.default)
    assert routing.args[2:5] == (2, False, "near_softmax")
    assert routing.args[9] == pytest.approx(0.02)
