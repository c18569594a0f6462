"""The offload tier of the KV cache: what is copied there, found there, and read from there by sequences that run."""

from typing import Any

import pytest
from fake_mover import FakeMover
from fake_runner import FULL, make_engine, oracle
from run_together import run_together

from inferc.errors import RequestError
from inferc.kv_groups import CacheGroup, WindowCacheGroup
from inferc.runtime.step.cost import WORK
from inferc.runtime.step.sampling_params import SamplingParams

PROMPT = [number % 50 for number in range(7, 47)]
WINDOW = WindowCacheGroup(8, window=6)


def alone(prompts: list[list[int]], max_tokens: int = 5) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return [oracle(prompt, params, (), 10_000)[0] for prompt in prompts]


IN_PLACE = pytest.mark.parametrize("in_place", [True, False], ids=["in place", "copied"])


@IN_PLACE
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)])
def test_what_made_room_is_found_below(groups: tuple[CacheGroup, ...], in_place: bool) -> None:
    engine = make_engine(prefix_cache=True, num_blocks=14, num_offloaded=100, groups=groups, offload_in_place=in_place)
    others = [[number, *PROMPT[1:]] for number in range(5)]
    assert run_together(engine, [PROMPT]) == alone([PROMPT])
    for other in others:
        run_together(engine, [other])
    assert engine.stats().num_evicted > 30
    before = engine.stats()
    assert run_together(engine, [PROMPT]) == alone([PROMPT])
    after = engine.stats()
    assert after.cached_tokens - before.cached_tokens == 36
    assert engine.scheduler.cache.num_loaded > 0
    copied: int = engine.runner.num_loaded  # type: ignore[attr-defined]
    assert copied == (0 if in_place else engine.scheduler.cache.num_loaded)


@IN_PLACE
def test_a_later_run_finds_what_was_stored_and_checks_it(in_place: bool) -> None:
    mover = FakeMover()
    first = make_engine(prefix_cache=True, num_offloaded=30, mover=mover, offload_in_place=in_place)
    run_together(first, [PROMPT])
    first.close()
    assert mover.closed and len(mover.stored) == 11
    second = make_engine(prefix_cache=True, num_offloaded=30, mover=mover, offload_in_place=in_place)
    assert run_together(second, [PROMPT, PROMPT]) == alone([PROMPT, PROMPT])
    assert mover.num_checks == 9 and second.stats().cached_tokens == 2 * 36


def test_what_is_open_is_stored_as_the_engine_is_closed() -> None:
    mover = FakeMover()
    engine = make_engine(prefix_cache=True, num_offloaded=30, mover=mover, max_num_batched_tokens=64)
    engine.add_request("open", PROMPT, SamplingParams(max_tokens=20))
    for _ in range(4):
        engine.step()
    engine.close()
    assert len(mover.stored) == 10


def test_nothing_is_stored_after_a_step_that_failed() -> None:
    mover = FakeMover()
    engine = make_engine(prefix_cache=True, num_offloaded=30, mover=mover)
    engine.runner.fail_at = 2  # type: ignore[attr-defined]
    engine.add_request("a", PROMPT, SamplingParams(max_tokens=20))
    with pytest.raises(Exception, match="the fake model broke"):
        run_together(engine, [PROMPT])
    engine.close()
    assert not mover.stored and mover.closed


def test_what_is_damaged_is_computed_again(caplog: pytest.LogCaptureFixture) -> None:
    mover = FakeMover()
    first = make_engine(prefix_cache=True, num_offloaded=30, mover=mover)
    run_together(first, [PROMPT])
    first.close()
    place = sorted(mover.stored)[4]
    mover.damaged.add(place)
    second = make_engine(prefix_cache=True, num_offloaded=30, mover=mover)
    assert run_together(second, [PROMPT]) == alone([PROMPT])
    assert "a block of the KV cache on disk is not used: it is damaged" in caplog.text
    assert second.stats().num_damaged == 1 and 0 < second.stats().cached_tokens < 36


def test_what_is_slower_to_read_than_to_compute_is_computed() -> None:
    mover = FakeMover()
    first = make_engine(prefix_cache=True, num_offloaded=30, mover=mover)
    run_together(first, [PROMPT])
    first.close()
    mover.seconds_per_byte = 1.0
    second = make_engine(prefix_cache=True, num_offloaded=30, mover=mover)
    second.scheduler.forecast.cost.set_prices(dict(zip(WORK, (0.01, 1e-4, 1e-4, 1e-6, 1e-6), strict=True)))
    assert run_together(second, [PROMPT]) == alone([PROMPT])
    assert mover.num_checks == 0 and second.stats().cached_tokens == 0


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)])
def test_a_sequence_four_times_the_arena_runs(seed: int, groups: tuple[CacheGroup, ...]) -> None:
    mover = FakeMover(seed)
    sizes = {"num_blocks": 13, "max_model_len": 240, "max_num_batched_tokens": 16}
    engine = make_engine(prefix_cache=True, num_offloaded=80, mover=mover, groups=groups, **sizes)  # type: ignore[arg-type]
    long = [number * 7 % 50 for number in range(150)]
    assert run_together(engine, [long], 42) == alone([long], 42)
    manager = engine.scheduler.offload.manager
    assert manager is not None and manager.num_spilled > 30
    assert mover.num_read_ahead > 0
    assert run_together(engine, [long, PROMPT, [*long, 3, 4]], 20) == alone([long, PROMPT, [*long, 3, 4]], 20)
    with pytest.raises(RequestError, match="the whole KV cache holds 48"):
        engine.score("text", long)


def test_a_long_sequence_does_not_wait_for_the_room_that_its_own_beginning_takes() -> None:
    """The cached beginning fills the arena, and no other sequence is there to make room."""
    engine = make_engine(
        prefix_cache=True, num_offloaded=80, num_blocks=13, max_model_len=240, max_num_batched_tokens=16
    )
    long = [number * 7 % 50 for number in range(150)]
    assert run_together(engine, [long[:45]], 4) == alone([long[:45]], 4)
    assert run_together(engine, [long], 20) == alone([long], 20)
    assert engine.stats().cached_tokens > 0


def test_a_block_that_is_below_by_now_is_not_found_as_one_of_the_arena() -> None:
    """A sequence that fills its last block and finds no other sits out, and has that one spilled meanwhile."""
    sizes = {"num_blocks": 2, "max_model_len": 12, "max_num_seqs": 2, "max_num_batched_tokens": 9}
    engine = make_engine(prefix_cache=True, policy="lpm", num_offloaded=10, mover=FakeMover(0, rate=1e-3), **sizes)  # type: ignore[arg-type]
    prompts = [[3, 4, 3, 3, 3], [3, 3, 3, 3], [3, 3, 3, 3]]
    assert run_together(engine, prompts, 7) == alone(prompts, 7)


def test_a_long_sequence_ends_where_nothing_can_be_stored() -> None:
    mover = FakeMover()
    mover.fails = True
    engine = make_engine(prefix_cache=True, num_offloaded=80, mover=mover, num_blocks=13, max_model_len=240)
    engine.add_request("long", [number * 7 % 50 for number in range(150)], SamplingParams(max_tokens=4))
    refused = []
    while engine.has_work:
        engine.step()
        refused += engine.take_refused()
    assert refused == [("long", "it is longer than --kv-memory holds, and the files of --kv-disk take no more")]
    assert run_together(engine, [PROMPT]) == alone([PROMPT])


def test_where_steps_do_not_read_there_a_sequence_is_no_longer_than_the_arena() -> None:
    engine = make_engine(prefix_cache=True, num_offloaded=80, num_blocks=13, max_model_len=240, offload_in_place=False)
    assert engine.scheduler.cache.max_tokens == 48
    with pytest.raises(RequestError, match="the whole KV cache holds 48"):
        engine.score("text", [number * 7 % 50 for number in range(150)])


@IN_PLACE
@pytest.mark.parametrize("rate", [1e-12, 1.0])
def test_a_preempted_sequence_is_swapped_if_that_is_cheaper(rate: float, in_place: bool) -> None:
    mover = FakeMover(rate=rate)
    sizes: dict[str, Any] = {"num_blocks": 9, "max_num_seqs": 2, "num_offloaded": 40}
    engine = make_engine(prefix_cache=True, overcommit=True, mover=mover, offload_in_place=in_place, **sizes)
    engine.scheduler.forecast.cost.set_prices(dict(zip(WORK, (0.01, 1e-4, 1e-4, 1e-6, 1e-6), strict=True)))
    prompts = [PROMPT[:8], PROMPT[8:16]]
    assert run_together(engine, prompts, 12) == alone(prompts, 12)
    stats, tiers = engine.stats(), engine.scheduler.offload.manager
    assert stats.num_preemptions == 1 and tiers is not None
    computed_again = stats.scheduled_tokens - 2 * (8 + 11)
    assert (tiers.num_swapped > 0) == (rate < 1)
    assert (computed_again < 4) == (rate < 1)
