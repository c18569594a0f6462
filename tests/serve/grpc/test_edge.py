"""Tests of the frame around a gRPC call: messages that come in part or not at all, and bytes that are none."""

import asyncio
import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2
from serving import Server

from inferc.errors import RequestError
from inferc.serve.errors import QueueFull, RequestTimeout
from inferc.serve.grpc.edge import MAX_MESSAGE_BYTES, MESSAGES_AT_ONCE, SMALL_BYTES, Arrivals
from inferc.serve.grpc.server import MAX_STREAMS, SERVICES, WINDOW_BYTES
from inferc.serve.security.access import Key, digest_of, write_keys

RAW = bytes
HEALTH, TOKENIZE = "/grpc.health.v1.Health", "/inferc.v1.InferenceService/Tokenize"
REFLECTION = "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo"
EMPTY_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))  # a frame of HTTP/2: length, type, flags, stream
LONG = 3600.0  # seconds that no test waits for


class Call:
    """A call whose message comes when the test says so; None ends what the client sends."""

    def __init__(self, *messages: bytes | None) -> None:
        self.messages: asyncio.Queue[bytes | None] = asyncio.Queue()
        for message in messages:
            self.messages.put_nowait(message)

    async def read(self) -> Any:
        message = await self.messages.get()
        return grpc.aio.EOF if message is None else message  # type: ignore[attr-defined]  # the stubs lack it


def read(arrivals: Arrivals, call: Any) -> asyncio.Task[bytes | None]:
    return asyncio.create_task(arrivals.read(call))


def run(work: Any) -> Any:
    return asyncio.run(asyncio.wait_for(work, 60))


async def places_are_taken() -> None:
    """All that is to happen without a message has happened."""
    for _ in range(10):
        await asyncio.sleep(0)


# ------------------------------------------------------------------------------------------------- messages


def test_messages_on_their_way_are_few_and_who_comes_at_once_waits_for_none() -> None:
    async def work() -> None:
        arrivals = Arrivals(at_once_seconds=0, message_seconds=LONG)
        calls = [Call() for _ in range(MESSAGES_AT_ONCE)]
        reading = [read(arrivals, call) for call in calls]
        await places_are_taken()
        with pytest.raises(QueueFull, match="16 messages are on their way to the server already; try again later"):
            await read(arrivals, Call())
        assert await read(arrivals, Call(b"small")) == b"small"
        calls[3].messages.put_nowait(b"slow")
        assert await reading[3] == b"slow", "and its place is free"
        reading[3] = read(arrivals, calls[3])
        reading[5].cancel()
        await asyncio.wait((reading[5],))
        reading[5] = read(arrivals, calls[5])
        await places_are_taken()
        assert not any(each.done() for each in reading), "a client that left took its place with it"
        for each in reading:
            each.cancel()

    run(work())


def test_a_message_has_its_time() -> None:
    async def work() -> None:
        arrivals = Arrivals(at_once_seconds=0, message_seconds=0)
        for _ in range(2 * MESSAGES_AT_ONCE):
            with pytest.raises(RequestTimeout, match="the message was not whole within 0 s"):
                await read(arrivals, Call())
        assert [each async for each in arrivals.messages(Call(b"a", b"b", None))] == [b"a", b"b"]  # type: ignore[arg-type]

    run(work())


def test_messages_of_calls_under_way_are_bounded_together() -> None:
    async def work() -> None:
        arrivals, data = Arrivals(message_seconds=LONG), bytes(MAX_MESSAGE_BYTES)
        calls: Any = [Call(data) for _ in range(MESSAGES_AT_ONCE)]
        async with AsyncExitStack() as under_way:
            for call in calls:
                assert await under_way.enter_async_context(arrivals.message(call)) is data
            with pytest.raises(QueueFull, match="the server holds too much of others' messages"):
                await under_way.enter_async_context(arrivals.message(Call(data)))  # type: ignore[arg-type]
            small: Any = Call(bytes(SMALL_BYTES))
            assert len(await under_way.enter_async_context(arrivals.message(small))) == SMALL_BYTES
        async with arrivals.message(Call(data)) as again:  # type: ignore[arg-type]
            assert again is data

    run(work())


def test_a_call_without_a_message_is_told_so() -> None:
    async def work() -> None:
        with pytest.raises(RequestError, match="the call has no message; send one"):
            async with Arrivals().message(Call(None)):  # type: ignore[arg-type]
                raise AssertionError("it has none")

    run(work())


# --------------------------------------------------------------------------------------------------- a server


def error_of(channel: grpc.Channel, method: str, requests: Iterator[bytes]) -> Any:
    with pytest.raises(grpc.RpcError) as raised:
        list(channel.stream_stream(method, RAW, RAW)(requests, timeout=30))
    return raised.value


@pytest.mark.parametrize(
    "method", [TOKENIZE, "/inferc.v1.InferenceService/Generate", f"{HEALTH}/Check", f"{HEALTH}/Watch"]
)
def test_every_call_without_a_message_gets_a_status(served: str, method: str) -> None:
    with grpc.insecure_channel(served) as channel:
        error = error_of(channel, method, iter(()))
    assert (error.code(), error.details()) == (
        grpc.StatusCode.INVALID_ARGUMENT,
        "the call has no message; send one",
    )


@pytest.mark.parametrize("method", [f"{HEALTH}/Check", f"{HEALTH}/Watch", f"{HEALTH}/List", REFLECTION])
@pytest.mark.parametrize("data", [b"\xff\xff\xff", b"\x0a\x02\xff\xfe"])
def test_bytes_that_are_no_message_are_refused_and_not_logged(
    served: str, server: Server, method: str, data: bytes
) -> None:
    before = server.log
    with grpc.insecure_channel(served) as channel:
        assert error_of(channel, method, iter((data,))).code() is grpc.StatusCode.INVALID_ARGUMENT
    assert server.log == before


@pytest.mark.parametrize("method", [f"{HEALTH}/Check", f"{HEALTH}/Watch", REFLECTION, f"/{SERVICES[1]}/ServerLive"])
def test_who_needs_no_key_sends_little(served: str, method: str) -> None:
    with grpc.insecure_channel(served) as channel:
        error = error_of(channel, method, iter((bytes(SMALL_BYTES + 1),)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "at most 65536 are taken here" in error.details()


def test_health_lists_its_services_and_watches_even_those_it_does_not_know(served: str) -> None:
    kinds: Any = health_pb2  # whose stubs lack List
    with grpc.insecure_channel(served) as channel:
        data = channel.unary_unary(f"{HEALTH}/List", RAW, RAW)(b"")
        found = kinds.HealthListResponse.FromString(data).statuses
        assert {name: each.status for name, each in found.items()} == dict.fromkeys(
            ("", *SERVICES), kinds.HealthCheckResponse.SERVING
        )
        asked = kinds.HealthCheckRequest(service="unknown").SerializeToString()
        watching: Any = channel.unary_stream(f"{HEALTH}/Watch", RAW, kinds.HealthCheckResponse.FromString)(asked)
        assert next(watching).status == kinds.HealthCheckResponse.SERVICE_UNKNOWN
        watching.cancel()


def test_a_key_is_asked_for_before_a_message(tiny_artifact: Any, tmp_path: Any) -> None:
    keys, over = tmp_path / "keys.json", threading.Event()
    write_keys(keys, [Key("alice", digest_of("alice-key"))])

    def never() -> Iterator[bytes]:
        over.wait()
        yield from ()

    with Server(tiny_artifact, "--api-keys", str(keys)) as server, grpc.insecure_channel(server.address) as channel:
        try:
            assert error_of(channel, TOKENIZE, never()).code() is grpc.StatusCode.UNAUTHENTICATED
        finally:
            over.set()
        large = bytes(MAX_MESSAGE_BYTES - 100)
        assert error_of(channel, TOKENIZE, iter((large,))).code() is grpc.StatusCode.UNAUTHENTICATED


def test_a_large_message_is_read(served: str) -> None:
    data = b"\x12" + b"\x80\x80\x80\x0f" + b"a" * (15 << 21)  # field 2, a text of 30 MiB
    with grpc.insecure_channel(served) as channel:
        error = error_of(channel, TOKENIZE, iter((data,)))
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT and "has 31457280 characters" in error.details()


@pytest.mark.slow
def test_a_message_that_grows_beyond_the_bounds_as_it_is_unpacked_ends_the_call_alone(tiny_artifact: Any) -> None:
    """The library of gRPC ends the call itself, and its client gets an error of its own."""
    with Server(tiny_artifact) as server, grpc.insecure_channel(server.address) as channel:
        check = channel.unary_unary(f"{HEALTH}/Check", RAW, RAW)
        for _ in range(8):
            with pytest.raises(grpc.RpcError) as raised:
                check(bytes(MAX_MESSAGE_BYTES + 1), compression=grpc.Compression.Gzip)
            assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert "Traceback" not in server.log


def test_a_connection_is_told_how_many_calls_it_may_have_and_how_much_is_held_of_each(served: str) -> None:
    host, _, port = served.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as connection, connection.makefile("rb") as answer:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + EMPTY_SETTINGS)
        head = answer.read(9)
        assert head[3] == 4, "SETTINGS come first"
        data = answer.read(int.from_bytes(head[:3], "big"))
    settings = dict(struct.iter_unpack(">HI", data))
    assert (settings[3], settings[4]) == (MAX_STREAMS, WINDOW_BYTES)
