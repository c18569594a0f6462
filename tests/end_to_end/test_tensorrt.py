"""Artifacts for TensorRT, which are built here and run on a GPU that is not there: the tokens of Hugging Face.

Each plan is TensorRT-RTX's own. Its network is run layer by layer on the CPU (tensorrt_network.py) in place of the
GPU's kernels; everything around it is what runs on a GPU.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from unittest import mock

import oracle
import pytest
import torch
import transformers
from fake_tensorrt import on_fake_gpu, plans_are_kept
from families import DENSE, FAMILIES
from greedy import greedy_of_hugging_face
from oracle import run_lowered
from random_models import make_random_model
from real_gpu import chip, need_gpu
from segment_runs import Roundings
from torch import Tensor

import inferc
from inferc.backends.lower import LowerConfig, lower
from inferc.codegen.tensorrt.adapter import to_build
from inferc.compiler.build import compile
from inferc.compiler.drift import measure
from inferc.compiler.run_kernels import run_kernels
from inferc.config import CompileConfig, DType, Quantize
from inferc.errors import UnsupportedError
from inferc.frontend.capture import capture
from inferc.frontend.checkpoint.load import load
from inferc.ir.program import Program
from inferc.ir.reference import weight_reader
from inferc.manifest import TENSORRT_LAYERS
from inferc.passes.quantize.schemes import SCHEMES
from inferc.targets import Target

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
SHIPPED = ROOT / "examples" / "models"
FLOAT32 = CompileConfig(target="tensorrt:sm_86", dtype="float32", certify="none")
SLOW = pytest.mark.slow
GREEDY = inferc.SamplingParams(temperature=0.0, ignore_eos=True)
# By model and scheme, the prompt whose two likeliest tokens are 0.07 apart: rows that are rounded to the other side of
# a tie change the logits by more.
NEAR_TIES = {("tiny-moe", "w8a8"): 1}


def test_tokens_are_hugging_faces(tmp_path: Path) -> None:
    with plans_are_kept() as known:
        compile(SHIPPED / "tiny-draft", tmp_path / "out", FLOAT32)
    lengths = (1, 60, 33, 2, 17, 40)
    prompts = [[(7 + 13 * i * i + length) % 500 + 4 for i in range(length)] for length in lengths]
    params = [replace(GREEDY, max_tokens=4 + 3 * index) for index in range(len(prompts))]
    want = greedy_of_hugging_face(SHIPPED / "tiny-draft", prompts, 25)
    want = [ids[: each.max_tokens] for ids, each in zip(want, params, strict=True)]
    for options in ({}, {"max_num_seqs": 1}, {"max_num_batched_tokens": 16, "max_num_seqs": 3}):
        with on_fake_gpu(known), inferc.LLM(tmp_path / "out", **options) as llm:
            found = [list(result.outputs[0].token_ids) for result in llm.generate(prompts, params)]
        assert found == want, options


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ("tiny-draft", "bfloat16"),
        *[pytest.param("tiny-llama", dtype, marks=SLOW) for dtype in ("bfloat16", "float16")],
    ],
)
def test_in_16_bits_the_numbers_are_close(model: str, dtype: str, tmp_path: Path) -> None:
    """The attention here is TensorRT's own."""
    source = SHIPPED / model
    with plans_are_kept() as known:
        config = replace(FLOAT32, dtype=dtype)  # type: ignore[arg-type]
        summary = compile(source, tmp_path / "out", config)
    assert "tensorrt.dense_attention" in [row.name for row in summary.kernels]
    compile(source, tmp_path / "cpu", replace(FLOAT32, target="cpu"))
    prompts = [[(7 + 13 * i * i) % 500 + 4 for i in range(length)] for length in (5, 70)]
    with on_fake_gpu(known):
        name, ours, _ = run_kernels(tmp_path / "out", prompts, 0)
    assert name.startswith("TensorRT-RTX") and name.endswith("on Fake GPU")
    _, theirs, _ = run_kernels(tmp_path / "cpu", prompts, 0)
    assert float(measure(ours, theirs).kl.mean()) < 1e-3


@pytest.mark.parametrize(
    "model", ["tiny-draft", *(pytest.param(each, marks=SLOW) for each in ("tiny-moe", "tiny-llama"))]
)
@pytest.mark.parametrize("scheme", ["int8", pytest.param("w8a8", marks=SLOW)])
def test_in_integers(model: str, scheme: Quantize, tmp_path: Path) -> None:
    """The tokens of the cpu target with the same integers and scales; the plan holds integers."""
    config = replace(FLOAT32, quantize=scheme, max_model_len=256)
    with plans_are_kept() as known:
        quantized = compile(SHIPPED / model, tmp_path / "out", config)
    whole = compile(SHIPPED / model, tmp_path / "whole", replace(config, quantize=None))
    parameters = (SHIPPED / model / "model.safetensors").stat().st_size / 2  # in bfloat16
    assert whole.weights_bytes - quantized.weights_bytes > 1.5 * parameters  # of 3, for a table is there twice
    compile(SHIPPED / model, tmp_path / "cpu", replace(config, target="cpu"))
    prompts = [[(11 * i * i + 7 * length) % 290 + 5 for i in range(length)] for length in (1, 40, 17)]
    with on_fake_gpu(known):
        _, ours, greedy = run_kernels(tmp_path / "out", prompts, 16)
    _, theirs, expected = run_kernels(tmp_path / "cpu", prompts, 16)
    decided = [index for index in range(len(prompts)) if index != NEAR_TIES.get((model, scheme))]
    assert [greedy[index] for index in decided] == [expected[index] for index in decided]
    assert float(measure(ours, theirs).kl.mean()) < (1e-8 if scheme == "int8" else 1e-3)  # integers of rows tip


@pytest.mark.parametrize(
    ("model", "scheme"),
    [
        ("tiny-draft", "w8a8"),
        *(
            pytest.param(*each, marks=SLOW)
            for each in (("tiny-moe", "w8a8"), ("tiny-llama", "w8a8"), ("tiny-draft", "fp8"))
        ),
    ],
)
def test_rows_are_the_references_before_each_rounding_to_8_bits(model: str, scheme: Quantize, tmp_path: Path) -> None:
    """A whole plan's rows before each rounding, and its logits, equal the references', with prompts in chunks.

    The plan uses its own caches.
    """
    target = "tensorrt:sm_89" if scheme == "fp8" else FLOAT32.target
    how = replace(FLOAT32, target=target, quantize=scheme, max_model_len=128)
    with plans_are_kept() as known:
        compile(SHIPPED / model, tmp_path / "out", how)
    (plan,) = known.values()
    checkpoint = load(SHIPPED / model)
    program = capture(checkpoint, how.dtype, 128, check=False)
    lower(program, LowerConfig(Target.parse(how.target), quantize=how.quantize))
    read_weight = weight_reader(program, checkpoint.reader)
    for weight in program.weights:
        read_weight(weight)  # and keep it, so that what is rounded below are rows alone
    prompts = [[(11 * i * i + 7 * length) % 290 + 5 for i in range(length)] for length in (1, 128, 17)]
    roundings = Roundings()
    with roundings.recorded():
        want = run_lowered(program, read_weight, prompts, 16)

    def step(_: Program, inputs: dict[str, Tensor], __: object) -> tuple[Tensor, Tensor]:
        found = plan.network({name: inputs[name] for name in plan.network.shapes})
        for name, value in found.items():
            if name.endswith(".out"):
                inputs[name.removesuffix(".out")].copy_(value)
        return found["hidden"], found["logits"]

    with roundings.followed(), mock.patch.object(oracle, "run_step", step):
        found = run_lowered(program, read_weight, prompts, 16)
    for ours, theirs in zip(found, want, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=float(1e-5 * theirs.abs().max()))


@pytest.mark.parametrize("model", ["tiny-draft", pytest.param("tiny-llama", marks=SLOW)])
def test_in_fp8(model: str, tmp_path: Path) -> None:
    """Rows and weights of projections, on a chip that multiplies them: the tokens of the reference of the same scheme,
    which is within the scheme's budget."""
    config = replace(FLOAT32, target="tensorrt:sm_89", quantize="fp8", max_model_len=256)
    with plans_are_kept() as known:
        compile(SHIPPED / model, tmp_path / "out", replace(config, certify="full"))
    compile(SHIPPED / model, tmp_path / "reference", replace(config, target="reference"))
    prompts = [[(11 * i * i + 7 * length) % 290 + 5 for i in range(length)] for length in (1, 40, 17)]
    params, found = replace(GREEDY, max_tokens=16), []
    with on_fake_gpu(known, capability=(8, 9)):
        for name in ("out", "reference"):
            with inferc.LLM(tmp_path / name) as llm:
                found.append([result.outputs[0].token_ids for result in llm.generate(prompts, params)])
    assert found[0] == found[1]
    layers = json.loads((tmp_path / "out" / TENSORRT_LAYERS).read_bytes())
    kinds = [layer["kind"] for layer in layers]
    assert kinds.count("quantize") * 2 <= kinds.count("dequantize") and kinds.count("quantize") >= 8


# Windows and sinks; latents and groups of experts; chunks and scaled inputs of experts.
FAMILIES_HERE = ("gpt_oss",)


@pytest.mark.parametrize("name", [name if name in FAMILIES_HERE else pytest.param(name, marks=SLOW) for name in DENSE])
def test_families(name: str, tmp_path: Path) -> None:
    """Random models: each one's plan is built, and its network gives Hugging Face's tokens."""
    family = FAMILIES[name]
    if family.model_type(name) not in transformers.CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} does not have it")
    prompts = [[(11 * i * i + 7 * length) % 290 + 5 for i in range(length)] for length in (1, 40, 17, 33)]
    folder = make_random_model(family.model_type(name), tmp_path / "m", **family.fields)
    with plans_are_kept() as known:
        compile(folder, tmp_path / "out", FLOAT32)
    with on_fake_gpu(known), inferc.LLM(tmp_path / "out", max_num_batched_tokens=16, max_num_seqs=4) as llm:
        params = replace(GREEDY, max_tokens=12)
        found = [list(result.outputs[0].token_ids) for result in llm.generate(prompts, params)]
    assert found == greedy_of_hugging_face(folder, prompts, 12)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "scheme"),
    [
        ("float32", None),
        ("bfloat16", None),
        ("float16", None),
        ("bfloat16", "int8"),
        ("bfloat16", "w8a8"),
        ("bfloat16", "fp8"),
    ],
)
def test_on_a_gpu(dtype: DType, scheme: Quantize | None, tmp_path: Path) -> None:
    """The plan on a GPU gives Hugging Face's tokens in float32, and in 16 bits its likelihood within the budget."""
    arch = chip("sm_89")  # which TensorRT-RTX, too, builds plans for where it is not
    try:
        to_build(arch, arch)
    except UnsupportedError as error:
        pytest.skip(f"no plan for the GPU of this machine: {error}")
    if scheme == "fp8" and "fp8" not in Target.parse(f"tensorrt:{arch}").schemes:
        pytest.skip(f"{arch} has no fp8")
    source = SHIPPED / "tiny-llama"
    config = CompileConfig(target=f"tensorrt:{arch}", dtype=dtype, quantize=scheme, certify="none")
    compile(source, tmp_path / "out", config)
    need_gpu("its plan")
    prompts = [[(7 + 13 * i * i) % 500 + 4 for i in range(length)] for length in (1, 60, 33, 600)]
    want = greedy_of_hugging_face(source, prompts, 24)
    with inferc.LLM(tmp_path / "out") as llm:
        found = [list(each.outputs[0].token_ids) for each in llm.generate(prompts, replace(GREEDY, max_tokens=24))]
    if dtype == "float32":
        assert found == want
    compile(source, tmp_path / "cpu", CompileConfig(dtype="float32", certify="none"))
    (_, ours, _), (_, theirs, _) = (run_kernels(tmp_path / name, prompts, 0) for name in ("out", "cpu"))
    most = 1e-8 if dtype == "float32" else 1e-3 if scheme is None else SCHEMES[scheme].max_kl
    assert float(measure(ours, theirs).kl.mean()) < most
