"""The limit on HTTP connections, which leaves open files for everything else, and room for health probes.

A connection is busy while a request that was received completely is not answered; the number of busy ones is limited.
All others are idle, even with a part of a request, except for health probes, which are answered at once. If there is no
room for another connection, the one that was idle for the longest time is ended. If all places are busy, a few more
connections are accepted, and answered with 503 (server full) unless they are health probes.
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

HEALTH_PLACES = 128  # connections beyond the limit, for health probes
ENDED_AT_ONCE = 64  # idle connections that are ended when the system has no file descriptor left
# Bytes that are read from a refused connection before it is closed: the system resets a connection that is closed with
# unread data, and the answer would be lost.
READ_BYTES = 64 << 10
SAY_SECONDS = 60.0  # the least time between two warnings


class Connections:
    """The open connections of the HTTP endpoint.

    limit: number of places; None: any number. There are never more than `limit` + HEALTH_PLACES connections, beside
    those that have been ended and are about to be closed.
    """

    def __init__(self, limit: int | None, say: Callable[[str], None] | None = None) -> None:
        self.limit = sys.maxsize if limit is None else limit
        self.num_ended = 0  # connections that were ended to make room, so far
        self._open: set[Connection] = set()
        self._busy: set[Connection] = set()
        self._idle: dict[Connection, None] = {}  # in the order in which they became idle, the latest last
        self._ended: set[Connection] = set()  # connections that were ended and whose files are still open
        self._say = say or Seldom()

    def __len__(self) -> int:
        return len(self._open)

    @property
    def is_full(self) -> bool:
        """True if every place is taken by a busy connection."""
        return len(self._busy) >= self.limit

    def came(self, connection: Connection, asked: Asked) -> bool:
        """Register a new connection, and return whether there is room for it.

        asked: what it asks for as far as can be seen. A connection that has asked for something is not ended before a
        protocol has looked at it.
        """
        if self._num_here >= self.limit:
            self._say(
                f"{self._num_here} HTTP connections are open, and there are places for {self.limit}:"
                " idle ones are closed, and requests told 503 where there are none"
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
        """End some idle connections, so that their files can be used again."""
        for _ in range(ENDED_AT_ONCE):
            if not self._end_oldest():
                break

    @property
    def _num_here(self) -> int:
        return len(self._open) - len(self._ended)

    def _end_oldest(self) -> bool:
        """End the connection that was idle for the longest time, and return whether there was one."""
        while self._idle:
            connection = next(iter(self._idle))
            del self._idle[connection]
            if connection.is_begun or not connection.peek(1):  # otherwise it has asked for something by now
                self.num_ended += 1
                self._ended.add(connection)
                connection.end()
                return True
        return False

    def may_ask(self, connection: Connection) -> bool:
        """Return whether a request on this connection would find a place."""
        return connection in self._busy or (self._is_here(connection) and not self.is_full)

    def take_place(self, connection: Connection) -> bool:
        """Take a place for a request that was received completely, and return whether there was one."""
        if not self.may_ask(connection):
            return False
        self._idle.pop(connection, None)
        self._busy.add(connection)
        return True

    def visit(self, connection: Connection) -> None:
        """Note that a connection carries a health probe, which takes no place and cannot be ended as idle."""
        self._idle.pop(connection, None)

    def rest(self, connection: Connection) -> None:
        """Note that a connection is idle from now on: it has no request, or only a part of one."""
        if self._is_here(connection):
            self._busy.discard(connection)
            self._idle.pop(connection, None)
            self._idle[connection] = None

    def left(self, connection: Connection) -> None:
        """Forget a connection that is closed."""
        for each in (self._open, self._busy, self._ended):
            each.discard(connection)
        self._idle.pop(connection, None)

    def _is_here(self, connection: Connection) -> bool:
        return connection in self._open and connection not in self._ended


class Connection(socket.socket):
    """An accepted connection, which is counted until it is closed."""

    def __init__(self, listener: socket.socket, among: Connections) -> None:
        """Accept a connection; raises OSError as `accept` does, BlockingIOError if none waits."""
        plain, _ = listener.accept()
        super().__init__(plain.family, plain.type, plain.proto, plain.detach())
        self.setblocking(False)
        self.among = among
        self.is_begun = False  # a protocol or a TLS handshake reads from it
        self.transport: asyncio.Transport | None = None  # the transport of its protocol

    def peek(self, num_bytes: int) -> bytes:
        """Return the first bytes that the client has sent, without taking them."""
        try:
            return self.recv(num_bytes, socket.MSG_PEEK)
        except OSError:  # nothing has come yet, or it is broken, which the protocol will see
            return b""

    def refuse(self, answer: bytes) -> None:
        with suppress(OSError):
            self.send(answer)
            self.recv(READ_BYTES)
        self.close()

    def end(self) -> None:
        """Close the connection, now or in the next turn of the event loop."""
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
    """A logger of a frequent warning, once in SAY_SECONDS at most, with the number of those left out."""

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
