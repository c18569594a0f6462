"""The engine for asyncio: requests in from any task, text out as async iterators.

The engine runs in a process of its own. One thread here waits for what it sends; everything else happens on the event
loop, so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol

from inferc.errors import GenerationError, InfercError, ObjectiveError, RequestError
from inferc.runtime.engine import EngineStats
from inferc.runtime.engine_loop import Event, Failed, Sink, Stats
from inferc.runtime.sampling_params import SamplingParams
from inferc.runtime.sequence import Output
from inferc.runtime.step import Logprobs
from inferc.runtime.text import Text, TextStream

log = logging.getLogger(__name__)

MAX_SEQUENCES = 1024  # of all requests, running and waiting; more are refused
PING_SECONDS = 1.0  # how often the engine is asked whether it still steps
HUNG_SECONDS = 60.0  # a step that lasts longer is no step any more
State = Literal["serving", "hung", "draining", "dead"]


class EngineUnavailable(InfercError):
    """The engine takes no requests: it is draining, it does not answer, or it died."""


class QueueFull(InfercError):
    """Too many sequences are running or waiting."""


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


@dataclass
class _Pending:
    """What of an output the reader has not taken yet."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    finish_reason: str | None = None
    shows: bool = False  # says anything: text, log probabilities, the end

    def piece(self, index: int) -> Piece:
        return Piece(index, "".join(self.texts), self.token_ids, self.finish_reason, self.logprobs)


class EngineLike(Protocol):
    """What AsyncEngine asks of an engine (an EngineClient); nothing here waits unless it says so. Sinks are called on any thread."""

    @property
    def stopped(self) -> str | None: ...

    def add(self, prompt_token_ids: Sequence[int], params: SamplingParams, sink: Sink, name: str = "") -> str: ...

    def abort(self, request_id: str, index: int | None = None) -> None: ...

    def ask_stats(self, sink: Sink) -> str: ...

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

    request_id is the client's name for it; the engine's own (`engine_id`) is never used twice, so what is still on its
    way for a request of the same name cannot come here. Pieces that the reader has not taken are merged, so a slow
    reader costs one piece per output and stalls nobody.
    """

    def __init__(self, engine: AsyncEngine, request_id: str, params: SamplingParams) -> None:
        self.request_id = request_id
        self.engine_id = ""  # until it is started
        self.num_sequences = params.n
        self.num_cached = 0  # of the prompt's tokens
        self.num_forgotten: dict[int, int] = {}  # tokens that the last one of each sequence did not see
        self._engine = engine
        self._texts = [TextStream(engine.text, params) for _ in range(params.n)]
        self._running = set(range(params.n))
        self._pending: dict[int, _Pending] = {}
        self._error: InfercError | None = None
        self._news = asyncio.Event()

    @property
    def is_open(self) -> bool:
        return bool(self._running) and self._error is None

    def push(self, output: Output) -> None:
        """Take what a step brought."""
        if output.index not in self._running:  # it ended by a stop string while this was on its way
            return
        if output.index == 0 and output.num_cached is not None:
            self.num_cached = output.num_cached
        if output.num_forgotten:
            self.num_forgotten[output.index] = output.num_forgotten
        delta = self._texts[output.index].push(output.token_ids, output.finish_reason)
        if delta.finish_reason is not None:
            self._running.discard(output.index)
            if output.finish_reason is None:
                self._engine.client.abort(self.engine_id, output.index)
        pending = self._pending.setdefault(output.index, _Pending())
        pending.texts.append(delta.text)
        pending.token_ids += output.token_ids
        pending.logprobs += output.logprobs or ()
        pending.finish_reason = delta.finish_reason
        # What shows nothing yet (half a character, a possible stop string) waits for what completes it.
        if delta.text or pending.logprobs or delta.finish_reason is not None:
            pending.shows = True
            self._news.set()

    def fail(self, error: InfercError) -> None:
        self._error = self._error or error
        self._news.set()

    def close(self) -> None:
        """End the request if it still runs. Call it when done, whatever happened."""
        if self.is_open and self.engine_id:
            self._engine.client.abort(self.engine_id)
        self._engine.forget(self)

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Piece:
        while True:
            await self._news.wait()
            for index in sorted(self._pending):
                if self._pending[index].shows:
                    return self._pending.pop(index).piece(index)
            if self._error is not None:
                raise self._error
            if not self._running:
                raise StopAsyncIteration
            self._news.clear()


class AsyncEngine:
    """Requests by id, on one event loop. What the engine says comes in by `_sink`, from a thread of its client's."""

    def __init__(self, client: EngineLike, text: Text, facts: ModelFacts, max_sequences: int = MAX_SEQUENCES) -> None:
        self.client = client
        self.text = text
        self.facts = facts
        self.state: State = "serving"
        self._loop = asyncio.get_running_loop()
        self._max_sequences = max_sequences
        self._streams: dict[str, Stream] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._reason = ""
        self._incoming: deque[tuple[Stream, Event]] = deque()
        self._is_woken = False

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    def open(self, prompt_token_ids: Sequence[int], params: SamplingParams, request_id: str = "") -> Stream:
        """Start a request; close the stream when done with it.

        Raises RequestIdInUse, QueueFull or EngineUnavailable. What else is wrong with the request (a prompt that is
        too long) is raised by the stream.
        """
        self.check_open(params.n)
        request_id = request_id or f"r-{secrets.token_hex(8)}"
        if request_id in self._streams:
            raise RequestIdInUse(f"request id {request_id!r} is in use; give every request its own")
        stream = Stream(self, request_id, params)
        self._streams[request_id] = stream
        self._idle.clear()
        try:
            sink = partial(self._sink, stream)
            stream.engine_id = self.client.add(prompt_token_ids, params, sink, request_id)
        except RequestError:
            stream.close()
            raise
        except InfercError as error:  # it died, and `watch` has not seen it yet
            stream.close()
            raise EngineUnavailable(str(error)) from None
        return stream

    def check_open(self, num_sequences: int = 1) -> None:
        """Raise EngineUnavailable or QueueFull if a request of so many sequences would not be taken now."""
        if self.state == "draining":
            raise EngineUnavailable("the server is shutting down and takes no new requests")
        if self.state != "serving":
            raise EngineUnavailable(self._reason)
        found = sum(stream.num_sequences for stream in self._streams.values())
        if found + num_sequences > self._max_sequences:
            raise QueueFull(
                f"{found} sequences are running or waiting, and {self._max_sequences} are let in; try again later"
            )

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
        self.client.abort(stream.engine_id)
        stream.fail(RequestAborted(f"request {request_id!r} was aborted"))
        return True

    def forget(self, stream: Stream) -> None:
        if self._streams.get(stream.request_id) is stream:
            del self._streams[stream.request_id]
        if not self._streams:
            self._idle.set()

    async def drain(self, limit_seconds: float) -> bool:
        """Take no more requests and let the running ones end, at most this long. Whether all did."""
        if self.state != "dead":
            self.state = "draining"
        try:
            await asyncio.wait_for(self._idle.wait(), limit_seconds)
        except asyncio.TimeoutError:
            late = EngineUnavailable("the server shut down before the request was done")
            for stream in list(self._streams.values()):
                self.client.abort(stream.engine_id)
                stream.fail(late)
            return False
        return True

    async def watch(self, died: asyncio.Event, on_state: Callable[[State], Awaitable[None]]) -> None:
        """Return when the engine has died: every stream has ended then, and no request is taken any more.

        died is set by whoever started the engine. on_state hears of every change that is not `drain`'s. The engine is
        asked for its counters again and again, and a step that does not end within HUNG_SECONDS makes it "hung" until
        it answers.
        """
        asked, answered = time.monotonic(), asyncio.Event()
        self._ping(answered)
        while self.client.stopped is None:
            with suppress(asyncio.TimeoutError):
                await asyncio.wait_for(died.wait(), PING_SECONDS)
            if answered.is_set():
                asked, answered = time.monotonic(), asyncio.Event()
                self._ping(answered)
                if self.state == "hung":
                    log.warning("the engine answers again")
                    self.state = "serving"
                    await on_state(self.state)
            elif self.state == "serving" and time.monotonic() - asked > HUNG_SECONDS:
                self._reason = f"the engine has not ended its step for {HUNG_SECONDS:g} s"
                log.error("%s; %d requests are running", self._reason, len(self._streams))
                self.state = "hung"
                await on_state(self.state)
        self._reason = self.client.stopped
        log.error("%s; %d requests were running", self._reason, len(self._streams))
        self.state = "dead"
        for stream in list(self._streams.values()):
            stream.fail(EngineUnavailable(self._reason))
        await on_state(self.state)

    def _ping(self, answered: asyncio.Event) -> None:
        def sink(event: Event) -> None:
            if isinstance(event, Stats):
                with suppress(RuntimeError):
                    self._loop.call_soon_threadsafe(answered.set)

        with suppress(InfercError):  # it has stopped: `watch` sees that
            self.client.ask_stats(sink)

    def _sink(self, stream: Stream, event: Event) -> None:
        """Called on the engine client's thread. All events of a step wake the loop once."""
        self._incoming.append((stream, event))
        if not self._is_woken:
            self._is_woken = True
            # Raises RuntimeError once the loop is closed: nobody is left to hear it then.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._is_woken = False  # before taking: what comes from here on wakes the loop again
        while self._incoming:
            stream, event = self._incoming.popleft()
            if isinstance(event, Output):
                stream.push(event)
            elif isinstance(event, Failed):
                error = event.error
                is_its_own = isinstance(error, RequestError | GenerationError | ObjectiveError)
                stream.fail(error if is_its_own else EngineUnavailable(event.reason))
