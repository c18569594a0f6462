"""The certificate of a quantized model: the scheme's budget for the pass, whose row is the reference of later rows."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from random_models import make_random_model

from inferc.compiler.build import compile
from inferc.compiler.certify import Certifier
from inferc.config import CompileConfig
from inferc.errors import VerifyError
from inferc.frontend.checkpoint.load import load
from inferc.passes.quantize.schemes import KV_INT8, SCHEMES
from inferc.runtime.artifact.inspect import inspect_artifact

PROMPTS = [[3, 200, 17, 45, 96], [7, 7, 80, 12, 5, 61, 190, 33, 2]]


OF_CPU = [name for name in SCHEMES if name != "fp8"]  # whose certificate is asked for with TensorRT's artifacts


def measured(row: dict[str, Any]) -> dict[str, Any]:
    """Everything of a row but its name and what it was judged by."""
    return {name: value for name, value in row.items() if name not in ("name", "judged_by", "limits")}


@pytest.mark.slow
@pytest.mark.quick("int8")
@pytest.mark.parametrize(
    "scheme", [pytest.param(name, marks=pytest.mark.slow) if name.startswith("int4-") else name for name in OF_CPU]
)
def test_a_quantized_model(scheme: str, tiny_llama_folder: Path, tmp_path: Path) -> None:
    compile(tiny_llama_folder, tmp_path / "out", CompileConfig(certify="full", quantize=scheme))  # type: ignore[arg-type]
    certificate = json.loads((tmp_path / "out" / "certificate.json").read_bytes())
    rows = {row["name"]: row for row in certificate["rows"]}
    assert certificate["ok"]
    budget = certificate["budgets"][scheme]
    assert budget == {"max_kl": SCHEMES[scheme].max_kl, "min_top1": SCHEMES[scheme].min_top1}
    assert rows["split_head"]["relative_error"] <= 1e-5 < rows["quantize"]["relative_error"]
    assert rows["quantize"]["kl"] <= budget["max_kl"] and rows["quantize"]["top1_agreement"] >= budget["min_top1"]
    assert rows["kernels"]["kl"] == pytest.approx(rows["quantize"]["kl"], rel=0.1)
    fused = {"fuse_rms_norm_quantize", "fuse_silu_mul_quantize"}
    assert fused & set(rows) == (set() if scheme == "int8" else fused)
    for name in fused & set(rows):
        assert measured(rows[name]) == measured(rows["quantize"]), "a fusion changes no bit"


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [None, pytest.param("w8a8", marks=pytest.mark.slow)])
def test_a_kv_cache_in_int8(scheme: str | None, tiny_llama_folder: Path, tmp_path: Path) -> None:
    config = CompileConfig(certify="full", kv_dtype="int8", quantize=scheme)  # type: ignore[arg-type]
    compile(tiny_llama_folder, tmp_path / "out", config)
    certificate = json.loads((tmp_path / "out" / "certificate.json").read_bytes())
    rows = {row["name"]: row for row in certificate["rows"]}
    budget = {"max_kl": KV_INT8.max_kl, "min_top1": KV_INT8.min_top1}
    assert certificate["ok"] and certificate["budgets"]["kv_int8"] == budget
    cached = rows["quantize_kv_cache"]
    assert rows["page_kv_cache"]["relative_error"] <= 1e-5 < cached["relative_error"]
    assert cached["kl"] <= KV_INT8.max_kl and cached["top1_agreement"] >= KV_INT8.min_top1
    last = cached
    if scheme is not None:
        assert list(certificate["budgets"])[-2:] == ["kv_int8", scheme]
        last = rows["quantize"]
        assert cached["kl"] < last["kl"] <= KV_INT8.max_kl + SCHEMES[scheme].max_kl
    assert rows["kernels"]["kl"] == pytest.approx(last["kl"], rel=0.1)


@pytest.mark.parametrize(
    ("family", "scheme"),
    [
        pytest.param("gpt_oss", "int4", marks=pytest.mark.slow),
        pytest.param("llama4_text", "w8a8", marks=pytest.mark.slow),
        pytest.param("gpt_oss", "w8a8", marks=pytest.mark.slow),
        pytest.param("llama4_text", "int4", marks=pytest.mark.slow),
    ],
)
def test_experts_with_biases_and_with_scaled_inputs(family: str, scheme: str, tmp_path: Path) -> None:
    """The kernels compute what the references do. Routers of random weights tip, so the budget is no matter here."""
    folder = make_random_model(family, tmp_path / "model", **FAMILIES[family].fields)
    config = CompileConfig(certify="full", allow_drift=True, quantize=scheme)  # type: ignore[arg-type]
    compile(folder, tmp_path / "out", config)
    certificate = json.loads((tmp_path / "out" / "certificate.json").read_bytes())
    rows = {row["name"]: row for row in certificate["rows"]}
    assert rows["kernels"]["kl"] == pytest.approx(rows["quantize"]["kl"], rel=0.1)
    assert rows["kernels"]["relative_error"] == pytest.approx(rows["quantize"]["relative_error"], rel=0.1)
    kind = {"int4": "w4a8", "w8a8": "w8a8"}[scheme]
    assert f"cpp.moe_experts_{kind}.float32" in {each.name for each in inspect_artifact(tmp_path / "out").kernels}


@pytest.fixture
def certifier(tiny_llama_folder: Path) -> Certifier:
    """Return a certifier that is about to see the row of `quantize`."""
    made = Certifier(load(tiny_llama_folder), "float32", PROMPTS, "", max_model_len=256)
    made.judge.budget = SCHEMES["int8"].budget
    return made


def noisy(certifier: Certifier, size: float) -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [logits + size * torch.randn_like(logits) for logits in certifier.reference]


def test_over_its_budget_it_is_refused(certifier: Certifier) -> None:
    with pytest.raises(VerifyError, match=r"its KL to float32 is .* nats, int8 is allowed 1.00e-02; --allow-drift"):
        certifier.judge.add("quantize", "reference", noisy(certifier, 1.0))


def test_other_tokens_than_the_budget_allows_are_refused(certifier: Certifier) -> None:
    other = [logits.clone() for logits in certifier.reference]
    for logits in other:  # the two most likely ones change places, by next to nothing
        values, ids = logits.topk(2, -1)
        middle = values.mean(-1)
        logits.scatter_(1, ids, torch.stack((middle, middle + 1e-4), -1))
    certifier.judge.budget = replace(SCHEMES["w8a8"].budget, max_kl=10.0)
    with pytest.raises(VerifyError, match=r"its own at 0\.0% of the positions, w8a8 needs 85%"):
        certifier.judge.add("quantize", "reference", other)


def test_what_follows_is_measured_by_the_quantized_program(certifier: Certifier) -> None:
    certifier.judge.add("quantize", "reference", noisy(certifier, 0.05))
    certifier.judge.add("fuse", "reference", noisy(certifier, 0.05))
    assert certifier.certificate.rows[-1].ok
    with pytest.raises(VerifyError, match=r"kernels .* the int8 program's own by the references is"):
        certifier.judge.add("kernels", "cpu", noisy(certifier, 0.12))


def test_kernels_that_round_rows_have_the_budget_again(certifier: Certifier) -> None:
    certifier.certificate.lossy = [replace(SCHEMES["int8"].budget, min_top1=0.5)]
    certifier._kernels_round = True
    certifier.judge.add("quantize", "reference", noisy(certifier, 0.05))
    certifier.add_kernels("onnxruntime", noisy(certifier, 0.12), [])
    assert certifier.certificate.rows[-1].ok
    with pytest.raises(VerifyError, match=r"kernels .*, int8 is allowed 1.00e-02"):
        certifier.add_kernels("onnxruntime", noisy(certifier, 1.0), [])
