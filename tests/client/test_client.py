"""What the client refuses before it sends anything, and when it tries again: no real server runs here."""

import asyncio
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import grpc
import pytest

from inferc.client import SERVICE, AsyncClient, Client, ServerError
from inferc.client.messages import generate_request
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


def test_one_stop_string_is_one() -> None:
    assert list(generate_request("a", "", stop="END").sampling.stop) == ["END"]
    assert list(generate_request("a", "", stop=["END", "."]).sampling.stop) == ["END", "."]


class Busy:
    """A server that takes nothing, a fifth of a second after it was asked, and says when another try is worth while."""

    def __init__(self) -> None:
        self.retry_after = "0.05"
        self.num_calls = 0
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
        time.sleep(0.2)
        context.set_trailing_metadata((("retry-after", self.retry_after),))
        context.abort(grpc.StatusCode.UNAVAILABLE, "busy")

    def close(self) -> None:
        self._server.stop(0).wait()


@pytest.fixture
def busy() -> Iterator[Busy]:
    server = Busy()
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
def test_all_tries_together_end_in_time(busy: Busy, kind: str) -> None:
    assert "busy" in str(ask(kind, busy)) and busy.num_calls == 3
    start = time.monotonic()
    ask(kind, busy, retries=20, timeout=0.6)
    assert busy.num_calls < 3 + 4
    assert time.monotonic() - start < 4, "twenty tries take five seconds"
    busy.num_calls, busy.retry_after = 0, "60"
    assert "busy" in str(ask(kind, busy, timeout=0.6)), "there is no time to wait for another try"
    assert busy.num_calls == 1


def test_a_date_to_come_back_at_is_no_number_of_seconds(busy: Busy) -> None:
    busy.retry_after = "Wed, 21 Oct 2026 07:28:00 GMT"
    error = ask("whole", busy, retries=0)
    assert isinstance(error, ServerError) and error.retry_after is None
