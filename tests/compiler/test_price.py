"""The price of a certificate: what it computes, and how long that takes on a machine of known speed."""

from __future__ import annotations

import itertools

import pytest
from random_models import make_random_model

from inferc.compiler import price as module
from inferc.compiler.price import PROBE, active_parameters, price
from inferc.frontend.capture import capture
from inferc.frontend.checkpoint.load import load
from inferc.ir.program import Program


@pytest.fixture(scope="module")
def experts(tmp_path_factory: pytest.TempPathFactory) -> Program:
    """A model with 4 experts, of which a token takes 2, in 2 equal layers."""
    folder = make_random_model("mixtral", tmp_path_factory.mktemp("models") / "experts", "bfloat16")
    return capture(load(folder), "bfloat16", 128, check=False)


def test_only_chosen_experts_count(experts: Program) -> None:
    matrices = experts.info.num_parameters - 5 * 64  # all but the norms
    one = 3 * 64 * 96  # gate, up and down
    assert active_parameters(experts) == matrices - 2 * 2 * one


@pytest.mark.parametrize(
    ("certify", "expected"),
    [
        ("auto", "2 of 2 layers in float32, and the whole model over 256 tokens"),
        ("full", "the whole model after each of some 15 passes, over 135 tokens"),
    ],
)
def test_what_is_quick_has_no_time(experts: Program, certify: str, expected: str) -> None:
    assert price(certify, experts) == expected


@pytest.mark.parametrize(("rate", "expected"), [(100e9, "about 64 s: "), (10e9, "about 11 min: ")])
def test_a_time(experts: Program, monkeypatch: pytest.MonkeyPatch, rate: float, expected: str) -> None:
    """The model has a billion parameters; half of its layers stand for all."""
    seconds = 2.0 * PROBE[0] * PROBE[1] ** 2 / rate
    clock = itertools.count()
    monkeypatch.setattr("inferc.compiler.price.time.perf_counter", lambda: next(clock) * seconds)
    monkeypatch.setattr(module, "active_parameters", lambda _: 10**9)
    monkeypatch.setattr(module, "distinct_prefix", lambda _: -1)
    assert price("auto", experts).startswith(expected)
