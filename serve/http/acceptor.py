"""Who connects over HTTP, taken from the system and begun with: a few at a time, and who asks for health before all others.

asyncio's own server begins with connections in the order in which they came. Behind thousands that come at once, health would wait
until all of them have a protocol of their own.
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
from collections import deque
from collections.abc import Awaitable, Callable, Iterator
from contextlib import suppress
from functools import partial

from inferc.serve.http.connections import Asked, Connection, Connections, Seldom
from inferc.serve.security.access import OPEN

log = logging.getLogger(__name__)

PROBES = tuple(
    f"{verb} {path}".encode() for path in sorted(OPEN) for verb in ("GET", "HEAD")
)  # how one for health begins
PEEKED_BYTES = max(map(len, PROBES))
# Before others have their turn of the event loop: connections that are taken in a row, how often, and those that are begun with.
TAKEN_IN_A_ROW, ROWS = 64, 4
BEGUN_AT_ONCE = 8  # of each kind
RETRY_SECONDS = 0.05  # after the system had no file left
NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Acceptor:
    """Takes connections of a listening socket, those that there is a place for, until it is closed; made on an event loop."""

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        begin: Callable[[Connection], Awaitable[object]],
        greets: bool,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """begin: gives a connection its protocol. greets: what is asked can be seen from outside, as under TLS it cannot, and who
        finds no place is told so in plain HTTP."""
        self._listener, self._connections, self._begin, self._greets = listener, connections, begin, greets
        self._say = say or Seldom()
        self._loop = asyncio.get_running_loop()
        # Taken, and not begun with.
        self._new: list[Connection] = []  # and silent when they came; they are looked at once more
        self._probes, self._silent, self._others = deque[Connection](), deque[Connection](), deque[Connection]()
        self._beginning: asyncio.Handle | None = None  # with more of them, in the next turn
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._loop.add_reader(listener.fileno(), self._take)

    def close(self) -> None:
        """Take nobody any more, and close what has no protocol yet. The socket listens on."""
        self._loop.remove_reader(self._listener.fileno())
        for handle in (self._retry, self._beginning):
            if handle is not None:
                handle.cancel()
        for waiting in (self._new, self._probes, self._silent, self._others):
            for connection in waiting:
                connection.close()
            waiting.clear()
        for task in self._tasks:
            task.cancel()

    def _take(self) -> None:
        """Take who waits in the system's queue; of those who are left the event loop tells again."""
        for _ in range(ROWS):
            taken, num_ended = list(self._accept()), self._connections.num_ended
            for connection in taken:
                self._sort(connection)
            # Where others had to end, their files are to be closed before more are opened.
            if len(taken) < TAKEN_IN_A_ROW or self._connections.num_ended > num_ended:
                break
        if self._beginning is None:
            self._begin_some()

    def _accept(self) -> Iterator[Connection]:
        for _ in range(TAKEN_IN_A_ROW):
            try:
                yield Connection(self._listener, self._connections)
            except (BlockingIOError, InterruptedError):
                return
            except OSError as error:  # else it is of one connection, which is no more
                if error.errno in NO_FILES:
                    self._pause(error)
                    return

    def _pause(self, error: OSError) -> None:
        self._say(f"no connection can be taken: {error}; raise the limit of open files")
        self._connections.end_some()
        self._loop.remove_reader(self._listener.fileno())  # it would be told of them without end
        self._retry = self._loop.call_later(RETRY_SECONDS, self._loop.add_reader, self._listener.fileno(), self._take)

    def _sort(self, connection: Connection) -> None:
        asked = self._asked(connection)
        if not self._connections.came(connection, asked):
            connection.refuse(FULL if self._greets else b"")
        elif asked == "nothing":
            self._new.append(connection)
        else:
            (self._probes if asked == "health" else self._others).append(connection)

    def _asked(self, connection: Connection) -> Asked:
        """What can be seen from outside: the beginning of a request for health may become one."""
        said = connection.peek(PEEKED_BYTES) if self._greets else b""
        if said.startswith(PROBES):
            return "health"
        return "nothing" if any(probe.startswith(said) for probe in PROBES) else "other"

    def _begin_some(self) -> None:
        self._beginning = None
        new, self._new = self._new, []
        for connection in new:  # between its coming and its first words a client needs a moment
            (self._probes if self._asked(connection) == "health" else self._silent).append(connection)
        for waiting in (self._probes, self._silent, self._others):
            left = BEGUN_AT_ONCE
            while waiting and left:
                connection = waiting.popleft()
                if connection.fileno() >= 0:  # else it has been ended
                    task = self._loop.create_task(self._begin_with(connection))
                    self._tasks.add(task)
                    task.add_done_callback(partial(self._has_begun, connection))
                    left -= 1
        if self._probes or self._silent or self._others:
            self._beginning = self._loop.call_soon(self._begin_some)

    async def _begin_with(self, connection: Connection) -> None:
        connection.is_begun = True
        if not self._greets:
            self._connections.rest(connection)  # a handshake keeps no place, whatever had been said before it began
        # Of a handshake that fails, or of a client that has left: nobody has asked for anything.
        with suppress(OSError, asyncio.TimeoutError):
            await self._begin(connection)

    def _has_begun(self, connection: Connection, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            connection.end()
        elif (error := task.exception()) is not None:
            log.error("a connection has got no protocol", exc_info=error)
            connection.close()
