"""Models that die, are unloaded, or are still waiting for a place when the server ends, where not all may be awake."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import pytest
from scripted_models import House, settle, states, until
from virtual_time import run

from inferc.errors import InfercError
from inferc.serve.errors import EngineUnavailable


async def ends(work: Coroutine[Any, Any, None]) -> bool:
    """Return whether work ends, not cut by a time limit, which it might take for its end."""
    done, _ = await asyncio.wait((asyncio.create_task(work),), timeout=5)
    return bool(done)


def test_one_that_dies_before_it_made_room_is_asked_again() -> None:
    async def work() -> None:
        house = House(2, limit=1)
        async with house as (a, b):
            first = a.ask()
            await settle()
            waiting = b.ask()
            await settle()
            a.process.die("killed")
            await until(lambda: len(a.processes) == 2 and bool(a.process.sinks))
            await settle()
            late = a.ask()
            await settle()
            assert len(a.process.sinks) == 1 and a.num_alive == 1 and not b.processes
            await a.answer()
            await first
            await b.answer()
            await waiting
            await a.answer()
            await late
            assert house.started == ["a", "a", "b", "a"]

    run(work())


def test_one_that_dies_and_has_nothing_to_do_makes_room_when_it_is_back() -> None:
    async def work() -> None:
        async with House(2, limit=1) as (a, b):
            a.may_start = False
            a.process.die("killed")
            await until(lambda: len(a.processes) == 2)
            asked = b.ask()
            await settle()
            assert not b.processes, "the place is taken"
            a.process.start_gate.open()
            await b.answer()
            await asked

    run(work())


def test_one_that_is_given_up_leaves_its_place() -> None:
    async def work() -> None:
        async with House(2, limit=1) as (a, b):
            first = a.ask()
            await settle()
            waiting = b.ask()
            await settle()
            a.errors = [InfercError("no memory")] * 9
            a.process.die("killed")
            with pytest.raises(EngineUnavailable, match="not started again"):
                await first
            await b.answer()
            await waiting
            assert states([a, b]) == ["dead", "serving"]

    run(work())


def test_one_that_cannot_wake_is_given_up_and_leaves_its_place() -> None:
    async def work() -> None:
        async with House(2, limit=1) as (a, b):
            b.errors = [InfercError("no memory")] * 9
            asked = b.ask()
            await settle()
            with pytest.raises(EngineUnavailable, match="the engine does not start; the server's log says why"):
                await asked
            await a.use()
            assert states([a, b]) == ["serving", "dead"] and not b.supervisor.is_waking

    run(work())


def test_waking_is_told_from_starting_again() -> None:
    async def work() -> None:
        async with House(2, limit=1) as (_, b):
            b.may_start = False
            b.errors = [InfercError("no memory")]
            asked = b.ask()
            await until(lambda: bool(b.processes))
            assert b.engine.state == "starting" and b.supervisor.is_waking
            b.process.start_gate.open()
            await until(lambda: len(b.processes) == 2)
            assert b.engine.state == "starting" and not b.supervisor.is_waking
            b.process.start_gate.open()
            await b.answer()
            await asked

    run(work())


def test_an_unloaded_model_that_waited_holds_up_nobody() -> None:
    async def work() -> None:
        async with House(2, limit=1) as (a, b):
            first = a.ask()
            await settle()
            waiting = b.ask()
            await settle()
            second = a.ask()
            await settle()
            assert not await b.engine.drain(0.01)
            await b.supervisor.close()
            with pytest.raises(EngineUnavailable, match="shut down"):
                await waiting
            for request in (first, second):
                await a.answer()
                await request
            assert len(a.processes) == 1

    run(work())


def test_an_unloaded_model_leaves_its_place_to_who_waits() -> None:
    async def work() -> None:
        async with House(2, limit=1) as (a, b):
            first = a.ask()
            await settle()
            waiting = b.ask()
            await settle()
            draining = asyncio.create_task(a.engine.drain(60))
            await a.answer()
            await first
            assert await draining
            await a.supervisor.close()
            await b.answer()
            await waiting

    run(work())


def test_a_model_can_be_unloaded_while_it_wakes() -> None:
    async def work() -> None:
        async with House(2, limit=1) as (a, b):
            b.may_start = False
            asked = b.ask()
            await until(lambda: bool(b.processes))
            assert not await b.engine.drain(0.01)
            await b.supervisor.close()
            with pytest.raises(EngineUnavailable):
                await asked
            await a.use()

    run(work())


@pytest.mark.parametrize("turns", range(8))
def test_the_end_is_not_lost_where_news_comes_along_with_it(turns: int) -> None:
    async def work() -> None:
        house = House(2, limit=1)
        async with house as (a, b):
            first = a.ask()
            await settle()
            waiting = b.ask()
            await settle()
            house.residency.look()
            for _ in range(turns):
                await asyncio.sleep(0)
            assert await ends(b.supervisor.close())
            waiting.cancel()
            a.supervisor.make_room()  # the same of a model that is awake
            for _ in range(turns):
                await asyncio.sleep(0)
            assert await ends(a.supervisor.close())
            first.cancel()
            await settle()

    run(work())


def test_a_server_that_shuts_down_answers_who_waits() -> None:
    async def work() -> None:
        async with House(3, limit=1) as models:
            asked = []
            for model in models:
                asked.append(model.ask())
                await settle()
            drained = [asyncio.create_task(model.engine.drain(60)) for model in models]
            await settle()
            for model in models:
                await model.answer()
            await asyncio.gather(*asked)
            assert all(await asyncio.gather(*drained))

    run(work())
