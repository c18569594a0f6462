"""Artifacts for onnxruntime on a GPU, with K and V in a driver's memory, here the host's, and the ops on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import onnx
import onnxruntime
import pytest
from fake_cuda import FakeCuda
from real_gpu import need_gpu

import inferc
from inferc.compiler.build import compile
from inferc.config import CompileConfig, Quantize
from inferc.errors import ConfigError, InfercError, UnsupportedError
from inferc.runtime.artifact.inspect import inspect_artifact
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.runners.cuda import driver
from inferc.runtime.runners.dense import onnxruntime as onnx_model

SHIPPED = Path(__file__).parents[2] / "examples" / "models"
ON_GPU = CompileConfig(target="onnx:cuda", certify="none", max_model_len=250)
GREEDY = inferc.SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
PROMPTS = [[(7 + 13 * i * i + length) % 500 + 4 for i in range(length)] for length in (1, 60, 33, 2, 17, 200)]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeCuda]:
    """A driver without a GPU, in whose memory onnxruntime's CPU kernels find K and V."""
    fake = FakeCuda(capability=(8, 6))
    monkeypatch.setattr(driver, "open_library", lambda: fake)
    monkeypatch.setattr(onnx_model, "CUDA", onnx_model.CPU)
    yield fake
    fake.check()
    assert not fake.device and not fake.host, "memory is left"


def tokens_of(path: Path, **options: Any) -> list[list[int]]:
    with inferc.LLM(path, **options) as llm:
        params = [replace(GREEDY, max_tokens=4 + 3 * index) for index in range(len(PROMPTS))]
        return [list(result.outputs[0].token_ids) for result in llm.generate(PROMPTS, params)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "quantize"), [("tiny-draft", None), pytest.param("tiny-moe", "int4", marks=pytest.mark.slow)]
)
def test_tokens_are_those_of_the_same_ops_on_the_cpu(model: str, quantize: Any, gpu: FakeCuda, tmp_path: Path) -> None:
    compile(SHIPPED / model, tmp_path / "gpu", replace(ON_GPU, quantize=quantize))
    compile(SHIPPED / model, tmp_path / "cpu", replace(ON_GPU, target="onnx", dtype="float16", quantize=quantize))
    want = tokens_of(tmp_path / "cpu", max_num_seqs=3)
    assert tokens_of(tmp_path / "gpu", max_num_seqs=3) == want
    assert tokens_of(tmp_path / "gpu", max_num_seqs=3, max_num_batched_tokens=16) == want
    assert gpu.calls["cuMemAlloc"] > 0
    artifact = load_artifact(tmp_path / "gpu")
    assert artifact.block_size == 256, "rows begin at whole alignments"
    kernels = {each.name for each in inspect_artifact(tmp_path / "gpu").kernels}
    assert "onnx.dense_write_attention" in kernels and "onnx.moe_experts_int4" not in kernels
    types = {
        each.name: each.type.tensor_type.elem_type
        for each in onnx.load(tmp_path / "gpu" / "model.onnx", load_external_data=False).graph.input
    }
    assert types["k_cache_0"] == onnx.TensorProto.FLOAT16


def test_memory_for_fewer_sequences_than_asked_for(gpu: FakeCuda, tmp_path: Path) -> None:
    compile(SHIPPED / "tiny-draft", tmp_path / "out", ON_GPU)
    want = tokens_of(tmp_path / "out")
    allocated = gpu.calls["cuMemAlloc"]
    gpu.total_bytes = (256 << 20) + (2 << 20)  # what is kept free, and a few rows
    assert tokens_of(tmp_path / "out") == want
    assert gpu.calls["cuMemAlloc"] == 2 * allocated
    gpu.total_bytes = 256 << 20
    with pytest.raises(ConfigError, match="less than two blocks"):
        inferc.LLM(tmp_path / "out")


@pytest.mark.slow
def test_a_provider_that_does_not_start(gpu: FakeCuda, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """onnxruntime would say so in its log, and run on the CPU."""
    compile(SHIPPED / "tiny-draft", tmp_path / "out", ON_GPU)
    monkeypatch.setattr(onnx_model, "CUDA", ("CUDAExecutionProvider", "cuda"))
    with pytest.raises(ConfigError, match="has no CUDAExecutionProvider, only .*; for a GPU install 'inferc.onnx-gpu"):
        inferc.LLM(tmp_path / "out")
    session = onnxruntime.InferenceSession

    def without_it(path: str, options: Any, providers: list[str]) -> Any:
        return session(path, options, providers=providers[1:])

    monkeypatch.setattr("onnxruntime.get_available_providers", lambda: ["CUDAExecutionProvider"])
    monkeypatch.setattr("onnxruntime.InferenceSession", without_it)
    with pytest.raises(ConfigError, match="could not start CUDAExecutionProvider, and would run on CPUExecution"):
        inferc.LLM(tmp_path / "out")


@pytest.mark.slow
def test_without_a_gpu(tmp_path: Path) -> None:
    compile(SHIPPED / "tiny-draft", tmp_path / "out", ON_GPU)
    with pytest.raises(InfercError, match="NVIDIA"):
        inferc.LLM(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float32"}, "--dtype float32: it takes float16"),
        ({"quantize": "w8a8"}, "--quantize w8a8: it takes int8, int4"),
        ({"kv_dtype": "int8"}, "--kv-dtype int8: it takes float16"),
        ({"tp": 2}, "--tp 2: it takes 1"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match=message):
        compile(SHIPPED / "tiny-draft", tmp_path / "out", replace(ON_GPU, **options))


@pytest.mark.slow
@pytest.mark.gpu
def test_on_a_gpu(tmp_path: Path) -> None:
    """The likelihood of a text by onnxruntime's CUDA provider is that of the same ops on the CPU."""
    schemes: tuple[Quantize | None, ...] = (None, "int4")
    for quantize in schemes:
        compile(SHIPPED / "tiny-llama", tmp_path / f"gpu {quantize}", replace(ON_GPU, quantize=quantize))
    need_gpu(f"{len(schemes)} artifacts")
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        pytest.skip("onnxruntime has no CUDAExecutionProvider here: install inferc[onnx-gpu]")
    for quantize in schemes:
        on_cpu = replace(ON_GPU, target="onnx", dtype="float16", quantize=quantize)
        compile(SHIPPED / "tiny-llama", tmp_path / f"cpu {quantize}", on_cpu)
        ours, theirs = (tokens_of(tmp_path / f"{where} {quantize}") for where in ("gpu", "cpu"))
        same = [mine == other for mine, other in zip(ours, theirs, strict=True)]
        assert sum(same) >= len(same) - 2, "but for ties and rows that a CPU rounds"
