"""Serve a model whose layers differ in kind, heads and stored K and V by its compiled step over poisoned pools."""

from __future__ import annotations

from typing import Any

import pytest
from lowered import Compiled, Heads, Shape
from oracle import generate_greedy

from inferc.config import EngineConfig
from inferc.kv_groups import ChunkCacheGroup, WindowCacheGroup, cache_groups
from inferc.runtime.engine.engine import Engine, ModelLimits
from inferc.runtime.runners.cpu import abi
from inferc.runtime.runners.cpu.runner import CpuRunner
from inferc.runtime.scheduler.config import SchedulerConfig
from inferc.runtime.step.sampling_params import SamplingParams

LAYERS = (
    Heads(kv_heads=2, dim=16),
    Heads(kv_heads=1, dim=32, mask="sliding", window=20),
    Heads(kv_heads=4, dim=16, mask="chunked", window=24),
    Heads(kv_heads=1, dim=32, mask="sliding", window=20, reads=1),
    Heads(kv_heads=1, dim=32, mask="sliding", window=20),
)
PROMPTS = [[(7 * i + 3 * length + i * i) % 90 for i in range(length)] for length in (70, 3, 41, 24, 16)]
NEW_TOKENS = 40


@pytest.fixture(scope="module", params=[False, True], ids=("plain", "int8"))
def compiled(request: pytest.FixtureRequest) -> Compiled:
    shape = Shape(layers=5, attention=LAYERS, max_positions=128, int8_kv=request.param, block_size=16)
    return Compiled(shape, abi.detect_isa()[:1])


@pytest.fixture(scope="module")
def expected(compiled: Compiled) -> list[list[int]]:
    return generate_greedy(compiled.lowered, compiled.tensors.__getitem__, PROMPTS, NEW_TOKENS)


def make_engine(compiled: Compiled, pipeline: bool = True, **options: Any) -> Engine:
    groups = cache_groups(compiled.kv_groups)
    config = EngineConfig(num_threads=2, **options).resolve(compiled.max_model_len, compiled.block_size, groups)
    runner = CpuRunner(compiled, config, poison=True)
    sizes = SchedulerConfig(
        config.max_num_seqs,
        config.max_num_batched_tokens,
        compiled.max_model_len,
        config.num_blocks,
        compiled.block_size,
        groups,
        overcommit=options.get("overcommit", False),
    )
    return Engine(runner, ModelLimits(90, compiled.max_model_len), sizes, pipeline)


def generate(engine: Engine) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=NEW_TOKENS, ignore_eos=True)
    ids: list[list[int]] = [[] for _ in PROMPTS]
    for index, prompt in enumerate(PROMPTS):
        engine.add_request(str(index), prompt, params)
    while engine.has_work:
        for output in engine.step():
            ids[int(output.request_id)] += output.token_ids
        engine.scheduler.check_integrity()
    engine.close()
    return ids


def test_groups_hold_what_their_layers_store(compiled: Compiled) -> None:
    groups = [(group.kind, group.layers, group.bytes_per_token) for group in compiled.lowered.kv_groups]
    row = {dim: dim + 4 if compiled.shape.int8_kv else 4 * dim for dim in (16, 32)}
    assert groups == [
        ("full", (0,), 2 * 1 * 2 * row[16]),
        ("window", (1, 4), 2 * 2 * 1 * row[32]),
        ("chunk", (2,), 2 * 1 * 4 * row[16]),
    ]


@pytest.mark.parametrize("pipeline", [True, False])
def test_every_group_has_what_its_layers_see(compiled: Compiled, expected: list[list[int]], pipeline: bool) -> None:
    engine = make_engine(compiled, pipeline, max_num_seqs=5, max_num_batched_tokens=16)
    # 19 keys before 16 new tokens touch at most 4 blocks, and 23 do too.
    assert engine.stats().num_blocks == [5 * 8 + 1, 5 * 4 + 1, 5 * 4 + 1]
    assert generate(engine) == expected
    stats = engine.stats()
    assert stats.num_preemptions == 0
    assert stats.num_freed_outside_window > 0


def test_small_pools_preempt_and_change_nothing(compiled: Compiled, expected: list[list[int]]) -> None:
    memory = 9 * 16 * compiled.kv_bytes_per_token
    engine = make_engine(compiled, max_num_seqs=5, max_num_batched_tokens=12, kv_memory_bytes=memory, overcommit=True)
    assert engine.stats().num_blocks == [9, 9, 9]
    assert generate(engine) == expected
    assert engine.stats().num_preemptions > 0
    assert engine.stats().kv_usage == 0.0


def test_a_text_longer_than_the_windows_pool_is_scored(compiled: Compiled) -> None:
    ids = [(11 * i + i * i) % 90 for i in range(120)]
    scores = []
    for budget in (128, 10):
        engine = make_engine(compiled, max_num_seqs=1, max_num_batched_tokens=budget)
        engine.score("a", ids)
        while engine.has_work:
            engine.step()
        ((_, score),) = engine.take_scores()
        scores.append(score)
        engine.scheduler.check_integrity()
        engine.close()
    assert engine.stats().num_blocks == [9, 4, 4], "the last engine's"
    assert engine.stats().num_freed_outside_window > 0
    assert scores[0] == scores[1]
    assert all(value < 0 for value in scores[0].logprobs)


@pytest.mark.parametrize("early", ["window", "chunk"])
def test_a_block_given_back_too_early_would_be_noticed(
    compiled: Compiled, expected: list[list[int]], early: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The poison shows a block that is freed while it is still seen: it becomes block 0, which is NaN."""
    kind = {"window": WindowCacheGroup, "chunk": ChunkCacheGroup}[early]
    real = kind.first_key
    monkeypatch.setattr(kind, "first_key", lambda group, at: min(at, real(group, at) + 16))
    engine = make_engine(compiled, max_num_seqs=5, max_num_batched_tokens=16)
    assert generate(engine) != expected
