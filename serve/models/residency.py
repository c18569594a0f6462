"""The choice of which models are awake (have an engine), when not all of them may be at the same time.

Models that want to be awake get a place in the order in which they ask. If no place is free, an awake model makes room:
of the idle ones, the one that was used longest ago. If all are busy, the one whose oldest running request is the most
recent starts no more requests, and the first of all that becomes idle goes to sleep. A running request is never cut
off; a model that waits too long for a place is refused. The requests that a model was woken for start as soon as it
wakes, so that every turn answers something.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from inferc.serve.errors import NoRoomToWake
from inferc.serve.models.async_engine import AsyncEngine


class Sleeper(Protocol):
    """A protocol for the owner of an engine that can put it to sleep (Supervisor)."""

    engine: AsyncEngine
    is_leaving: bool  # the engine is being shut down and will give its place back

    @property
    def is_requested(self) -> bool:
        """True if somebody still waits for the engine."""

    def make_room(self) -> None:
        """Start no more requests, and sleep when the running ones have ended."""

    def stay_resident(self) -> None:
        """Cancel `make_room`, unless the engine sleeps by now."""


class WakeCancelled(Exception):
    """The error that a model need not be woken, because nobody waits for it any more."""


class Residency:
    """The places for awake engines, at most `limit` of them (None: any number).

    A model that waits longer than `wait_seconds` for a place is refused.
    """

    def __init__(self, limit: int | None = None, wait_seconds: float = 30.0) -> None:
        self._limit, self._wait_seconds = limit, wait_seconds
        self._resident: list[Sleeper] = []
        self._turn = asyncio.Lock()  # fair: models that wait for it get it in the order in which they came
        self._news = asyncio.Event()

    @property
    def has_room(self) -> bool:
        return self._limit is None or len(self._resident) < self._limit

    def take_free(self, who: Sleeper) -> bool:
        """Take a place if one is free and nobody else waits for one; return whether it was taken."""
        if not self.has_room or self._turn.locked():
            return False
        self._resident.append(who)
        return True

    def leave(self, who: Sleeper) -> None:
        """Give a place back, if there is one to give."""
        if who in self._resident:
            self._resident.remove(who)
        self.look()

    def look(self) -> None:
        """Wake the model that waits for a place: an engine became idle, started, died, or is requested by nobody."""
        self._news.set()

    async def take(self, who: Sleeper) -> None:
        """Wait for a place and take it.

        Raises NoRoomToWake if there is none in time, and WakeCancelled if nobody waits for the model any more.
        """
        if self._limit is None:
            self._resident.append(who)
            return
        deadline = time.monotonic() + self._wait_seconds
        async with self._turn:
            asked: Sleeper | None = None
            try:
                while who.is_requested and not self.has_room:
                    asked = self._ask(asked)
                    is_coming = asked is not None and (asked.is_leaving or asked.engine.is_idle)
                    left = None if is_coming else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        raise NoRoomToWake(
                            f"the model sleeps, and of the {self._limit} that may be awake (--max-awake) none came to"
                            f" rest within {self._wait_seconds:g} s; try again later",
                            retry_after=1.0,
                        )
                    await self._wait_for_news(left)
                if not who.is_requested:
                    raise WakeCancelled
                self._resident.append(who)
            finally:
                if asked is not None:
                    asked.stay_resident()

    async def _wait_for_news(self, seconds: float | None) -> None:
        """Wait at most this long for a change.

        asyncio.wait_for may swallow a cancellation that comes together with the change, so it is not used.
        """
        self._news.clear()
        waiting = asyncio.ensure_future(self._news.wait())
        try:
            await asyncio.wait((waiting,), timeout=seconds)
        finally:
            waiting.cancel()

    def _ask(self, asked: Sleeper | None) -> Sleeper | None:
        """Choose who makes room, and ask it to: the one asked before, unless that one is busy and another is idle."""
        leaving = next((each for each in self._resident if each.is_leaving), None)
        there = [each for each in self._resident if each.engine.client is not None]
        idle = [each for each in there if each.engine.is_idle]
        if leaving is None and (asked in idle or (asked in there and not idle)):
            return asked
        if asked is not None:
            asked.stay_resident()
        if leaving is not None or not there:
            return leaving
        if idle:
            chosen = min(idle, key=lambda each: each.engine.used_at)
        else:
            chosen = max(there, key=lambda each: each.engine.oldest_at)
        chosen.make_room()
        return chosen
