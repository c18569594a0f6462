"""Sliding windows on the cpu target: blocks that leave a window are reused, and no token and no bit changes by it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from command_line import run_inferc
from greedy import greedy_of_hugging_face
from hypothesis import given, settings
from hypothesis import strategies as st
from random_models import make_random_model

import inferc
from inferc.compiler.build import compile
from inferc.config import CompileConfig
from inferc.errors import ConfigError, RequestError
from inferc.kv_groups import CacheGroup, CacheLimits, cache_groups, pools_bytes, share_out
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.engine.load import load_engine
from inferc.runtime.measure.profile import profile_step
from inferc.runtime.runners.cpu.runner import CpuRunner

pytestmark = pytest.mark.slow

WINDOW = 24
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "windows": ("mistral", {"sliding_window": WINDOW}),
    "mixed": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": WINDOW, "num_hidden_layers": 3, "max_window_layers": 1},
    ),
}
GREEDY: dict[str, Any] = {"temperature": 0.0, "ignore_eos": True}
Bits = list[tuple[int, float]]  # token id and log probability of every new token


@dataclass(frozen=True)
class Made:
    """A model folder and its artifact."""

    kind: str
    model: Path
    artifact: Path

    @property
    def groups(self) -> tuple[CacheGroup, ...]:
        return cache_groups(load_artifact(self.artifact).kv_groups)

    def memory(self, *num_blocks: int) -> int:
        """The bytes of pools of so many blocks: a number for each group, or one for all."""
        counts = num_blocks * len(self.groups) if len(num_blocks) == 1 else num_blocks
        return pools_bytes(self.groups, CacheLimits(16, 256, 1, 1), counts)


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Made]:
    """Return a function that makes models by kind and dtype, each of them once."""

    @cache
    def make_one(kind: str, dtype: str) -> Made:
        folder = tmp_path_factory.mktemp(kind)
        family, fields = FAMILIES[kind]
        make_random_model(family, folder / "model", dtype, **fields)
        compile(folder / "model", folder / "artifact", CompileConfig(certify="none", block_size=16))
        return Made(kind, folder / "model", folder / "artifact")

    return make_one


@pytest.fixture(
    scope="module",
    params=[kind if kind == "windows" else pytest.param(kind, marks=pytest.mark.slow) for kind in FAMILIES],
)
def made(request: pytest.FixtureRequest, make: Callable[[str, str], Made]) -> Made:
    return make(request.param, "float32")


def prompt(length: int) -> list[int]:
    return [5 + (length * 31 + 17 * i * i + i) % 300 for i in range(length)]


@pytest.mark.slow
def test_sequences_run_together_where_only_given_back_blocks_make_room(made: Made) -> None:
    prompts, count, budget = [prompt(length) for length in (100, 90, 75, 61)], 60, 16
    needed = 1 + sum(-(-(len(ids) + count) // 16) for ids in prompts)
    windows = 1 + len(prompts) * 4  # 23 keys before 16 new tokens touch 4 blocks
    sizes = [windows if group.frees_blocks else needed for group in made.groups]
    memory = made.memory(*sizes)
    engine = load_engine(made.artifact, max_num_seqs=4, max_num_batched_tokens=budget, kv_memory_bytes=memory)
    assert engine.stats().num_blocks == sizes
    assert memory < made.memory(needed), "with pools of one size, and all of every sequence kept, it is not enough"
    for index, ids in enumerate(prompts):
        engine.add_request(str(index), ids, inferc.SamplingParams(max_tokens=count, **GREEDY))
    found: list[list[int]] = [[] for _ in prompts]
    most_tokens = 0
    while engine.has_work:
        for output in engine.step():
            found[int(output.request_id)] += output.token_ids
        engine.scheduler.check_integrity()
        batch = engine.scheduler.batch
        most_tokens = max(most_tokens, int(batch.num_computed[batch.order].sum()))
    stats = engine.stats()
    engine.close()
    assert found == greedy_of_hugging_face(made.model, prompts, count)
    assert (stats.num_preemptions, stats.finished) == (0, {"length": 4})
    assert most_tokens > (windows - 1) * 16, "more tokens were cached than the windows' pool holds"
    left = sum((len(ids) + count - 2 - WINDOW + 1) // 16 for ids in prompts)
    assert stats.num_freed_outside_window == left * sum(group.frees_blocks for group in made.groups)


def test_one_sequence_longer_than_its_pool(made: Made) -> None:
    """If all layers have windows, a few blocks are enough for any length; a full layer needs all blocks."""
    ids, count = prompt(150), 70
    with inferc.LLM(made.artifact, kv_memory_bytes=made.memory(6), max_num_batched_tokens=64) as llm:
        params = inferc.SamplingParams(max_tokens=count, **GREEDY)
        if made.kind == "mixed":
            with pytest.raises(RequestError, match="prompt has 150 tokens, and the whole KV cache holds 80"):
                llm.generate([ids], params)
            return
        found = llm.generate([ids], params)[0].outputs[0].token_ids
        assert found == greedy_of_hugging_face(made.model, [ids], count)[0]
        stats = llm.stats()
        assert (stats.num_blocks, stats.num_preemptions) == ([6], 0)
        assert stats.num_freed_outside_window == (150 + count - 2 - WINDOW + 1) // 16
        score = llm.score(ids)
    with inferc.LLM(made.artifact) as llm:
        assert llm.score(ids) == score


def test_memory_for_less_than_two_blocks_is_refused(made: Made) -> None:
    with pytest.raises(ConfigError, match="holds less than two blocks"):
        inferc.LLM(made.artifact, kv_memory_bytes=made.memory(2) - 1)


def test_inspect_tells_the_groups(made: Made) -> None:
    entries = load_artifact(made.artifact).kv_groups
    layers = {"windows": [("window", [0, 1])], "mixed": [("full", [0]), ("window", [1, 2])]}[made.kind]
    assert [(entry.kind, entry.layers) for entry in entries] == layers
    for entry in entries:
        size = 2 * len(entry.layers) * 2 * 16 * 4  # K and V, layers, KV heads, head_dim, float32
        assert entry.bytes_per_token == size
        assert entry.window == (WINDOW if entry.kind == "window" else 0)
    total = 2 * sum(len(each) for _, each in layers) * 2 * 16 * 4
    printed = run_inferc("inspect", made.artifact).stdout
    assert f"KV cache  {total} bytes a token\n" in printed
    rows = [line.split(maxsplit=1) for line in printed.splitlines() if "bytes a token" in line][1:]
    assert (
        rows
        == {
            "windows": [["window", "24     2 layers (0-1), 2 heads of 16, float32, 512 bytes a token"]],
            "mixed": [
                ["full", "1 layer (0), 2 heads of 16, float32, 256 bytes a token"],
                ["window", "24     2 layers (1-2), 2 heads of 16, float32, 512 bytes a token"],
            ],
        }[made.kind]
    )


def test_the_kernels_are_timed_after_more_tokens_than_the_windows_pool_holds(made: Made) -> None:
    artifact = load_artifact(made.artifact)
    config = inferc.EngineConfig(max_num_seqs=1, max_num_batched_tokens=16)
    runner = CpuRunner(artifact, config)
    try:
        assert profile_step(runner, artifact, 3, 200).context_len == 200
    finally:
        runner.close()


# ---------------------------------------------------------------------------------------------------- bits


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((kind, dtype), marks=() if dtype == "bfloat16" else pytest.mark.slow)
        for kind in FAMILIES
        for dtype in ("bfloat16", "float32")
    ],
)
def exact(request: pytest.FixtureRequest, make: Callable[[str, str], Made]) -> Made:
    return make(*request.param)


def run(made: Made, lengths: list[int], count: int, **engine: Any) -> tuple[list[Bits], Any]:
    """The new tokens with their log probabilities, sampled with a seed of each prompt's own; and the counters."""
    params = [
        inferc.SamplingParams(temperature=0.9, seed=length, max_tokens=count, ignore_eos=True, logprobs=0)
        for length in lengths
    ]
    with inferc.LLM(made.artifact, **engine) as llm:
        results = llm.generate([prompt(length) for length in lengths], params)
        bits = [[(item.token_id, item.logprob) for item in result.outputs[0].logprobs or []] for result in results]
        assert all(len(row) == count for row in bits)
        return bits, llm.stats()


LENGTHS = (1, 7, 16, 23, 24, 25, 40, 65, 81)
NEW_TOKENS = 36


@pytest.fixture(scope="module")
def alone(exact: Made) -> dict[int, Bits]:
    """Return what each length of prompt gives on its own, computed whole on one thread, with memory for all of it."""
    return {
        length: run(exact, [length], NEW_TOKENS, num_threads=1, max_num_batched_tokens=128)[0][0] for length in LENGTHS
    }


@pytest.mark.quick("exact2")
@given(data=st.data())
@settings(max_examples=10, deadline=None, derandomize=True)
def test_any_schedule_gives_the_same_bits(exact: Made, alone: dict[int, Bits], data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.sampled_from(LENGTHS), min_size=2, max_size=7, unique=True), label="lengths")
    budget = data.draw(st.integers(8, 96), label="token budget")
    threads = data.draw(st.integers(1, 3), label="threads")
    blocks = -(-(max(lengths) + NEW_TOKENS) // 16) + 1 + data.draw(st.integers(0, 12), label="spare blocks")
    options = {"max_num_batched_tokens": budget, "max_num_seqs": 8, "num_threads": threads}
    bits, _ = run(exact, lengths, NEW_TOKENS, kv_memory_bytes=exact.memory(blocks), **options)
    for length, row in zip(lengths, bits, strict=True):
        assert row == alone[length], f"prompt of {length} tokens"


def test_preemption_gives_the_same_bits(exact: Made, alone: dict[int, Bits]) -> None:
    lengths = [16, 7, 1, 23, 24]  # one or two blocks each at first, three or more at the end
    memory = exact.memory(9)
    assert set(share_out(exact.groups, CacheLimits(16, 256, 8, 32), memory)) == {9}
    sizes = {"max_num_batched_tokens": 32, "max_num_seqs": 8, "kv_memory_bytes": memory}
    bits, stats = run(exact, lengths, NEW_TOKENS, **sizes, overcommit=True)
    assert stats.num_preemptions > 0
    assert stats.num_freed_outside_window > 0
    assert bits == [alone[length] for length in lengths]
