"""Tests on an NVIDIA GPU: greedy tokens of random families and shipped models are Hugging Face's, token for token.

In float32, where a near-tie does not decide; in bfloat16 the logits are compared with the reference target's.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from cuda_runs import logits, run
from families import FAMILIES
from gpu_families import REFUSED
from greedy import greedy_of
from library_data import library_preferred
from lowered import as_torch, make_plan
from random_models import make_random_model
from real_gpu import chip, need_gpu
from speculated import always_draft

import inferc
from inferc.compiler.build import compile
from inferc.config import CompileConfig, EngineConfig
from inferc.frontend.checkpoint.load import load
from inferc.frontend.reference import reference_model
from inferc.kv_groups import cache_groups
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.runners.cuda.driver import Driver
from inferc.runtime.runners.cuda.runner import CudaRunner
from inferc.runtime.runners.cuda.weights import placer
from inferc.runtime.runners.reference import ReferenceRunner

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(900),  # the first waits for a process that compiles
    pytest.mark.xdist_group("compiled models"),
]
SHIPPED = Path(__file__).parents[2] / "examples" / "models"
KNOWN = [name for name, family in FAMILIES.items() if family.since <= transformers.__version__]
MODELS = [*(name for name in KNOWN if name not in REFUSED), *(path.name for path in sorted(SHIPPED.glob("tiny-*")))]
BF16 = ("llama", "qwen3", "tiny-llama")
LIBRARY = "tiny-llama"  # of these, the one that is tried with products left to cuBLASLt as well
NEW_TOKENS = 16
LENGTHS = (1, 60, 17, 33, 5, 90)
ENGINES: dict[str, dict[str, int]] = {
    "whole prompts": {"max_num_batched_tokens": 512, "max_num_seqs": 8},
    "chunked prefill": {"max_num_batched_tokens": 16, "max_num_seqs": 4},
}
LOGITS_OFF = 0.02  # of the largest: bfloat16 kernels beside references that round after each op


def prompts() -> list[list[int]]:
    source = np.random.default_rng(7)
    return [source.integers(5, 300, length).tolist() for length in LENGTHS]


def make(name: str, folder: Path, target: str, dtype: str, library: bool = False) -> str:
    """Compile one model; why it cannot be, or nothing. In a process of its own.

    library: leave its products of two rows and more to cuBLASLt.
    """
    try:
        model = SHIPPED / name
        if name in FAMILIES:
            family = FAMILIES[name]
            model = folder / "models" / name
            if not model.exists():
                make_random_model(family.model_type(name), model, **family.fields)
        device, _, arch = target.partition(":")
        out = folder / f"{name}-{dtype}-{device}{'-library' if library else ''}"
        with library_preferred(folder / "configs", arch, 2, model, dtype) if library else nullcontext():
            compile(model, out, CompileConfig(target=target, dtype=dtype, certify="none"))  # type: ignore[arg-type]
    except Exception as error:  # noqa: BLE001  (reported by the model's own test)
        return f"{type(error).__name__}: {error}"
    return ""


@dataclass
class Made:
    """Artifacts that are compiled in parallel into one folder.

    faults: the compile errors of each (model, dtype).
    """

    folder: Path
    faults: dict[tuple[str, str], list[Future[str]]]


@pytest.fixture(scope="session")
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Made]:
    """Return artifacts for the chosen tests, in their order; each test waits for its own."""
    made, target = Made(tmp_path_factory.mktemp("gpu"), {}), f"cuda:{chip()}"
    chosen: dict[str, list[str]] = {"float32": [], "bfloat16": []}
    for item in request.session.items:
        if isinstance(item, pytest.Function) and item.path == Path(__file__):
            in_float32 = item.function is test_tokens_are_the_references
            chosen["float32" if in_float32 else "bfloat16"].append(str(item.callspec.params["name"]))
    context = multiprocessing.get_context("spawn")  # a fork would inherit the GPU's context
    with ProcessPoolExecutor(max(1, (os.cpu_count() or 2) - 2), mp_context=context) as pool:

        def submit(name: str, dtype: str, *options: Any) -> None:
            made.faults.setdefault((name, dtype), []).append(pool.submit(make, name, made.folder, *options))

        for name in dict.fromkeys(chosen["float32"]):
            submit(name, "float32", target, "float32")
        for name in dict.fromkeys(chosen["bfloat16"]):
            for each in (target, "reference"):
                submit(name, "bfloat16", each, "bfloat16")
        if LIBRARY in chosen["bfloat16"]:
            submit(LIBRARY, "bfloat16", target, "bfloat16", True)
        yield made
        pool.shutdown(cancel_futures=True)


def reference_greedy(folder: Path) -> list[list[int]]:
    return greedy_of(reference_model(load(folder), "float32"), prompts(), NEW_TOKENS)


def sound(made: Made, name: str, dtype: str) -> Path:
    """Return the folder of all artifacts if this one compiled without a fault; without a GPU a test ends here."""
    faults = [each.result() for each in made.faults[name, dtype]]
    assert not any(faults), faults
    need_gpu(f"{name} in {dtype}")
    return made.folder


@pytest.mark.parametrize("name", MODELS)
def test_tokens_are_the_references(made: Made, name: str) -> None:
    folder = sound(made, name, "float32")
    expected = reference_greedy(folder / "models" / name if name in FAMILIES else SHIPPED / name)
    params = inferc.SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    for engine, options in ENGINES.items():
        with inferc.LLM(folder / f"{name}-float32-cuda", **options) as llm:
            found = [list(result.outputs[0].token_ids) for result in llm.generate(prompts(), params)]
        assert found == expected, engine


def runners(folder: Path, how: str = "", **changes: Any) -> tuple[CudaRunner, ReferenceRunner]:
    """Open the artifacts `folder`-cuda`how` and `folder`-reference."""
    artifact, reference = (load_artifact(Path(f"{folder}-{target}")) for target in (f"cuda{how}", "reference"))
    config = EngineConfig(max_num_seqs=8, max_num_batched_tokens=256, kv_memory_bytes=64 << 20, **changes)
    groups = cache_groups(artifact.kv_groups)
    resolved = config.resolve(artifact.max_model_len, artifact.block_size, groups, 64 << 20, "cuda")
    runner = CudaRunner(artifact, resolved, Driver(), placer(artifact), owns_driver=True, poison=True)
    return runner, ReferenceRunner(reference, resolved)


@pytest.mark.parametrize(("name", "how"), [*((name, "") for name in BF16), (LIBRARY, "-library")])
def test_bfloat16_logits_are_near_the_references(made: Made, name: str, how: str) -> None:
    """Prefill and decode, launch by launch and as graphs, which give the same ids."""
    folder = sound(made, name, "bfloat16")
    artifact = load_artifact(folder / f"{name}-bfloat16-cuda{how}")
    runner, oracle = runners(folder / f"{name}-bfloat16", how)
    assert bool(runner._cublaslt) == bool(how), "pip install nvidia-cublas"
    for plan in (
        make_plan([(0, prompts()[1], 0), (1, prompts()[2], 0)], block_size=artifact.block_size),
        make_plan([(0, [7], 60), (1, [9], 17)], block_size=artifact.block_size),
    ):
        rows = logits(runner, artifact, plan)
        found, expected = as_torch(rows).float(), torch.from_numpy(oracle._logits(plan))
        assert float((found - expected).abs().max()) <= LOGITS_OFF * float(expected.abs().max())
        assert run(runner, plan).token_ids.tolist() == as_torch(rows).float().argmax(-1).tolist()
    runner.close()


@pytest.mark.parametrize("name", BF16)
def test_in_the_invariant_order_neither_the_batch_nor_chunks_show(made: Made, name: str) -> None:
    folder = sound(made, name, "bfloat16")
    artifact = load_artifact(folder / f"{name}-bfloat16-cuda")
    tokens, others = np.random.default_rng(8).integers(5, 300, (2, 200)).tolist()
    found = []
    for ends, among in (([200], []), ([7, 140, 198, 199, 200], [(1, others, 0), (2, others[:5], 0)])):
        runner, _ = runners(folder / f"{name}-bfloat16", deterministic=True)
        for begin, end in pairwise([0, *ends]):
            seqs = [(0, tokens[begin:end], begin), *(among if end - begin < 50 else [])]
            rows = logits(runner, artifact, make_plan(seqs, block_size=artifact.block_size))
        runner.close()
        found.append(rows[0].tobytes())
    assert found[0] == found[1]


@pytest.mark.parametrize("name", BF16)
def test_blocks_on_disk_have_the_same_bits(made: Made, name: str, tmp_path: Path) -> None:
    """The blocks are those of an earlier run, and of sequences that made room for others."""
    folder = sound(made, name, "bfloat16")
    out = folder / f"{name}-bfloat16-cuda"
    artifact = load_artifact(out)
    block_bytes = artifact.block_size * artifact.kv_bytes_per_token
    source = np.random.default_rng(9)
    texts = [source.integers(5, 300, 7 * artifact.block_size + 3).tolist() for _ in range(4)]
    params = inferc.SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)
    options: dict[str, Any] = {"deterministic": True, "max_num_seqs": 2, "max_num_batched_tokens": 256}

    def answers(**more: Any) -> tuple[list[Any], int]:
        with inferc.LLM(out, **options, **more) as llm:
            results = [llm.generate([text], params)[0].outputs[0] for text in (*texts, texts[0])]
            return [
                [(each.token_id, each.logprob) for each in row.logprobs or []] for row in results
            ], llm.stats().num_loaded

    expected, _ = answers()
    disk: dict[str, Any] = {"kv_disk": str(tmp_path), "kv_disk_bytes": 64 * block_bytes}
    # All of it fits the GPU's memory here, and what is not written by the end is written as it is closed.
    stored, _ = answers(**disk)
    assert stored == expected
    found, raised = answers(kv_memory_bytes=13 * block_bytes, **disk)
    assert found == expected and raised >= 5 * 7


@pytest.mark.parametrize("name", BF16)
def test_what_a_block_begins_alike_is_copied_with_the_same_bits(made: Made, name: str) -> None:
    folder = sound(made, name, "bfloat16")
    out = folder / f"{name}-bfloat16-cuda"
    size = load_artifact(out).block_size
    first = np.random.default_rng(10).integers(5, 300, 3 * size).tolist()
    second = [*first[: size + size // 2 + 1], *range(5, 25)]
    params = inferc.SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True, logprobs=0)

    def answers(prefix_cache: bool) -> tuple[list[Any], int]:
        with inferc.LLM(out, deterministic=True, prefix_cache=prefix_cache) as llm:
            results = [llm.generate([ids], params)[0].outputs[0] for ids in (first, second)]
            rows = [[(each.token_id, each.logprob) for each in row.logprobs or []] for row in results]
            return rows, llm.stats().cached_tokens

    assert answers(True) == (answers(False)[0], size + size // 2 + 1)


@pytest.mark.parametrize("name", BF16)
def test_drafted_tokens_change_no_answer(made: Made, name: str) -> None:
    """The invariant order has the same bits with drafts; a model that drafts for itself is always right."""
    folder = sound(made, name, "bfloat16")
    out = folder / f"{name}-bfloat16-cuda"
    options: dict[str, Any] = {"deterministic": True, "kv_memory_bytes": 64 << 20, **ENGINES["whole prompts"]}
    loops = {"logit_bias": {30: 9.0, 31: 8.5, 32: 8.0}, "repetition_penalty": 1.05, "logprobs": 1}
    for speculate, more in (("ngram", loops), (f"draft:{out}", {})):
        params = [
            inferc.SamplingParams(max_tokens=32, ignore_eos=True, temperature=index % 2, seed=index, **more)  # type: ignore[arg-type]
            for index in range(len(LENGTHS))
        ]
        answers = []
        for how in ("none", speculate):
            with inferc.LLM(out, speculate=how, **options) as llm:
                if how != "none":
                    always_draft(llm)
                answers.append([(one.token_ids, one.logprobs) for one in answered(llm, params)])
                stats = llm.stats()
        assert answers[0] == answers[1], speculate
        assert stats.num_drafted > 0
        assert speculate == "ngram" or stats.num_accepted == stats.num_drafted


def answered(llm: inferc.LLM, params: list[inferc.SamplingParams]) -> list[Any]:
    return [result.outputs[0] for result in llm.generate(prompts(), params)]
