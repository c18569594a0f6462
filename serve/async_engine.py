"""The engine for asyncio: requests in from any task, text out as async iterators.

The engine runs in a process of its own. One thread here waits for what it sends; everything else happens on the event
loop, so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol

from inferc.errors import InfercError, RequestError
from inferc.runtime.engine import EngineStats
from inferc.runtime.engine_loop import Event, Failed, Sink
from inferc.runtime.sampling_params import SamplingParams
from inferc.runtime.sequence import Output
from inferc.runtime.step import Logprobs
from inferc.runtime.text import Text, TextStream

log = logging.getLogger(__name__)

MAX_REQUESTS = 1024  # running and waiting; more are refused
WATCH_SECONDS = 0.05  # how often the engine's health is looked at
State = Literal["serving", "draining", "dead"]


class EngineUnavailable(InfercError):
    """The engine takes no requests: it is draining, or it died."""


class QueueFull(InfercError):
    """Too many requests are waiting."""


class RequestAborted(InfercError):
    """Somebody else ended the request."""


class RequestIdInUse(RequestError):
    """A request of this id is still running."""


@dataclass(frozen=True)
class Piece:
    """What came for output `index` since the piece before it. The last piece of an output has a finish_reason."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[Logprobs]


class EngineLike(Protocol):
    """What AsyncEngine asks of an engine (an EngineClient); nothing here waits unless it says so. Sinks are called on any thread."""

    @property
    def stopped(self) -> str | None: ...

    def add(self, request_id: str, prompt_token_ids: Sequence[int], params: SamplingParams, sink: Sink) -> None: ...

    def abort(self, request_id: str, index: int | None = None) -> None: ...

    def stats(self) -> EngineStats:
        """Waits for the engine, unlike the others."""


@dataclass(frozen=True)
class ModelFacts:
    """What the serving side must know of the model."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)  # of sampling parameters


class Stream:
    """One request's answer, to be iterated once.

    Pieces that the reader has not taken are merged, so a slow reader costs one piece per output and stalls nobody.
    """

    def __init__(self, engine: AsyncEngine, request_id: str, params: SamplingParams) -> None:
        self.request_id = request_id
        self._engine = engine
        self._texts = [TextStream(engine.text, params) for _ in range(params.n)]
        self._running = set(range(params.n))
        self._pending: dict[int, Piece] = {}
        self._error: InfercError | None = None
        self._news = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return bool(self._running) and self._error is None

    def push(self, output: Output) -> None:
        """Take what a step brought."""
        if output.index not in self._running:  # it ended by a stop string while this was on its way
            return
        delta = self._texts[output.index].push(output.token_ids, output.finish_reason)
        new = Piece(output.index, delta.text, output.token_ids, delta.finish_reason, output.logprobs or [])
        if delta.finish_reason is not None:
            self._running.discard(output.index)
            if output.finish_reason is None:
                self._engine.client.abort(self.request_id, output.index)
        old = self._pending.get(output.index)
        if old is not None:
            new = replace(
                new,
                text=old.text + new.text,
                token_ids=old.token_ids + new.token_ids,
                logprobs=old.logprobs + new.logprobs,
            )
        # What shows nothing yet (half a character, a possible stop string) waits for what completes it.
        self._pending[output.index] = new
        if new.text or new.finish_reason is not None or new.logprobs:
            self._news.set()

    def fail(self, error: InfercError) -> None:
        self._error = self._error or error
        self._news.set()

    def close(self) -> None:
        """End the request if it still runs. Call it when done, whatever happened."""
        if self.is_open:
            self._engine.client.abort(self.request_id)
        self._engine.forget(self)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Piece:
        while True:
            await self._news.wait()
            for index in sorted(self._pending):
                piece = self._pending[index]
                if _shows(piece):
                    del self._pending[index]
                    return piece
            if self._error is not None:
                raise self._error
            if not self._running:
                raise StopAsyncIteration
            self._news.clear()


def _shows(piece: Piece) -> bool:
    """Whether a piece says anything; if not (half a character, a possible stop string) it waits for the next."""
    return bool(piece.text or piece.logprobs) or piece.finish_reason is not None


class AsyncEngine:
    """Requests by id, on one event loop. What the engine says comes in by `_sink`, from a thread of its client's."""

    def __init__(self, client: EngineLike, text: Text, facts: ModelFacts, max_requests: int = MAX_REQUESTS) -> None:
        self.client = client
        self.text = text
        self.facts = facts
        self.state: State = "serving"
        self._loop = asyncio.get_running_loop()
        self._max_requests = max_requests
        self._streams: dict[str, Stream] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._reason = ""
        self._incoming: deque[Event] = deque()
        self._is_woken = False

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    def open(self, prompt_token_ids: Sequence[int], params: SamplingParams, request_id: str = "") -> Stream:
        """Start a request; close the stream when done with it.

        Raises RequestIdInUse, QueueFull or EngineUnavailable. What else is wrong with the request (a prompt that is
        too long) is raised by the stream.
        """
        self._check_open()
        request_id = request_id or f"r-{secrets.token_hex(8)}"
        if request_id in self._streams:
            raise RequestIdInUse(f"request id {request_id!r} is in use; give every request its own")
        if len(self._streams) >= self._max_requests:
            raise QueueFull(
                f"{len(self._streams)} requests are running or waiting, as many as are let in; try again later"
            )
        stream = Stream(self, request_id, params)
        self._streams[request_id] = stream
        self._idle.clear()
        try:
            self.client.add(request_id, prompt_token_ids, params, self._sink)
        except RequestError:
            stream.close()
            raise
        except InfercError as error:  # it died, and `watch` has not seen it yet
            stream.close()
            raise EngineUnavailable(str(error)) from None
        return stream

    def _check_open(self) -> None:
        if self.state == "draining":
            raise EngineUnavailable("the server is shutting down and takes no new requests")
        if self.state == "dead":
            raise EngineUnavailable(self._reason)

    async def stats(self) -> EngineStats:
        """The engine's counters of now. Raises EngineUnavailable if it does not answer."""
        try:
            return await asyncio.to_thread(self.client.stats)
        except InfercError as error:
            raise EngineUnavailable(str(error)) from None

    def abort(self, request_id: str) -> bool:
        """End a request from outside of its stream; whether it was running."""
        stream = self._streams.get(request_id)
        if stream is None or not stream.is_open:
            return False
        self.client.abort(request_id)
        stream.fail(RequestAborted(f"request {request_id!r} was aborted"))
        return True

    def forget(self, stream: Stream) -> None:
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
        if not self._streams:
            self._idle.set()

    async def drain(self, limit_seconds: float) -> bool:
        """Take no more requests and let the running ones end, at most this long. Whether all did."""
        if self.state == "serving":
            self.state = "draining"
        try:
            await asyncio.wait_for(self._idle.wait(), limit_seconds)
        except asyncio.TimeoutError:
            late = EngineUnavailable("the server shut down before the request was done")
            for stream in list(self._streams.values()):
                self.client.abort(stream.request_id)
                stream.fail(late)
            return False
        return True

    async def watch(self) -> None:
        """Return when the engine has died: every stream has ended then, and no request is taken any more."""
        while self.client.stopped is None:
            await asyncio.sleep(WATCH_SECONDS)
        self._reason = f"the engine stopped: {self.client.stopped}"
        log.error("%s; %d requests were running", self._reason, len(self._streams))
        self.state = "dead"
        for stream in list(self._streams.values()):
            stream.fail(EngineUnavailable(self._reason))

    def _sink(self, event: Event) -> None:
        """Called on the engine client's thread. All events of a step wake the loop once."""
        self._incoming.append(event)
        if not self._is_woken:
            self._is_woken = True
            # Raises RuntimeError once the loop is closed: nobody is left to hear it then.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._is_woken = False  # before taking: what comes from here on wakes the loop again
        while self._incoming:
            event = self._incoming.popleft()
            stream = self._streams.get(event.request_id or "")
            if stream is None:
                continue
            if isinstance(event, Output):
                stream.push(event)
            elif isinstance(event, Failed):
                stream.fail(RequestError(event.reason) if event.is_request_error else EngineUnavailable(event.reason))
