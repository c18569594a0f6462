"""A KV cache in int8, end to end: the kernels do what the oracle does, which is close to the model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES
from oracle import run_lowered
from random_models import make_random_model
from torch import Tensor

import inferc
from inferc.backends.lower import LowerConfig, lower
from inferc.compiler.build import compile
from inferc.compiler.run_kernels import run_kernels
from inferc.config import CompileConfig
from inferc.frontend.capture import capture
from inferc.frontend.checkpoint.load import load
from inferc.ir.reference import weight_reader
from inferc.runtime.artifact.inspect import inspect_artifact
from inferc.targets import Target

SHIPPED = Path(__file__).parents[2] / "examples/models"
PROMPTS = [[(7 + 13 * i * i + length) % 300 for i in range(length)] for length in (5, 23, 70)]
# A norm in the write, windows beside full layers, softcap, one KV head, latents, sinks, chunks.
KINDS = ("qwen3", "qwen2-windows", "gemma2", "gpt_bigcode", "deepseek_v3", "gpt_oss", "llama4_text")


def size(x: Tensor) -> float:
    """Return the size of logits at a median position, since any change is large where a router takes another expert."""
    return float(x.pow(2).mean(-1).sqrt().median())


@pytest.mark.slow  # make test has a certificate of such a cache (tests/compiler/test_certify_quantized.py)
@pytest.mark.parametrize("name", KINDS)
def test_the_kernels_do_what_the_oracle_does(name: str, tmp_path: Path) -> None:
    """The two differ only in numbers that another order of additions rounds to the neighbouring integer."""
    family = FAMILIES[name]
    folder = make_random_model(family.model_type(name), tmp_path / "model", **family.fields)
    compile(folder, tmp_path / "out", CompileConfig(dtype="float32", kv_dtype="int8", certify="none"))
    # Which decodes what a prefill finds most likely, or run_kernels raises.
    found = torch.cat(run_kernels(tmp_path / "out", PROMPTS, num_greedy=8)[1])
    plain, expected = (oracle(folder, kv_dtype) for kv_dtype in ("auto", "int8"))
    rounding = size(expected - plain)
    assert 1e-5 < rounding / size(plain) < 0.05
    assert size(found - expected) < 0.1 * rounding
    assert {group.dtype for group in inspect_artifact(tmp_path / "out").kv_groups} == {"int8"}


def oracle(folder: Path, kv_dtype: str) -> Tensor:
    """Every prompt's logits by the ops' references, in chunks."""
    checkpoint = load(folder)
    program = capture(checkpoint, "float32", 256, check=False)
    lower(program, LowerConfig(Target.parse("reference"), kv_dtype=kv_dtype))
    return torch.cat(run_lowered(program, weight_reader(program, checkpoint.reader), PROMPTS, chunk_size=16))


@pytest.mark.slow
@pytest.mark.parametrize(
    "scheme", [None, *(pytest.param(scheme, marks=pytest.mark.slow) for scheme in ("w8a8", "int4"))]
)
def test_the_shipped_model(scheme: Any, tmp_path: Path) -> None:
    """Certified, with half the cache: on its own and with weights in integers."""
    config = CompileConfig(kv_dtype="int8", quantize=scheme)
    certificate = compile(SHIPPED / "tiny-llama", tmp_path / "out", config).certificate
    assert certificate is not None and certificate.ok
    assert {budget.name for budget in certificate.lossy} >= {"kv_int8", *([scheme] if scheme else [])}
    assert inspect_artifact(tmp_path / "out").kv_bytes_per_token == 6 * 2 * 2 * (64 + 4)
    with inferc.LLM(tmp_path / "out", max_num_batched_tokens=64) as llm:
        params = inferc.SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
        (result,) = llm.generate(["def add(a, b):\n    return"], params)
    assert "a" in result.outputs[0].text
