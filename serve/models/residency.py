"""Which of several models are awake, where not all of them may be at once.

A model that wants to be awake gets a place in its turn. If none is free, one makes room: of those with nothing to do the one
that was used longest ago; if all are at work, the one whose requests are the youngest begins no more of them, and whichever
is first with nothing to do goes. What runs is never cut: who waits too long for it is refused. What a model was woken for is
begun as it wakes, so that every turn answers something.
"""

from __future__ import annotations

import asyncio
import time
from typing import Protocol

from inferc.serve.errors import NoPlace
from inferc.serve.models.async_engine import AsyncEngine


class Sleeper(Protocol):
    """What runs an engine, and can put it to sleep (Supervisor)."""

    engine: AsyncEngine
    is_leaving: bool  # its engine is being ended, and gives its place back

    @property
    def is_wanted(self) -> bool:
        """Whether somebody still waits for it."""

    def make_room(self) -> None:
        """Begin nothing more, and sleep when what runs is over."""

    def stay_awake(self) -> None:
        """Take that back, unless it sleeps by now."""


class NotWanted(Exception):
    """Nobody waits any more for the model that wanted a place."""


class Places:
    """At most `limit` engines are awake; None: all that want to be. One that waits longer than `wait_seconds` is refused."""

    def __init__(self, limit: int | None = None, wait_seconds: float = 30.0) -> None:
        self._limit, self._wait_seconds = limit, wait_seconds
        self._awake: list[Sleeper] = []
        self._turn = asyncio.Lock()  # those who wait for it get it in their order
        self._news = asyncio.Event()

    @property
    def has_room(self) -> bool:
        return self._limit is None or len(self._awake) < self._limit

    def take_free(self, who: Sleeper) -> bool:
        """Take a place if one is free, and nobody waits for it."""
        if not self.has_room or self._turn.locked():
            return False
        self._awake.append(who)
        return True

    def leave(self, who: Sleeper) -> None:
        """Give a place back, if there is one to give."""
        if who in self._awake:
            self._awake.remove(who)
        self.look()

    def look(self) -> None:
        """Something has changed: an engine has nothing to do any more, has come, died, or is wanted by nobody."""
        self._news.set()

    async def take(self, who: Sleeper) -> None:
        """Wait for a place. Raises NoPlace if there is none in time, and NotWanted if it is for nobody any more."""
        if self._limit is None:
            self._awake.append(who)
            return
        deadline = time.monotonic() + self._wait_seconds
        async with self._turn:
            asked: Sleeper | None = None
            try:
                while who.is_wanted and not self.has_room:
                    asked = self._ask(asked)
                    is_coming = asked is not None and (asked.is_leaving or asked.engine.is_at_rest)
                    left = None if is_coming else deadline - time.monotonic()
                    if left is not None and left <= 0:
                        raise NoPlace(
                            f"the model sleeps, and of the {self._limit} that may be awake (--max-awake) none came to rest"
                            f" within {self._wait_seconds:g} s; try again later",
                            retry_after=1.0,
                        )
                    await self._wait_for_news(left)
                if not who.is_wanted:
                    raise NotWanted
                self._awake.append(who)
            finally:
                if asked is not None:
                    asked.stay_awake()

    async def _wait_for_news(self, seconds: float | None) -> None:
        """At most this long. Not by wait_for, which may swallow a cancellation that comes along with the news."""
        self._news.clear()
        waiting = asyncio.ensure_future(self._news.wait())
        try:
            await asyncio.wait((waiting,), timeout=seconds)
        finally:
            waiting.cancel()

    def _ask(self, asked: Sleeper | None) -> Sleeper | None:
        """Who is asked to make room: who was asked already, unless that one works and another does not."""
        leaving = next((each for each in self._awake if each.is_leaving), None)
        there = [each for each in self._awake if each.engine.client is not None]
        at_rest = [each for each in there if each.engine.is_at_rest]
        if leaving is None and (asked in at_rest or (asked in there and not at_rest)):
            return asked
        if asked is not None:
            asked.stay_awake()
        if leaving is not None or not there:
            return leaving
        if at_rest:
            chosen = min(at_rest, key=lambda each: each.engine.used_at)
        else:
            chosen = max(there, key=lambda each: each.engine.oldest_at)
        chosen.make_room()
        return chosen
