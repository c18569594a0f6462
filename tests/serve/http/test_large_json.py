"""Large bodies read in pieces are what the standard library reads, within bounds."""

import asyncio
import json
import threading
from collections import Counter
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
from http_calls import request
from hypothesis import example, given
from hypothesis import strategies as st
from serving import Server

from inferc.errors import RequestError
from inferc.serve.http import address as http_address
from inferc.serve.http import bodies as http_bodies
from inferc.serve.http import edge as http_edge
from inferc.serve.http import large_json
from inferc.serve.http.edge import SHORT_BYTES, STARTS_AT_ONCE, Edge
from inferc.serve.http.server import HttpServer, make_app
from inferc.serve.security.access import Access

TEXTS = st.text(st.sampled_from('ab"\\\n\té東\U0001f469\ud83d\udc69{}[],:'), max_size=40) | st.text(max_size=20)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXTS
NUMBERS = st.lists(st.integers(-(10**6), 10**6) | st.floats(-1e9, 1e9), max_size=40)
VALUES = st.recursive(
    SCALARS | NUMBERS,
    lambda inner: st.lists(inner, max_size=6) | st.dictionaries(TEXTS, inner, max_size=6),
    max_leaves=25,
)


@pytest.fixture(scope="module", autouse=True)
def small_bounds() -> Any:
    """So small that little counts as long, and is cut often."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {"LONG_TEXT": 8, "LONG_LIST": 12, "PIECE": 12, "MASKED_AT_ONCE": 7}.items():
            patch.setattr(large_json, name, value)
        yield


@given(VALUES, st.booleans(), st.sampled_from([None, 1]))
@example({"k" * 20: ["v" * 20, [1, 2] * 20]}, True, None)
@example(["\U0001f469" * 20, "\ud83d" * 20, "\\" * 40, '"' * 40], True, None)
def test_values_are_those_of_the_standard_library(value: Any, ascii_only: bool, indent: int | None) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    found = large_json.loads(data)
    assert found == json.loads(data) and repr(found) == repr(json.loads(data))


@given(VALUES, st.data())
def test_what_is_no_json_to_the_standard_library_is_none(value: Any, draw: st.DataObject) -> None:
    text = json.dumps(value, ensure_ascii=False)
    at = draw.draw(st.integers(0, len(text)))
    text = text[:at] + draw.draw(st.sampled_from(['"', "\\", "[", "]", ",", "{", "}", "1", " ", ""])) + text[at + 1 :]
    data = text.encode("utf-8", "surrogatepass")
    try:
        expected = json.loads(data)
    except ValueError:
        with pytest.raises(ValueError):
            large_json.loads(data)
    else:
        assert repr(large_json.loads(data)) == repr(expected)


def test_a_list_is_no_name() -> None:
    numbers = [1] * 1000
    with pytest.raises(ValueError, match="the name of an object's field is a list"):
        large_json.loads(b'{"a": 1, %b: 1}' % json.dumps(numbers).encode())
    assert large_json.loads(json.dumps({"k" * 1000: numbers}).encode()) == {"k" * 1000: numbers}


def test_a_long_integer_is_about_as_large_and_made_at_once() -> None:
    numbers = ["1" * 400, "-" + "2" * 5000, "3" * 40]
    for data in (f"[{','.join(numbers)}]", f'{{"a": {numbers[1]}, "b": [{numbers[0]}, {{}}]}}'):
        text = repr(large_json.loads(data.encode())).replace("0", "")
        assert "1" * 39 in text and "2" * 39 in text
    assert large_json.loads(f"[{numbers[0]}]".encode())[0] > 10**399


@pytest.mark.parametrize(
    ("bound", "value", "message"),
    [
        ("MAX_PARTS", [[]] * 20, "more parts than are read at once, at most 15 texts, lists and objects"),
        ("MAX_PARTS", [""] * 20, "more parts"),
        ("MAX_PARTS", [{}] * 20, "more parts"),
        ("MAX_NUMBERS", [1] * 20, "more numbers than are read at once, at most 15"),
        ("MAX_NUMBERS", [[1, 2]] * 10, "more numbers"),
        ("MAX_REST", ["a" * 8] * 10, "more bytes than are read at once, at most 15 beside long texts"),
    ],
)
def test_more_than_the_bounds_is_refused(monkeypatch: pytest.MonkeyPatch, bound: str, value: Any, message: str) -> None:
    monkeypatch.setattr(large_json, bound, 15)
    with pytest.raises(RequestError, match=message):
        large_json.loads(json.dumps(value).encode())


def test_nothing_is_made_of_what_is_beyond_the_bounds() -> None:
    with pytest.raises(RequestError, match="more parts"):
        large_json.loads(b'{"prompt":[' + b"{}," * 300_000 + b"{}]}")
    with pytest.raises(RecursionError):
        large_json.loads(b"[" * 100_000 + b"]" * 100_000)


# ---------------------------------------------------------------------------------------------- beside the loop


def test_who_sends_a_large_body_keeps_nobody_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one is being read, the event loop answers others."""
    begun, may_end = threading.Event(), threading.Event()

    def slow(data: bytes) -> Any:
        begun.set()
        assert may_end.wait(30)
        return json.loads(data)

    monkeypatch.setattr(large_json, "loads", slow)
    models: Any = SimpleNamespace(is_serving=True)
    metrics: Any = SimpleNamespace(responses=Counter())

    async def talk() -> tuple[bytes, bytes]:
        listener = http_address.bind("127.0.0.1", 0)
        server = HttpServer(make_app(models, metrics, Access()), listener)
        running = asyncio.create_task(server.run_until_stopped())
        address = http_address.name_of(listener).split(":")
        body = b"[" + b" " * http_bodies.SMALL_BYTES + b"]"
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\nconnection: close\r\n"
        large, writer = await asyncio.open_connection(*address)
        writer.write(head + b"content-length: %d\r\n\r\n" % len(body) + body)
        assert await asyncio.to_thread(begun.wait, 30)
        small, other = await asyncio.open_connection(*address)
        other.write(b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        health = await asyncio.wait_for(small.read(), 30)
        may_end.set()
        answer = await asyncio.wait_for(large.read(), 30)
        for each in (writer, other):
            each.close()
        server.stop()
        await running
        listener.close()
        return health, answer

    health, answer = asyncio.run(talk())
    assert health.startswith(b"HTTP/1.1 200")
    assert answer.startswith(b"HTTP/1.1 400") and b"the body is no JSON object" in answer


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", b'{"prompt":[' + b"{}," * 1_500_000 + b"{}]}"),
        ("/v1/embeddings", b'{"input":[' + b"[]," * 1_500_000 + b"[]]}"),
        ("/v1/chat/completions", b'{"messages":[' + b"{}," * 100_000 + b"{}]}"),
        ("/v1/responses", b'{"input":' + b"[" * 2_000_000),
        ("/tokenize", b'{"prompt":' + b'{"":' * 1_000_000),
        ("/detokenize", b'{"tokens":[' + b"1," * 500_000 + b'"a"]}'),
        ("/v1/completions", b'{"stop":["a"], "prompt":[' + b"5," * 500_000 + b"5]}"),
        ("/v1/completions", b'{"prompt":"a", "stop":[' + b'"a",' * 100_000 + b"5]}"),
    ],
)
def test_a_large_invalid_body_costs_little(server: Server, path: str, body: bytes) -> None:
    process = psutil.Process(server.process.pid)
    before = process.memory_info().rss
    reply = request(server.url, path, body)
    assert reply.status == 400 and len(reply.error["message"]) < 400, reply.body
    assert process.memory_info().rss - before < 200 << 20


def scope_of(path: str) -> dict[str, Any]:
    """Return the scope that an ASGI application gets of a request."""
    return {"type": "http", "method": "POST", "path": path, "headers": [], "raw_path": b"", "query_string": b""}


def test_a_body_counts_no_more_once_its_answer_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who reads an answer slowly keeps no place from others; a stream holds what it was asked."""
    monkeypatch.setattr(http_edge, "BODIES_AT_ONCE", 1)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await receive()
        headers = [(b"content-length", b"2")] if scope["path"] == "/whole" else []
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await let_go.wait()

    async def ask(path: str) -> int:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"x" * 90, "more_body": False}

        async def send(message: Any) -> None:
            sent.append(message)
            begun.set()

        scope = scope_of(path)
        waiting.append(asyncio.create_task(edge(scope, receive, send)))
        await begun.wait()
        begun.clear()
        return int(sent[0]["status"])

    async def work() -> None:
        assert [await ask(path) for path in ("/whole", "/whole", "/stream", "/whole")] == [200, 200, 200, 503]
        let_go.set()
        await asyncio.gather(*waiting)
        assert await ask("/whole") == 200

    let_go, begun = asyncio.Event(), asyncio.Event()
    waiting: list[asyncio.Task[None]] = []
    edge = Edge(app, 100, Access())
    asyncio.run(work())


@pytest.mark.parametrize(("num_bytes", "most"), [(10, STARTS_AT_ONCE), (SHORT_BYTES + 1, 1)])
def test_few_bodies_are_begun_with_at_once_and_one_long_one(num_bytes: int, most: int) -> None:
    """Bodies that are read on the event loop hold up all others for as long as that takes."""
    starting, seen = 0, list[int]()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        nonlocal starting
        await receive()
        starting += 1
        seen.append(starting)
        await asyncio.sleep(0)
        starting -= 1
        scope["started"]()
        scope["started"]()  # which is said once or twice

    async def ask() -> None:
        scope = scope_of("/health")

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"x" * num_bytes, "more_body": False}

        async def send(message: Any) -> None:
            raise AssertionError(message)

        await edge(scope, receive, send)

    async def work() -> None:
        await asyncio.gather(*(ask() for _ in range(4 * STARTS_AT_ONCE)))

    edge = Edge(app, 1 << 20, Access())
    asyncio.run(work())
    assert max(seen) == most and len(seen) == 4 * STARTS_AT_ONCE


def test_bodies_of_all_together_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who sends more than there is memory for is told to come back, and what has ended counts no more."""
    monkeypatch.setattr(http_edge, "BODIES_AT_ONCE", 2)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        assert (await receive())["more_body"]
        held.append(scope)
        if len(held) == 2:
            are_held.set()
        await let_go.wait()

    async def ask() -> list[Any]:
        sent: list[Any] = []

        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": b"x" * 90, "more_body": True}

        async def send(message: Any) -> None:
            sent.append(message)

        scope = scope_of("/health")
        await edge(scope, receive, send)
        return sent

    async def work() -> None:
        first = [asyncio.create_task(ask()) for _ in range(2)]
        await asyncio.wait_for(are_held.wait(), 30)
        refused = await ask()
        assert refused[0]["status"] == 503 and (b"retry-after", b"1") in refused[0]["headers"]
        let_go.set()
        await asyncio.gather(*first)
        assert await ask() == [] and len(held) == 3

    held: list[Any] = []
    let_go, are_held = asyncio.Event(), asyncio.Event()
    edge = Edge(app, 100, Access())
    asyncio.run(work())
