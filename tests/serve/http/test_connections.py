"""Places for connections: who gives way, who is told that there is none, and that health is always answered."""

import asyncio
import gc
import socket
import struct
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from types import SimpleNamespace
from typing import Any

import pytest
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from inferc.serve.http import address as http_address
from inferc.serve.http import connections
from inferc.serve.http import slow_clients as http_protocol
from inferc.serve.http.connections import Connection, Connections, Seldom
from inferc.serve.http.server import HttpServer, make_app
from inferc.serve.http.slow_clients import BEGINS_AT_BYTES, MAX_PIPELINED
from inferc.serve.security.access import Access

HEALTH = b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n"
BEGUN = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{"


class Open:
    """Opens connections that have sent some bytes. places: those that are open at the endpoint."""

    def __init__(self, address: Any, places: Connections) -> None:
        self.address, self.places = address, places
        self.writers: list[asyncio.StreamWriter] = []
        self.changed = asyncio.Event()  # one came to the endpoint, or left it
        for name in ("came", "left"):
            setattr(places, name, self._telling(getattr(places, name)))

    def _telling(self, change: Callable[..., Any]) -> Callable[..., Any]:
        def told(*args: Any) -> Any:
            self.changed.set()
            return change(*args)

        return told

    async def until(self, num_places: int) -> None:
        """Wait until so many connections are open at the endpoint."""
        while len(self.places) != num_places:
            self.changed.clear()
            await asyncio.wait_for(self.changed.wait(), 30)

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
    """Run an endpoint with any ASGI application."""

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


def test_a_wish_for_another_protocol_is_passed_over() -> None:
    """The wish is sent by `curl --http2`."""
    wish = "connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\nhttp2-settings: AAMAAABkAAQAoAAAAAIAAAAA\r\n"

    async def work(opened: Open) -> None:
        reader = await opened(post("/first", 3, b"abc", wish))
        assert await answer(reader) == b"3"
        for more in (wish, ""):
            opened.writers[-1].write(post("/second", 14, b"\r\nupgrade: a\r\n", more))
            assert await answer(reader) == b"14"
        opened.writers[-1].write(post("/third", 2, more=wish))
        opened.writers[-1].write(b"ab")
        assert await answer(reader) == b"2"

    with_application(Lengths(), 8, work)


@pytest.mark.parametrize(
    "begins", [b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n", b"POST /a HTTP/1.1\r\ncontent-length: 1\r\n\r\n0"]
)
def test_a_request_behind_another_may_be_cut_anywhere(begins: bytes) -> None:
    second = b"GET /b HTTP/1.1\r\nhost: x\r\nuser: y\r\n\r\n"

    async def work(opened: Open) -> None:
        reader = await opened(b"")
        for cut in range(len(second) + 1):
            opened.writers[-1].write(begins + second[:cut])
            assert await answer(reader) in (b"0", b"1")
            opened.writers[-1].write(second[cut:])
            assert await answer(reader) == b"0"

    with_application(Lengths(), 8, work)


def test_a_wish_in_a_request_behind_another() -> None:
    second = b"POST /b HTTP/1.1\r\nconnection: upgrade\r\nupgrade: h2c\r\ncontent-length: 2\r\n\r\nab"

    async def work(opened: Open) -> None:
        reader = await opened(b"GET /a HTTP/1.1\r\nhost: x\r\n\r\n" + second)
        assert await answer(reader) == b"0"
        assert await answer(reader) == b"2"

    with_application(Lengths(), 8, work)


def test_a_body_in_chunks_of_a_byte_is_handed_over_as_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """uvicorn copies all that is there for each piece that it is handed."""
    plain, sizes = HttpToolsProtocol.on_body, list[int]()

    def on_body(self: HttpToolsProtocol, body: bytes) -> None:
        sizes.append(len(body))
        plain(self, body)

    monkeypatch.setattr(HttpToolsProtocol, "on_body", on_body)

    async def work(opened: Open) -> None:
        chunks = b"1\r\nx\r\n" * 10_000 + b"0\r\n\r\n"
        reader = await opened(b"POST /a HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n" + chunks)
        assert await answer(reader) == b"10000" and sum(sizes) == 10_000 and len(sizes) < 100

    with_application(Lengths(), 8, work)


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
            await opened.until(1)
            await opened.until(0)

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


def test_an_answer_that_is_read_slowly_is_not_cut_for_others() -> None:
    """The application has given all of it away, and the connection takes no further request yet."""
    app = Early(32 << 20)

    async def work(opened: Open) -> None:
        reader = await opened(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        begin = await head(reader)
        assert b"content-length: %d\r\n" % len(app.body) in begin
        told = await opened(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await head(told)).startswith(b"HTTP/1.1 503 ")
        assert len(await asyncio.wait_for(reader.readexactly(len(app.body)), 30)) == len(app.body)

    with_application(app, 1, work)


class Doors:
    """An ASGI application that reads the body, and answers when the door of its path is opened."""

    def __init__(self) -> None:
        self.open: dict[str, asyncio.Event] = defaultdict(asyncio.Event)
        self.asked: dict[str, asyncio.Event] = defaultdict(asyncio.Event)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        message: Any = {"more_body": True}
        while message.get("more_body", False):
            message = await receive()
        if message["type"] == "http.disconnect":
            return
        self.asked[scope["path"]].set()
        await self.open[scope["path"]].wait()
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"0")]})
        await send({"type": "http.response.body"})


def test_who_finds_all_places_taken_when_its_body_is_there_is_told_so() -> None:
    app = Doors()

    async def work(opened: Open) -> None:
        again = await opened(post("/first", 0))
        await app.asked["/first"].wait()
        slow = await opened(b"")
        app.open["/first"].set()
        assert b" 200 " in await head(again)
        opened.writers[-1].write(post("/slow", 3, b"a", "expect: 100-continue\r\n"))
        assert b" 100 " in await head(slow)
        opened.writers[0].write(post("/second", 0))
        await app.asked["/second"].wait()
        opened.writers[-1].write(b"bc")
        assert (await head(slow)).startswith(b"HTTP/1.1 503 ") and "/slow" not in app.asked

    with_application(app, 1, work)


@pytest.mark.slow
def test_nothing_is_left_of_a_client_that_resets() -> None:
    """A closed connection leaves neither timers nor what they hold, answered or with a second request under way."""
    app = Doors()
    app.open["/first"].set()

    async def work(opened: Open) -> None:
        before = asyncio.all_tasks()
        for rest in (b"", post("/second", 0) + post("/third", 0)):
            client = socket.create_connection(opened.address)
            client.sendall(post("/first", 0) + rest)
            client.setblocking(False)
            assert b"200 OK" in await asyncio.wait_for(asyncio.get_running_loop().sock_recv(client, 1 << 16), 30)
            if rest:
                await app.asked["/second"].wait()
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            client.close()
            await opened.until(0)
        app.open["/second"].set()
        await asyncio.wait(asyncio.all_tasks() - before, timeout=30)
        gc.collect()
        assert not [each for each in gc.get_objects() if isinstance(each, http_protocol.Protocol)]

    with_application(app, 8, work)


class Pairs(ExitStack):
    """Makes connections, begun with and not counted yet, each with its client."""

    def __init__(self, places: Connections) -> None:
        super().__init__()
        self._places = places
        self._listener = self.enter_context(http_address.bind("127.0.0.1", 0))

    def client(self) -> socket.socket:
        return self.enter_context(socket.create_connection(self._listener.getsockname(), timeout=30))

    def __call__(self, is_begun: bool = True, client: socket.socket | None = None) -> tuple[Connection, socket.socket]:
        client = client or self.client()
        connection = self.enter_context(Connection(self._listener, self._places))
        connection.is_begun = is_begun
        return connection, client


def is_open(client: socket.socket) -> bool:
    client.setblocking(False)
    try:
        return client.recv(1) != b""
    except BlockingIOError:
        return True


def test_a_connection_that_is_closed_gives_its_place_back() -> None:
    said: list[str] = []
    places = Connections(2, said.append)
    with Pairs(places) as pair:
        (first, _), (second, second_client), (third, third_client) = pair(), pair(), pair()
        assert places.came(first, "nothing") and places.came(second, "nothing") and len(places) == 2 and not said
        assert places.take_place(first) and places.take_place(second) and places.is_full
        assert places.came(third, "nothing") and not places.may_ask(third) and places.may_ask(first)
        assert said == [
            (
                "2 HTTP connections are open, and there are places for 2: idle ones are closed, and requests told 503"
                " where there are none"
            )
        ]
        first.close()
        assert places.take_place(third) and not places.take_place(pair()[0])
        places.rest(third)
        places.rest(second)  # later than the other, which goes first
        (fourth, _) = pair()
        assert places.came(fourth, "nothing") and places.num_ended == 1
        assert not is_open(third_client) and len(places) == 3, "its file is still open"
        assert is_open(second_client)
    assert len(places) == 0


def test_beyond_the_places_there_are_none_but_for_health(monkeypatch: pytest.MonkeyPatch) -> None:
    """Later connections take the place of those that were admitted for health alone, and none beside them."""
    monkeypatch.setattr(connections, "HEALTH_PLACES", 1)
    places = Connections(2, lambda message: None)
    with Pairs(places) as pair:
        (first, _), (second, _), (third, third_client), (fourth, _), (health, _) = (pair() for _ in range(5))
        for each in (first, second):
            assert places.came(each, "other")
        assert places.came(third, "nothing")
        for each in (first, second):
            places.rest(each)
        assert places.came(fourth, "other") and not is_open(third_client) and len(places) == 4
        assert places.take_place(second) and not places.take_place(first)
        assert places.came(health, "health")


def test_who_has_been_ended_is_not_counted_and_has_no_place() -> None:
    places = Connections(2, lambda message: None)
    with Pairs(places) as pair:
        old, new = [pair()[0] for _ in range(2)], [pair()[0] for _ in range(2)]
        for each in old:
            assert places.came(each, "nothing")
        for each in new:
            assert places.came(each, "other"), "in the place of one whose file is still open"
        assert places.is_full and len(places) == 4
        for each in new:
            places.rest(each)
        for each in old:
            places.rest(each)
            assert not places.may_ask(each) and not places.take_place(each)
        assert not places.is_full


def test_idle_ones_end_where_the_system_has_no_files() -> None:
    places = Connections(None)
    with Pairs(places) as pair:
        (first, first_client), (second, second_client), (third, third_client) = pair(), pair(), pair()
        assert places.came(first, "nothing") and places.came(second, "other") and places.came(third, "health")
        places.end_some()
        assert not is_open(first_client) and is_open(second_client) and is_open(third_client)


def test_what_is_told_of_a_closed_connection_is_not_its_successors() -> None:
    """A request of one that is lost may end later, and files' numbers are given out again."""
    places = Connections(1, lambda message: None)
    with Pairs(places) as pair:
        first, _ = pair()
        number = first.fileno()
        assert places.came(first, "other")
        client = pair.client()
        first.close()
        second, _ = pair(client=client)
        assert second.fileno() == number and places.came(second, "nothing")
        places.rest(first)
        assert not places.take_place(first) and not places.is_full and places.take_place(second)
        places.rest(first)
        assert places.is_full


def test_who_was_heard_last_gives_way_last() -> None:
    places = Connections(2, lambda message: None)
    with Pairs(places) as pair:
        (first, first_client), (second, second_client), (third, _) = pair(), pair(), pair()
        assert places.came(first, "nothing") and places.came(second, "nothing")
        places.rest(first)  # another piece of its request has come
        assert places.came(third, "nothing") and not is_open(second_client) and is_open(first_client)


def test_who_waits_for_a_protocol_is_closed_at_once_unless_it_has_asked_by_then() -> None:
    places = Connections(2, lambda message: None)
    with Pairs(places) as pair:
        (first, first_client), (second, second_client) = pair(is_begun=False), pair(is_begun=False)
        assert places.came(first, "nothing") and places.came(second, "nothing")
        first_client.sendall(HEALTH)
        assert places.came(pair()[0], "nothing")
        assert second.fileno() == -1 and not is_open(second_client) and is_open(first_client) and len(places) == 2


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
