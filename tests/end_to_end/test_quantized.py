"""Artifacts with quantized weights: the model with its dequantized weights, and close to the one it was."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from families import FAMILIES
from random_models import make_random_model
from safetensors.torch import load_file, save_file

import inferc
from inferc.compiler.build import compile
from inferc.compiler.run_kernels import run_kernels
from inferc.config import CompileConfig, Quantize
from inferc.runtime.artifact.inspect import inspect_artifact

SHIPPED = Path(__file__).parents[2] / "examples/models"
PROMPTS = [[(7 + 13 * i * i + length) % 300 for i in range(length)] for length in (5, 23, 70)]
KEPT = ("norm", "mlp.gate.weight", "bias")
MODELS = ("llama", "qwen3_moe", "gpt_neox")  # packed projections, experts, biases and a parallel residual


def dequantized(folder: Path, out: Path) -> Path:
    """Write the model with embedding, LM head, projections and experts replaced by the values of their int8 form.

    Nothing else is rounded.
    """
    out.mkdir()
    for path in folder.iterdir():
        (out / path.name).write_bytes(path.read_bytes())
    tensors = load_file(folder / "model.safetensors")
    for name, value in tensors.items():
        if not any(kept in name for kept in KEPT):
            scale = value.abs().amax(-1, keepdim=True) / 127
            tensors[name] = (value / scale).round() * scale
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    return out


def logits_of(folder: Path, out: Path, **options: Any) -> torch.Tensor:
    """Every prompt's logits by the compiled step, which must decode what a prefill finds most likely."""
    compile(folder, out, CompileConfig(certify="none", **options))
    return torch.cat(run_kernels(out, PROMPTS, num_greedy=8)[1])


@pytest.fixture(scope="module", params=(*MODELS[:2], pytest.param(MODELS[2], marks=pytest.mark.slow)))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, torch.Tensor]:
    """A float32 model, and the logits of the one with its dequantized weights."""
    folder = tmp_path_factory.mktemp("quantized")
    made = make_random_model(request.param, folder / "model")
    return made, logits_of(dequantized(made, folder / "dequantized"), folder / "plain")


def ops_of(artifact: Path) -> set[str]:
    return {kernel.op for kernel in inspect_artifact(artifact).kernels}


def kernels_of(artifact: Path) -> set[str]:
    return {kernel.name for kernel in inspect_artifact(artifact).kernels}


@pytest.mark.quick("llama")
def test_int8_is_the_model_with_its_dequantized_weights(model: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    folder, expected = model
    found = logits_of(folder, tmp_path / "out", quantize="int8")
    assert (found - expected).abs().max() < 2e-5 * expected.abs().max()
    assert "inferc.linear_int8" in ops_of(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.quick("llama")
def test_w8a8_is_near_the_model_with_its_dequantized_weights(model: tuple[Path, torch.Tensor], tmp_path: Path) -> None:
    """The rows are rounded too, to one part in 254 of their largest element."""
    folder, expected = model
    found = logits_of(folder, tmp_path / "out", quantize="w8a8")
    error = (found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert 1e-4 < error < 0.06
    norms = {"inferc.layer_norm_quantize", "inferc.rms_norm_quantize"}
    ops = ops_of(tmp_path / "out")
    assert {"inferc.linear_w8a8", "inferc.quantize_rows"} <= ops and ops & norms


@pytest.mark.parametrize("family", ["llama", pytest.param("qwen3_moe", marks=pytest.mark.slow)])
def test_four_bits_are_near_the_model(family: str, tmp_path: Path) -> None:
    folder = make_random_model(family, tmp_path / "model")
    expected = logits_of(folder, tmp_path / "plain")
    errors = {}
    for scheme in ("int4", "int4-g128"):
        found = logits_of(folder, tmp_path / scheme, quantize=scheme)
        errors[scheme] = float((found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt())
        assert "inferc.linear_w4a8" in ops_of(tmp_path / scheme)
    assert 0.01 < errors["int4"] < 0.35, errors
    if family == "qwen3_moe":
        assert "cpp.moe_experts_w4a8.float32" in kernels_of(tmp_path / "int4")


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme",
    ["w8a8", *(pytest.param(each, marks=pytest.mark.slow) for each in ("int8", "int4", "int4-g64", "int4-g128"))],
)
def test_a_mixture_is_what_the_oracle_computes(scheme: Quantize, tmp_path: Path) -> None:
    """A mixture equals the references but for a thousandth of its integers, which the last bit of a sum moves."""
    folder = make_random_model("qwen3_moe", tmp_path / "model", **FAMILIES["qwen3_moe"].fields)

    def log_probabilities(target: Literal["cpu", "reference"], quantize: Quantize | None) -> torch.Tensor:
        out = tmp_path / f"{target}-{quantize}"
        compile(folder, out, CompileConfig(target=target, certify="none", quantize=quantize))
        with inferc.LLM(out) as llm:
            return torch.tensor([value for ids in PROMPTS for value in llm.score(ids).logprobs])

    expected = log_probabilities("reference", scheme)
    rounding = (expected - log_probabilities("reference", None)).abs()
    error = (log_probabilities("cpu", scheme) - expected).abs()
    assert error.median() < 1e-3 * rounding.median() and error.max() < 0.1 * rounding.max()


def shipped_nll(out: Path, **options: Any) -> float:
    """Nats a token of eight windows of eval.txt, by the shipped tiny-llama."""
    from tokenizers import Tokenizer

    folder = SHIPPED / "tiny-llama"
    text = (SHIPPED / "eval.txt").read_text(encoding="utf-8")
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text, add_special_tokens=False).ids
    windows = [ids[start : start + 512] for start in range(0, 4096, 512)]
    compile(folder, out, CompileConfig(certify="none", **options))
    logits = run_kernels(out, windows, num_greedy=0)[1]
    losses = [
        torch.nn.functional.cross_entropy(each[:-1], torch.tensor(window[1:]), reduction="sum")
        for each, window in zip(logits, windows, strict=True)
    ]
    return float(sum(losses)) / sum(len(window) - 1 for window in windows)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scheme", "worse"),
    [
        ("int8", 0.003),
        ("w8a8", 0.006),
        ("int4", 0.06),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in (("int4-g64", 0.07), ("int4-g128", 0.08))),
    ],
)
def test_perplexity_of_the_shipped_model(scheme: str, worse: float, tmp_path: Path) -> None:
    before, after = shipped_nll(tmp_path / "plain"), shipped_nll(tmp_path / "quantized", quantize=scheme)
    assert abs(math.exp(after - before) - 1) < worse
    whole, halved = (inspect_artifact(tmp_path / name).weights_bytes for name in ("plain", "quantized"))
    assert halved < (0.36 if scheme.startswith("int4") else 0.52) * whole


@pytest.mark.slow
@pytest.mark.parametrize("scheme", [None, "int4"])
def test_perplexity_with_a_kv_cache_in_int8(scheme: str | None, tmp_path: Path) -> None:
    before = shipped_nll(tmp_path / "plain", quantize=scheme)
    after = shipped_nll(tmp_path / "int8", quantize=scheme, kv_dtype="int8")
    assert 0 < abs(math.exp(after - before) - 1) < 0.003
