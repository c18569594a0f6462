"""Formulas over a step's sizes, their prediction on a device, and models extended by equal layers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inferc.cost.devices import Device
from inferc.cost.formulas import (
    CachedLayers,
    CostLog,
    ModelFacts,
    OpCost,
    PassCost,
    Step,
    expected_experts,
    extended,
    predict,
)
from inferc.ir.ops import visible
from inferc.manifest import json_bytes

MASKS = {"full": "causal", "window": "sliding", "chunk": "chunked"}
# 100 bytes a second; 1000 operations a second in bfloat16 and 250 in float32; half a second to start a kernel.
SLOW = Device("slow", "A slow one", 10_000, 100.0, {"float32": 250.0, "bfloat16": 1000.0}, 0.5, "made up")


@given(
    kind=st.sampled_from(sorted(MASKS)),
    window=st.integers(1, 12),
    new=st.integers(1, 20),
    before=st.integers(0, 20),
    num_seqs=st.integers(1, 3),
)
def test_keys_and_pairs_are_what_the_mask_shows(kind: str, window: int, new: int, before: int, num_seqs: int) -> None:
    context = before + new
    seen = visible(torch.arange(before, context), torch.arange(context), MASKS[kind], window)
    step = Step(new * num_seqs, num_seqs, num_seqs, context)
    assert step.quantity(f"pairs:{kind}:{window}") == num_seqs * int(seen.sum())
    assert step.quantity(f"keys:{kind}:{window}") == num_seqs * int(seen.any(0).sum())


def test_sizes_of_a_step() -> None:
    step = Step(num_tokens=6, num_seqs=2, num_rows=3, context=9)
    assert [step.quantity(name) for name in ("1", "T", "S", "B", "T*T", "B*S")] == [1, 6, 3, 2, 36, 6]
    assert step.evaluate((("1", 7), ("T", 10))) == 67
    assert Step.prefill(5) == Step(5, 1, 1, 5)
    assert Step.decode(4, 100) == Step(4, 4, 4, 100)


def test_expected_experts() -> None:
    assert expected_experts(8, 2, 1) == 2  # one token touches just its own
    assert expected_experts(4, 2, 2) == 3  # of the two that the first left, the second finds one in the mean
    assert expected_experts(8, 2, 1000) == pytest.approx(8)
    assert Step.prefill(2).quantity("experts:4:2:T") == 3
    assert Step(100, 1, 2, 100).quantity("experts:4:2:S") == 3


def test_a_prediction_by_hand() -> None:
    ops = {
        # 300 bytes are 3 s, 2000 operations 2 s: waits for memory.
        OpCost("a", "bfloat16", (("1", 200),), (), (("T", 50),), (("T", 1000),)): 1,
        # 100 bytes are 1 s, 500 operations in float32 2 s: waits for arithmetic. Twice.
        OpCost("b", "float32", (), (("keys:full:0", 10),), (), (("1", 500),)): 2,
    }
    found = predict(ops, Step.decode(2, 5), SLOW)
    assert (found.weights_bytes, found.cache_bytes, found.activation_bytes) == (200, 200, 100)
    assert found.bytes == 500
    assert found.flops == 3000
    assert (found.memory_s, found.compute_s, found.launch_s) == (3.0, 4.0, 1.5)
    assert found.seconds == 8.5
    assert found.bound == "compute"
    assert predict(dict([next(iter(ops.items()))]), Step.decode(2, 5), SLOW).bound == "memory"


def test_a_dtype_without_units_runs_at_float32() -> None:
    op = {OpCost("a", "float16", flops=(("1", 1000),)): 1}
    assert predict(op, Step.prefill(1), SLOW).compute_s == 4.0
    assert SLOW.ridge("bfloat16") == 10.0


def log(num_layers: int) -> CostLog:
    """Return the costs of a model whose layers have a product each, and which fuses every pair of neighbours."""
    layer, ends = OpCost("layer", "bfloat16", weights=(("1", 10),)), OpCost("ends", "bfloat16", flops=(("S", 3),))
    fused = OpCost("fused", "bfloat16", activations=(("T", 4),))
    group = CachedLayers("full", num_layers, num_kv_heads=2, head_dim=4, window=0, bytes_per_token=32 * num_layers)
    facts = ModelFacts(
        "tiny",
        "Tiny",
        "bfloat16",
        num_layers,
        100 + 7 * num_layers,
        64,
        200 + 14 * num_layers,
        (group,),
        32 * num_layers,
        64 * num_layers,
    )
    captured = PassCost("captured", 0, num_layers + 1, num_layers + 1, {layer: num_layers, ends: 1})
    ops = {layer: num_layers, ends: 1, fused: num_layers - 1}
    return CostLog(facts, captured, (PassCost("fuse", num_layers - 1, num_layers + 1, 2 * num_layers, ops),))


def test_a_model_follows_from_two_shorter_ones() -> None:
    assert extended(log(2), log(3), 5) == log(7)
    assert extended(log(2), log(4), 3) == log(8)


def test_a_log_survives_json() -> None:
    assert CostLog.load(json_bytes(log(3).stored)) == log(3)
    assert len(log(3).stored.ops) == 3  # each distinct op once, however many passes have it
