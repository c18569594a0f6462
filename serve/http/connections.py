"""How many HTTP connections there are: so few that files are left for everything else, and those who ask for health find a place.

A connection is busy with a request that has come whole and is not answered, and there are places for so many of them. All others
are idle, with part of a request too, but for those who ask for health and are answered at once. Where there is no room for another,
the one that was idle for the longest is ended. Where all places are busy, a few more are taken in, and told that the server is full
unless they ask for health.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Literal, TypeAlias

log = logging.getLogger(__name__)

Asked: TypeAlias = Literal["nothing", "health", "other"]

HEALTH_PLACES = 128  # beyond the limit, for those who ask for health
ENDED_AT_ONCE = 64  # where the system has no files left
READ_BYTES = 64 << 10  # of who is refused: the system resets what is closed unread, and the answer is lost
SAY_SECONDS = 60.0  # from one line about this to the next


class Connections:
    """The open connections. limit: places, or None for any number; there are never more than `limit` + HEALTH_PLACES, and those that
    have been ended and are about to be closed."""

    def __init__(self, limit: int | None, say: Callable[[str], None] | None = None) -> None:
        self.limit = sys.maxsize if limit is None else limit
        self.num_ended = 0  # so far
        self._open: set[Connection] = set()
        self._busy: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # who was heard last is last
        self._ended: set[Connection] = set()  # whose files are still open
        self._say = say or Seldom()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def is_full(self) -> bool:
        """Whether every place is taken by a connection that is busy."""
        return len(self._busy) >= self.limit

    def came(self, connection: Connection, asked: Asked) -> bool:
        """Whether it is let in. asked: as far as can be seen; who has asked is not ended before a protocol has looked at it."""
        if self._num_here >= self.limit:
            self._say(
                f"{self._num_here} HTTP connections are open, and there are places for {self.limit}: idle ones are closed,"
                " and requests told 503 where there are none"
            )
            if self.is_full and asked == "other":
                return False
            while not self.is_full and self._num_here >= self.limit and self._end_oldest():
                pass
            if self._num_here >= self.limit + HEALTH_PLACES and not self._end_oldest():
                return False
        self._open.add(connection)
        if asked == "other":
            self._busy.add(connection)
        elif asked == "nothing":
            self._idle[connection] = None
        return True

    def end_some(self) -> None:
        """End idle ones, so that there are files again."""
        for _ in range(ENDED_AT_ONCE):
            if not self._end_oldest():
                break

    @property
    def _num_here(self) -> int:
        return len(self._open) - len(self._ended)

    def _end_oldest(self) -> bool:
        """Whether there was one to be ended."""
        while self._idle:
            connection = next(iter(self._idle))
            del self._idle[connection]
            if connection.is_begun or not connection.peek(1):  # else it has asked for something by now
                self.num_ended += 1
                self._ended.add(connection)
                connection.end()
                return True
        return False

    def may_ask(self, connection: Connection) -> bool:
        """Whether a request would find a place."""
        return connection in self._busy or (self._is_here(connection) and not self.is_full)

    def take_place(self, connection: Connection) -> bool:
        """Whether there was one, for a request that has come whole."""
        if not self.may_ask(connection):
            return False
        self._idle.pop(connection, None)
        self._busy.add(connection)
        return True

    def visit(self, connection: Connection) -> None:
        """It asks for health, which takes no place."""
        self._idle.pop(connection, None)

    def rest(self, connection: Connection) -> None:
        """Nothing is asked on it, or not wholly, since now."""
        if self._is_here(connection):
            self._busy.discard(connection)
            self._idle.pop(connection, None)
            self._idle[connection] = None

    def left(self, connection: Connection) -> None:
        """It is closed."""
        for each in (self._open, self._busy, self._ended):
            each.discard(connection)
        self._idle.pop(connection, None)

    def _is_here(self, connection: Connection) -> bool:
        return connection in self._open and connection not in self._ended


class Connection(socket.socket):
    """One that was accepted, and is counted until it is closed."""

    def __init__(self, listener: socket.socket, among: Connections) -> None:
        """Raises OSError as `accept` does: BlockingIOError if nobody waits."""
        plain, _ = listener.accept()
        super().__init__(plain.family, plain.type, plain.proto, plain.detach())
        self.setblocking(False)
        self.among = among
        self.is_begun = False  # a protocol reads from it, or a handshake does
        self.transport: asyncio.Transport | None = None  # of its protocol

    def peek(self, num_bytes: int) -> bytes:
        """How what it has sent begins."""
        try:
            return self.recv(num_bytes, socket.MSG_PEEK)
        except OSError:  # nothing is there yet, or it is broken, as whoever reads from it will see
            return b""

    def refuse(self, answer: bytes) -> None:
        with suppress(OSError):
            self.send(answer)
            self.recv(READ_BYTES)
        self.close()

    def end(self) -> None:
        """Close it, now or in the next turn of the event loop."""
        if self.transport is not None:
            self.transport.abort()
        elif self.is_begun:
            with suppress(OSError):
                self.shutdown(socket.SHUT_RDWR)  # the handshake sees its end
        else:
            self.close()

    def close(self) -> None:
        self.among.left(self)
        self.transport = None
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
