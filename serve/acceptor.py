"""Who connects over HTTP, taken from the system and begun with: a few at a time, and who asks for health before all others.

asyncio's own server begins with connections in the order in which they came. Behind thousands that come at once, health would wait
until all of them have a protocol of their own.
"""

from __future__ import annotations

import asyncio
import errno
import socket
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress

from inferc.serve.access import OPEN
from inferc.serve.connections import Connections, Seldom

PROBES = tuple(b"GET " + path.encode() for path in sorted(OPEN))  # how a request for health begins
PEEKED_BYTES = max(map(len, PROBES))
READ_BYTES = 64 << 10  # of who is refused: the system resets what is closed unread, and the answer is lost
# Of connections, before others have their turn of the event loop.
TAKEN_AT_ONCE = 256
BEGUN_AT_ONCE = 16
RETRY_SECONDS = 1.0  # after the system had no file left
NO_FILES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
FULL = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"


class Acceptor:
    """Takes connections of a listening socket while it is open, those that there is a place for; made on an event loop."""

    def __init__(
        self,
        listener: socket.socket,
        connections: Connections,
        begin: Callable[[socket.socket], Awaitable[object]],
        greets: bool,
        say: Callable[[str], None] | None = None,
    ) -> None:
        """begin: gives a connection its protocol. greets: what is asked can be seen from outside, as under TLS it cannot, and who
        finds no place is told so in plain HTTP."""
        self._listener, self._connections, self._begin, self._greets = listener, connections, begin, greets
        self._say = say or Seldom()
        self._loop = asyncio.get_running_loop()
        self._probes: deque[Connection] = deque()  # that ask for health, and that nothing has begun with
        self._others: deque[Connection] = deque()
        self._is_beginning = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._retry: asyncio.TimerHandle | None = None
        self._loop.add_reader(listener.fileno(), self._take)

    def close(self) -> None:
        """Take nobody any more, and close what nothing has begun with. The socket listens on."""
        self._loop.remove_reader(self._listener.fileno())
        if self._retry is not None:
            self._retry.cancel()
        for waiting in (self._probes, self._others):
            for connection in waiting:
                connection.close()
            waiting.clear()

    def _take(self) -> None:
        """Take who waits in the system's queue; of more than TAKEN_AT_ONCE the event loop tells again."""
        for _ in range(TAKEN_AT_ONCE):
            try:
                self._sort(Connection(self._listener, self._connections))
            except (BlockingIOError, InterruptedError):
                break
            except OSError as error:  # else it is of one connection, which is no more
                if error.errno in NO_FILES:
                    self._pause(error)
                    break
        if not self._is_beginning:
            self._begin_some()

    def _pause(self, error: OSError) -> None:
        self._say(f"no connection can be taken: {error}; raise the limit of open files")
        self._loop.remove_reader(self._listener.fileno())  # it would be told of them without end
        self._retry = self._loop.call_later(RETRY_SECONDS, self._loop.add_reader, self._listener.fileno(), self._take)

    def _sort(self, connection: Connection) -> None:
        said = connection.peek() if self._greets else b""
        is_in_vain = self._connections.is_full and not any(said.startswith(probe[: len(said)]) for probe in PROBES)
        if is_in_vain or not self._connections.came(connection):
            connection.refuse(FULL if self._greets else b"")
        elif said.startswith(PROBES):
            self._probes.append(connection)
        else:
            self._others.append(connection)

    def _begin_some(self) -> None:
        for _ in range(BEGUN_AT_ONCE):
            waiting = self._probes or self._others
            if not waiting:
                break
            task = self._loop.create_task(self._begin_with(waiting.popleft()))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
        self._is_beginning = bool(self._probes or self._others)
        if self._is_beginning:
            self._loop.call_soon(self._begin_some)

    async def _begin_with(self, connection: Connection) -> None:
        self._connections.rests(connection.fileno())
        # Of a handshake that fails, or of a client that has left: nobody has asked for anything.
        with suppress(OSError, asyncio.TimeoutError):
            await self._begin(connection)


class Connection(socket.socket):
    """One that was accepted, and gives its place back when it is closed."""

    def __init__(self, listener: socket.socket, connections: Connections) -> None:
        """Raises OSError as `accept` does: BlockingIOError if nobody waits."""
        plain, _ = listener.accept()
        super().__init__(plain.family, plain.type, plain.proto, plain.detach())
        self.setblocking(False)
        self._connections: Connections | None = connections

    def peek(self) -> bytes:
        """How what it has sent begins."""
        try:
            return self.recv(PEEKED_BYTES, socket.MSG_PEEK)
        except OSError:  # nothing is there yet
            return b""

    def refuse(self, answer: bytes) -> None:
        with suppress(OSError):
            self.send(answer)
            self.recv(READ_BYTES)
        self.close()

    def close(self) -> None:
        connections, self._connections = self._connections, None
        if connections is not None:
            connections.left(self.fileno())
        super().close()
