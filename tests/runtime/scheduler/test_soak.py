"""Run many steps of scheduler, cache and engine under random traffic: nothing leaks, starves or exceeds a budget."""

import itertools
import random
from collections.abc import Callable

import pytest
from fake_mover import FakeMover
from fake_runner import FULL, VOCAB_SIZE, make_engine

from inferc.errors import InfercError, ObjectiveError, RequestError
from inferc.kv_groups import ChunkCacheGroup, WindowCacheGroup
from inferc.runtime.engine.engine import Engine
from inferc.runtime.scheduler.policies import NAMES
from inferc.runtime.step.cost import WORK
from inferc.runtime.step.sampling_params import SamplingParams

pytestmark = pytest.mark.long

EPOCH = 2500  # steps of one engine
MOST_OPEN = 40  # requests at once
LATEST = 4000  # steps within which every sequence ends, however many others there are
GROUPS = ((FULL,), (FULL, WindowCacheGroup(8, window=6)), (ChunkCacheGroup(8, window=8), WindowCacheGroup(8, window=9)))


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def engine_of(rng: random.Random, clock: Callable[[], float], policy: str) -> Engine:
    seqs = rng.randint(1, 12)
    prefix_cache = rng.random() < 0.7
    num_offloaded = rng.choice([0, 12, 40]) if prefix_cache else 0
    made = make_engine(
        max_num_seqs=seqs,
        max_num_batched_tokens=rng.randint(seqs, 40),
        max_model_len=rng.choice([48, 48, 120]),
        num_blocks=rng.randint(14, 60),
        block_size=4,
        groups=rng.choice(GROUPS),
        eos=(7,),
        pipeline=rng.random() < 0.8,
        prefix_cache=prefix_cache,
        partial_blocks=rng.random() < 0.5,
        num_offloaded=num_offloaded,
        offload_in_place=rng.random() < 0.7,
        mover=FakeMover(rng.getrandbits(16), rate=rng.choice([1e-12, 1e-3])) if num_offloaded else None,
        policy=policy.replace("N", "50"),
        tbt_ms=rng.choice([None, None, 20.0]),
        overcommit=rng.random() < 0.5,
        clock=clock,
    )
    if rng.random() < 0.5:
        made.scheduler.forecast.cost.set_prices(dict(zip(WORK, (0.01, 1e-4, 1e-4, 1e-6, 1e-6), strict=True)))
    return made


def params_of(rng: random.Random) -> SamplingParams:
    return SamplingParams(
        n=rng.choice([1, 1, 1, 3]),
        temperature=rng.choice([0.0, 1.0]),
        seed=rng.getrandbits(32),
        max_tokens=rng.randint(1, 16),
        ignore_eos=rng.random() < 0.5,
        presence_penalty=rng.choice([0.0, 0.0, 0.5]),
        logprobs=rng.choice([None, None, 2]),
        priority=rng.randint(0, 1),
        client=rng.choice(["", "a", "b", str(rng.randint(0, 50))]),
        ttft_ms=rng.choice([None, 100.0, 3000.0]),
        tbt_ms=rng.choice([None, None, 30.0, 1000.0]),
        cache_salt=rng.choice(["", "", "salt"]),
        cache_priority=rng.choice([0, 0, 0, 1, 10]),
    )


def run_epoch(rng: random.Random, steps: int, policy: str) -> dict[str, int]:
    """Run one engine with traffic in bursts until all is done, and return counts of what happened."""
    clock = Clock()
    engine = engine_of(rng, clock, policy)
    runner = engine.runner
    begun: dict[str, int] = {}  # the step at which each open request came
    scores: set[str] = set()
    counts = dict.fromkeys(("requests", "aborted", "refused", "failed", "scored", "outputs"), 0)
    broken = [rng.randrange(VOCAB_SIZE) for _ in range(3)]
    runner.broken_prompt = broken  # type: ignore[attr-defined]
    step = 0
    while step < steps or engine.has_work:
        step += 1
        clock.now += rng.choice([0.001, 0.01, 0.05])
        is_burst = step // 50 % 3 == 0
        while step < steps and len(begun) < MOST_OPEN and rng.random() < (0.6 if is_burst else 0.15):
            name = str(counts["requests"])
            counts["requests"] += 1
            ids = [3] * rng.randint(1, 20) + [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(0, 8))]
            if rng.random() < 0.02:
                ids *= 3
            try:
                if rng.random() < 0.03:
                    engine.score(name, [*ids, 1], num_top=rng.randrange(3))
                    scores.add(name)
                    continue
                engine.add_request(name, broken if rng.random() < 0.02 else ids, params_of(rng))
                begun[name] = step
            except ObjectiveError:
                counts["refused"] += 1
            except RequestError:
                cache = engine.scheduler.cache
                assert len(ids) + 16 > min(cache.max_tokens_at_once, engine.model.max_model_len - 1)
        if begun and rng.random() < 0.03:
            name = rng.choice(list(begun))
            engine.abort(name)
            del begun[name]
            counts["aborted"] += 1
        outputs = engine.step()
        for name, _ in engine.take_refused():
            del begun[name]
            counts["refused"] += 1
        for output in outputs:
            assert output.request_id in begun, "an output of what has ended"
            counts["outputs"] += 1
            if output.finish_reason == "error":
                engine.abort(output.request_id)
                counts["failed"] += 1
        for name, _ in engine.take_scores():
            scores.remove(name)
            counts["scored"] += 1
        still = set(engine.request_ids)
        begun = {name: at for name, at in begun.items() if name in still}
        assert not begun or step - min(begun.values()) < LATEST, "somebody starves"
        if step % 20 == 0:
            engine.scheduler.check_integrity()
    assert not begun and not scores and not engine.request_ids
    engine.scheduler.check_integrity()
    cache, scheduler = engine.scheduler.cache, engine.scheduler
    assert all(pool.num_free == pool.size for pool in (*cache.pools, *(store.pool for store in cache.stores))), (
        "blocks leak"
    )
    assert len(scheduler.batch.free_slots) == scheduler.config.max_num_seqs, "slots leak"
    assert not len(scheduler.waiting) and not scheduler.waiting.num_clients, "clients leak"
    return {**counts, "steps": step, "preempted": engine.stats().num_preemptions}


def soak(steps: int, seed: int) -> dict[str, int]:
    rng = random.Random(seed)
    total: dict[str, int] = {"steps": 0}
    policies = itertools.chain(("slo",), itertools.cycle(NAMES))  # which alone refuses
    while total["steps"] < steps:
        for name, count in run_epoch(rng, min(EPOCH, steps), next(policies)).items():
            total[name] = total.get(name, 0) + count
    return total


@pytest.mark.slow
@pytest.mark.parametrize(("seed", "steps"), [(1, 5_000), pytest.param(2, 50_000, marks=pytest.mark.slow)])
def test_many_steps(seed: int, steps: int) -> None:
    total = soak(steps, seed)
    assert min(total.values()) > 0, "everything has happened"
    assert total["requests"] > steps // 13 and total["outputs"] > steps // 2


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("seed", range(10, 14))
def test_a_million_steps(seed: int) -> None:
    assert min(soak(250_000, seed).values()) > 0


def test_a_step_that_fails_ends_the_engine_and_says_why() -> None:
    engine = make_engine()
    engine.runner.fail_at = 3  # type: ignore[attr-defined]
    engine.add_request("a", [1, 2], SamplingParams(max_tokens=30, ignore_eos=True))
    with pytest.raises(InfercError, match="the step failed: the fake model broke"):
        while engine.has_work:
            engine.step()
