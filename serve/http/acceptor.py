"""The acceptor of HTTP connections, which starts a few at a time, and health probes before all others.

asyncio's own server starts connections in the order in which they come. A health probe behind thousands that come at
once would have to wait until all of them have a protocol object.
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
)  # the possible beginnings of a health probe's request
PEEKED_BYTES = max(map(len, PROBES))
# In one turn of the event loop, at most ROWS times TAKEN_IN_A_ROW connections are accepted, and BEGUN_AT_ONCE of each
# kind (probes, silent ones, others) are started.
TAKEN_IN_A_ROW, ROWS = 64, 4
BEGUN_AT_ONCE = 8
RETRY_SECONDS = 0.05  # pause before the next try when the system has no file descriptor left
NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Acceptor:
    """The acceptor of a listening socket, which takes those connections that there is a place for, until it is closed.

    It must be created on the event loop that it uses.
    """

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        begin: Callable[[Connection], Awaitable[object]],
        greets: bool,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """Begin to accept connections.

        begin: gives a connection its protocol.
        greets: the connections are plain HTTP (no TLS), so their requests can be peeked at before a protocol reads
        them, and a connection for which there is no place is answered with 503.
        """
        self._listener, self._connections, self._begin, self._greets = listener, connections, begin, greets
        self._say = say or Seldom()
        self._loop = asyncio.get_running_loop()
        # The connections that were accepted and not started yet. Those in `_new` had sent nothing when they came, and
        # are looked at once more.
        self._new: list[Connection] = []
        self._probes, self._silent, self._others = deque[Connection](), deque[Connection](), deque[Connection]()
        self._beginning: asyncio.Handle | None = None  # starts more of them in the next turn
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._loop.add_reader(listener.fileno(), self._take)

    def close(self) -> None:
        """Accept no more connections, and close those that have no protocol yet; the socket keeps listening."""
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
        """Accept connections from the system's queue; if some are left, the event loop calls this again."""
        for _ in range(ROWS):
            taken, num_ended = list(self._accept()), self._connections.num_ended
            for connection in taken:
                self._sort(connection)
            # If idle connections had to be ended, let their files be closed before more are opened.
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
            except OSError as error:  # any error that is not in NO_FILES is of one connection, which is gone
                if error.errno in NO_FILES:
                    self._pause(error)
                    return

    def _pause(self, error: OSError) -> None:
        self._say(f"no connection can be taken: {error}; raise the limit of open files")
        self._connections.end_some()
        self._loop.remove_reader(self._listener.fileno())  # otherwise the loop would call this all the time
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
        """Tell what a connection asks for, by peeking; a beginning of a health probe still counts as "nothing"."""
        said = connection.peek(PEEKED_BYTES) if self._greets else b""
        if said.startswith(PROBES):
            return "health"
        return "nothing" if any(probe.startswith(said) for probe in PROBES) else "other"

    def _begin_some(self) -> None:
        self._beginning = None
        new, self._new = self._new, []
        for connection in new:  # look again: a client sends its first bytes a moment after it has connected
            (self._probes if self._asked(connection) == "health" else self._silent).append(connection)
        for waiting in (self._probes, self._silent, self._others):
            left = BEGUN_AT_ONCE
            while waiting and left:
                connection = waiting.popleft()
                if connection.fileno() >= 0:  # negative: it has been ended meanwhile
                    task = self._loop.create_task(self._begin_with(connection))
                    self._tasks.add(task)
                    task.add_done_callback(partial(self._has_begun, connection))
                    left -= 1
        if self._probes or self._silent or self._others:
            self._beginning = self._loop.call_soon(self._begin_some)

    async def _begin_with(self, connection: Connection) -> None:
        connection.is_begun = True
        if not self._greets:
            self._connections.rest(connection)  # a TLS handshake takes no place of a busy connection
        # These errors come from a handshake that fails, or a client that has left; no request is lost.
        with suppress(OSError, TimeoutError):
            await self._begin(connection)

    def _has_begun(self, connection: Connection, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if task.cancelled():
            connection.end()
        elif (error := task.exception()) is not None:
            log.error("a connection has got no protocol", exc_info=error)
            connection.close()
