"""A sequence gets the same bits alone, in a batch, in chunks, on any number of threads, after preemption, behind a
prefix that was found in the cache, and where what it has lies on a disk.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from families import FAMILIES
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import make_random_model

import inferc
from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.runtime.artifact.inspect import inspect_artifact
from inferc.runtime.engine.load import load_engine
from inferc.runtime.engine.stats import EngineStats
from inferc.runtime.step.cost import WORK

Bits = list[tuple[int, float]]  # token id and log probability of every new token
NEW_TOKENS = 12


OPTIONS: dict[str, dict[str, Any]] = {
    "bfloat16": {},
    "float32": {"dtype": "float32"},
    "int8": {"quantize": "int8"},
    "w8a8": {"quantize": "w8a8"},
    "kv-int8": {"kv_dtype": "int8"},
    "w8a8-kv-int8": {"quantize": "w8a8", "kv_dtype": "int8"},
    "int4-experts": {"quantize": "int4"},
    "w8a8-experts": {"quantize": "w8a8"},
}
KINDS = [kind if kind == "bfloat16" else pytest.param(kind, marks=pytest.mark.slow) for kind in OPTIONS]


@pytest.fixture(scope="module", params=KINDS)
def artifact(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3 has norms on q and k beside all that Llama has. Integers multiply rows in bfloat16, or in int8."""
    folder = tmp_path_factory.mktemp("bits")
    options, family = OPTIONS[request.param], "qwen3_moe" if "experts" in request.param else "qwen3"
    fields = {**FAMILIES[family].fields, "max_position_embeddings": 1024}
    make_random_model(family, folder / "model", options.get("dtype", "bfloat16"), **fields)
    compile(folder / "model", folder / "artifact", CompileConfig(certify="none", **options))
    return folder / "artifact"


def run(
    artifact: Path, prompts: list[list[int]], num_new: int = NEW_TOKENS, **engine: Any
) -> tuple[list[Bits], EngineStats]:
    """Sample with a separate seed per prompt; return the new tokens, their log probabilities and engine counters."""
    with inferc.LLM(artifact, **engine) as llm:
        params = [
            inferc.SamplingParams(temperature=0.9, seed=len(ids), max_tokens=num_new, ignore_eos=True, logprobs=0)
            for ids in prompts
        ]
        results = llm.generate(prompts, params)
        outputs = [result.outputs[0] for result in results]
        bits = [[(item.token_id, item.logprob) for item in output.logprobs or []] for output in outputs]
        assert all(len(row) == num_new for row in bits)
        return bits, llm.stats()


def prompt(length: int) -> list[int]:
    return [5 + (length * 31 + 17 * i * i + i) % 300 for i in range(length)]


@pytest.fixture(scope="module")
def alone(artifact: Path) -> dict[int, Bits]:
    """Return what each length of prompt gives on its own, computed whole on one thread."""
    lengths = range(1, 81)
    return {
        length: run(artifact, [prompt(length)], num_threads=1)[0][0] for length in lengths if length % 9 in (1, 5, 7)
    }


@given(data=st.data())
@settings(max_examples=12, deadline=None, derandomize=True)
def test_any_schedule_gives_the_same_bits(artifact: Path, alone: dict[int, Bits], data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.sampled_from(sorted(alone)), min_size=2, max_size=7, unique=True), label="lengths")
    budget = data.draw(st.integers(8, 96), label="token budget")
    threads = data.draw(st.integers(1, 3), label="threads")
    spare = data.draw(st.integers(0, 12), label="spare blocks")
    blocks = -(-(max(lengths) + NEW_TOKENS) // 32) + 1 + spare
    block_bytes = 32 * int(inspect_artifact(artifact).kv_bytes_per_token)
    bits, _ = run(
        artifact,
        [prompt(length) for length in lengths],
        max_num_batched_tokens=budget,
        max_num_seqs=8,
        num_threads=threads,
        kv_memory_bytes=blocks * block_bytes,
    )
    for length, row in zip(lengths, bits, strict=True):
        assert row == alone[length], f"prompt of {length} tokens"


def test_preemption_gives_the_same_bits(artifact: Path) -> None:
    prompts = [prompt(length) for length in (16, 14, 10, 7, 5, 1)]  # a block each at first, two at the end
    block_bytes = 32 * int(inspect_artifact(artifact).kv_bytes_per_token)
    sizes = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "kv_memory_bytes": 8 * block_bytes}
    bits, stats = run(artifact, prompts, 45, **sizes, overcommit=True)
    assert stats.num_preemptions > 0
    assert bits == [run(artifact, [ids], 45)[0][0] for ids in prompts]


def test_a_prefix_found_in_the_cache_gives_the_same_bits(artifact: Path) -> None:
    """The prefix is one of a sequence that still runs, of one that has ended, or of one computed in the same step."""
    common = prompt(75)
    prompts = [common, [*common[:70], 9], common[:64], [*common[:40], *prompt(30)], common[:33], [*common, *prompt(6)]]
    bits, stats = run(artifact, prompts, max_num_seqs=3, max_num_batched_tokens=200, num_threads=2)
    assert stats.cached_tokens == 64 + 32 + 32 + 32 + 64 + 19, "19 of them within blocks"
    assert bits == [run(artifact, [ids], prefix_cache=False)[0][0] for ids in prompts]
    again, stats = run(artifact, prompts, max_num_seqs=1, max_num_batched_tokens=16)
    assert stats.cached_tokens > 0 and again == bits


def test_what_attention_chose_gives_the_same_bits(artifact: Path) -> None:
    """The first sequence chooses in its prompt, the second while it decodes, and both when they are computed again."""
    prompts = [prompt(length) for length in (560, 505, 40)]
    alone = [run(artifact, [ids], kv_evict="heavy-hitters:200", num_threads=1)[0][0] for ids in prompts]
    assert alone[:2] != [run(artifact, [ids])[0][0] for ids in prompts[:2]]
    block_bytes = 32 * int(inspect_artifact(artifact).kv_bytes_per_token)
    sizes = {"kv_memory_bytes": 18 * block_bytes, "max_num_batched_tokens": 50, "max_num_seqs": 3, "num_threads": 2}
    bits, stats = run(artifact, prompts, kv_evict="heavy-hitters:200", overcommit=True, **sizes)
    assert bits == alone and stats.num_preemptions > 0


def test_what_lies_on_disk_gives_the_same_bits(artifact: Path, tmp_path: Path) -> None:
    """The blocks are those of an earlier run, and of a sequence of which the arena holds two blocks of five."""
    prompts = [prompt(length) for length in (110, 75, 40)]
    alone = [run(artifact, [ids], 35, num_threads=1)[0][0] for ids in prompts]
    block_bytes = 32 * int(inspect_artifact(artifact).kv_bytes_per_token)
    sizes = {"kv_memory_bytes": 3 * block_bytes, "max_num_batched_tokens": 16, "max_num_seqs": 2}
    bits, stats = run(artifact, prompts, 35, kv_disk=str(tmp_path), kv_disk_bytes=100 * block_bytes, **sizes)
    assert bits == alone and stats.num_spilled > 0 and stats.num_stored >= 9
    bits, stats = run(artifact, prompts, 35, kv_disk=str(tmp_path), kv_disk_bytes=100 * block_bytes, **sizes)
    assert bits == alone and stats.cached_tokens == 96 + 64 + 32
    assert stats.num_loaded > 0 and stats.num_damaged == 0


def test_a_swapped_sequence_gives_the_same_bits(artifact: Path, tmp_path: Path) -> None:
    prompts = [prompt(length) for length in (75, 70, 40, 16)]
    block_bytes = 32 * int(inspect_artifact(artifact).kv_bytes_per_token)
    sizes: dict[str, Any] = {"max_num_batched_tokens": 96, "kv_memory_bytes": 8 * block_bytes}
    disk: dict[str, Any] = {"kv_disk": str(tmp_path), "kv_disk_bytes": 100 * block_bytes}
    engine = load_engine(artifact, max_num_seqs=4, overcommit=True, **sizes, **disk)
    # Of a machine on which to compute is dear: whoever is preempted is swapped.
    engine.scheduler.forecast.cost.set_prices(dict.fromkeys(WORK, 1.0))
    tokens: dict[str, list[int]] = {str(len(ids)): [] for ids in prompts}
    for ids in prompts:
        params = inferc.SamplingParams(temperature=0.9, seed=len(ids), max_tokens=45, ignore_eos=True)
        engine.add_request(str(len(ids)), ids, params)
    while engine.has_work:
        for output in engine.step():
            tokens[output.request_id] += output.token_ids
        engine.scheduler.check_integrity()
    stats = engine.stats()
    engine.close()
    assert stats.num_preemptions > 0 and stats.num_swapped > 0
    for ids in prompts:
        assert tokens[str(len(ids))] == [token for token, _ in run(artifact, [ids], 45)[0][0]]
