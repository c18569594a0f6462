"""Tests of requests under way, for which a server waits before it ends."""

import asyncio

from inferc.serve.under_way import UnderWay


def test_it_is_over_when_all_is_answered() -> None:
    async def work() -> None:
        under_way = UnderWay()
        assert await under_way.over(0)
        with under_way.one():
            under_way.begin()
            assert not await under_way.over(-1)
            waiting = asyncio.create_task(under_way.over(60))
            under_way.end()
            await asyncio.sleep(0)
            assert not waiting.done() and under_way.count == 1
        assert await waiting and under_way.count == 0

    asyncio.run(work())
