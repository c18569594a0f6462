"""How many HTTP connections there are: so few that files are left for everything else, and those who ask for health find a place.

Where all places are taken, the connection that has been idle for the longest, or has brought nothing of its request, gives its place
to the next one. Where all are busy, a few more are taken in, and told that the server is full unless they ask for health.
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
READ_BYTES = 64 << 10  # of who is refused: the system resets what is closed unread, and the answer is lost
SAY_SECONDS = 60.0  # from one line about this to the next


class Connections:
    """The open connections by their files' numbers. limit: places, or None for any number; beyond `limit` + HEALTH_PLACES one is
    let in only where another ends for it."""

    def __init__(self, limit: int | None, say: Callable[[str], None] | None = None) -> None:
        self.limit = sys.maxsize if limit is None else limit
        self.num_ended = 0  # so far, for others; their files are closed a little later
        self._open: dict[int, Connection] = {}
        self._idle: dict[int, None] = {}  # those that no request is answered on; who was heard last is last
        self._extra: set[int] = set()  # those beyond the limit
        self._say = say or Seldom()

    def __len__(self) -> int:
        return len(self._open)

    def came(self, connection: Connection, has_asked: bool) -> bool:
        """Whether there is a place for it. has_asked: it has sent something; it is busy until this was looked at."""
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
        if not has_asked:
            self._idle[number] = None
        return True

    @property
    def is_full(self) -> bool:
        """Whether every place is taken by a connection that is busy."""
        return len(self._open) - len(self._idle) >= self.limit

    def _end_oldest(self) -> None:
        number = next(iter(self._idle))
        del self._idle[number]
        self.num_ended += 1
        self._open[number].end()

    def busy(self, number: int) -> None:
        """What is asked on it is not answered."""
        self._idle.pop(number, None)

    def rests(self, number: int) -> None:
        """Nothing is asked on it, or not wholly, since now."""
        if number in self._open:
            self._idle.pop(number, None)
            self._idle[number] = None

    def is_extra(self, number: int) -> bool:
        """Whether it was taken in for health alone."""
        return number in self._extra

    def left(self, number: int) -> None:
        self._open.pop(number, None)
        self._idle.pop(number, None)
        self._extra.discard(number)


class Connection(socket.socket):
    """One that was accepted, and gives its place back when it is closed."""

    def __init__(self, listener: socket.socket, connections: Connections) -> None:
        """Raises OSError as `accept` does: BlockingIOError if nobody waits."""
        plain, _ = listener.accept()
        super().__init__(plain.family, plain.type, plain.proto, plain.detach())
        self.setblocking(False)
        self.is_begun = False  # a protocol reads from it
        self._connections: Connections | None = connections

    def peek(self, num_bytes: int) -> bytes:
        """How what it has sent begins."""
        try:
            return self.recv(num_bytes, socket.MSG_PEEK)
        except OSError:  # nothing is there yet
            return b""

    def refuse(self, answer: bytes) -> None:
        with suppress(OSError):
            self.send(answer)
            self.recv(READ_BYTES)
        self.close()

    def end(self) -> None:
        """Give way to another: at once, or as soon as the protocol has seen that nothing more comes, and closes it."""
        if self.is_begun:
            with suppress(OSError):
                self.shutdown(socket.SHUT_RDWR)
        else:
            self.close()

    def close(self) -> None:
        connections, self._connections = self._connections, None
        if connections is not None:
            connections.left(self.fileno())
        super().close()


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
