"""Scheduling by made-up tokens: what each step computes, and who waits for whom."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from fake_runner import FULL, VOCAB_SIZE, make_engine, next_id

from inferc.errors import ConfigError, RequestError
from inferc.kv_groups import CacheGroup, WindowCacheGroup
from inferc.runtime.scheduler.batch import FEW_STOP_IDS
from inferc.runtime.scheduler.config import SchedulerConfig
from inferc.runtime.scheduler.scheduler import Scheduler
from inferc.runtime.step.plan import StepPlan, StepResult
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.sequence import Output, Sequence, Status


def make_scheduler(
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 8,
    max_model_len: int = 32,
    num_blocks: int = 33,
    block_size: int = 4,
    chunked_prefill: bool = True,
    groups: tuple[CacheGroup, ...] = (FULL,),
    overcommit: bool = False,
) -> Scheduler:
    counts = (num_blocks,) * len(groups)
    return Scheduler(
        SchedulerConfig(
            max_num_seqs,
            max_num_batched_tokens,
            max_model_len,
            counts,
            block_size,
            groups,
            chunked_prefill,
            overcommit=overcommit,
        )
    )


def sequence(name: str, prompt_len: int, max_tokens: int = 10, stop_ids: frozenset[int] = frozenset()) -> Sequence:
    params = SamplingParams(max_tokens=max_tokens)
    return Sequence(name, 0, 0, prompt_len, list(range(prompt_len)), params, 0, prompt_len + max_tokens, stop_ids)


def schedule(scheduler: Scheduler) -> StepPlan:
    plan = scheduler.schedule()
    assert plan is not None
    return plan


def land(scheduler: Scheduler, plan: StepPlan, token: int = 40) -> list[Output]:
    outputs = scheduler.update(plan, StepResult(np.full(len(plan.logits_rows), token, np.int32)))
    scheduler.check_integrity()
    return list(outputs)


def lengths(plan: StepPlan) -> list[int]:
    return [int(count) for count in np.diff(plan.query_start_loc)]


def test_a_prompt_is_computed_in_chunks_of_the_budget() -> None:
    scheduler = make_scheduler()
    scheduler.add(sequence("a", 18))
    chunks = []
    for _ in range(3):
        plan = schedule(scheduler)
        chunks.append((lengths(plan), plan.seq_lens.tolist(), plan.logits_rows.tolist()))
        land(scheduler, plan)
    assert chunks == [([8], [8], []), ([8], [16], []), ([2], [18], [1])]


def test_decodes_come_before_prefills_and_the_rest_of_the_budget_is_used() -> None:
    scheduler = make_scheduler()
    scheduler.add(sequence("a", 4))
    land(scheduler, schedule(scheduler))
    scheduler.add(sequence("b", 20))
    plan = schedule(scheduler)
    assert lengths(plan) == [1, 7]
    assert plan.token_ids.tolist() == [40, 0, 1, 2, 3, 4, 5, 6]
    assert plan.positions.tolist() == [4, 0, 1, 2, 3, 4, 5, 6]
    assert plan.logits_rows.tolist() == [0]


def test_without_chunks_a_prompt_waits_until_it_fits_whole() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32, chunked_prefill=False)
    scheduler.add(sequence("a", 20))
    scheduler.add(sequence("b", 20))
    scheduler.add(sequence("c", 2))
    plan = schedule(scheduler)
    assert lengths(plan) == [20]  # "c" would fit, but nobody overtakes "b"
    land(scheduler, plan)
    assert lengths(schedule(scheduler)) == [1, 20, 2]


def test_the_step_after_one_in_flight_takes_its_ids_late() -> None:
    scheduler = make_scheduler()
    scheduler.add(sequence("a", 3))
    scheduler.add(sequence("b", 2))
    first = schedule(scheduler)
    second = schedule(scheduler)
    assert second.pending_rows.tolist() == [0, 1]
    assert second.pending_slots.tolist() == first.sample.seq_slots.tolist() == second.seq_slots.tolist()
    assert second.positions.tolist() == [3, 2]
    assert second.sample.counters.tolist() == [1, 1]
    land(scheduler, first)
    land(scheduler, second)
    third = schedule(scheduler)
    assert third.pending_rows.tolist() == []
    assert third.token_ids.tolist() == [40, 40]


def test_many_end_tokens_of_one_sequence_are_nothing_that_others_look_at() -> None:
    """The end tokens of one request must not widen the array that every step of all requests compares."""
    scheduler = make_scheduler()
    scheduler.add(sequence("many", 3, stop_ids=frozenset(range(41, 100_000))))
    scheduler.add(sequence("one", 3, stop_ids=frozenset([40])))
    scheduler.add(sequence("other", 3, stop_ids=frozenset(range(100, 200))))
    assert {output.request_id for output in land(scheduler, schedule(scheduler), 40) if output.finish_reason} == {"one"}
    assert {output.request_id for output in land(scheduler, schedule(scheduler), 41) if output.finish_reason} == {
        "many"
    }
    assert scheduler.batch.stop_ids.shape[0] == FEW_STOP_IDS
    assert {output.request_id for output in land(scheduler, schedule(scheduler), 199)} == {"other"}


def test_a_token_computed_beyond_the_end_is_dropped_and_its_block_freed() -> None:
    scheduler = make_scheduler(block_size=1)
    scheduler.add(sequence("a", 3, stop_ids=frozenset([40])))
    first, second = schedule(scheduler), schedule(scheduler)
    free = scheduler.cache.num_free
    outputs = land(scheduler, first)
    assert [output.finish_reason for output in outputs] == ["stop"]
    assert scheduler.cache.num_free == free, "the step in flight still writes to its blocks"
    assert scheduler.schedule() is None
    assert land(scheduler, second) == []
    assert scheduler.cache.num_free == (32,)
    assert not scheduler.has_work


def test_no_step_is_scheduled_beyond_max_tokens() -> None:
    scheduler = make_scheduler()
    scheduler.add(sequence("a", 3, max_tokens=2))
    first, second = schedule(scheduler), schedule(scheduler)
    assert scheduler.schedule() is None
    assert land(scheduler, first)[0].finish_reason is None
    assert land(scheduler, second)[0].finish_reason == "length"


def test_who_came_last_is_preempted_and_computed_again() -> None:
    scheduler = make_scheduler(num_blocks=5, overcommit=True)  # room for 16 tokens
    old, new = sequence("old", 4), sequence("new", 3)
    scheduler.add(old)
    scheduler.add(new)
    for _ in range(2):
        land(scheduler, schedule(scheduler))
    scheduler.add(late := sequence("late", 9))  # no room for it
    while scheduler.num_preemptions == 0:
        land(scheduler, plan := schedule(scheduler))
    assert (old.status, list(scheduler.waiting)) == (Status.RUNNING, [new, late])
    assert plan.seq_lens.tolist() == [9], "the older one goes on with the block it got"
    while old.status is Status.RUNNING:
        land(scheduler, plan := schedule(scheduler))
    again = schedule(scheduler)
    assert again.token_ids.tolist() == [0, 1, 2, 40, 40, 40, 40, 40]
    assert again.sample.counters.tolist() == [] or again.sample.counters.tolist() == [5]


def test_abort_frees_blocks_at_once_or_after_the_step_in_flight() -> None:
    scheduler = make_scheduler()
    waiting, running = sequence("waiting", 30), sequence("running", 4)
    scheduler.add(running)
    plan = schedule(scheduler)
    scheduler.add(waiting)
    scheduler.abort(waiting)
    scheduler.abort(running)
    assert scheduler.cache.num_free == (31,)
    assert land(scheduler, plan) == []
    assert scheduler.cache.num_free == (32,)
    scheduler.add(idle := sequence("idle", 4))
    land(scheduler, schedule(scheduler))
    scheduler.abort(idle)
    assert scheduler.cache.num_free == (32,)


def test_nobody_is_admitted_whose_prompt_has_no_room() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=32, num_blocks=9)
    scheduler.add(sequence("a", 20, max_tokens=12))
    scheduler.add(sequence("b", 13))
    assert lengths(schedule(scheduler)) == [20]
    assert scheduler.num_preemptions == 0


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"max_num_seqs": 9}, "less than max_num_seqs"),
        ({"chunked_prefill": False}, "without chunked prefill"),
        ({"num_blocks": 1}, "2 or more"),
    ],
)
def test_sizes_that_cannot_work_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_scheduler(**sizes)  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------ windows

WINDOW = WindowCacheGroup(8, window=4)


def test_a_sequence_that_leaves_without_a_block_makes_room_all_the_same() -> None:
    window = WindowCacheGroup(8, window=1)
    scheduler = make_scheduler(max_num_seqs=2, num_blocks=2, block_size=1, groups=(window,))  # one block
    for name in ("a", "b"):
        scheduler.add(sequence(name, 1, max_tokens=1))
    plan: StepPlan | None = schedule(scheduler)  # of a; its only block is given back before it ends
    while plan is not None and plan.seq_slots.tolist() == [0]:
        following = scheduler.schedule()
        land(scheduler, plan)
        plan = following or scheduler.schedule()
    assert not scheduler.waiting


def test_a_block_passes_on_while_the_step_in_flight_still_reads_it() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=5, num_blocks=4, groups=(WINDOW,))  # 3 blocks of 4
    scheduler.add(sequence("a", 6))
    for _ in range(3):
        land(scheduler, schedule(scheduler))
    scheduler.add(sequence("b", 1))
    in_flight = schedule(scheduler)  # position 7 of a, which sees 4 to 7: its first block makes room for b
    while (following := schedule(scheduler)).positions.tolist() != [11, 4]:
        land(scheduler, in_flight)
        in_flight = following
    assert in_flight.positions.tolist() == [10, 3]
    (before,), (after,) = in_flight.block_tables, following.block_tables
    assert before[:, :3].tolist() == [[0, 2, 3], [1, 0, 0]], "7 to 10 lie in two blocks"
    assert after[:, :3].tolist() == [[0, 0, 3], [1, 2, 0]], "8 to 11 lie in one; b had none left to grow"
    assert following.slot_mapping[0].tolist() == [3 * 4 + 3, 2 * 4], "written in the step after the last that reads it"
    land(scheduler, in_flight)
    land(scheduler, following)
    assert scheduler.num_preemptions == 0


def test_a_long_prompt_runs_through_a_pool_that_holds_its_window_only() -> None:
    scheduler = make_scheduler(num_blocks=3, groups=(WINDOW,))  # 2 blocks of 4, the least for a window of 4
    scheduler.add(sequence("a", 22, max_tokens=6))
    chunks = []
    while scheduler.has_work:
        plan = schedule(scheduler)
        chunks.append(lengths(plan)[0])
        land(scheduler, plan)
    assert chunks == [8, 4, 4, 4, 2, 1, 1, 1, 1, 1], "as many tokens as there is room for"


def test_a_prompt_waits_for_the_blocks_of_who_just_left() -> None:
    window = WindowCacheGroup(8, window=16)
    scheduler = make_scheduler(
        max_num_seqs=2, max_num_batched_tokens=5, max_model_len=80, num_blocks=9, groups=(window,)
    )
    scheduler.add(sequence("short", 1, max_tokens=60, stop_ids=frozenset([40])))
    in_flight = schedule(scheduler)
    scheduler.add(sequence("long", 60))
    while (following := schedule(scheduler)).seq_lens.tolist() != [13]:  # no block for the long one
        land(scheduler, in_flight, token=41)
        in_flight = following
    assert scheduler.cache.num_free == (0,)
    assert land(scheduler, in_flight, token=40)[0].finish_reason == "stop"
    assert scheduler.schedule() is None, "the short one's blocks come back with the step in flight"
    land(scheduler, following)
    assert schedule(scheduler).seq_lens.tolist() == [49], "the long one goes on where it was"
    assert scheduler.num_preemptions == 0


def test_a_decode_step_touches_only_sequences_that_cross_a_block(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = {"max_num_seqs": 8, "max_num_batched_tokens": 128, "max_model_len": 40, "num_blocks": 81}
    scheduler = make_scheduler(**sizes, groups=(FULL, WINDOW))  # type: ignore[arg-type]
    for i in range(8):
        scheduler.add(sequence(str(i), 8 + i, max_tokens=20))
    land(scheduler, schedule(scheduler))
    in_flight = schedule(scheduler)
    touched: dict[str, int] = {"free_outside_window": 0, "grow_all": 0}
    for name in touched:
        real = getattr(scheduler.cache, name)

        def counted(*args: Any, real: Callable[..., bool | None] = real, name: str = name) -> bool | None:
            touched[name] += np.size(args[0])  # a slot, or many
            return real(*args)

        monkeypatch.setattr(scheduler.cache, name, counted)
    for _ in range(12):
        following = schedule(scheduler)
        land(scheduler, in_flight)
        in_flight = following
    assert touched == {"free_outside_window": 8 * 12 // 4, "grow_all": 8 * 12 // 4}


def test_a_prompt_and_a_text_to_score_do_not_wait_for_each_other() -> None:
    """Each has half of the blocks and needs one more, and neither can give one back yet: the prompt gives way."""
    window = WindowCacheGroup(8, window=18)
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=4, num_blocks=9, groups=(window,))
    texts = {"scored": [i % 50 for i in range(40)], "prompt": [i * 7 % 50 for i in range(40)]}
    engine.score("scored", texts["scored"])
    engine.step()
    engine.add_request("prompt", texts["prompt"], SamplingParams(max_tokens=3, temperature=0))
    ids: list[int] = []
    for _ in range(100):
        ids += [token for output in engine.step() for token in output.token_ids]
        engine.scheduler.check_integrity()
    assert not engine.has_work
    assert engine.stats().num_preemptions > 0, "they were meant to meet"
    assert [score.argmax[-1] for _, score in engine.take_scores()] == [next_id(texts["scored"][:-1])]
    assert len(ids) == 3 and ids[0] == next_id(texts["prompt"])


# -------------------------------------------------------------------------------------------------- engine


def test_one_request_gives_n_sequences_with_seeds_of_their_own() -> None:
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], SamplingParams(n=3, max_tokens=6, seed=5))
    texts: dict[int, list[int]] = {0: [], 1: [], 2: []}
    while engine.has_work:
        for output in engine.step():
            texts[output.index] += output.token_ids
    assert len({tuple(text) for text in texts.values()}) == 3
    assert texts[0][0] == next_id([1, 2, 3], 5, 0)


def test_banned_tokens_never_come_and_end_tokens_not_early() -> None:
    """Each sequence of a batch has its own, also those that join and leave while others run."""
    free = next_id([1, 2, 3])
    asked = {
        "plain": SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True),
        "banned": SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True, banned_token_ids=(free, 7, free)),
        "early": SamplingParams(temperature=0.0, max_tokens=6, min_tokens=4, stop_token_ids=tuple(range(40))),
        "both": SamplingParams(
            temperature=0.0, max_tokens=8, min_tokens=5, stop_token_ids=tuple(range(30)), banned_token_ids=(45, 46, 47)
        ),
    }
    engine = make_engine()
    texts: dict[str, list[int]] = {name: [] for name in asked}
    for name, params in asked.items():
        engine.add_request(name, [1, 2, 3], params)
    while engine.has_work:
        for output in engine.step():
            texts[output.request_id] += output.token_ids
    for name, params in asked.items():
        context = [1, 2, 3]
        for count in range(len(texts[name])):
            early = params.stop_token_ids if count < params.min_tokens else ()
            context.append(next_id(context, banned=frozenset((*params.banned_token_ids, *early))))
        assert texts[name] == context[3:], name
        assert len(texts[name]) == params.max_tokens or texts[name][-1] in params.stop_token_ids
        assert len(texts[name]) >= params.min_tokens


def test_a_request_without_a_seed_is_random() -> None:
    texts = set()
    for _ in range(3):
        engine = make_engine()
        engine.add_request("a", [1], SamplingParams(max_tokens=8))
        text: list[int] = []
        while engine.has_work:
            text += [token for output in engine.step() for token in output.token_ids]
        texts.add(tuple(text))
    assert len(texts) > 1


@pytest.mark.parametrize(
    ("prompt", "params", "message"),
    [
        ([], {}, "the prompt is empty"),
        ([1] * 64, {}, "64 tokens, and the model takes 63 of its 64"),
        ([1] * 50, {}, "whole KV cache holds 40"),
        ([VOCAB_SIZE], {}, r"token id 50 is outside of the vocabulary \[0, 50\)"),
        ([-1], {}, "token id -1"),
        ([1], {"logit_bias": {50: 1.0}}, "logit_bias: token id 50"),
        ([1], {"stop_token_ids": (99,)}, "stop_token_ids: token id 99"),
        ([1], {"banned_token_ids": (99,)}, "banned_token_ids: token id 99"),
        ([1], {"banned_token_ids": tuple(range(50))}, "all tokens are in banned_token_ids: nothing is left to choose"),
        ([1], {"banned_token_ids": (5,), "allowed_token_ids": (5,)}, "allowed_token_ids are all in banned_token_ids"),
        (
            [1],
            {"banned_token_ids": tuple(range(49)), "stop_token_ids": (49,), "min_tokens": 1},
            "leave end tokens only",
        ),
        ([1], {"allowed_token_ids": (3, 4), "stop_token_ids": (3, 4), "min_tokens": 1}, "leave end tokens only"),
    ],
)
def test_requests_that_cannot_be_served_are_refused(prompt: list[int], params: dict[str, object], message: str) -> None:
    engine = make_engine(num_blocks=11)
    with pytest.raises(RequestError, match=message):
        engine.add_request("a", prompt, SamplingParams(**params))  # type: ignore[arg-type]
    assert not engine.has_work
    engine.add_request("a", [1], SamplingParams())
    with pytest.raises(RequestError, match="in use"):
        engine.add_request("a", [1], SamplingParams())


def test_a_step_that_fails_says_why() -> None:
    engine = make_engine()
    engine.runner.fail_at = 2  # type: ignore[attr-defined]
    engine.add_request("a", [1], SamplingParams(max_tokens=8))
    with pytest.raises(Exception, match="the fake model broke"):
        while True:
            engine.step()


def test_scoring_shares_the_engine_with_generation() -> None:
    engine = make_engine(max_num_seqs=2, max_num_batched_tokens=4, num_blocks=12)
    for name in ("a", "b", "c"):
        engine.add_request(name, [1, 2, 3], SamplingParams(max_tokens=9, temperature=0))
    ids = [5, 4, 3, 2, 1, 0, 9, 8, 7]
    engine.score("s", ids)
    scores, texts = [], {"a": [1, 2, 3], "b": [1, 2, 3], "c": [1, 2, 3]}
    while engine.has_work:
        for output in engine.step():
            texts[output.request_id] += output.token_ids
        scores += engine.take_scores()
        engine.scheduler.check_integrity()
    [(request_id, score)] = scores
    assert request_id == "s"
    assert score.argmax == [next_id(ids[:i]) for i in range(1, len(ids))]
    assert score.logprobs == [-float(token) for token in ids[1:]]
    assert all(text[-1] == next_id(text[:-1]) and len(text) == 12 for text in texts.values())
    with pytest.raises(RequestError, match="2 tokens or more"):
        engine.score("s", [1])
    engine.score("t", ids)
    engine.abort("t")
    assert not engine.has_work


def test_stats_count_tokens_that_nobody_wants_any_more() -> None:
    """A stop string is found outside of the engine, which has made more tokens by then: they are its work as well."""
    engine = make_engine()
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=20))
    ids: list[int] = []
    while len(ids) < 6:
        ids += [token for output in engine.step() for token in output.token_ids]
    engine.abort("a", 0)  # as for a stop string that ended with the second token
    while engine.has_work:
        assert not engine.step(), "of an aborted sequence nothing more is handed out"
    assert engine.stats().output_tokens == len(ids) == 6
    assert engine.stats().finished == {"abort": 1}


def test_stats_count_what_happened() -> None:
    engine = make_engine(eos=(7,))
    engine.add_request("a", [1, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True))
    engine.add_request("b", [1], SamplingParams())
    engine.step()
    engine.abort("b")
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert (stats.prompt_tokens, stats.output_tokens) == (4, 4)
    assert stats.finished == {"abort": 1, "length": 1}
    assert stats.num_running == stats.num_waiting == 0
    assert stats.kv_usage == 0.0


def test_stats_name_the_requests_that_wait() -> None:
    engine = make_engine(max_num_seqs=1)
    for name in ("a", "b"):
        engine.add_request(name, [1, 2, 3], SamplingParams(n=2, max_tokens=4, temperature=0))
    engine.score("s", [5, 4, 3])
    assert engine.stats().waiting_ids == ["a", "b", "s"]
    engine.step()
    assert "b" in engine.stats().waiting_ids
    engine.abort("a")
    engine.abort("b")
    while engine.has_work:
        engine.step()
    assert engine.stats().waiting_ids == []
