"""Quantized artifacts for onnxruntime: within their scheme's budget, and as good as the cpu target's on text."""

from __future__ import annotations

import json
from pathlib import Path

import onnx
import pytest
from command_line import run_inferc
from families import DENSE, FAMILIES, by_turns
from random_models import make_random_model

import inferc
from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.passes.quantize.schemes import SCHEMES
from inferc.runtime.artifact.inspect import inspect_artifact

pytestmark = pytest.mark.slow

SHIPPED = Path(__file__).parents[2] / "examples" / "models"
PERPLEXITY = {  # of the cpu target in float32 by `inferc eval`: docs/quantization.md has the figures
    "tiny-llama": {"int8": 17.537, "w8a8": 17.561, "int4": 18.177, "int4-g64": 18.315, "int4-g128": 18.540},
    "tiny-moe": {"int8": 17.116, "w8a8": 17.116, "int4": 17.522, "int4-g64": 17.476, "int4-g128": 17.604},
}
# Of groups of 128 its experts' inputs are no whole number.
EXPERTS = {"int8": "moe_experts_int8", "w8a8": "moe_experts_int8", "int4-g128": "all_experts_int4"}
PRODUCTS = {"int8": "linear_int8", "w8a8": "linear_w8a8"}
HERE = (("tiny-moe", "w8a8"),)


@pytest.mark.parametrize(
    ("model", "scheme"),
    [
        pytest.param(model, scheme, marks=[] if (model, scheme) in HERE else pytest.mark.slow)
        for model in PERPLEXITY
        for scheme in PERPLEXITY[model]
    ],
)
def test_shipped_models(model: str, scheme: str, tmp_path: Path) -> None:
    """The certificate's rows, the model's perplexity, and requests that join and leave."""
    out = tmp_path / "out"
    config = CompileConfig(target="onnx", quantize=scheme, certify="full")  # type: ignore[arg-type]
    summary = compile(SHIPPED / model, out, config)
    assert summary.certificate is not None
    rows = {row.name: row for row in summary.certificate.rows}
    for name in ("quantize", "kernels"):
        row = rows[name]
        assert row.ok and row.kl is not None
        assert row.kl <= SCHEMES[scheme].max_kl and row.top1_agreement >= SCHEMES[scheme].min_top1
    assert rows["kernels"].ran_by.startswith("onnxruntime ")
    kernels = {each.name for each in inspect_artifact(out).kernels}
    assert f"onnx.{PRODUCTS.get(scheme, 'linear_int4')}" in kernels
    assert f"onnx.embedding_int8{'' if scheme == 'int8' else '_columns'}" in kernels
    if model == "tiny-moe":
        assert f"onnx.{EXPERTS.get(scheme, 'moe_experts_int4')}" in kernels
    onnx.checker.check_model(str(out / "model.onnx"), full_check=True)
    done = run_inferc("eval", out, "--text", SHIPPED / "eval.txt", "--json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["perplexity"] == pytest.approx(PERPLEXITY[model][scheme], rel=3e-3)
    prompts = [[(7 + 13 * i * i + length) % 500 + 4 for i in range(length)] for length in (1, 60, 33, 17)]
    params = inferc.SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    found = []
    for options in ({"max_num_seqs": 1}, {"max_num_batched_tokens": 16, "max_num_seqs": 3}):
        with inferc.LLM(out, **options) as llm:
            found.append([list(result.outputs[0].token_ids) for result in llm.generate(prompts, params)])
    same = sum(ours == theirs for ours, theirs in zip(*found, strict=True))
    assert same >= 3, "kernels that round the same rows choose the same tokens, but for ties"


@pytest.mark.slow
@pytest.mark.parametrize(("name", "scheme"), by_turns(DENSE, ("int8", "w8a8", "int4")))
def test_families(name: str, scheme: str, tmp_path: Path) -> None:
    """Random models, whose logits may move far; the kernels move them no further than the references do."""
    folder = make_random_model(FAMILIES[name].model_type(name), tmp_path / "m", **FAMILIES[name].fields)
    config = CompileConfig(target="onnx", quantize=scheme, certify="full", allow_drift=True)  # type: ignore[arg-type]
    summary = compile(folder, tmp_path / "out", config)
    assert summary.certificate is not None
    rows = {row.name: row for row in summary.certificate.rows}
    # A router of random weights tips where rows are rounded that the references do not round.
    is_mixture = any(
        "moe" in each.name or "experts" in each.name for each in inspect_artifact(tmp_path / "out").kernels
    )
    most = 3.0 if is_mixture else 1.5
    found, allowed = rows["kernels"].relative_error, rows["quantize"].relative_error
    assert found is not None and allowed is not None and found < most * allowed + 0.02, rows
    onnx.checker.check_model(str(tmp_path / "out" / "model.onnx"), full_check=True)
