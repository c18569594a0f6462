"""Places for connections: who gives way, who is told that there is none, and that health is always answered."""

import asyncio
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest

from inferc.serve import connections, http_address, http_protocol
from inferc.serve.access import Access
from inferc.serve.connections import Connection, Connections, Seldom
from inferc.serve.http_protocol import BEGINS_AT_BYTES, MAX_PIPELINED
from inferc.serve.http_server import HttpServer, make_app

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
BEGUN = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"


class Open:
    """Opens connections that have sent some bytes. places: those that are open at the endpoint."""

    def __init__(self, address: Any, places: Connections) -> None:
        self.address, self.places = address, places
        self.writers: list[asyncio.StreamWriter] = []

    async def __call__(self, sent: bytes) -> asyncio.StreamReader:
        connection = socket.create_connection(self.address)
        connection.sendall(sent)  # before the endpoint, which is of this thread, has seen that it is there
        reader, writer = await asyncio.open_connection(sock=connection)
        self.writers.append(writer)
        return reader


def with_places(limit: int, work: Callable[[Open], Awaitable[None]]) -> None:
    """Run `work` against an endpoint with so many places; it opens connections that have sent some bytes."""

    models: Any = SimpleNamespace(is_serving=True, is_broken=False)
    metrics: Any = SimpleNamespace(responses=Counter())
    ours = make_app(models, metrics, Access())

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await (asyncio.Future() if scope["path"] == "/never" else ours(scope, receive, send))

    with_application(app, limit, work)


def with_application(app: Any, limit: int, work: Callable[[Open], Awaitable[None]]) -> None:
    """The same of any ASGI application."""

    async def run() -> None:
        listener = http_address.bind("127.0.0.1", 0)
        server = HttpServer(app, listener, max_connections=limit)
        running = asyncio.create_task(server.run_until_stopped())
        opened = Open(listener.getsockname(), server.connections)
        await work(opened)
        for writer in opened.writers:
            writer.close()
        server.stop(at_once=True)
        await running
        listener.close()
        assert len(server.connections) == 0

    asyncio.run(run())


async def head(reader: asyncio.StreamReader) -> bytes:
    return await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 30)


async def busy(opened: Open) -> asyncio.StreamReader:
    """A connection with a request on it that is not answered: one before it on the same connection has been."""
    reader = await opened(HEALTH + HEALTH.replace(b"/health", b"/never"))
    assert b" 200 " in await head(reader)
    return reader


def test_the_connection_that_is_idle_for_the_longest_gives_way() -> None:
    async def work(opened: Open) -> None:
        first = await opened(HEALTH)
        assert b" 200 " in await head(first)
        second = await opened(HEALTH)
        assert b" 200 " in await head(second)
        third = await opened(HEALTH)
        assert b" 200 " in await head(third)
        assert await asyncio.wait_for(first.read(), 30) == b""
        fourth = await opened(HEALTH)
        assert b" 200 " in await head(fourth)
        assert await asyncio.wait_for(second.read(), 30) == b"" and not third.at_eof()

    with_places(2, work)


def test_where_all_are_busy_others_are_told_so_and_health_answers() -> None:
    async def work(opened: Open) -> None:
        working = [await busy(opened), await busy(opened)]
        refused = await opened(b"GET /v1/models HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await asyncio.wait_for(refused.read(), 30)).startswith(
            b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 1"
        )
        with_body = await opened(BEGUN + b"}" * 98)
        assert (await asyncio.wait_for(with_body.read(), 30)).startswith(b"HTTP/1.1 503 ")
        for path in (b"/health", b"/live", b"/ready", b"/health/?a=1"):
            assert b" 200 " in await head(await opened(HEALTH.replace(b"/health", path)))
        assert not any(reader.at_eof() for reader in working)

    with_places(2, work)


def test_who_has_asked_for_half_of_something_gives_way() -> None:
    """However far it has come: the application hears of long bodies before they are whole."""

    async def work(opened: Open) -> None:
        slow = await opened(HEALTH + BEGUN)
        assert b" 200 " in await head(slow)
        long = await opened(post("/v1/completions", 1 << 20, bytes(BEGINS_AT_BYTES), "expect: 100-continue\r\n"))
        assert b" 100 " in await head(long)
        await busy(opened)
        assert await is_closed(slow)
        assert b" 404 " in await head(await opened(HEALTH.replace(b"/health", b"/nothing")))
        assert await is_closed(long)

    with_places(2, work)


def test_beyond_the_places_for_health_a_connection_is_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEALTH_PLACES", 0)

    async def work(opened: Open) -> None:
        await busy(opened)
        refused = await opened(b"")
        assert (await asyncio.wait_for(refused.read(), 30)).startswith(b"HTTP/1.1 503 ")

    with_places(1, work)


class Lengths:
    """An ASGI application that answers with the length of the body."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.has_begun = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun.append(scope["path"])
        self.has_begun.set()
        size, more = 0, True
        while more:
            message = await receive()
            size, more = size + len(message.get("body", b"")), message.get("more_body", False)
        length = str(size).encode()
        headers = [(b"content-length", str(len(length)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": length})


def post(path: str, length: int, body: bytes = b"", more: str = "") -> bytes:
    return f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-length: {length}\r\n{more}\r\n".encode() + body


async def answer(reader: asyncio.StreamReader) -> bytes:
    begin = await head(reader)
    assert begin.startswith(b"HTTP/1.1 200 OK\r\n")
    return await reader.readexactly(int(begin.partition(b"content-length: ")[2].split()[0]))


def test_the_application_begins_with_a_request_when_its_body_is_there() -> None:
    app = Lengths()

    async def work(opened: Open) -> None:
        slow = await opened(post("/before", 1, b"a") + post("/slow", 3, b"ab"))
        assert await answer(slow) == b"1"
        both = await opened(post("/first", 2, b"ab") + post("/second", 3, b"abc"))
        assert (await answer(both), await answer(both)) == (b"2", b"3")
        chunks = await opened(
            b"POST /chunks HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n2\r\nab\r\n0\r\n\r\n"
        )
        assert await answer(chunks) == b"2"
        assert app.begun == ["/before", "/first", "/second", "/chunks"]

    with_application(app, 8, work)
    assert "/slow" not in app.begun


def test_of_a_long_body_it_hears_before_the_end_and_of_one_that_waits_for_leave() -> None:
    app = Lengths()

    async def work(opened: Open) -> None:
        asks = await opened(post("/asks", 3, more="expect: 100-continue\r\n"))
        assert await head(asks) == b"HTTP/1.1 100 Continue\r\n\r\n"
        app.has_begun.clear()
        await opened(post("/long", 1 << 20, bytes(BEGINS_AT_BYTES)))
        await asyncio.wait_for(app.has_begun.wait(), 30)
        assert app.begun == ["/asks", "/long"]

    with_application(app, 8, work)


class Early:
    """An ASGI application that answers with so many bytes, whatever comes."""

    def __init__(self, length: int) -> None:
        self.body = b"x" * length
        self.num_begun = 0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_begun += 1
        headers = [(b"content-length", str(len(self.body)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": self.body})


async def is_closed(reader: asyncio.StreamReader) -> bool:
    try:
        return await asyncio.wait_for(reader.read(1), 30) == b""
    except ConnectionResetError:
        return True


@pytest.fixture
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http_protocol, "LOOK_SECONDS", 0.2)


def test_a_body_without_end_behind_another_request_holds_no_place(soon: None) -> None:
    async def work(opened: Open) -> None:
        reader = await opened(post("/first", 2, b"ab") + post("/slow", 1000, b"abc"))
        assert await answer(reader) == b"2"
        assert (await head(reader)).startswith(b"HTTP/1.1 408 ") and await is_closed(reader)

    with_application(Lengths(), 8, work)


def test_who_is_answered_before_the_body_is_whole_rests_when_it_is(soon: None) -> None:
    async def work(opened: Open) -> None:
        reader = await opened(post("/x", BEGINS_AT_BYTES + 100, bytes(BEGINS_AT_BYTES)))
        assert await answer(reader) == b"x"
        opened.writers[-1].write(bytes(100))
        assert await is_closed(reader)

    with_application(Early(1), 8, work)


def test_who_never_reads_holds_no_place(soon: None) -> None:
    async def work(opened: Open) -> None:
        connection = socket.create_connection(opened.address)
        with connection:
            connection.sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 2)
            while not opened.places:
                await asyncio.sleep(0)
            while opened.places:
                await asyncio.sleep(0)

    with_application(Early(32 << 20), 8, work)


def test_of_many_requests_at_once_the_first_are_answered() -> None:
    app = Early(1)

    async def work(opened: Open) -> None:
        reader = await opened(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 5000)
        for _ in range(1 + MAX_PIPELINED):
            assert await answer(reader) == b"x"
        assert await is_closed(reader)

    with_application(app, 8, work)
    assert app.num_begun == 1 + MAX_PIPELINED


class Pairs(ExitStack):
    """Makes connections, begun with and not counted yet, each with its client."""

    def __init__(self, places: Connections) -> None:
        super().__init__()
        self._places = places
        self._listener = self.enter_context(http_address.bind("127.0.0.1", 0))

    def __call__(self, is_begun: bool = True) -> tuple[Connection, socket.socket]:
        client = self.enter_context(socket.create_connection(self._listener.getsockname(), timeout=30))
        connection = self.enter_context(Connection(self._listener, self._places))
        connection.is_begun = is_begun
        return connection, client


def test_a_connection_that_is_closed_gives_its_place_back() -> None:
    said: list[str] = []
    places = Connections(2, said.append)
    with Pairs(places) as pair:
        (first, _), (second, second_client), (third, _) = pair(), pair(), pair()
        assert places.came(first, False) and places.came(second, False) and len(places) == 2 and not said
        places.busy(first.fileno())
        places.busy(second.fileno())
        assert places.came(third, False) and places.is_extra(third.fileno()) and not places.is_extra(first.fileno())
        assert said == ["2 HTTP connections are open, and there are places for 2: idle ones are closed"]
        third.close()
        first.close()
        (fourth, fourth_client), (fifth, _) = pair(), pair()
        assert len(places) == 1 and places.came(fourth, False) and not places.is_extra(fourth.fileno())
        places.rests(second.fileno())  # later than the one before, which goes first
        assert places.came(fifth, False) and places.num_ended == 1
        assert fourth_client.recv(1) == b"" and len(places) == 3, "its file is still open"
        second_client.setblocking(False)
        with pytest.raises(BlockingIOError):
            second_client.recv(1)
    assert len(places) == 0


def test_who_waits_for_a_protocol_is_closed_at_once_for_another() -> None:
    places = Connections(1, lambda message: None)
    with Pairs(places) as pair:
        (first, client), (second, _) = pair(is_begun=False), pair(is_begun=False)
        assert places.came(first, False) and places.came(second, False)
        assert first.fileno() == -1 and client.recv(1) == b"" and len(places) == 1


def test_who_was_heard_last_gives_way_last() -> None:
    places = Connections(2, lambda message: None)
    with Pairs(places) as pair:
        (first, first_client), (second, second_client), (third, _) = pair(), pair(), pair()
        assert places.came(first, False) and places.came(second, False)
        places.rests(first.fileno())  # another piece of its request has come
        assert places.came(third, False) and second_client.recv(1) == b""
        first_client.setblocking(False)
        with pytest.raises(BlockingIOError):
            first_client.recv(1)


def test_who_has_asked_for_something_is_busy_until_it_was_looked_at() -> None:
    places = Connections(1, lambda message: None)
    with Pairs(places) as pair:
        (first, _), (second, _) = pair(is_begun=False), pair(is_begun=False)
        assert places.came(first, True) and places.is_full
        places.rests(first.fileno())  # it was no request
        assert not places.is_full and places.came(second, True) and first.fileno() == -1


def test_beyond_the_limit_who_asks_for_nothing_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "HEALTH_PLACES", 1)
    places = Connections(1, lambda message: None)
    with Pairs(places) as pair:
        (first, _), (second, second_client), (third, _), (fourth, _) = (pair() for _ in range(4))
        assert places.came(first, False) and not places.is_full
        places.busy(first.fileno())
        assert places.is_full
        assert places.came(second, False) and places.is_extra(second.fileno())
        assert places.came(third, True) and places.is_extra(third.fileno()), (
            "in the place of the one that has asked for nothing"
        )
        assert second_client.recv(1) == b""
        second.close()
        assert not places.came(fourth, True) and not places.is_extra(fourth.fileno())


def test_who_has_asked_for_something_else_takes_no_place_for_health(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does it put anybody out who has asked for nothing yet."""
    monkeypatch.setattr(connections, "HEALTH_PLACES", 1)

    async def work(opened: Open) -> None:
        await busy(opened)
        silent = await opened(b"")
        for _ in range(3):
            refused = await opened(BEGUN)
            assert (await asyncio.wait_for(refused.read(), 30)).startswith(b"HTTP/1.1 503 ")
        assert not silent.at_eof()
        assert b" 200 " in await head(await opened(HEALTH))

    with_places(1, work)


def test_a_line_comes_once_a_minute(caplog: pytest.LogCaptureFixture) -> None:
    now = 0.0
    say = Seldom(lambda: now)
    for second in range(0, 130, 10):
        now = float(second)
        say("full")
    assert [record.message for record in caplog.records] == [
        "full",
        "full (5 times more since this was said last)",
        "full (5 times more since this was said last)",
    ]
