"""Who is begun with first, who is told that there is no place, and what happens when the system has no files."""

from __future__ import annotations

import asyncio
import errno
import socket
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

import pytest

from inferc.serve.http import acceptor, connections
from inferc.serve.http import address as http_address
from inferc.serve.http.acceptor import BEGUN_AT_ONCE, FULL, Acceptor
from inferc.serve.http.connections import Connection, Connections

HEALTH = b"GET /health HTTP/1.1\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n"


class Reads(asyncio.Protocol):
    """Tells a connection by whom it is read."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.connection.transport = transport


class House(AbstractAsyncContextManager["House"]):
    """A listening socket, its acceptor, and what it has begun with: how each had begun to speak."""

    def __init__(self, limit: int | None = None, greets: bool = True) -> None:
        self.listener = http_address.bind("127.0.0.1", 0)
        self.connections = Connections(limit)
        self.begun: list[bytes] = []
        self.taken: list[Connection] = []
        self.said: list[str] = []
        self.clients: list[socket.socket] = []
        self.fails: Exception | None = None
        self.never = False  # is a protocol ready
        self.has_protocols = False  # that read from connections
        self.acceptor = Acceptor(self.listener, self.connections, self._begin, greets, self.said.append)

    async def _begin(self, connection: Connection) -> None:
        self.taken.append(connection)
        self.begun.append(connection.peek(len(HEALTH)))
        if self.fails is not None:
            raise self.fails
        if self.has_protocols:
            await asyncio.get_running_loop().connect_accepted_socket(lambda: Reads(connection), connection)
        if self.never:
            await asyncio.Future[None]()

    def connect(self, sent: bytes) -> socket.socket:
        client = socket.create_connection(self.listener.getsockname(), timeout=30)
        self.clients.append(client)
        client.sendall(sent)
        return client

    async def until(self, is_true: Callable[[], bool]) -> None:
        for _ in range(1_000_000):  # turns of the loop
            if is_true():
                return
            await asyncio.sleep(0)
        raise AssertionError("it does not come")

    async def __aexit__(self, *of_error: object) -> None:
        self.acceptor.close()
        for each in (self.listener, *self.clients, *self.taken):
            each.close()
        await self.until(lambda: len(self.connections) == 0)


def test_who_asks_for_health_is_begun_with_first() -> None:
    async def work() -> None:
        async with House() as house:
            for _ in range(2 * BEGUN_AT_ONCE):
                house.connect(POST)
            house.connect(HEALTH)
            await house.until(lambda: bool(house.begun))
            assert house.begun[0] == HEALTH and len(house.begun) == BEGUN_AT_ONCE + 1
            await house.until(lambda: len(house.begun) == 2 * BEGUN_AT_ONCE + 1)
            assert house.begun.count(HEALTH) == 1 and len(house.connections) == len(house.begun)

    asyncio.run(work())


def test_who_has_said_nothing_does_not_stand_behind_those_who_have() -> None:
    """A silent client may be about to ask for health."""

    async def work() -> None:
        async with House() as house:
            for _ in range(2 * BEGUN_AT_ONCE):
                house.connect(POST)
            house.connect(b"")
            await house.until(lambda: bool(house.begun))
            assert house.begun[0] == b""

    asyncio.run(work())


def test_who_asks_for_health_a_moment_after_it_came_does_not_stand_behind_the_silent() -> None:
    async def work() -> None:
        async with House() as house:
            for _ in range(40 * BEGUN_AT_ONCE):
                house.connect(b"")
            await house.until(lambda: len(house.begun) >= BEGUN_AT_ONCE)
            late = house.connect(b"")
            await house.until(lambda: len(house.connections) == 40 * BEGUN_AT_ONCE + 1)
            late.sendall(HEALTH)
            await house.until(lambda: HEALTH in house.begun)
            assert len(house.begun) < 20 * BEGUN_AT_ONCE

    asyncio.run(work())


def test_more_than_are_taken_at_once_all_have_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "TAKEN_IN_A_ROW", 3)
    monkeypatch.setattr(acceptor, "ROWS", 2)
    monkeypatch.setattr(acceptor, "BEGUN_AT_ONCE", 2)

    async def work() -> None:
        async with House() as house:
            for sent in (POST, b"", HEALTH) * 7:
                house.connect(sent)
            await house.until(lambda: len(house.begun) == 21)

    asyncio.run(work())


def test_who_has_asked_and_waits_for_a_protocol_keeps_its_place() -> None:
    """While two accepted connections have not started yet, a third one is refused, and a health probe finds a place."""

    async def work() -> None:
        async with House(limit=2) as house:
            clients = [house.connect(sent) for sent in (POST, POST, POST, HEALTH)]
            await house.until(lambda: len(house.begun) == 3)
            assert sorted(house.begun) == sorted([POST[: len(HEALTH)]] * 2 + [HEALTH])
            assert clients[2].recv(len(FULL)) == FULL and clients[2].recv(1) == b""

    asyncio.run(work())


def test_health_finds_a_place_among_those_who_say_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Silent clients have all places, and those beyond them; one of them gives way, and health to none of the next."""
    monkeypatch.setattr(connections, "HEALTH_PLACES", 2)

    async def work() -> None:
        async with House(limit=1) as house:
            house.connect(POST)
            await house.until(lambda: len(house.begun) == 1)
            silent = [house.connect(b"") for _ in range(4)]
            house.connect(HEALTH)
            silent += [house.connect(b"") for _ in range(4)]
            await house.until(lambda: HEALTH in house.begun)
            await house.until(lambda: sum(map(_is_closed, silent)) == 7)
            assert len(house.begun) == 3 and len(house.connections) == 3

    asyncio.run(work())


def test_files_are_closed_before_more_are_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each new connection of a row ends an idle one that has a protocol, and the next row waits for a loop turn."""
    monkeypatch.setattr(acceptor, "TAKEN_IN_A_ROW", 3)

    async def work() -> None:
        async with House(limit=6) as house:
            house.has_protocols = True
            for _ in range(6):
                house.connect(b"")
            await house.until(lambda: len(house.begun) == 6)
            for _ in range(6):
                house.connect(b"")
            most = 0

            def is_done() -> bool:
                nonlocal most
                most = max(most, len(house.connections))
                return len(house.begun) == 12 and len(house.connections) == 6

            await house.until(is_done)
            assert most == 9

    asyncio.run(work())


def test_who_gets_no_protocol_holds_no_place(caplog: pytest.LogCaptureFixture) -> None:
    async def work() -> None:
        async with House(limit=1) as house:
            house.fails = RuntimeError("a fault of ours")
            client = house.connect(POST)
            await house.until(lambda: _is_closed(client))
            assert len(house.connections) == 0

    asyncio.run(work())
    assert "a fault of ours" in caplog.text


def test_under_tls_nobody_is_looked_at_or_greeted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEALTH_PLACES", 0)

    async def work() -> None:
        async with House(limit=BEGUN_AT_ONCE + 1, greets=False) as house:
            for _ in range(BEGUN_AT_ONCE):
                house.connect(POST)
            last = house.connect(HEALTH)
            await house.until(lambda: len(house.begun) == BEGUN_AT_ONCE + 1)
            assert house.begun[-1] == HEALTH, "in the order in which they came"
            assert all(map(house.connections.take_place, house.taken))
            late = house.connect(POST)
            await house.until(lambda: _is_closed(late))
            assert not _is_closed(last)

    asyncio.run(work())


def test_a_handshake_that_is_never_ended_keeps_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who had begun one before it was begun with is not ended at once, and does not stay for that."""
    monkeypatch.setattr(connections, "HEALTH_PLACES", 0)

    async def work() -> None:
        async with House(limit=BEGUN_AT_ONCE, greets=False) as house:
            house.never = True
            halves = [house.connect(b"\x16\x03\x01") for _ in range(BEGUN_AT_ONCE)]
            late = [house.connect(b"") for _ in range(2)]  # no one can be ended for them yet
            await house.until(lambda: all(map(_is_closed, late)))
            await house.until(lambda: len(house.begun) == BEGUN_AT_ONCE)
            house.connect(b"")
            await house.until(lambda: len(house.begun) == BEGUN_AT_ONCE + 1)
            await house.until(lambda: sum(map(_is_closed, halves)) == 1)

    asyncio.run(work())


def _is_closed(client: socket.socket) -> bool:
    """Return whether a connection was closed without a word."""
    client.setblocking(False)
    try:
        return client.recv(1) == b""
    except BlockingIOError:
        return False
    except ConnectionResetError:
        return True


def test_a_handshake_that_fails_is_nobodys_error() -> None:
    async def work() -> None:
        heard: list[object] = []
        asyncio.get_running_loop().set_exception_handler(lambda loop, context: heard.append(context))
        async with House() as house:
            house.fails = ConnectionResetError()
            house.connect(POST)
            await house.until(lambda: bool(house.begun))
            house.fails = None
            house.connect(HEALTH)
            await house.until(lambda: len(house.begun) == 2)
        assert not heard

    asyncio.run(work())


class Exhausted(socket.socket):
    """A listening socket of a system that has no file left, until it has."""

    left = 0
    asked = 0

    def accept(self) -> tuple[socket.socket, object]:
        self.asked += 1
        if not self.left:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_without_files_it_waits_and_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acceptor, "RETRY_SECONDS", 0.01)
    monkeypatch.setattr(socket, "socket", Exhausted)

    async def work() -> None:
        async with House() as house:
            listener = house.listener
            assert isinstance(listener, Exhausted)
            house.connect(POST)
            await house.until(lambda: listener.asked == 3)
            assert (
                house.said
                == ["no connection can be taken: [Errno 24] Too many open files; raise the limit of open files"] * 3
            )
            listener.left = 1
            await house.until(lambda: bool(house.begun))

    asyncio.run(work())


def test_closed_it_takes_nobody() -> None:
    async def work() -> None:
        async with House() as house:
            clients = [house.connect(POST) for _ in range(4 * BEGUN_AT_ONCE)]
            await house.until(lambda: bool(house.begun))
            house.acceptor.close()
            clients.append(house.connect(HEALTH))
            await house.until(lambda: sum(map(_is_closed, clients)) + len(house.begun) == len(clients) - 1)
            assert len(house.begun) < 4 * BEGUN_AT_ONCE and HEALTH not in house.begun

    asyncio.run(work())


def test_closed_it_leaves_nobody_half_begun() -> None:
    """Whose protocol would come only after the others had been told of the end."""

    async def work() -> None:
        async with House() as house:
            house.has_protocols = house.never = True
            clients = [house.connect(POST) for _ in range(BEGUN_AT_ONCE + 1)]
            await house.until(lambda: bool(house.begun))
            house.acceptor.close()
            house.taken.clear()
            await house.until(lambda: all(map(_is_closed, clients)))

    asyncio.run(work())
