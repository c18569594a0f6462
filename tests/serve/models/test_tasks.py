"""Coroutines that run at once, and what becomes of the others when one fails."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from inferc.serve.models.tasks import all_ended, gather


@pytest.mark.parametrize(("helper", "ends"), [(gather, ["cancelled"]), (all_ended, ["by itself"])])
def test_no_work_goes_on_when_one_has_failed(helper: Callable[..., Any], ends: list[str]) -> None:
    seen: list[str] = []

    async def fail() -> None:
        raise OSError("broken")

    async def work() -> None:
        try:
            for _ in range(5):
                await asyncio.sleep(0)
            seen.append("by itself")
        except asyncio.CancelledError:
            seen.append("cancelled")
            raise

    async def both() -> None:
        with pytest.raises(OSError, match="broken"):
            await helper((fail(), work()))
        assert seen == ends

    asyncio.run(both())


@pytest.mark.parametrize("helper", [gather, all_ended])
def test_results_come_in_order(helper: Callable[..., Any]) -> None:
    async def number(value: int) -> int:
        for _ in range(value):
            await asyncio.sleep(0)
        return value

    assert asyncio.run(helper(map(number, (3, 1, 2)))) == [3, 1, 2]
