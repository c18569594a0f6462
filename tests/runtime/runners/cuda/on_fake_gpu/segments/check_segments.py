"""Steps of kernels and engines give the reference's tokens, logits and scores, by the engine and by the runner."""

from __future__ import annotations

import dataclasses
import random
import shutil
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cuda_runs
import numpy as np
import pytest
import tensorrt_rtx as trt
from fake_cuda import FakeCuda, Misuse
from fake_gpu import ARTIFACTS, MODELS, OTHER, PROMPT, TOLERANCE, plans
from fake_segments import known_plans
from fake_tensorrt import Context, Engine, FakeTensorRT, Known, on_fake_gpu
from lowered import make_plan

import inferc
from inferc.config import EngineConfig
from inferc.errors import ArtifactError, ConfigError, InfercError, UnsupportedError
from inferc.kv_groups import cache_groups
from inferc.manifest_types import Launch
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.engine.load import load_engine
from inferc.runtime.runners.cuda.driver import Driver
from inferc.runtime.runners.cuda.engines import bind_call, open_engines
from inferc.runtime.runners.cuda.runner import CudaRunner
from inferc.runtime.runners.cuda.weights import placer
from inferc.runtime.runners.reference import ReferenceRunner
from inferc.runtime.step.plan import SampleRows

GREEDY = inferc.SamplingParams(temperature=0.0, ignore_eos=True)
SHORT = dataclasses.replace(GREEDY, max_tokens=2)
SMALL: dict[str, Any] = {"max_num_seqs": 3, "max_num_batched_tokens": 24, "kv_memory_bytes": 1 << 20}
ONE_ANSWER = [name for name in MODELS if TOLERANCE[name] < 0.01]  # else it may be a token that is as likely
LLAMA = ARTIFACTS / "llama"


@pytest.fixture(scope="module")
def known() -> dict[str, Known]:
    return {digest: plan for name in MODELS for digest, plan in known_plans(ARTIFACTS / name).items()}


@pytest.fixture
def gpu(known: dict[str, Known]) -> Iterator[FakeTensorRT]:
    with on_fake_gpu(known, folder=LLAMA) as fake:
        yield fake


def prompts() -> list[list[int]]:
    """The second begins with a block of the first, the others join when there is room."""
    source = random.Random(3)
    first, *others = [[source.randrange(5, 300) for _ in range(length)] for length in (36, 7, 1, 12, 2)]
    return [first, [*first[:32], 9, 8], *others]


@pytest.mark.parametrize("name", ONE_ANSWER)
def test_tokens_are_the_references(name: str, known: dict[str, Known]) -> None:
    """Requests join and leave, prompts are cut into chunks beside decode, and one finds another's blocks."""
    params = [dataclasses.replace(GREEDY, max_tokens=count) for count in (2, 4, 3, 6, 2, 3)]
    with inferc.LLM(ARTIFACTS / f"{name}-reference", max_num_seqs=3) as llm:
        want = [list(each.outputs[0].token_ids) for each in llm.generate(prompts(), params)]
    with on_fake_gpu(known, folder=ARTIFACTS / name) as fake, inferc.LLM(ARTIFACTS / name, **SMALL) as llm:
        found = llm.generate(prompts()[:1], params[:1]) + llm.generate(prompts()[1:], params[1:])
        cuda: FakeCuda = fake.engines[0].cuda
        assert cuda.calls["cuGraphLaunch"] > 4
    assert [list(each.outputs[0].token_ids) for each in found] == want
    assert [each.num_cached_tokens for each in found] == [0, 32, 0, 0, 0, 0]


@contextmanager
def opened(name: str, known: dict[str, Known], **changes: Any) -> Iterator[tuple[CudaRunner, ReferenceRunner]]:
    artifact = load_artifact(ARTIFACTS / name)
    config = EngineConfig(**{"max_num_seqs": 4, "max_num_batched_tokens": 96, "kv_memory_bytes": 1 << 20, **changes})
    with on_fake_gpu(known, folder=artifact.path) as fake:
        driver = Driver(library=FakeCuda(artifact.path, capability=(8, 6)))
        fake.cuda = driver._library
        engines = open_engines(artifact, config, driver)
        groups = cache_groups(artifact.kv_groups)
        resolved = config.resolve(artifact.max_model_len, artifact.block_size, groups, 1 << 30)
        runner = CudaRunner(
            artifact, resolved, driver, placer(artifact), owns_driver=True, poison=True, engines=engines
        )
        yield runner, ReferenceRunner(load_artifact(ARTIFACTS / f"{name}-reference"), resolved)
        driver._library.check()
        runner.close()
        assert not driver._library.device and not driver._library.host


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_scores_are_the_references(name: str, known: dict[str, Known]) -> None:
    with opened(name, known) as (runner, oracle):
        for plan in plans():
            found, expected = cuda_runs.logits(runner, runner._artifact, plan), oracle._logits(plan)
            assert np.abs(found - expected).max() <= TOLERANCE[name] * np.abs(expected).max()
        plan = make_plan([(3, OTHER, 0)], all_rows=True)
        targets = np.array([*OTHER[1:], 7], np.int32)
        (scores, best), (expected, likely) = runner.score(plan, targets), oracle.score(plan, targets)
        assert name not in ONE_ANSWER or best.tolist() == likely.tolist()
        np.testing.assert_allclose(scores, expected, rtol=TOLERANCE[name], atol=10 * TOLERANCE[name])


def test_blocks_are_found_in_files_by_the_next_run(gpu: FakeTensorRT, tmp_path: Path) -> None:
    found = []
    for _ in range(2):
        with inferc.LLM(LLAMA, **SMALL, kv_disk=str(tmp_path), kv_disk_bytes=1 << 20) as llm:
            found += llm.generate(prompts()[:1], SHORT)
    assert [each.num_cached_tokens for each in found] == [0, 32]
    assert found[0].outputs[0].token_ids == found[1].outputs[0].token_ids


def test_a_step_that_asks_for_no_row_runs_no_segment_of_rows(known: dict[str, Known]) -> None:
    with opened("llama", known) as (runner, oracle):
        plan = make_plan([(0, PROMPT, 0)])
        nothing = dataclasses.replace(
            plan, logits_rows=plan.logits_rows[:0], sample=SampleRows.greedy(np.zeros(0, np.int32))
        )
        cuda_runs.run(runner, nothing)
        oracle.submit(nothing)
        oracle.wait()
        behind = make_plan([(0, [8], 9)])
        oracle.submit(behind)
        assert cuda_runs.run(runner, behind).token_ids.tolist() == oracle.wait().token_ids.tolist()


# --------------------------------------------------------------------------------------------- graphs


def test_each_size_is_captured_of_contexts_of_its_own(gpu: FakeTensorRT) -> None:
    """The contexts compile for their shapes at once; those of a prompt are compiled while others stand in."""
    with inferc.LLM(LLAMA, **SMALL) as llm:
        llm.generate([[5, 6, 7]] * 3, SHORT)
        for engine in gpu.engines:
            strategies = [
                getattr(how, "dynamic_shapes_kernel_specialization_strategy", None) for how in engine.contexts
            ]
            eager = trt.DynamicShapesKernelSpecializationStrategy.EAGER
            assert strategies == [None, None, *[eager] * (len(strategies) - 2)] and len(strategies) >= 4


def test_what_tensorrt_does_not_capture_runs_without_graphs(
    gpu: FakeTensorRT, caplog: pytest.LogCaptureFixture
) -> None:
    with inferc.LLM(LLAMA, **SMALL) as llm:
        (want,) = llm.generate([[5, 6, 7]], SHORT)
    gpu.capturable = False
    with inferc.LLM(LLAMA, **SMALL) as llm:
        before = gpu.engines[0].cuda.calls["cuGraphLaunch"]
        (found,) = llm.generate([[5, 6, 7]], SHORT)
        assert gpu.engines[0].cuda.calls["cuGraphLaunch"] == before
    assert found.outputs[0].token_ids == want.outputs[0].token_ids
    (message,) = [record.message for record in caplog.records if "without a CUDA graph" in record.message]
    assert message.startswith("TensorRT-RTX ") and "does not capture segment-0: steps of 1 sequences" in message


def test_a_capture_that_fails_says_why_and_steps_run_without(
    gpu: FakeTensorRT, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TensorRT fails such a capture, and cannot be asked before."""
    gpu.capturable = False
    monkeypatch.delattr(Context, "is_stream_capturable")
    with inferc.LLM(LLAMA, **SMALL) as llm:
        llm.generate([[5, 6, 7]], SHORT)
    (message,) = [record.message for record in caplog.records if "without a CUDA graph" in record.message]
    assert message.startswith("TensorRT failed segment 0: the fake engine is not captured")


def test_the_fake_gpu_refuses_captures_that_tensorrt_forbids(gpu: FakeTensorRT) -> None:
    """A capture of what never ran is refused, and so are other shapes than a graph was captured with."""
    artifact, driver = load_artifact(LLAMA), Driver(library=FakeCuda(LLAMA, capability=(8, 6)))
    gpu.cuda = driver._library
    engines = open_engines(artifact, EngineConfig(max_num_seqs=2), driver)
    stream, memory = driver.new_stream(), driver.allocate(1 << 20)
    launch = next(each for each in artifact.program.launches.step if each.engine is not None)
    call = bind_call(launch, str(launch.engine), engines, dict.fromkeys(launch.arguments, memory))
    two, three = ({"num_tokens": count, "num_rows": count, "num_seqs": count} for count in (2, 3))
    context = engines._context(call.engine, 0, for_graph=True)
    with pytest.raises(Misuse, match="and it ran with None"), driver.capture(stream):
        engines._call(context, call, two, stream, InfercError)
    engines.prepare([call], two, stream)
    with driver.capture(stream) as captured:
        engines.run(call, two, stream, captured=True)
    with pytest.raises(Misuse, match=r"captured of with token_ids of \(2,\) gets \(3,\)"):
        engines._call(engines._captured[call.engine, (2, 2)], call, three, stream, InfercError)
    assert captured.graph is not None


# ------------------------------------------------------------------------------------------- refusals


def refused(kind: type[InfercError], folder: Path = LLAMA, **options: Any) -> str:
    with pytest.raises(kind) as error:
        load_engine(folder, **{**SMALL, **options})
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_does_not_go_with_engines_is_refused(gpu: FakeTensorRT, tmp_path: Path) -> None:
    message = refused(UnsupportedError, deterministic=True)
    assert message.startswith("--deterministic: ") and message.endswith("--target cpu")
    assert "TensorRT: what it computes of a row may depend on what else runs; leave it out" in message
    message = refused(UnsupportedError, record=str(tmp_path / "r"))
    assert message.startswith(f"--record {tmp_path / 'r'}: ") and message.endswith("--target cpu")
    assert "depends on what else runs, and no replay can give the same bits; leave it out" in message
    assert refused(UnsupportedError, tap=["layers.0.*"]).startswith("--tap")
    assert "its steps sample one token of a sequence" in refused(UnsupportedError, speculate="ngram")
    message = refused(ConfigError, max_num_batched_tokens=8193)
    assert message.startswith("a step of 8193 tokens: the plans of ") and message.endswith(
        "take 8192; lower --max-num-batched-tokens"
    )


def test_plans_run_with_what_built_them(gpu: FakeTensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    gpu.validity = (trt.EngineValidity.INVALID, 0)
    assert refused(ArtifactError).startswith("TensorRT-RTX does not run this plan here")
    gpu.validity = (trt.EngineValidity.VALID, 0)
    gpu.__version__ = "1.5.0.99"
    assert "runs with the version that built it; found 1.5.0.99: install " in refused(ArtifactError)
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", None)
    assert "which is not installed: pip install" in refused(ConfigError)


def test_another_chip(known: dict[str, Known]) -> None:
    """Kernels would run there, plans do not."""
    with on_fake_gpu(known, (8, 9), LLAMA):
        message = refused(UnsupportedError)
    assert "tensorrt is for sm_86, and this GPU (Fake GPU) is sm_89: a plan runs on its own chip alone" in message
    assert message.endswith("compile the model with --target tensorrt-paged:sm_89 or cuda:sm_89")


def test_a_damaged_plan_is_found_before_tensorrt_sees_it(gpu: FakeTensorRT, tmp_path: Path) -> None:
    shutil.copytree(LLAMA, tmp_path / "out")
    plan = tmp_path / "out" / "tensorrt" / "segment-1.plan"
    data = bytearray(plan.read_bytes())
    data[1000] ^= 1
    plan.write_bytes(data)
    assert "segment-1.plan is damaged within bytes 0 to" in refused(ArtifactError, tmp_path / "out")
    assert not gpu.engines


def test_a_plan_that_tensorrt_does_not_take(known: dict[str, Known]) -> None:
    with on_fake_gpu(dict(list(known.items())[:1]), folder=LLAMA):
        assert "segment-1.plan does not load: Serialized engine does not conform" in refused(ArtifactError)


def test_no_memory_for_what_tensorrt_takes(gpu: FakeTensorRT, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Engine, "device_memory_size_v2", 1 << 33)
    message = refused(ConfigError)
    assert message == "Fake GPU has no 8589934592 bytes left, which TensorRT takes beside weights and values"


def test_an_address_that_engines_do_not_take_is_found_as_it_is_bound() -> None:
    with pytest.raises(AssertionError, match="segment 3: .*0x110.* are no multiples of 256"):
        launch = Launch(node="segment 3", layer=None, rows="rows", arguments={}, writes=[])
        bind_call(launch, "e", object(), {"x0": 0x100, "w0": 0x110})  # type: ignore[arg-type]


def test_a_step_that_tensorrt_fails_answers_with_what_it_says(gpu: FakeTensorRT) -> None:
    with inferc.LLM(LLAMA, **SMALL) as llm:
        gpu.engines[1].fails = True
        with pytest.raises(InfercError, match="the step failed: TensorRT failed segment 1: the fake engine broke"):
            llm.generate([PROMPT], SHORT)
