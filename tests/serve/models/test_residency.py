"""Several models of which not all may be awake at once, over scripted engine processes."""

import asyncio
import random
from types import SimpleNamespace
from typing import Any, cast

import pytest
from scripted_models import House, Model, settle, states, until
from virtual_time import run

from inferc.runtime.engine.scoring import Score
from inferc.serve.errors import NoRoomToWake
from inferc.serve.models.async_engine import AsyncEngine
from inferc.serve.models.residency import Residency

# ------------------------------------------------------------------------------------------------- whose turn


def test_the_first_are_awake_and_the_others_sleep_without_having_started() -> None:
    async def work() -> None:
        house = House(3, limit=2)
        async with house as models:
            await settle()
            assert states(models) == ["serving", "serving", "asleep"] and house.started == ["a", "b"]

    run(work())


def test_without_a_limit_all_are_awake() -> None:
    async def work() -> None:
        residency, started = Residency(), list[str]()
        models = [Model(name, residency, started) for name in "abc"]
        for model in models:
            await model.supervisor.start()
        await models[0].supervisor.sleep()
        await models[0].use()
        assert states(models) == ["serving"] * 3 and started == ["a", "b", "c", "a"]
        for model in models:
            await model.supervisor.close()

    run(work())


@pytest.mark.parametrize("order", ["ab", "ba"])
def test_the_one_that_was_used_longest_ago_makes_room(order: str) -> None:
    async def work() -> None:
        async with House(3, limit=2) as models:
            by_name = {model.name: model for model in models}
            for name in order:
                await by_name[name].use()
            await by_name["c"].use()
            first, second = (by_name[name] for name in order)
            assert (first.engine.state, second.engine.state) == ("asleep", "serving")
            assert (first.supervisor.num_swaps, second.supervisor.num_swaps) == (1, 0)

    run(work())


def test_one_that_was_woken_by_hand_counts_as_used() -> None:
    async def work() -> None:
        async with House(3, limit=2) as (a, b, c):
            await a.use()
            await b.use()
            await c.supervisor.wake()
            assert states([a, b, c]) == ["asleep", "serving", "serving"]
            await a.use()
            assert states([a, b, c]) == ["serving", "asleep", "serving"]

    run(work())


def test_what_runs_is_not_cut_and_what_comes_later_waits_for_its_turn() -> None:
    async def work() -> None:
        async with House(2, limit=1) as (a, b):
            first = a.ask()
            await settle()
            other = b.ask()
            await settle()
            second = a.ask()
            await settle()
            assert len(a.process.sinks) == 1 and not a.process.closed and not b.processes
            await a.answer()
            await first
            await b.answer()
            await other
            assert a.processes[0].closed
            await a.answer()
            await second
            assert len(a.processes) == 2 and b.processes[0].closed
            assert (a.supervisor.num_swaps, b.supervisor.num_swaps) == (1, 1)

    run(work())


def test_a_model_that_is_asked_without_end_starves_nobody() -> None:
    async def work() -> None:
        async with House(2, limit=1) as (a, b):
            running = [a.ask(), a.ask()]
            await settle()
            other = b.ask()
            await settle()
            answered = 0
            while not b.processes:  # a is never without requests
                running.append(a.ask())
                await settle()
                if a.process.sinks:
                    a.process.answer()
                    answered += 1
            assert answered == 2, "what had begun, and nothing after it"
            await b.answer()
            await other
            for _ in range(len(running) - answered):
                await a.answer()
            await asyncio.gather(*running)

    run(work())


def test_turns_are_in_the_order_of_asking() -> None:
    async def work() -> None:
        house = House(4, limit=1)
        async with house as (a, b, c, d):
            first = a.ask()
            await settle()
            others = []
            for model in (c, d, b, a):
                others.append(model.ask())
                await settle()
            await a.answer()
            await first
            for model in (c, d, b, a):
                await model.answer()
            await asyncio.gather(*others)
            assert house.started == ["a", "c", "d", "b", "a"]

    run(work())


def test_of_two_at_work_whichever_ends_first_makes_room() -> None:
    async def work() -> None:
        async with House(3, limit=2) as (a, b, c):
            old = a.ask()
            await asyncio.sleep(1)
            young = b.ask()
            await settle()
            waiting = c.ask()
            await settle()
            late = b.ask()  # b is the younger, and begins nothing more
            await settle()
            assert (len(a.process.sinks), len(b.process.sinks)) == (1, 1)
            await a.answer()  # but a ends first
            await old
            await c.answer()
            await waiting
            assert len(b.process.sinks) == 2, "it goes on"
            for request in (young, late):
                await b.answer()
                await request
            assert (a.supervisor.num_swaps, b.supervisor.num_swaps, len(b.processes)) == (1, 0, 1)

    run(work())


# ---------------------------------------------------------------------------------------- who does not wait any more


@pytest.mark.parametrize("how", ["request", "wake"])
def test_one_that_leaves_while_its_model_waits_lets_the_others_go_on(how: str) -> None:
    async def work() -> None:
        async with House(2, limit=1) as (a, b):
            first = a.ask()
            await settle()
            waiting: asyncio.Task[Any] = b.ask() if how == "request" else asyncio.create_task(b.supervisor.wake())
            await settle()
            second = a.ask()
            await settle()
            assert len(a.process.sinks) == 1
            waiting.cancel()
            await until(lambda: len(a.process.sinks) == 2)
            for request in (first, second):
                await a.answer()
                await request
            await settle()
            assert a.supervisor.num_swaps == 0 and not b.processes
            await b.use()

    run(work())


def test_one_that_left_gets_no_place_in_its_turn() -> None:
    async def work() -> None:
        house = House(3, limit=1)
        async with house as (a, b, c):
            first = a.ask()
            await settle()
            waiting = [b.ask(), c.ask()]
            await settle()
            waiting[0].cancel()
            await a.answer()
            await first
            await c.answer()
            await waiting[1]
            assert house.started == ["a", "c"]

    run(work())


def test_the_wait_is_bounded_and_what_runs_goes_on() -> None:
    async def work() -> None:
        async with House(2, limit=1, wait_seconds=0.05) as (a, b):
            first = a.ask()
            await settle()
            refused, woken = b.ask(), asyncio.create_task(b.supervisor.wake())
            await settle()
            second = a.ask()
            with pytest.raises(
                NoRoomToWake, match=r"of the 1 that may be awake \(--max-awake\) none came to rest within 0.05"
            ):
                await refused
            with pytest.raises(NoRoomToWake):
                await woken
            assert b.engine.metrics.refusals["unavailable"] == 1 and b.engine.num_requests == 0
            for request in (first, second):
                await a.answer()
                await request
            assert len(a.processes) == 1
            await b.use()

    run(work())


def test_one_at_rest_makes_room_even_if_nobody_may_wait_for_what_runs() -> None:
    async def work() -> None:
        async with House(2, limit=1, wait_seconds=0) as (a, b):
            await b.use()
            running = b.ask()
            await settle()
            with pytest.raises(NoRoomToWake):
                await a.ask()
            await b.answer()
            await running

    run(work())


def test_one_that_comes_to_rest_is_waited_for_however_long_its_end_takes() -> None:
    async def work() -> None:
        async with House(2, limit=1, wait_seconds=0.05) as (a, b):
            a.process.end_gate.close()
            asked = b.ask()
            await asyncio.sleep(100)
            assert not asked.done() and not b.processes, "memory is not free yet"
            a.process.end_gate.open()
            await b.answer()
            await asked

    run(work())


# ----------------------------------------------------------------------------------------------- sleep and wake


def test_a_place_that_a_sleep_frees_goes_to_who_waits() -> None:
    async def work() -> None:
        async with House(3, limit=2) as (a, b, c):
            requests = [a.ask(), b.ask()]
            await settle()
            waiting = c.ask()
            await settle()
            late = b.ask()  # b was asked to make room
            sleeping = asyncio.create_task(a.supervisor.sleep())
            await settle()
            await a.answer()
            await c.answer()
            await asyncio.gather(waiting, sleeping)
            for _ in range(2):
                await b.answer()
            await asyncio.gather(*requests, late)
            assert states([a, b, c]) == ["asleep", "serving", "serving"] and len(b.processes) == 1

    run(work())


def test_a_model_wakes_by_hand_in_its_turn() -> None:
    async def work() -> None:
        async with House(2, limit=1) as (a, b):
            first = a.ask()
            await settle()
            waking = asyncio.create_task(b.supervisor.wake())
            await settle()
            assert not waking.done()
            await a.answer()
            await first
            await waking
            assert states([a, b]) == ["asleep", "serving"] and a.supervisor.num_swaps == 1

    run(work())


def test_a_sleep_by_hand_is_no_swap() -> None:
    async def work() -> None:
        async with House(2, limit=1) as (a, b):
            await a.supervisor.sleep()
            await b.use()
            assert (a.supervisor.num_swaps, b.supervisor.num_swaps) == (0, 0)

    run(work())


class Sleeper:
    """A model that Residency asks to make room; `was_used` orders those that are idle."""

    def __init__(self, is_idle: bool = True, was_used: float = 0.0) -> None:
        self.engine = cast(
            AsyncEngine, SimpleNamespace(client=self, is_idle=is_idle, used_at=was_used, oldest_at=was_used)
        )
        self.is_leaving = self.is_asked = False
        self.is_requested = True

    def make_room(self) -> None:
        self.is_asked = True

    def stay_resident(self) -> None:
        self.is_asked = False


def test_who_was_asked_stays_if_another_leaves() -> None:
    async def work() -> None:
        residency = Residency(2)
        busy, other, waiting = Sleeper(False, 2.0), Sleeper(False, 1.0), Sleeper()
        assert residency.take_free(busy) and residency.take_free(other) and not residency.take_free(waiting)
        taking = asyncio.create_task(residency.take(waiting))
        await settle()
        assert (busy.is_asked, other.is_asked) == (True, False)
        other.is_leaving = True
        residency.look()
        await settle()
        assert not busy.is_asked and not taking.done()
        residency.leave(other)
        await taking

    run(work())


def test_nobody_takes_a_free_place_before_who_waits_for_it() -> None:
    async def work() -> None:
        residency = Residency(1)
        first, waiting, new = Sleeper(False), Sleeper(), Sleeper()
        assert residency.take_free(first)
        taking = asyncio.create_task(residency.take(waiting))
        await settle()
        residency.leave(first)
        assert not residency.take_free(new)
        await taking

    run(work())


# ------------------------------------------------------------------------------------------------ all at once


@pytest.mark.parametrize("seed", range(25))
def test_whatever_happens_no_more_than_may_be_are_awake_and_all_are_answered(seed: int) -> None:
    """Requests, deaths, sleeps, wakes and clients that leave, by chance."""

    async def work() -> None:
        chance = random.Random(seed)
        limit = chance.randint(1, 3)
        asked: list[asyncio.Task[Score]] = []
        calls: list[asyncio.Task[None]] = []
        num_deaths = 0
        async with House(4, limit) as models:

            def check() -> None:
                assert sum(model.num_alive for model in models) <= limit

            for _ in range(300):
                model = chance.choice(models)
                what = chance.random()
                if what < 0.4:
                    asked.append(model.ask())
                elif what < 0.7:
                    if model.processes and model.process.sinks:
                        model.process.answer()
                elif what < 0.78 and asked:
                    chance.choice(asked).cancel()
                elif what < 0.86:
                    calls.append(asyncio.create_task(model.supervisor.wake()))
                elif what < 0.94:
                    calls.append(asyncio.create_task(model.supervisor.sleep()))
                elif what < 0.97 and calls:
                    chance.choice(calls).cancel()
                elif num_deaths < 2 and model.engine.client is not None and not model.process.stopped:
                    num_deaths += 1  # fewer than a request is started for
                    model.process.die("killed")
                for _ in range(chance.randint(0, 4)):
                    await asyncio.sleep(0)
                    check()
            for call in calls:
                call.cancel()
            while not all(request.done() for request in asked):
                for model in models:
                    if model.processes and model.process.sinks:
                        model.process.answer()
                await asyncio.sleep(0.1)
                check()
            found = await asyncio.gather(*asked, return_exceptions=True)
            assert all(isinstance(each, Score | asyncio.CancelledError) for each in found), found
            assert sum(isinstance(each, Score) for each in found) > 30
            await asyncio.gather(*calls, return_exceptions=True)

    run(work())
