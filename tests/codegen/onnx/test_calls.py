"""Each op as ONNX, run by onnxruntime, gives what its reference gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dense_cases
import pytest
import torch
from dense_cases import EXPERTS, EXPRESSIONS, PLAIN, ROUTING
from graphs import Example, random, rows
from kernel_tables import choose_for
from onnx_runs import ONNX, run_onnx

from inferc.codegen.onnx.calls.elementwise import _FUNCTIONS
from inferc.errors import UnsupportedError
from inferc.ir.ops.pointwise import FUNCTIONS


def check(made: Example, folder: Path, tolerance: float = 2e-6) -> None:
    want = made.run()
    found = run_onnx(made, folder)
    assert len(found) == len(want)
    for ours, theirs in zip(found, want, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_ops(name: str, tmp_path: Path) -> None:
    check(dense_cases.plain(name), tmp_path)


def test_every_function_is_known() -> None:
    spelled_out = {"gelu", "gelu_tanh", "silu", "rsqrt"}
    assert set(_FUNCTIONS) | spelled_out == set(FUNCTIONS)
    assert all(any(f"{name}(" in each for each in EXPRESSIONS) for name in FUNCTIONS)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_pointwise(expression: str, tmp_path: Path) -> None:
    check(dense_cases.pointwise(expression), tmp_path)


def test_pointwise_over_a_column_and_a_row(tmp_path: Path) -> None:
    check(dense_cases.product_of(rows(8), rows(1, seed=2)), tmp_path)
    wider = dense_cases.product_of(rows(1), random(1, 8))
    with pytest.raises(UnsupportedError, match=r"inputs of \[T, 1\], \[1, 8\]: expected one of the result's \[T, 8\]"):
        choose_for(ONNX)(wider.program)


@pytest.mark.parametrize("pairs", ["halves", "neighbours", "neighbours_to_halves"])
@pytest.mark.parametrize(("rotary_dim", "scaling"), [(8, 1.0), (4, 1.25)])
def test_rope(pairs: str, rotary_dim: int, scaling: float, tmp_path: Path) -> None:
    check(dense_cases.rope(pairs, rotary_dim, scaling), tmp_path, 2e-5)  # angles of thousands


@pytest.mark.parametrize("how", ROUTING, ids=str)
def test_routing(how: dict[str, Any], tmp_path: Path) -> None:
    check(dense_cases.routing(how), tmp_path)


@pytest.mark.parametrize("how", EXPERTS, ids=str)
def test_experts(how: dict[str, Any], tmp_path: Path) -> None:
    made = dense_cases.experts(how)
    check(made, tmp_path, 1e-5)
    kernel = next(node.meta["kernel"] for node in made.program.graph.nodes if "moe" in str(node.target))
    is_its = how.get("activation", "silu") in ("silu", "swiglu_clamped") and "scale_input" not in how
    assert kernel == ("onnx.moe_experts" if is_its else "onnx.all_experts")
