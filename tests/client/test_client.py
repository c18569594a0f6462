"""Tests of what the client refuses before it sends anything, and of when it tries again; no real server runs."""

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from inferc.client import SERVICE, AsyncClient, Client, ServerError
from inferc.client.messages import embed_request, generate_request, score_request, tokenize_request
from inferc.errors import InfercError, RequestError


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ([2**40], "token_ids[0] is 1099511627776; a token id is 0 to 2147483647"),
        ([5, -1], "token_ids[1] is -1"),
        ([True], "token_ids[0] is True; a token id is a whole number"),
        ([1, "a"], "token_ids[1] is 'a'"),
        (["a", "b"], "token_ids[0] is 'a'"),
        ([{"role": "user"}], "message 0 of the chat needs a content, a text; found none"),
        ([{"role": "user", "content": "hi"}, {"role": 5, "content": "hi"}], "message 1 of the chat needs a role"),
        ([{"role": "user", "content": ["parts"]}], "found ['parts']"),
        ([{"role": "user", "content": "hi"}, 7], "message 1 of the chat is 7"),
        (None, "a prompt is a text, a list of token ids or a list of chat messages, found None"),
        (b"bytes", "found b'bytes'"),
        (17, "found 17"),
        ("half of a pair \ud83d", "the request cannot be sent"),
        ([{"role": "user", "content": "\ud83d"}], "the request cannot be sent"),
    ],
)
def test_a_prompt_that_is_none(prompt: Any, message: str) -> None:
    with Client("127.0.0.1:1", timeout=1) as client, pytest.raises(RequestError) as raised:
        client.complete(prompt)
    assert message in str(raised.value)
    assert "\n" not in str(raised.value)


def test_token_ids_that_are_none() -> None:
    with Client("127.0.0.1:1", timeout=1) as client, pytest.raises(RequestError, match=r"token_ids\[1\] is 1\.5"):
        client.detokenize([1, 1.5])  # type: ignore[list-item]


def test_a_server_that_does_not_answer_is_told_by_its_address() -> None:
    async def ask() -> None:
        async with AsyncClient("127.0.0.1:1") as client:
            await client.wait_until_ready(0.01)

    with Client("127.0.0.1:1") as client, pytest.raises(ServerError, match="no server answered at 127.0.0.1:1 within"):
        client.wait_until_ready(0.01)
    with pytest.raises(ServerError, match="no server answered at 127.0.0.1:1 within 0.01 s"):
        asyncio.run(ask())


@pytest.mark.parametrize(
    ("inputs", "told"),
    [("a text", "inputs: expected a list"), (5, "found 5"), ([b"a"], r"inputs\[0\] is b'a'"), ([[2**40]], "token id")],
)
def test_inputs_that_are_none(inputs: Any, told: str) -> None:
    with Client("127.0.0.1:1", timeout=1) as client, pytest.raises(RequestError, match=told):
        client.embed(inputs)
    with pytest.raises(RequestError, match="the request cannot be sent"):
        embed_request(["a"], "m", 2**40)
    with pytest.raises(RequestError, match="the request cannot be sent"):
        score_request("a", "m", 2**40, "")
    with pytest.raises(RequestError, match="these are token ids already"):
        tokenize_request([5], "m", True)  # type: ignore[list-item]


def test_one_stop_string_is_one() -> None:
    assert list(generate_request("a", "", stop="END").sampling.stop) == ["END"]
    assert list(generate_request("a", "", stop=["END", "."]).sampling.stop) == ["END", "."]


class Clock:
    """A clock for the client that only moves on when somebody works or pauses."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._lock = threading.Lock()

    def pass_by(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds

    async def pass_by_async(self, seconds: float) -> None:
        self.pass_by(seconds)


class Busy:
    """A server that takes nothing, 20 s after it was asked, and says when another try is worth while.

    The seconds are those of the client's clock. A call ends at its deadline, as gRPC sees to in real time.
    """

    def __init__(self, clock: Clock) -> None:
        self.retry_after = "5"
        self.num_calls = 0
        self._clock = clock
        self._server = grpc.server(ThreadPoolExecutor(4))
        handlers = {
            "Complete": grpc.unary_unary_rpc_method_handler(self._refuse),
            "Generate": grpc.unary_stream_rpc_method_handler(self._refuse),
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        self.address = f"127.0.0.1:{self._server.add_insecure_port('127.0.0.1:0')}"
        self._server.start()

    def _refuse(self, data: bytes, context: Any) -> None:
        self.num_calls += 1
        left = context.time_remaining()
        if left is not None and left < 20:
            self._clock.pass_by(left)
            context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the deadline is over")
        self._clock.pass_by(20)
        context.set_trailing_metadata((("retry-after", self.retry_after),))
        context.abort(grpc.StatusCode.UNAVAILABLE, "busy")

    def close(self) -> None:
        self._server.stop(0).wait()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock by which the client counts and pauses."""
    made = Clock()
    monkeypatch.setattr("inferc.client.messages.time", SimpleNamespace(monotonic=lambda: made.now))
    monkeypatch.setattr("inferc.client.client.time", SimpleNamespace(sleep=made.pass_by))
    monkeypatch.setattr("inferc.client.client.asyncio", SimpleNamespace(sleep=made.pass_by_async))
    return made


@pytest.fixture
def busy(clock: Clock) -> Iterator[Busy]:
    server = Busy(clock)
    yield server
    server.close()


def ask(kind: str, busy: Busy, **options: Any) -> InfercError:
    """The error, of one of the four ways to ask."""

    async def asynchronous() -> None:
        async with AsyncClient(busy.address, **options) as client:
            if kind == "async stream":
                async for _ in client.generate("a"):
                    pass
            else:
                await client.complete("a")

    def blocking() -> None:
        with Client(busy.address, **options) as client:
            list(client.generate("a")) if kind == "stream" else client.complete("a")

    with pytest.raises(ServerError) as raised:
        asyncio.run(asynchronous()) if kind.startswith("async") else blocking()
    return raised.value


@pytest.mark.parametrize("kind", ["stream", "whole", "async stream", "async whole"])
def test_all_tries_together_end_in_time(busy: Busy, clock: Clock, kind: str) -> None:
    start = clock.now
    assert "busy" in str(ask(kind, busy)) and busy.num_calls == 3
    assert 68 <= clock.now - start <= 72, "with two pauses of five seconds, more or less"
    start, busy.num_calls = clock.now, 0
    ask(kind, busy, retries=20, timeout=60)
    assert busy.num_calls == 3, "the last one has what is left of the time"
    assert 50 < clock.now - start < 61, "twenty tries take 500 s"
    start, busy.num_calls, busy.retry_after = clock.now, 0, "60"
    assert "busy" in str(ask(kind, busy, timeout=22)), "there is no time to wait for another try"
    assert busy.num_calls == 1 and clock.now - start == 20


def test_a_date_to_come_back_at_is_no_number_of_seconds(busy: Busy) -> None:
    busy.retry_after = "Wed, 21 Oct 2026 07:28:00 GMT"
    error = ask("whole", busy, retries=0)
    assert isinstance(error, ServerError) and error.retry_after is None
