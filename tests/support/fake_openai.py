"""A small server with OpenAI's interface, that lacks what others lack and fails as others fail."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, final

Json = dict[str, Any]


@dataclass
class Behaviour:
    """The behaviour of a fake server.

    refusals: statuses of requests, in turn after the first; 200: it is answered. tokens: of each chunk.
    """

    takes_ids: bool = True
    takes_extras: bool = True
    takes_stream_options: bool = True
    tells_usage: bool = True
    tells_each_chunk: bool = False
    lists_models: bool = True
    tokens: int = 1
    role_first: bool = False
    dies_after: int | None = None  # chunks; the connection is cut
    ends_after: int | None = None  # chunks; the stream ends, without a finish reason
    error_after: int | None = None  # chunks; an error comes in the stream
    holds: bool = False  # answers begin, and never end
    refusals: list[int] = field(default_factory=list)


@final
class FakeOpenAI:
    """Serves in a thread. bodies: what came, in order."""

    def __init__(self, behaviour: Behaviour | None = None, on_request: Callable[[int], None] | None = None) -> None:
        self.behaviour = behaviour or Behaviour()
        self.bodies: list[Json] = []
        self._on_request = on_request
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self.url = ""

    def __enter__(self) -> FakeOpenAI:
        self._thread.start()
        self._ready.wait(10)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(10)

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._serve())
        self._loop.close()

    async def _serve(self) -> None:
        self._stop = asyncio.Event()
        self._tasks: set[asyncio.Task[Any]] = set()
        server = await asyncio.start_server(self._connection, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _connection(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode()
                fields = dict(line.lower().split(": ", 1) for line in head.split("\r\n")[1:] if ": " in line)
                body = await reader.readexactly(int(fields.get("content-length", 0)))
                method, path, _ = head.split(" ", 2)
                if not await self._answer(method, path, body, writer):
                    return
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            return  # the client left, or the test is over
        finally:
            self._tasks.discard(task)
            writer.close()

    async def _answer(self, method: str, path: str, body: bytes, writer: asyncio.StreamWriter) -> bool:
        """Answer a request, and return whether the connection goes on."""
        how = self.behaviour
        if method == "GET":
            found = path == "/v1/models" and how.lists_models
            self._reply(writer, 200 if found else 404, {"data": [{"id": "fake"}]} if found else {"error": "no"})
            return True
        wanted = json.loads(body)
        self.bodies.append(wanted)
        if self._on_request is not None:
            self._on_request(len(self.bodies))
        refusal = self._refusal(wanted)
        if refusal is not None:
            self._reply(writer, refusal[0], {"error": {"message": refusal[1]}})
            return True
        return await self._stream(wanted, path.endswith("/chat/completions"), writer)

    def _refusal(self, wanted: Json) -> tuple[int, str] | None:
        how = self.behaviour
        if not how.takes_ids and isinstance(wanted.get("prompt"), list):
            return 422, "prompt: Input should be a valid string"
        if not how.takes_extras and ("ignore_eos" in wanted or len(wanted.get("stream_options") or {}) > 1):
            return 400, "Unrecognized request argument supplied: ignore_eos"
        if not how.takes_stream_options and "stream_options" in wanted:
            return 400, "Unrecognized request argument supplied: stream_options"
        if how.refusals and len(self.bodies) > 1:
            status = how.refusals.pop(0)
            if status != 200:
                return status, "come back later"
        return None

    async def _stream(self, wanted: Json, is_chat: bool, writer: asyncio.StreamWriter) -> bool:
        how = self.behaviour
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
        counts = [min(how.tokens, wanted["max_tokens"] - at) for at in range(0, wanted["max_tokens"], how.tokens)]
        if how.role_first:
            self._event(writer, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        told = 0
        for number, count in enumerate(counts):
            if number == how.dies_after:
                await writer.drain()
                return False
            if number == how.error_after:
                self._event(writer, {"error": {"message": "the engine died", "code": 500}})
            if number == how.ends_after:
                break
            told += count
            text = "ab " * count
            choice: Json = {"index": 0, **({"delta": {"content": text}} if is_chat else {"text": text})}
            choice["finish_reason"] = "length" if number == len(counts) - 1 else None
            usage = {"usage": self._usage(told)} if how.tells_each_chunk else {}
            self._event(writer, {"choices": [choice], **usage})
            await writer.drain()
            if how.holds:
                await asyncio.Event().wait()
        if how.ends_after is None:
            if how.tells_usage and "stream_options" in wanted:
                self._event(writer, {"choices": [], "usage": self._usage(told)})
            self._part(writer, b"data: [DONE]\n\n")
        writer.write(b"0\r\n\r\n")
        return True

    @staticmethod
    def _usage(told: int) -> Json:
        return {"prompt_tokens": 9, "completion_tokens": told, "prompt_tokens_details": {"cached_tokens": 4}}

    def _event(self, writer: asyncio.StreamWriter, body: Json) -> None:
        self._part(writer, b"data: " + json.dumps(body).encode() + b"\n\n")

    @staticmethod
    def _part(writer: asyncio.StreamWriter, data: bytes) -> None:
        writer.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    @staticmethod
    def _reply(writer: asyncio.StreamWriter, status: int, body: Json) -> None:
        data = json.dumps(body).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(data)}\r\n\r\n"
        writer.write(head.encode() + data)
