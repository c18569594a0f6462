"""Each op's network is built for a chip, and gives, layer by layer, what its reference gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import dense_cases
import pytest
import torch
from dense_cases import EXPERTS, EXPRESSIONS, PLAIN, ROUTING
from graphs import Example, example, random, rows
from kernel_tables import choose_for
from tensorrt_runs import TENSORRT, run_tensorrt

from inferc.codegen.tensorrt.calls import elementwise
from inferc.errors import UnsupportedError
from inferc.ir.ops.pointwise import FUNCTIONS
from inferc.targets import Target

inferc = torch.ops.inferc


def check(made: Example, folder: Path, tolerance: float = 2e-6, target: Target = TENSORRT) -> None:
    want = made.run()
    found = run_tensorrt(made, folder, target)
    assert len(found) == len(want)
    for ours, theirs in zip(found, want, strict=True):
        assert ours.dtype == theirs.dtype
        if ours.dtype == torch.float8_e4m3fn:
            ours, theirs = ours.float(), theirs.float()
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("name", PLAIN)
def test_plain_ops(name: str, tmp_path: Path) -> None:
    check(dense_cases.plain(name), tmp_path)


def test_every_function_is_known() -> None:
    spelled = ("silu", "gelu", "gelu_tanh", "rsqrt", "where")  # of several layers, each in a branch of its own
    assert {*elementwise.UNARY, *elementwise.ACTIVATIONS, *elementwise.BINARY, *spelled} == set(FUNCTIONS)


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_pointwise(expression: str, tmp_path: Path) -> None:
    check(dense_cases.pointwise(expression), tmp_path)


def test_pointwise_over_a_column_and_a_row(tmp_path: Path) -> None:
    check(dense_cases.product_of(rows(8), rows(1, seed=2)), tmp_path)
    wider = dense_cases.product_of(rows(1), random(1, 8))
    with pytest.raises(UnsupportedError, match=r"inputs of \[T, 1\], \[1, 8\]: expected one of the result's \[T, 8\]"):
        choose_for(TENSORRT)(wider.program)


@pytest.mark.parametrize("pairs", ["halves", "neighbours", "neighbours_to_halves"])
@pytest.mark.parametrize(("rotary_dim", "scaling"), [(8, 1.0), (4, 1.25)])
def test_rope(pairs: str, rotary_dim: int, scaling: float, tmp_path: Path) -> None:
    check(dense_cases.rope(pairs, rotary_dim, scaling), tmp_path)


@pytest.mark.parametrize("how", ROUTING, ids=str)
def test_routing(how: dict[str, Any], tmp_path: Path) -> None:
    check(dense_cases.routing(how), tmp_path)


@pytest.mark.parametrize("how", EXPERTS, ids=str)
def test_experts(how: dict[str, Any], tmp_path: Path) -> None:
    check(dense_cases.experts(how), tmp_path, 1e-5)


INTEGERS = torch.arange(-127, 128, dtype=torch.int8)


def integers(*sizes: int) -> torch.Tensor:
    """Return random integers over the whole range."""
    count = torch.Size(sizes).numel()
    return INTEGERS[(torch.arange(count) * 37) % len(INTEGERS)].reshape(sizes)


QUANTIZED: dict[str, tuple[Any, dict[str, torch.Tensor], dict[str, torch.Tensor]]] = {
    "linear_int8": (
        lambda x, w, s, b: inferc.linear_int8.default(x, w, s, b),
        {"x": rows(8)},
        {"w": integers(6, 8), "s": random(6).abs(), "b": random(6)},
    ),
    "embedding_int8": (
        lambda ids, w, s: inferc.embedding_int8.default(w, s, ids, torch.float32),
        {"ids": dense_cases.IDS},
        {"w": integers(70, 12), "s": random(70).abs()},
    ),
    "moe_experts": (
        lambda x, ids, shares, a, b, c, d: inferc.moe_experts.default(
            x, ids, shares, a, b, gate_up_scale=c, down_scale=d
        ),
        {"x": rows(8), "ids": torch.tensor([[0, 2], [1, 0], [2, 1], [0, 1], [1, 2]]).int(), "shares": rows(2).abs()},
        {"a": integers(3, 12, 8), "b": integers(3, 8, 6), "c": random(3, 12).abs() / 99, "d": random(3, 8).abs() / 99},
    ),
}


@pytest.mark.parametrize("name", QUANTIZED)
def test_weights_in_int8(name: str, tmp_path: Path) -> None:
    graph, inputs, weights = QUANTIZED[name]
    check(example(graph, inputs, weights), tmp_path, 2e-5)


ROUNDED: dict[str, tuple[Target, Any, Any]] = {
    "int8": (TENSORRT, inferc.quantize_rows.default, inferc.linear_w8a8.default),
    "fp8": (Target.parse("tensorrt:sm_89"), inferc.quantize_rows_fp8.default, inferc.linear_fp8.default),
}


@pytest.mark.parametrize("has_more", [False, True])
@pytest.mark.parametrize("kind", ROUNDED)
def test_rounded_rows(kind: str, has_more: bool, tmp_path: Path) -> None:
    """Rows are rounded to the values of the reference, also rows of zeros and of NaN."""
    target, quantize, linear = ROUNDED[kind]
    values, scale = quantize(random(6, 40))

    def graph(x: Any, w: Any, scale: Any, bias: Any, residual: Any) -> Any:
        both = quantize(x)
        more = (bias, residual) if has_more else ()
        return both[0], both[1], linear(both[0], both[1], w, scale, torch.float32, *more)

    x = rows(40) * torch.tensor([1.0, 0.0, 1e-4, 300.0, 1.0])[:, None]
    inputs, weights = {"x": x, "residual": rows(6)}, {"w": values, "scale": scale, "bias": random(6)}
    check(example(graph, inputs, weights), tmp_path, target=target)
    x[3, 5], x[4, 7] = torch.inf, torch.nan
    *_, found = run_tensorrt(example(graph, inputs, weights), tmp_path, target)
    assert found[:3].isfinite().all() and found[3:].isnan().all()
