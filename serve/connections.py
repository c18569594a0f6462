"""How many HTTP connections there are: so few that files are left for everything else, and those who ask for health find a place.

Where all places are taken, the connection that has been idle for the longest gives its place to the next one. Where all are
busy, a few more are taken in, and told that the server is full unless they ask for health.
"""

from __future__ import annotations

import logging
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from inferc.serve.access import OPEN

log = logging.getLogger(__name__)

HEALTH_PLACES = 128  # beyond the limit, for those who ask for health
PROBES = tuple(b"GET " + path.encode() for path in sorted(OPEN))  # how a request for health begins
PEEKED_BYTES = max(map(len, PROBES))
READ_BYTES = 64 << 10  # of who is refused: the system resets what is closed unread, and the answer is lost
REFUSED_AT_ONCE = 64  # in a row, before others have their turn
SAY_SECONDS = 60.0  # from one line about this to the next
FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
ACCEPT_FAILED = "socket.accept() out of system resource"  # asyncio's words for it


class Connections:
    """The open connections by their files' numbers. limit: places; more than `limit` + HEALTH_PLACES are closed at once."""

    def __init__(self, limit: int, say: Callable[[str], None] | None = None) -> None:
        self.limit = limit
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
        self._idle[number] = None
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
        """What was asked on it is answered."""
        if number in self._open:
            self._idle[number] = None

    def is_extra(self, number: int) -> bool:
        """Whether it was taken in for health alone."""
        return number in self._extra

    def left(self, number: int) -> None:
        self._open.pop(number, None)
        self._idle.pop(number, None)
        self._extra.discard(number)


class Listener(socket.socket):
    """A listening socket whose connections are counted, if `connections` is set."""

    connections: Connections | None = None
    greets = True  # who finds no place is told so, in plain HTTP

    def accept(self) -> tuple[socket.socket, Any]:
        """Raises BlockingIOError if nobody waits, or if all who waited were turned away."""
        for _ in range(REFUSED_AT_ONCE):
            plain, address = super().accept()
            if self.connections is None:
                return plain, address
            connection = _Counted(plain.family, plain.type, plain.proto, plain.detach())
            if not self._is_in_vain(connection) and self.connections.came(connection):
                connection.of = self.connections
                return connection, address
            if self.greets:
                connection.setblocking(False)
                with suppress(OSError):
                    connection.send(FULL)
                    connection.recv(READ_BYTES)
            connection.close()
        raise BlockingIOError

    def _is_in_vain(self, connection: socket.socket) -> bool:
        """Whether there is no place, and it has asked for something other than health already: as far as can be seen from
        outside, which under TLS is not at all."""
        assert self.connections is not None
        if not (self.greets and self.connections.is_full):
            return False
        try:
            begin = connection.recv(PEEKED_BYTES, socket.MSG_PEEK | socket.MSG_DONTWAIT)
        except OSError:  # nothing is there yet
            return False
        return not any(begin.startswith(probe[: len(begin)]) for probe in PROBES)


class _Counted(socket.socket):
    of: Connections | None = None

    def close(self) -> None:
        """Give the place back."""
        connections, self.of = self.of, None
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


def quiet_accept_errors(loop: Any) -> None:
    """Let an event loop say once a minute that there are no files left for a connection, where it would say so a thousand times a
    second."""
    say = Seldom()

    def handle(loop: Any, context: Mapping[str, Any]) -> None:
        if context.get("message") == ACCEPT_FAILED:
            say(f"no connection can be taken: {context.get('exception')}; raise the limit of open files")
        else:
            loop.default_exception_handler(context)

    loop.set_exception_handler(handle)
