"""The loop that other tests' timers run on: its clock goes on by itself, but not before a thread's work is done."""

import asyncio
import time

from virtual_time import Gate, run


def test_timers_end_in_their_order_and_the_clock_shows_their_times() -> None:
    async def work() -> list[tuple[str, float]]:
        start, ended = time.monotonic(), list[tuple[str, float]]()

        async def wait(name: str, seconds: float) -> None:
            await asyncio.sleep(seconds)
            ended.append((name, time.monotonic() - start))

        await asyncio.gather(wait("late", 3600), wait("soon", 2.5))
        return ended

    assert run(work()) == [("soon", 2.5), ("late", 3600.0)]


def test_time_stands_while_a_thread_works() -> None:
    async def work() -> tuple[int, float]:
        async with asyncio.timeout(1):
            start = time.monotonic()
            return await asyncio.to_thread(sum, range(1_000_000)), time.monotonic() - start

    assert run(work()) == (499_999_500_000, 0.0)


def test_time_goes_on_while_a_thread_stands_at_a_gate() -> None:
    async def work() -> list[str]:
        gate, seen = Gate(is_open=False), list[str]()

        def pass_through() -> None:
            gate.wait()
            seen.append("through")

        passing = asyncio.create_task(asyncio.to_thread(pass_through))
        await asyncio.sleep(60)
        seen.append("a minute later")
        gate.open()
        await passing
        return seen

    assert run(work()) == ["a minute later", "through"]
