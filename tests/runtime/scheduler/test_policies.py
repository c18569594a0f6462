"""Who is admitted first, who gives way and who is refused, under each policy."""

from collections.abc import Callable, Iterator

import pytest
from fake_runner import VOCAB_SIZE, make_engine

from inferc.errors import ConfigError, ObjectiveError, RequestError
from inferc.runtime.engine.engine import Engine
from inferc.runtime.scheduler.policies import NAMES, level_end, level_of, parse_policy
from inferc.runtime.scheduler.slo_admission import Slot, triage
from inferc.runtime.scheduler.waiting_queue import MAX_REMEMBERED, WaitingQueue
from inferc.runtime.step.cost import StepWork
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.sequence import Sequence

STEP = 0.01
PRICES = {"steps": STEP, "tokens": 1e-3, "sequences": 0.0, "keys": 0.0, "pairs": 0.0}


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def make(policy: str, **options: float) -> tuple[Engine, Clock]:
    clock = Clock()
    sizes = {"max_num_seqs": 1, "max_num_batched_tokens": 16, **options}
    engine = make_engine(policy=policy, clock=clock, pipeline=False, **sizes)  # type: ignore[arg-type]
    engine.scheduler.forecast.cost.set_prices(PRICES)
    return engine, clock


def add(engine: Engine, name: str, prompt: int | list[int] = 4, max_tokens: int = 3, **params: object) -> None:
    ids = list(range(prompt)) if isinstance(prompt, int) else prompt
    engine.add_request(name, ids, SamplingParams(temperature=0.0, max_tokens=max_tokens, **params))  # type: ignore[arg-type]


def steps(engine: Engine, clock: Clock) -> Iterator[list[str]]:
    """The names of each step's outputs, until all is done."""
    while engine.has_work:
        clock.now += STEP
        yield [output.request_id for output in engine.step()]
        engine.scheduler.check_integrity()


def order_of_firsts(engine: Engine, clock: Clock) -> list[str]:
    return list(dict.fromkeys(name for names in steps(engine, clock) for name in names))


def test_names_are_policies_and_others_are_refused() -> None:
    assert [parse_policy(name).name for name in NAMES[:-1]] == list(NAMES[:-1])
    assert parse_policy("window:50ms").window == 0.05
    for wrong in ("FCFS", "window", "window:0ms", "window:5s", "window:5.5ms", "best"):
        with pytest.raises(ConfigError, match="expected one of fcfs, priority, .*window:50ms"):
            parse_policy(wrong)


def test_first_come_is_first_served() -> None:
    engine, clock = make("fcfs")
    for name, length in (("a", 9), ("b", 1), ("c", 5)):
        add(engine, name, length, priority=length)
    assert order_of_firsts(engine, clock) == ["a", "b", "c"]


# ---------------------------------------------------------------------------------------------- priority


def test_higher_priorities_go_first_and_those_alike_by_arrival() -> None:
    engine, clock = make("priority")
    for name, priority in (("a", 0), ("b", 1), ("c", -1), ("d", 1)):
        add(engine, name, priority=priority)
    assert order_of_firsts(engine, clock) == ["b", "d", "a", "c"]


def test_a_higher_priority_takes_the_slot_of_a_lower_one_that_goes_on_later() -> None:
    engine, clock = make("priority")
    add(engine, "low", max_tokens=6)
    seen = steps(engine, clock)
    assert [next(seen) for _ in range(3)] == [["low"]] * 3
    add(engine, "equal")
    add(engine, "high", priority=1)
    assert [names[0] for names in seen if names] == [*["high"] * 3, *["low"] * 3, *["equal"] * 3]
    assert engine.stats().num_preemptions == 1


def test_a_higher_priority_takes_blocks_but_not_more_than_it_needs() -> None:
    engine, clock = make("priority", max_num_seqs=4, num_blocks=9, overcommit=True)  # 8 blocks of 4
    for name in ("a", "b", "c"):
        add(engine, name, 4, max_tokens=3)
    seen = steps(engine, clock)
    next(seen)
    add(engine, "high", 8, priority=1)
    list(seen)
    assert engine.stats().num_preemptions == 1


# --------------------------------------------------------------------------------------- multi-level queue


def test_levels_get_longer() -> None:
    assert [level_of(count) for count in (0, 63, 64, 191, 192, 448)] == [0, 0, 1, 1, 2, 3]
    assert [level_end(0, count) for count in (0, 63, 64, 192)] == [64, 64, 192, 448]
    assert (level_end(160, 0), level_end(160, 44), level_end(600, 0)) == (44, 172, 117), "a prompt counts an eighth"


def test_a_short_job_passes_one_that_has_got_much() -> None:
    engine, clock = make("mlq", max_model_len=256, num_blocks=80)
    add(engine, "long", max_tokens=120)
    seen = steps(engine, clock)
    for _ in range(60):
        next(seen)
    add(engine, "early", max_tokens=2)
    assert next(seen) == ["long"], "it has not used up its first level"
    names = [name for step in seen for name in step]
    at = names.index("early")
    assert at == 3 and names[at : at + 2] == ["early"] * 2 and names[at + 2] == "long"


def test_a_long_job_is_not_kept_waiting_for_ever() -> None:
    engine, clock = make("mlq", max_model_len=256, num_blocks=80)
    add(engine, "long", max_tokens=100)
    count = 0
    for names in steps(engine, clock):
        clock.now += 1.0
        if "long" in names and engine.scheduler.batch.num_known.max() >= 104:
            break
        if not any(seq.request_id != "long" for seq in engine.scheduler.waiting):
            count += 1
            add(engine, f"short {count}", max_tokens=4)
        if engine.stats().finished.get("length", 0) and "long" not in engine._requests:
            break
        assert count < 60, "it starves"


# ------------------------------------------------------------------------------------------ shortest, longest


def test_the_shortest_job_is_first_by_what_such_prompts_were_answered() -> None:
    engine, clock = make("sjf", max_num_seqs=2, max_model_len=64)
    chatty, terse = [3] * 4, [5] * 4
    for i in range(24):  # learns which prompt is answered at length
        add(engine, f"chatty {i}", chatty, 30)
        add(engine, f"terse {i}", terse, 30, stop_token_ids=tuple(range(VOCAB_SIZE)))
        list(steps(engine, clock))
    stats = engine.stats()
    assert stats.length_error < stats.length_error_of_mean / 2
    for name, ids in (("running", terse), ("also", terse), ("chatty", chatty), ("terse", terse)):
        add(engine, name, ids, 30)
    first = order_of_firsts(engine, clock)
    assert first.index("terse") < first.index("chatty")


def test_who_waits_long_enough_comes_before_a_shorter_job() -> None:
    engine, clock = make("sjf")
    add(engine, "running")
    next(steps(engine, clock))
    add(engine, "long", 40, ignore_eos=True, max_tokens=20)
    clock.now += 60.0
    add(engine, "short", 1, ignore_eos=True, max_tokens=1)
    assert order_of_firsts(engine, clock)[-2:] == ["long", "short"]


def test_the_longest_match_in_the_cache_is_first_also_if_it_gets_there_later() -> None:
    engine, clock = make("lpm", prefix_cache=True)
    add(engine, "first", [7] * 24)
    next(steps(engine, clock))
    add(engine, "unlike", [9] * 20)
    add(engine, "alike", [7] * 24)
    assert order_of_firsts(engine, clock) == ["first", "alike", "unlike"]


# ---------------------------------------------------------------------------------------------- objectives


def test_the_nearest_deadline_is_first() -> None:
    engine, clock = make("slo")
    for name, limit in (("none", None), ("late", 5000.0), ("soon", 1000.0)):
        add(engine, name, ttft_ms=limit)
    assert order_of_firsts(engine, clock) == ["soon", "late", "none"]


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"ttft_ms": 20.0}, "ttft_ms is 20, and 32 tokens .* take 52 ms .* idle; allow more, or shorten it"),
        ({"tbt_ms": 5.0}, "tbt_ms is 5, and a step takes 11 ms .* idle; allow more"),
    ],
)
def test_what_an_idle_engine_can_not_do_is_refused_at_once(params: dict[str, float], message: str) -> None:
    engine, _ = make("slo")
    with pytest.raises(ObjectiveError, match=message):
        add(engine, "a", 32, 3, **params)
    assert not engine.has_work and engine.stats().num_refused == 1
    engine, _ = make("fcfs")
    add(engine, "a", 32, 3, **params)


def test_what_can_not_be_served_in_time_is_refused_while_it_waits_and_the_others_are() -> None:
    engine, clock = make("slo", max_num_seqs=8)
    for i in range(6):  # a prompt of 16 takes 26 ms; so five are in time with a margin
        add(engine, str(i), 16, 1, ttft_ms=160.0, n=1)
    add(engine, "patient", 16, 1)
    done = order_of_firsts(engine, clock)
    refused = engine.take_refused()
    assert [reason for _, reason in refused] == [
        "there is no time for its first token, or for those of requests beside it"
    ]
    assert sorted([*done, refused[0][0]]) == [*map(str, range(6)), "patient"] and engine.stats().num_refused == 1


def beside_a_long_one(
    steps_before: int, tbt_ms: float | None, max_tokens: int, ttft_ms: float
) -> tuple[list[str], Engine]:
    """Whose tokens came in which order, after so many steps of an answer of 100 tokens alone; a step takes 12 ms."""
    engine, clock = make("slo", max_model_len=512, num_blocks=160)
    add(engine, "long", max_tokens=100, ignore_eos=True, tbt_ms=tbt_ms)
    seen = steps(engine, clock)
    for _ in range(steps_before):
        next(seen)
    add(engine, "soon", max_tokens=max_tokens, ignore_eos=True, ttft_ms=ttft_ms)
    return [name for names in seen for name in names], engine


def test_who_has_the_first_token_gives_way_where_somebody_would_be_late() -> None:
    names, engine = beside_a_long_one(3, None, max_tokens=2, ttft_ms=500.0)
    assert names[-1] == "long" and names.index("soon") < 10 and names.count("long") == 97
    assert engine.stats().num_preemptions == 1
    names, engine = beside_a_long_one(3, None, max_tokens=2, ttft_ms=5000.0)
    assert names[-1] == "soon" and engine.stats().num_preemptions == 0, "there is time: 97 steps of 12 ms"


def test_who_is_ahead_of_its_time_between_tokens_gives_way_and_is_back_before_it_is_late() -> None:
    names, engine = beside_a_long_one(60, 20.0, max_tokens=150, ttft_ms=450.0)
    assert names.index("soon") * STEP <= 0.45 and names.count("soon") == 150 and names.count("long") == 40
    last = max(i for i, name in enumerate(names) if name == "long")
    assert (60 + last) * STEP <= 99 * 0.02, (
        "the last of 100 tokens is there in time; after the other it would be at 2.5 s"
    )
    assert engine.stats().num_preemptions == 2, "each for the other"


@pytest.mark.parametrize(("tokens_ahead", "gives_way"), [(10, False), (40, True)])
def test_who_is_hardly_ahead_does_not_give_way(tokens_ahead: int, gives_way: bool) -> None:
    policy = parse_policy("slo")
    params = SamplingParams(ttft_ms=100.0, tbt_ms=20.0)
    running = Sequence("a", 0, 0, 4, [1] * 8, params, 0, 100, frozenset(), rank=5.0 + 0.02 * tokens_ahead)
    waiting = Sequence("b", 0, 1, 4, [1] * 4, params, 0, 100, frozenset(), rank=5.0)
    assert policy.gives_way(running, waiting) is gives_way
    begun = Sequence("c", 0, 1, 4, [1] * 5, SamplingParams(ttft_ms=100.0), 0, 100, frozenset(), rank=5.0)
    assert not policy.gives_way(running, begun), "its first token is there, and it asks for no time between the others"


def test_that_others_of_a_request_wait_for_its_prompt_refuses_nobody() -> None:
    engine, clock = make("slo", max_num_seqs=8, num_blocks=200, max_model_len=128, prefix_cache=True)
    add(engine, "four", [7] * 64, 3, ignore_eos=True, ttft_ms=200.0, n=4)
    assert sum(names.count("four") for names in steps(engine, clock)) == 12 and not engine.take_refused()


def test_where_nobody_decodes_a_prompt_is_not_cut() -> None:
    engine, clock = make("slo", max_model_len=128, max_num_batched_tokens=64, tbt_ms=12.0)
    add(engine, "a", [7] * 64, 2, ttft_ms=100.0)  # takes 74
    assert order_of_firsts(engine, clock) == ["a"] and not engine.take_refused()


def test_the_objective_of_who_has_most_left_is_given_up_where_slots_are_short() -> None:
    names, engine = beside_a_long_one(3, 50.0, max_tokens=2, ttft_ms=500.0)
    assert names[-1] == "long" and names.index("soon") * STEP <= 0.5 and names.count("long") == 97
    assert not engine.take_refused()
    names, engine = beside_a_long_one(3, 50.0, max_tokens=300, ttft_ms=500.0)
    assert names == ["long"] * 97 and [name for name, _ in engine.take_refused()] == ["soon"]


def test_who_got_the_first_token_late_comes_behind_those_who_can_still_have_it_in_time() -> None:
    engine, clock = make("slo", max_model_len=256, num_blocks=80)
    add(engine, "late", 20, max_tokens=25, ignore_eos=True, ttft_ms=60.0, tbt_ms=500.0)
    seen = steps(engine, clock)
    next(seen)  # of two that its prompt takes
    clock.now += 1.0
    next(seen)
    add(engine, "soon", max_tokens=30, ignore_eos=True, ttft_ms=200.0, tbt_ms=500.0)
    names = [name for step in seen for name in step]
    assert names[-1] == "late" and names.index("soon") < 20


@pytest.mark.parametrize("policy", ["fcfs", "slo"])
def test_no_more_run_at_once_than_steps_have_time_for(policy: str) -> None:
    of_engine = {"tbt_ms": 25.0} if policy == "fcfs" else {}
    engine, clock = make(
        policy, max_num_seqs=32, max_num_batched_tokens=64, max_model_len=128, num_blocks=800, **of_engine
    )
    for i in range(24):
        add(engine, str(i), max_tokens=50, tbt_ms=25.0 if policy == "slo" else None)
    most = 0
    for _ in steps(engine, clock):
        most = max(most, engine.scheduler.num_running)
    assert most == 15, "a step of 15 tokens takes 25 ms"


def test_a_time_that_no_step_has_limits_nobody() -> None:
    engine, clock = make("fcfs", max_num_seqs=8, max_model_len=128, num_blocks=400, tbt_ms=5.0)
    for i in range(8):
        add(engine, str(i), max_tokens=50)
    assert max(engine.scheduler.num_running for _ in steps(engine, clock)) == 8


def test_nobody_joins_a_static_batch_that_had_no_time_for_all() -> None:
    engine, clock = make(
        "static", max_num_seqs=32, max_num_batched_tokens=64, max_model_len=128, num_blocks=800, tbt_ms=25.0
    )
    for i in range(24):
        add(engine, str(i), max_tokens=5 + i, ignore_eos=True)
    seen = list(steps(engine, clock))
    first = {name for names in seen[:2] for name in names}
    last = max(i for i, names in enumerate(seen) if first & set(names))
    assert 8 < len(first) < 24 and all(set(names) <= first for names in seen[: last + 1])


def test_who_gave_way_is_not_kept_waiting_for_ever() -> None:
    engine, clock = make("slo", max_model_len=256, num_blocks=80)
    add(engine, "long", max_tokens=40, ignore_eos=True)
    count = 0
    for names in steps(engine, clock):
        clock.now += 1.0
        if "long" not in engine._requests:
            break
        engine.take_refused()
        if not any(seq.request_id != "long" for seq in engine.scheduler.waiting):
            count += 1
            add(engine, f"short {count}", max_tokens=4, ttft_ms=5000.0)
        assert count < 400, "it starves"
    assert engine.stats().num_preemptions > 0


def test_all_of_a_request_is_refused() -> None:
    engine, clock = make("slo", max_num_seqs=8)
    for i in range(4):
        add(engine, str(i), 16, 1, ttft_ms=60.0, n=2)
    next(steps(engine, clock))
    refused = engine.take_refused()
    assert len(refused) == len(dict(refused)) >= 2
    assert set(engine._requests).isdisjoint(dict(refused))


def test_the_longest_is_left_out_where_somebody_would_be_late() -> None:
    engine, _ = make("slo")
    forecast = engine.scheduler.forecast

    def waiting(name: str, tokens: int, deadline: float, may_refuse: bool = True) -> Sequence:
        params = SamplingParams(ttft_ms=1000.0 if may_refuse else None)
        return Sequence(name, 0, 0, tokens, [0] * tokens, params, 0, tokens + 1, frozenset(), rank=deadline)

    def left_out(*seqs: Sequence, ends: tuple[float, ...] = (0.0,) * 9) -> list[str]:
        return [seq.request_id for seq in triage(seqs, forecast, 0.0, StepWork(), map(Slot, ends)).refused]

    long, a, b = waiting("long", 160, 0.4), waiting("a", 16, 0.3), waiting("b", 16, 0.45)
    assert left_out(long, a) == []  # 260 + 26 ms
    assert left_out(long, a, waiting("c", 160, 0.5)) in (["long"], ["c"])
    assert left_out(long, a, b, waiting("d", 100, 0.46)) == ["long"]
    assert left_out(waiting("batch", 400, 0.1, may_refuse=False), a) == ["a"]
    assert left_out(a, b, ends=(0.0, 0.42)) == [] and left_out(a, b, ends=(0.0, 0.43)) != []


@pytest.mark.parametrize(("now", "lost"), [(0.0, []), (2.5, ["running"])])
def test_an_objective_is_given_up_in_the_last_third_of_the_time_only(now: float, lost: list[str]) -> None:
    engine, _ = make("slo")
    params = SamplingParams(ttft_ms=3000.0, tbt_ms=50.0)
    running = Sequence("running", 0, 0, 4, [0] * 8, params, 0, 500, frozenset())
    waiting = Sequence("waiting", 0, 1, 4, [0] * 4, params, 0, 500, frozenset(), rank=3.0)
    found = triage([waiting], engine.scheduler.forecast, now, StepWork(), [Slot(10.0, running)])
    assert found.any_late and not found.refused and [seq.request_id for seq in found.lost] == lost


@pytest.mark.parametrize(("ttft_ms", "is_served"), [(38.0, False), (40.0, True)])
def test_who_would_have_it_just_in_time_is_refused(ttft_ms: float, is_served: bool) -> None:
    engine, clock = make("slo")
    add(engine, "a", 16, 1, ttft_ms=ttft_ms)  # takes 26 ms, and 10 pass before the first step
    assert order_of_firsts(engine, clock) == ["a"] * is_served and len(engine.take_refused()) == (not is_served)


# --------------------------------------------------------------------------------------------------- batches


def test_nobody_joins_a_static_batch_that_has_begun() -> None:
    engine, clock = make("static", max_num_seqs=3, max_num_batched_tokens=8)
    for name in ("a", "b"):  # the second does not fit the first step, and belongs to the batch all the same
        add(engine, name, 6, 4)
    seen = steps(engine, clock)
    next(seen)
    add(engine, "late", 1, 1)
    names = [name for step in seen for name in step]
    assert names.index("late") == len(names) - 1 and names.count("b") == 4


def test_a_batch_begins_when_its_window_is_over_or_when_it_is_full() -> None:
    engine, clock = make("window:50ms", max_num_seqs=2)
    add(engine, "a")
    assert engine.step() == [] and engine.idle_seconds == pytest.approx(0.05)
    clock.now = 0.03
    assert engine.step() == [] and engine.idle_seconds == pytest.approx(0.02)
    clock.now = 0.05
    assert [output.request_id for output in engine.step()] == ["a"] and engine.idle_seconds is None
    list(steps(engine, clock))
    for name in ("b", "c"):
        add(engine, name)
    assert [output.request_id for output in engine.step()] == ["b", "c"]


# --------------------------------------------------------------------------------------------------- clients


def test_a_client_with_many_requests_does_not_keep_the_others_waiting() -> None:
    engine, clock = make("fcfs", max_num_seqs=2)
    for i in range(8):
        add(engine, f"greedy {i}", client="greedy")
    add(engine, "modest", client="modest")
    assert order_of_firsts(engine, clock).index("modest") == 1


def test_two_clients_get_the_same_share_however_long_their_requests_are() -> None:
    engine, clock = make("fcfs", max_num_seqs=2)
    for i in range(40):
        add(engine, f"long {i}", 16, 20, client="long")
        add(engine, f"short {i}", 2, 2, client="short")
    served = {"long": 0, "short": 0}
    for _, names in zip(range(70), steps(engine, clock), strict=False):
        for name in names:
            served[name.split()[0]] += 1
    assert engine.scheduler.waiting.num_clients == 2
    counts = engine.scheduler.waiting.served[:2]
    assert abs(counts[0] - counts[1]) <= 2 * (16 + 2 * 20)


def waiting_of(queue: WaitingQueue, client: str, rank: float) -> Sequence:
    seq = Sequence(client, 0, 0, 1, [0], SamplingParams(client=client), 0, 2, frozenset(), rank=rank)
    seq.client = queue.open(client)
    queue.add(seq)
    return seq


def test_who_comes_back_has_saved_up_nothing_and_owes_what_it_owed() -> None:
    queue = WaitingQueue()
    here, away = waiting_of(queue, "here", 0.0), waiting_of(queue, "away", 1.0)
    queue.served[[here.client, away.client]] = (5.0, 90.0)
    for seq in (here, away):
        queue.remove(seq)
    queue.close(away.client)
    assert queue.served[queue.open("away")] == 90.0
    queue.served[here.client] = 200.0
    queue.close(queue._numbers["away"])
    assert queue.served[queue.open("away")] == 200.0
    assert queue.served[queue.open("new")] == 200.0


def test_clients_that_are_gone_are_forgotten_in_the_end() -> None:
    queue = WaitingQueue()
    for i in range(MAX_REMEMBERED + 10):
        queue.close(queue.open(f"client {i}"))
    assert len(queue._past) == MAX_REMEMBERED and len(queue.served) == 8 and not queue.num_clients
    many = [queue.open(f"client {i}") for i in range(30)]
    assert len(set(many)) == 30


# ------------------------------------------------------------------------------------------------------ room


@pytest.mark.parametrize("overcommit", [False, True])
def test_nobody_is_let_in_whose_blocks_will_be_missing(overcommit: bool) -> None:
    sizes = {"max_num_seqs": 4, "num_blocks": 9}  # 8 blocks of 4: not enough for two of 20
    engine, clock = make("fcfs", **sizes, overcommit=overcommit)
    for name in ("a", "b"):
        add(engine, name, 4, 16, ignore_eos=True)
    list(steps(engine, clock))
    assert bool(engine.stats().num_preemptions) == overcommit


def test_those_who_end_soon_make_room_for_those_who_grow() -> None:
    engine, clock = make("fcfs", max_num_seqs=4, num_blocks=9)
    add(engine, "short", 12, 4, ignore_eos=True)  # 4 blocks, that are free when it ends after 4 steps
    add(engine, "long", 4, 24, ignore_eos=True)  # 7 blocks, but 2 by then
    first = next(steps(engine, clock))
    assert first == ["short", "long"]
    list(steps(engine, clock))
    assert engine.stats().num_preemptions == 0


def test_a_step_takes_no_more_of_a_prompt_than_those_who_decode_have_time_for() -> None:
    clock = Clock()
    engine = make_engine(tbt_ms=30.0, clock=clock, max_num_batched_tokens=40, num_blocks=80, pipeline=False)
    engine.scheduler.forecast.cost.set_prices(PRICES)
    add(engine, "decoding", 4, 20)
    engine.step()
    add(engine, "prompt", 50, 1)
    before = engine.stats().scheduled_tokens
    engine.step()
    assert engine.stats().scheduled_tokens - before == 1 + 19  # 10 ms for the step, and 1 for each token


def test_an_objective_of_a_request_limits_steps_under_slo() -> None:
    engine, clock = make("slo", max_num_seqs=4, max_num_batched_tokens=40)
    add(engine, "decoding", 4, 20, tbt_ms=30.0)
    next(steps(engine, clock))
    add(engine, "prompt", 50, 1)
    before = engine.stats().scheduled_tokens
    engine.step()
    assert engine.stats().scheduled_tokens - before == 20


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"priority": 1001}, "priority is 1001; expected at most 1000"),
        ({"priority": 1.5}, "priority: expected an integer"),
        ({"cache_priority": 11}, "cache_priority is 11; expected at most 10"),
        ({"client": "x" * 257}, "client: expected a string of at most 256"),
        ({"ttft_ms": 0.0}, r"ttft_ms is 0.0; expected a value in \(0.0"),
        ({"tbt_ms": float("nan")}, "tbt_ms: expected a finite number"),
    ],
)
def test_impossible_wishes_are_refused(wrong: dict[str, object], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        SamplingParams(**wrong)  # type: ignore[arg-type]


def test_a_policy_learns_what_steps_cost(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    engine = make_engine(policy="slo", clock=clock, max_num_seqs=4, num_blocks=200, max_num_batched_tokens=32)
    run: Callable[..., object] = engine.runner._run  # type: ignore[attr-defined]

    def slowly(plan: object) -> object:
        clock.now += 0.004 + 0.0005 * plan.num_tokens  # type: ignore[attr-defined]
        return run(plan)

    monkeypatch.setattr(engine.runner, "_run", slowly)
    for i in range(30):
        add(engine, str(i), 1 + i, 1 + i % 7)
    while engine.has_work:
        engine.step()
    cost = engine.scheduler.forecast.cost
    assert cost.seconds(StepWork(20, 1, 20, 190)) == pytest.approx(0.014, rel=0.05)
    assert 0 <= engine.stats().cost_error < 0.05
