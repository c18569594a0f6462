"""Tests of running a TensorRT plan on a fake GPU: calls that fit its profiles, memory, and refusals."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import tensorrt_rtx as trt
from fake_cuda import FakeCuda
from fake_tensorrt import FakeTensorRT, Known, on_fake_gpu, plans_are_kept
from hypothesis import given, settings
from hypothesis import strategies as st
from manifests import read_manifest, rewrite_manifest
from numpy.typing import NDArray
from run_together import run_together

import inferc
from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.errors import ArtifactError, ConfigError, InfercError, UnsupportedError
from inferc.manifest import TENSORRT_PLAN
from inferc.runtime.engine.load import load_engine
from inferc.runtime.runners.cuda import driver
from inferc.runtime.runners.dense.tensorrt import Profile, pieces_of

SHIPPED = Path(__file__).parents[4] / "examples" / "models"
Array = NDArray[Any]
Made = tuple[Path, Mapping[str, Known]]


@pytest.fixture(scope="module")
def artifact(tmp_path_factory: pytest.TempPathFactory) -> Made:
    out = tmp_path_factory.mktemp("tensorrt") / "out"
    with plans_are_kept() as known:
        config = CompileConfig(target="tensorrt:sm_86", dtype="float32", max_model_len=1500, certify="none")
        compile(SHIPPED / "tiny-draft", out, config)
    return out, known


# ------------------------------------------------------------------------------------------------- pieces


def call_of(starts: list[int], num_new: int, rows: list[int]) -> dict[str, Array]:
    begin = np.array(starts, np.int64)
    positions = (begin[:, None] + np.arange(num_new)).ravel()
    return {
        "token_ids": np.arange(len(positions), dtype=np.int32) + 100,
        "positions": positions,
        "starts": begin,
        "seq_lens": begin + num_new,
        "logits_rows": np.array(rows, np.int32),
    }


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_pieces_fit_and_make_up_the_call(data: st.DataObject) -> None:
    decode = Profile(data.draw(st.integers(1, 5)), 5, data.draw(st.integers(1, 5)))
    prefill = Profile(1, data.draw(st.integers(1, 6)), data.draw(st.integers(1, 4)))
    num_seqs = data.draw(st.integers(1, 12))
    num_new = 1 if num_seqs > 1 else data.draw(st.integers(1, 20))
    starts = data.draw(st.lists(st.integers(0, 50), min_size=num_seqs, max_size=num_seqs))
    num_tokens = num_seqs * num_new
    rows = data.draw(st.lists(st.integers(0, num_tokens - 1), max_size=num_tokens, unique=True))
    inputs = call_of(starts, num_new, rows)
    pieces = pieces_of(inputs, decode, prefill)
    for name in ("token_ids", "positions"):
        assert np.concatenate([each.inputs[name] for each in pieces]).tolist() == inputs[name].tolist()
    assert sorted(np.concatenate([each.places for each in pieces]).tolist()) == list(range(len(rows)))
    for each in pieces:
        own, most = each.inputs, (decode, prefill)[each.profile]
        assert len(own["starts"]) <= most.max_num_seqs and len(own["logits_rows"]) <= most.max_num_rows
        assert each.profile == 0 or len(own["token_ids"]) <= most.max_num_tokens
        assert len(own["token_ids"]) % len(own["starts"]) == 0 and len(own["logits_rows"]) >= 1
        count = len(own["token_ids"]) // len(own["starts"])
        assert (own["seq_lens"] - own["starts"] == count).all()
        assert (own["positions"].reshape(-1, count)[:, 0] == own["starts"]).all()
        asked = inputs["token_ids"][inputs["logits_rows"][each.places]]
        assert own["token_ids"][own["logits_rows"]][: len(each.places)].tolist() == asked.tolist()
        if each.profile == 0:
            assert each.inputs["starts"].tolist() == starts[each.first : each.first + len(own["starts"])]


def test_a_prompt_that_is_longer_than_a_call_is_cut(artifact: Made) -> None:
    """A prompt whose every row is asked for is cut as well: a call gives 256 rows."""
    path, known = artifact
    prompt = [(7 + 13 * i * i) % 500 + 4 for i in range(1100)]
    params = inferc.SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    with on_fake_gpu(known) as fake, inferc.LLM(path, max_num_batched_tokens=2000, prefix_cache=False) as llm:
        (whole,) = llm.generate([prompt], params)
        calls = fake.engines[0].calls
        assert [call[1] for call in calls[:3]] == [512, 512, 76] and calls[3][1] == 1
        del calls[:]
        score = llm.score(prompt)
        assert [call[1:] for call in calls] == [(256, 256)] * 4 + [(75, 75)], calls
    with on_fake_gpu(known), inferc.LLM(path, max_num_batched_tokens=64) as llm:
        (cut,) = llm.generate([prompt], params)
        np.testing.assert_allclose(llm.score(prompt).logprobs, score.logprobs, atol=1e-5)
    assert whole.outputs[0].token_ids == cut.outputs[0].token_ids


def test_more_sequences_than_a_call_takes(artifact: Made) -> None:
    path, known = artifact
    prompts = [[5 + i % 400] for i in range(300)]
    params = inferc.SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    with on_fake_gpu(known) as fake:
        engine = load_engine(path, max_num_seqs=300)
        found = run_together(engine, prompts, 2)
        engine.close()
        assert {call[0] for call in fake.engines[0].calls} == {256, 44}
    with on_fake_gpu(known), inferc.LLM(path, max_num_seqs=4) as llm:
        assert [result.outputs[0].token_ids for result in llm.generate(prompts[:8], params)] == found[:8]


# ----------------------------------------------------------------------------------------------- refusals


def with_facts(path: Path, folder: Path, **facts: str) -> Path:
    """The artifact with another manifest."""
    copy = folder / "copy"
    copy.mkdir()
    for each in path.rglob("*"):
        if each.is_file():
            (copy / each.relative_to(path)).parent.mkdir(parents=True, exist_ok=True)
            (copy / each.relative_to(path)).write_bytes(each.read_bytes())
    rewrite_manifest(copy, tensorrt={**read_manifest(path)["tensorrt"], **facts})
    return copy


def test_a_plan_of_another_version(artifact: Made, tmp_path: Path) -> None:
    path, known = artifact
    copy = with_facts(path, tmp_path, version="1.4.0.76")
    told = f"engine.plan was built by TensorRT-RTX 1.4.0.76, .* found {trt.__version__}: install 1.4.0.76, or compile"
    with on_fake_gpu(known), pytest.raises(ArtifactError, match=told):
        inferc.LLM(copy)


def test_a_plan_of_the_other_package(artifact: Made, tmp_path: Path) -> None:
    path, known = artifact
    copy = with_facts(path, tmp_path, package="tensorrt", version="11.4.0.106")
    told = "engine.plan was built by TensorRT 11.4.0.106, which is not installed: pip install tensorrt-cu13"
    with on_fake_gpu(known), pytest.raises(ConfigError, match=told):
        inferc.LLM(copy)


def test_another_chip(artifact: Made) -> None:
    path, known = artifact
    told = r"engine.plan is for sm_86, and this GPU \(Fake GPU\) is sm_89: .*--target tensorrt:sm_89"
    with on_fake_gpu(known, capability=(8, 9)), pytest.raises(UnsupportedError, match=told):
        inferc.LLM(path)


def test_without_the_package(artifact: Made) -> None:
    path, known = artifact
    told = r"which is not installed: pip install 'inferc\[tensorrt\]'"
    missing = mock.patch.dict(sys.modules, {"tensorrt_rtx": None})
    with on_fake_gpu(known), missing, pytest.raises(ConfigError, match=told):
        inferc.LLM(path)


def test_without_a_gpu(artifact: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    path, _ = artifact
    monkeypatch.setattr(driver, "LIBRARY", "libcuda-that-is-not-there.so.1")
    with pytest.raises(UnsupportedError, match="no NVIDIA driver on this machine .*; run this where a GPU is"):
        inferc.LLM(path)


def test_a_damaged_plan_is_not_given_to_tensorrt(artifact: Made, tmp_path: Path) -> None:
    path, known = artifact
    copy = with_facts(path, tmp_path)
    data = bytearray((copy / TENSORRT_PLAN).read_bytes())
    data[len(data) // 2] ^= 1
    (copy / TENSORRT_PLAN).write_bytes(data)
    with on_fake_gpu(known) as fake, pytest.raises(ArtifactError, match="engine.plan is damaged"):
        inferc.LLM(copy)
    assert not fake.engines


@contextmanager
def fake_gpu_where(artifact: Made, **how: Any) -> Iterator[FakeTensorRT]:
    with on_fake_gpu(artifact[1]) as fake:
        fake.__dict__.update(how)
        yield fake


def test_what_tensorrt_rtx_finds_wrong_is_told(artifact: Made) -> None:
    wrong = trt.EngineInvalidityDiagnostics
    bits = int(wrong.OLD_CUDA_DRIVER) | int(wrong.INSUFFICIENT_GPU_MEMORY)
    told = "does not run this plan here: old cuda driver, insufficient gpu memory"
    with (
        fake_gpu_where(artifact, validity=(trt.EngineValidity.INVALID, bits)),
        pytest.raises(ArtifactError, match=told),
    ):
        inferc.LLM(artifact[0])


def test_a_plan_that_tensorrt_does_not_take(artifact: Made) -> None:
    with on_fake_gpu({}), pytest.raises(ArtifactError, match="engine.plan does not load: Serialized engine does not"):
        inferc.LLM(artifact[0])


def test_caches_must_be_written_in_place(artifact: Made) -> None:
    with (
        fake_gpu_where(artifact, in_place=False),
        pytest.raises(ArtifactError, match="does not write k_cache_0 in place"),
    ):
        inferc.LLM(artifact[0])


def test_as_many_sequences_as_the_gpu_has_memory_for(artifact: Made) -> None:
    path, known = artifact
    prompts = [[5 + i, 9] for i in range(6)]
    params = inferc.SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
    row = 2 * 2 * 64 * 1536 * 4  # layers, K and V, head_dim, tokens, bytes
    with on_fake_gpu(known) as fake:
        engine = load_engine(path, kv_memory_bytes=4 * row)  # three sequences: block 0 is nobody's
        found = run_together(engine, prompts, 3)
        engine.close()
        assert max(call[0] for call in fake.engines[0].calls) == 3
        with inferc.LLM(path) as llm:
            assert [result.outputs[0].token_ids for result in llm.generate(prompts, params)] == found


def test_a_gpu_without_memory(artifact: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    real = FakeCuda.__init__

    def small(self: FakeCuda, *args: Any, **how: Any) -> None:
        real(self, *args, **{**how, "total_bytes": 1 << 20})

    monkeypatch.setattr(FakeCuda, "__init__", small)
    with on_fake_gpu(artifact[1]), pytest.raises(ConfigError, match="Fake GPU has no [0-9]+ bytes left, which a step"):
        inferc.LLM(artifact[0])


def test_a_step_that_fails_is_told(artifact: Made) -> None:
    path, known = artifact
    with on_fake_gpu(known) as fake, inferc.LLM(path) as llm:
        fake.engines[0].fails = True
        with pytest.raises(InfercError, match="TensorRT failed a step: the fake engine broke"):
            llm.generate([[5, 6]], inferc.SamplingParams(max_tokens=2))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv_evict": "sinks:32+window:32"}, "its KV cache gives no blocks away"),
        ({"kv_disk": "/tmp/kv"}, "its KV cache gives no blocks away"),
        ({"tap": ("layers.0.add",)}, "runs on TensorRT: its values are not seen"),
        ({"record": "/tmp/record"}, "--record .* runs on TensorRT: what it computes depends on what else runs"),
    ],
)
def test_what_needs_blocks_is_refused(options: dict[str, Any], message: str, artifact: Made) -> None:
    with on_fake_gpu(artifact[1]), pytest.raises(UnsupportedError, match=message):
        inferc.LLM(artifact[0], **options)
