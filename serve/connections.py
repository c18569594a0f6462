"""How many HTTP connections there are: so few that files are left for everything else, and those who ask for health find a place.

Where all places are taken, the connection that has been idle for the longest gives its place to the next one. Where all are
busy, a few more are taken in, and told that the server is full unless they ask for health.
"""

from __future__ import annotations

import logging
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress

log = logging.getLogger(__name__)

HEALTH_PLACES = 128  # beyond the limit, for those who ask for health
SAY_SECONDS = 60.0  # from one line about this to the next


class Connections:
    """The open connections by their files' numbers. limit: places, or None for any number; beyond `limit` + HEALTH_PLACES nobody is
    let in. Who has come is busy until a protocol has begun with it, and it `rests`."""

    def __init__(self, limit: int | None, say: Callable[[str], None] | None = None) -> None:
        self.limit = sys.maxsize if limit is None else limit
        self._open: dict[int, socket.socket] = {}
        self._idle: dict[int, None] = {}  # those that no request is answered on, in the order in which they became so
        self._extra: set[int] = set()  # those beyond the limit
        self._say = say or Seldom()

    def __len__(self) -> int:
        return len(self._open)

    def came(self, connection: socket.socket) -> bool:
        """Whether there is a place for it."""
        number = connection.fileno()
        if len(self._open) >= self.limit:
            self._say(
                f"{len(self._open)} HTTP connections are open, and there are places for {self.limit}: idle ones are closed"
            )
            has_place_for_health = self.is_full and len(self._open) < self.limit + HEALTH_PLACES
            if not has_place_for_health and not self._idle:
                return False
            if self.is_full:
                self._extra.add(number)
            if not has_place_for_health:
                self._end_oldest()
        self._open[number] = connection
        return True

    @property
    def is_full(self) -> bool:
        """Whether every place is taken by a connection that is busy."""
        return len(self._open) - len(self._idle) >= self.limit

    def _end_oldest(self) -> None:
        number = next(iter(self._idle))
        del self._idle[number]
        with suppress(OSError):
            self._open[number].shutdown(socket.SHUT_RDWR)  # whoever reads from it sees its end, and closes it

    def busy(self, number: int) -> None:
        """A request has begun on it."""
        self._idle.pop(number, None)

    def rests(self, number: int) -> None:
        """Nothing is asked on it yet, or what was asked is answered."""
        if number in self._open:
            self._idle[number] = None

    def is_extra(self, number: int) -> bool:
        """Whether it was taken in for health alone."""
        return number in self._extra

    def left(self, number: int) -> None:
        self._open.pop(number, None)
        self._idle.pop(number, None)
        self._extra.discard(number)


class Seldom:
    """Logs a warning once a minute at most, with how many there were that were not logged."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next_at, self._num_left_out = clock(), 0

    def __call__(self, message: str) -> None:
        if self._clock() < self._next_at:
            self._num_left_out += 1
            return
        self._next_at = self._clock() + SAY_SECONDS
        more = f" ({self._num_left_out} times more since this was said last)" if self._num_left_out else ""
        self._num_left_out = 0
        log.warning("%s%s", message, more)
