"""Products by weights in integers, run by onnxruntime, beside the ops' references."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import onnx
import pytest
import torch
from graphs import TOKENS, Example, example, random, rows
from onnx_runs import ONNX, STANDARD, run_onnx
from torch import Tensor

from inferc.ir.ops.quantize import quantize_int4, quantize_rows
from inferc.targets import Target

inferc = torch.ops.inferc
IDS = torch.tensor([[0, 2], [3, 1], [1, 2], [2, 0], [3, 2]], dtype=torch.int32)
SHARES = torch.tensor([[0.5, 0.25], [0.9, 0.3], [1.0, 0.0], [0.4, 0.6], [0.1, 0.2]])


def exact_rows(k: int) -> Tensor:
    """Rows that are the same once a kernel has rounded them to int8, block by block of 16 or more."""
    x = random(TOKENS, k, seed=5).mul(60).round().clamp(-127, 127)
    x[:, ::16] = 127.0
    return x * torch.logspace(-3, 1, TOKENS)[:, None]


def check(made: Example, folder: Path, tolerance: float = 3e-6, target: Target = ONNX) -> set[str]:
    """Returns the ops of the model."""
    want, found = made.run(), run_onnx(made, folder, target)
    assert len(found) == len(want)
    for ours, theirs in zip(found, want, strict=True):
        assert ours.dtype == theirs.dtype
        torch.testing.assert_close(
            ours.double(), theirs.double(), rtol=tolerance, atol=tolerance * float(theirs.abs().max())
        )
    nodes = onnx.load(folder / "model.onnx", load_external_data=False).graph.node
    assert target != STANDARD or {node.domain for node in nodes} == {""}
    return {node.op_type for node in nodes}


@pytest.mark.parametrize("target", [ONNX, STANDARD], ids=lambda target: target.spec)
@pytest.mark.parametrize("has_more", [False, True])
@pytest.mark.parametrize("k", [16, 48, 384, 24])
def test_linear_int8(k: int, has_more: bool, target: Target, tmp_path: Path) -> None:
    """24 is no whole blocks."""
    values, scale = quantize_rows(random(6, k))

    def graph(x: Any, w: Any, scale: Any, bias: Any, residual: Any) -> Any:
        more = (bias, residual) if has_more else ()
        return inferc.linear_int8.default(x, w, scale, *more)

    inputs = {"x": exact_rows(k), "residual": rows(6)}
    made = example(graph, inputs, {"w": values, "scale": scale, "bias": random(6)})
    assert ("MatMulNBits" in check(made, tmp_path, target=target)) is (k != 24 and target == ONNX)


def test_the_kernel_rounds_rows_block_by_block(tmp_path: Path) -> None:
    """The documentation of onnxruntime's CPU kernels holds, to within 1 % of the largest result."""
    values, scale = quantize_rows(random(6, 256))
    made = example(
        lambda x, w, scale: inferc.linear_int8.default(x, w, scale),
        {"x": rows(256)},
        {"w": values, "scale": scale},
    )
    check(made, tmp_path, 1e-2)


@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_what_is_no_number_is_seen_in_the_logits(broken: float, tmp_path: Path) -> None:
    """The kernel would make some integer of it."""
    values, scale = quantize_rows(random(6, 256))

    def graph(x: Any, w: Any, scale: Any) -> Any:
        return inferc.linear_int8.default(x, w, scale, None, None, torch.float32)

    x = rows(256)
    x[3, 100] = broken
    (found,) = run_onnx(example(graph, {"x": x}, {"w": values, "scale": scale}), tmp_path)
    assert found[3].isnan().all() and found[[0, 1, 2, 4]].isfinite().all()


@pytest.mark.parametrize("target", [ONNX, STANDARD], ids=lambda target: target.spec)
@pytest.mark.parametrize("has_more", [False, True])
@pytest.mark.parametrize(("k", "group"), [(64, 32), (128, 64), (256, 128), (112, 32)])
def test_linear_int4(k: int, group: int, has_more: bool, target: Target, tmp_path: Path) -> None:
    values, of_groups, scale = quantize_int4(random(6, k), group)

    def graph(x: Any, w: Any, groups: Any, scale: Any, bias: Any, residual: Any) -> Any:
        more = (bias, residual) if has_more else ()
        return inferc.linear_int4.default(x, w, groups, scale, *more)

    weights = {"w": values, "groups": of_groups, "scale": scale, "bias": random(6)}
    made = example(graph, {"x": exact_rows(k), "residual": rows(6)}, weights)
    assert ("MatMulNBits" in check(made, tmp_path, target=target)) is (target == ONNX)


@pytest.mark.parametrize("target", [ONNX, STANDARD], ids=lambda target: target.spec)
@pytest.mark.parametrize("k", [32, 24])
def test_embedding_int8(k: int, target: Target, tmp_path: Path) -> None:
    values, scale = quantize_rows(random(9, k))

    def graph(ids: Any, w: Any, scale: Any) -> Any:
        return inferc.embedding_int8.default(w, scale, ids, torch.float32)

    check(example(graph, {"ids": torch.tensor([8, 0, 3, 3, 1])}, {"w": values, "scale": scale}), tmp_path, 0.0, target)


@pytest.mark.parametrize("target", [ONNX, STANDARD], ids=lambda target: target.spec)
def test_a_tied_table_is_stored_once(target: Target, tmp_path: Path) -> None:
    """The table is stored in the layout of the product; the lookup takes columns of it."""
    values, scale = quantize_rows(random(9, 24))

    def graph(ids: Any, w: Any, scale: Any) -> Any:
        rows = inferc.embedding_int8.default(w, scale, ids, torch.float32)
        both = inferc.quantize_rows.default(rows)
        return rows, inferc.linear_w8a8.default(both[0], both[1], w, scale, torch.float32)

    made = example(graph, {"ids": torch.tensor([8, 0, 3, 3, 1])}, {"w": values, "scale": scale})
    check(made, tmp_path, target=target)
    assert made.program.weights["w"].layout == "transposed"


@pytest.mark.parametrize("has_more", [False, True])
def test_linear_w8a8(has_more: bool, tmp_path: Path) -> None:
    """The rows' integers too are the reference's; of zeros, and of what is no number."""
    values, scale = quantize_rows(random(6, 40))

    def graph(x: Any, w: Any, scale: Any, bias: Any, residual: Any) -> Any:
        both = inferc.quantize_rows.default(x)
        more = (bias, residual) if has_more else ()
        return both[0], both[1], inferc.linear_w8a8.default(both[0], both[1], w, scale, torch.float32, *more)

    x = rows(40) * torch.tensor([1.0, 0.0, 1e-4, 300.0, 1.0])[:, None]
    inputs, weights = {"x": x, "residual": rows(6)}, {"w": values, "scale": scale, "bias": random(6)}
    ops = check(example(graph, inputs, weights), tmp_path)
    assert "MatMulInteger" in ops and not ops & {"MatMulNBits", "MatMul", "Gemm"}
    x[4, 7] = torch.nan
    *_, found = run_onnx(example(graph, inputs, weights), tmp_path)
    assert found[:4].isfinite().all() and found[4].isnan().all()


EXPERTS: dict[str, tuple[dict[str, Any], str]] = {
    "SwiGLU": ({}, "moe_experts"),
    "clamped": ({"activation": "swiglu_clamped", "alpha": 1.702, "limit": 1.5}, "moe_experts"),
    "GELU": ({"activation": "gelu_tanh"}, "all_experts"),
    "scaled input": ({"scale_input": True}, "all_experts"),
}


@pytest.mark.parametrize("target", [ONNX, STANDARD], ids=lambda target: target.spec)
@pytest.mark.parametrize("has_biases", [False, True])
@pytest.mark.parametrize("name", EXPERTS)
@pytest.mark.parametrize(("bits", "k"), [(8, 32), (4, 32), (4, 40)])
def test_experts(bits: int, k: int, name: str, has_biases: bool, target: Target, tmp_path: Path) -> None:
    """Experts whose inner size is no whole number of four-bit groups are among the cases: 40."""
    how, kernel = EXPERTS[name]
    experts, n = 4, 32
    weights = {"first": random(experts, 2 * n), "second": random(experts, k)}
    names: list[str] = []
    for what, shape in (("gate_up", (experts, 2 * n, k)), ("down", (experts, k, n))):
        flat = random(*shape).flatten(0, 1)
        if bits == 8:
            made = dict(zip((what, f"{what}_scale"), quantize_rows(flat), strict=True))
        else:
            made = dict(zip((what, f"{what}_group_scale", f"{what}_scale"), quantize_int4(flat, 32), strict=True))
        weights |= {name: value.unflatten(0, shape[:2]) for name, value in made.items()}
        names += made

    def graph(x: Any, ids: Any, shares: Any, **rest: Any) -> Any:
        biases = {"gate_up_bias": rest["first"], "down_bias": rest["second"]} if has_biases else {}
        return inferc.moe_experts.default(x, ids, shares, **{each: rest[each] for each in names}, **biases, **how)

    keyword = inspect.Parameter.KEYWORD_ONLY
    names_of_all = ("x", "ids", "shares", *weights)
    parameters = [inspect.Parameter(each, keyword) for each in names_of_all]
    graph.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    program = example(graph, {"x": rows(k) * 3, "ids": IDS, "shares": SHARES}, weights)
    check(program, tmp_path, 1e-5, target)
    (chosen,) = (node.meta["kernel"] for node in program.program.graph.nodes if "moe" in str(node.target))
    is_whole = (bits == 8 or k % 32 == 0) and target == ONNX
    assert chosen == f"onnx.{kernel if is_whole else 'all_experts'}_int{bits}"
