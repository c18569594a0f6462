"""Tests of eviction: what a token sees depends on its position alone, whatever runs beside it and whatever is found."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from fake_mover import FakeMover
from fake_runner import FULL, VOCAB_SIZE, make_engine, next_id, oracle, seen_of

from inferc.errors import ConfigError, UnsupportedError
from inferc.kv_groups import CacheGroup, CacheLimits, ChunkCacheGroup, EvictedCacheGroup, Eviction, WindowCacheGroup
from inferc.runtime.engine.engine import Engine
from inferc.runtime.step.sampling_params import SamplingParams

EVICTED = EvictedCacheGroup(8, window=8, sinks=4, stride=8)
WINDOW = WindowCacheGroup(8, window=6)


def test_a_spec_becomes_groups_of_whole_blocks() -> None:
    (group,) = Eviction.parse("sinks:4+window:1000").apply([FULL], 32)
    assert group == EvictedCacheGroup(8, window=1024, sinks=32, stride=256)
    full, window = Eviction.parse("sinks:0+window:6").apply([FULL, WINDOW], 2)
    assert isinstance(full, EvictedCacheGroup) and (full.sinks, full.window, window) == (0, 6, WINDOW)
    (group,) = Eviction.parse("heavy-hitters:100").apply([FULL], 32)
    assert group == EvictedCacheGroup(8, window=64, sinks=64, stride=256, counted=32)
    for text in ("window:6", "sinks:1+window:0", "sinks:-1+window:5", "sinks:4+window:10%", "heavy-hitters:0"):
        with pytest.raises(ConfigError, match=r"expected sinks:N\+window:M or heavy-hitters:N in tokens"):
            Eviction.parse(text)
    with pytest.raises(ConfigError, match="keeps a window of 4 tokens, and the model has layers that attend over 6"):
        Eviction(0, 4).apply([FULL, WINDOW], 4)
    with pytest.raises(UnsupportedError, match="attend in chunks"):
        Eviction(0, 40).apply([ChunkCacheGroup(8, window=8)], 4)


def test_what_a_query_sees_changes_at_strides_alone() -> None:
    seen = [EVICTED.first_key(position) for position in range(60)]
    assert seen[:16] == [0] * 16 and seen[16:24] == [8] * 8 and seen[24] == 16
    for position in range(59):
        assert EVICTED.most_new(position) == next(
            new for new in range(1, 60) if EVICTED.first_key(position + new) != seen[position]
        )
    for token in range(4, 50):
        unseen = EVICTED.unseen_from(token)
        assert EVICTED.first_key(unseen) > token >= EVICTED.first_key(unseen - 1)
    assert EVICTED.most_blocks(CacheLimits(4, 1000, 1, 16)) == 5


def run(
    engine: Engine, requests: dict[str, tuple[list[int], SamplingParams]], rng: random.Random
) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {name: [] for name in requests}
    waiting = list(requests)
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.4:
            name = waiting.pop(0)
            engine.add_request(name, *requests[name])
        for output in engine.step():
            found[output.request_id] += output.token_ids
        engine.scheduler.check_integrity()
    cache = engine.scheduler.cache
    assert all(pool.num_free == pool.size for pool in (*cache.pools, *(store.pool for store in cache.stores))), (
        "blocks leak"
    )
    return found


@pytest.mark.parametrize(
    "seed", [pytest.param(seed, marks=pytest.mark.slow if seed >= 12 else ()) for seed in range(120)]
)
def test_every_schedule_gives_the_text_of_each_sequence_alone(seed: int) -> None:
    rng = random.Random(seed)
    size = rng.choice([1, 2, 4])
    evicted = EvictedCacheGroup(
        8, window=4 * rng.randint(1, 3), sinks=4 * rng.randint(0, 2), stride=4 * rng.randint(1, 3)
    )
    if rng.random() < 0.5:
        evicted = replace(evicted, counted=rng.randint(1, 4))
    groups = rng.choice([(evicted,), (evicted, replace(WINDOW, window=4)), (evicted, evicted)])
    num_offloaded = rng.choice([0, 60])
    most = evicted.most_blocks(CacheLimits(size, 200, 1, 64))
    engine = make_engine(
        max_num_seqs=rng.randint(1, 4),
        max_num_batched_tokens=rng.randint(4, 40),
        max_model_len=120,
        num_blocks=[1 + most + rng.randint(0, 3 * most) if group is evicted else 60 for group in groups],
        block_size=size,
        groups=groups,
        pipeline=rng.random() < 0.7,
        prefix_cache=bool(num_offloaded) or rng.random() < 0.6,
        overcommit=rng.random() < 0.5,
        partial_blocks=rng.random() < 0.5,
        num_offloaded=num_offloaded,
        offload_in_place=rng.random() < 0.5,
        mover=FakeMover(seed) if num_offloaded else None,
    )
    requests = {}
    common = [rng.randrange(VOCAB_SIZE) for _ in range(60)]
    for name in range(7):
        prompt = [*common[: rng.randint(1, 60)], *(rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 9)))]
        params = SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 50), ignore_eos=True)
        requests[str(name)] = prompt, params
    found = run(engine, requests, rng)
    for asked, (prompt, params) in requests.items():
        assert found[asked] == oracle(prompt, params, (), 120, group=evicted, size=size)[0]


def test_an_answer_tells_what_it_forgot_and_memory_stays_bounded() -> None:
    engine = make_engine(num_blocks=6, max_model_len=400, groups=(EVICTED,))
    assert engine.scheduler.cache.max_tokens == 400, "of five blocks"
    engine.add_request("a", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=60, ignore_eos=True))
    told = []
    while engine.has_work:
        for output in engine.step():
            told.append(output.num_forgotten)
    assert sorted(set(told)) == [0, 4, 12, 20, 28, 36, 44]
    assert max(told) == 60 + 3 - 2 - (60 + 3 - 2) % 8 - 8 - 4


@pytest.mark.parametrize("group", [EVICTED, replace(EVICTED, counted=3)], ids=["sinks", "heavy hitters"])
def test_texts_are_scored_as_they_would_be_generated(group: CacheGroup) -> None:
    engine = make_engine(num_blocks=6, max_model_len=400, groups=(group,))
    text = [number * 7 % VOCAB_SIZE for number in range(90)]
    engine.score("text", text)
    while engine.has_work:
        engine.step()
    ((_, score),) = engine.take_scores()
    assert score.argmax == [next_id(seen_of(text, position, group)) for position in range(89)]
