"""The engine for asyncio: requests in from any task, text out as async iterators.

The engine runs in a process of its own, which may die and be started again (supervisor.py). One thread here waits for
what it sends; everything else happens on the event loop, so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, Protocol, TypeAlias

from inferc.errors import GenerationError, InfercError, ObjectiveError, RequestError
from inferc.runtime.engine import EngineStats
from inferc.runtime.engine_loop import Event, Failed, Scored, Sink
from inferc.runtime.sampling_params import SamplingParams
from inferc.runtime.scoring import Score
from inferc.runtime.sequence import Output
from inferc.runtime.step import Logprobs
from inferc.runtime.text import Text, TextStream
from inferc.serve.admission import QueueForecast
from inferc.serve.metrics import Ended, ModelMetrics, Outcome
from inferc.serve.waiting import RequestTimeout

log = logging.getLogger(__name__)

MAX_SEQUENCES = 1024  # of all requests, running and waiting; more are refused
MAX_STARTS = 3  # of a request whose engines die: after that, it may be what they die of
State = Literal["starting", "serving", "asleep", "draining", "dead"]


class EngineUnavailable(InfercError):
    """The engine takes no requests: the server shuts down, or the engine died. retry_after: seconds until it may be back."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class QueueFull(InfercError):
    """Too many sequences are running or waiting. retry_after: seconds until there may be room."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


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

    def score(self, token_ids: Sequence[int], sink: Sink, num_top: int = 0) -> str: ...

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

    news: set when there is something to take; several streams that are read together share one.
    """

    def __init__(
        self,
        engine: AsyncEngine,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        news: asyncio.Event | None = None,
        owner: str = "",
        on_over: Callable[[int], None] = lambda output_tokens: None,
    ) -> None:
        """owner: whose it is, and who may abort it. on_over is called once, when it is over."""
        self.request_id = request_id
        self.owner = owner
        self.on_over = on_over
        self.timer: asyncio.TimerHandle | None = None  # of its time limit
        self.engine_id = ""  # until it is started
        self.num_starts = 0
        self.num_sequences = params.n
        self.prompt_len = len(prompt_token_ids)
        self.opened_at = time.monotonic()
        self._first_at = [math.nan] * params.n
        self._last_at = [math.nan] * params.n
        self._counts = [0] * params.n
        self._queue_seconds: float | None = None
        self._reason = ""  # of an output that ended
        self.num_cached = 0  # of the prompt's tokens
        self.num_forgotten: dict[int, int] = {}  # tokens that the last one of each sequence did not see
        self._engine = engine
        self._prompt: Sequence[int] | None = prompt_token_ids  # until something came: it is not started again then
        self._params = params
        self._texts = [TextStream(engine.text, params) for _ in range(params.n)]
        self._running = set(range(params.n))
        self._pending: dict[int, _Pending] = {}
        self._error: InfercError | None = None
        self._news = news or asyncio.Event()

    @property
    def is_open(self) -> bool:
        return bool(self._running) and self._error is None

    def ended(self) -> Ended:
        """What is to be counted of it, now that it is over."""
        outcome: Outcome = "left"
        if isinstance(self._error, RequestAborted):
            outcome = "aborted"
        elif isinstance(self._error, RequestError | ObjectiveError | QueueFull):
            outcome = "refused"
        elif self._error is not None:
            outcome = "error"
        elif not self._running:
            outcome = "length" if self._reason == "length" else "stop"
        return Ended(
            outcome,
            self.opened_at,
            self.prompt_len,
            self.num_cached,
            self._first_at,
            self._last_at,
            self._counts,
            self._queue_seconds,
            self._params.ttft_ms,
            self._params.tbt_ms,
        )

    @property
    def num_waiting(self) -> int:
        """Outputs of which nothing has come."""
        return self._counts.count(0)

    @property
    def num_output(self) -> int:
        """Tokens of all outputs so far."""
        return sum(self._counts)

    @property
    def can_start(self) -> bool:
        """Whether it can be started (again): its reader has seen nothing of it."""
        return self._prompt is not None

    def start(self, client: EngineLike, sink: Sink) -> None:
        assert self._prompt is not None
        self.engine_id = client.add(self._prompt, self._params, sink, self.request_id)

    def take_event(self, event: Event, now: float) -> None:
        if isinstance(event, Output):
            self.push(event, now)

    def push(self, output: Output, now: float) -> None:
        """Take what a step brought, at this time of the monotonic clock."""
        if output.index not in self._running:  # it ended by a stop string while this was on its way
            return
        self._prompt = None
        if output.num_cached is not None and output.index == 0:
            self.num_cached, self._queue_seconds = output.num_cached, output.queue_seconds
        self._count(output.index, len(output.token_ids), now)
        if output.num_forgotten:
            self.num_forgotten[output.index] = output.num_forgotten
        delta = self._texts[output.index].push(output.token_ids, output.finish_reason)
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
            self._running.discard(output.index)
            if output.finish_reason is None:
                self._engine.abort_in_engine(self, output.index)
        pending = self._pending.get(output.index)
        if pending is None:
            pending = self._pending[output.index] = _Pending()
        pending.texts.append(delta.text)
        pending.token_ids += output.token_ids
        if output.logprobs:
            pending.logprobs += output.logprobs
        pending.finish_reason = delta.finish_reason
        # What shows nothing yet (half a character, a possible stop string) waits for what completes it.
        if delta.text or pending.logprobs or delta.finish_reason is not None:
            pending.shows = True
            self._news.set()

    def _count(self, index: int, num_tokens: int, now: float) -> None:
        if self._counts[index]:
            self._engine.metrics.tbt.observe((now - self._last_at[index]) / max(1, num_tokens), num_tokens)
        elif num_tokens:
            self._first_at[index] = now
            self._engine.queue.first_token(now)
            if index == 0:
                self._engine.metrics.ttft.observe(now - self.opened_at)
        self._counts[index] += num_tokens
        self._last_at[index] = now

    def fail(self, error: InfercError) -> None:
        self._error = self._error or error
        self._news.set()

    def close(self) -> None:
        """End the request if it still runs. Call it when done, whatever happened."""
        if self.is_open:
            self._engine.abort_in_engine(self)
        self._engine.forget(self)

    def take(self) -> Piece | None:
        """What there is of one of the outputs, or None. Raises what ended the request once all else is taken."""
        for index in sorted(self._pending) if len(self._pending) > 1 else self._pending:
            if self._pending[index].shows:
                return self._pending.pop(index).piece(index)
        if self._error is not None:
            raise self._error
        return None

    @property
    def is_done(self) -> bool:
        """Nothing more comes."""
        return not self._running and not self._pending

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Piece:
        while True:
            await self._news.wait()
            if (piece := self.take()) is not None:
                return piece
            if not self._running:
                raise StopAsyncIteration
            self._news.clear()


class Scoring:
    """A text that is being scored: `result` waits for it."""

    num_sequences = 1

    def __init__(
        self, engine: AsyncEngine, token_ids: Sequence[int], num_top: int, request_id: str, owner: str
    ) -> None:
        self.request_id = request_id
        self.owner = owner
        self.engine_id = ""
        self.num_starts = 0
        self._engine = engine
        self._token_ids, self._num_top = token_ids, num_top
        self._result: asyncio.Future[Score] = asyncio.get_running_loop().create_future()

    can_start = True

    @property
    def is_open(self) -> bool:
        return not self._result.done()

    def start(self, client: EngineLike, sink: Sink) -> None:
        self.engine_id = client.score(self._token_ids, sink, self._num_top)

    def take_event(self, event: Event, now: float) -> None:
        if isinstance(event, Scored) and not self._result.done():
            self._result.set_result(event.score)

    def fail(self, error: InfercError) -> None:
        if not self._result.done():
            self._result.set_exception(error)

    async def result(self) -> Score:
        """The score; whoever is cancelled while waiting ends the work."""
        try:
            return await self._result
        finally:
            if self.is_open or self._result.cancelled():
                self._engine.abort_in_engine(self)
            self._engine.forget(self)


Work: TypeAlias = Stream | Scoring


class AsyncEngine:
    """Requests by id, on one event loop. What the engine says comes in by `_sink`, from a thread of its client's.

    While there is no engine (it starts, starts again, or sleeps) requests wait for it: `attach` starts them. One of which
    nothing has come is started again when its engine dies, MAX_STARTS times in all.

    text may be set later, before the first request. wanted: called when a request waits for an engine that sleeps.
    """

    text: Text

    def __init__(
        self,
        text: Text | None,
        facts: ModelFacts,
        max_sequences: int = MAX_SEQUENCES,
        wanted: Callable[[], None] = lambda: None,
        metrics: ModelMetrics | None = None,
        max_queue_seconds: float | None = None,
    ) -> None:
        """max_queue_seconds: until the first token, as far as can be foreseen; who would wait longer is refused."""
        self.client: EngineLike | None = None
        if text is not None:
            self.text = text
        self.facts = facts
        self.state: State = "starting"
        self.reason = ""  # of being dead
        self.metrics = metrics or ModelMetrics()
        self.queue = QueueForecast()
        self._max_queue_seconds = max_queue_seconds
        self.wanted = wanted
        self._loop = asyncio.get_running_loop()
        self._max_sequences = max_sequences
        self._works: dict[str, Work] = {}
        self._parked: dict[str, Work] = {}  # of these, which wait for an engine
        self._num_sequences = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._incoming: deque[tuple[Work, int, Event]] = deque()
        self._is_woken = False

    @property
    def num_requests(self) -> int:
        return len(self._works)

    @property
    def num_sequences(self) -> int:
        """Of all requests, running and waiting."""
        return self._num_sequences

    # ------------------------------------------------------------------------------------------- requests

    def open(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str = "",
        news: asyncio.Event | None = None,
        owner: str = "",
        on_over: Callable[[int], None] = lambda output_tokens: None,
        max_seconds: float | None = None,
    ) -> Stream:
        """Start a request; close the stream when done with it. news, owner, on_over: as in Stream.

        max_seconds: it fails with RequestTimeout when it has taken so long.
        Raises RequestIdInUse, QueueFull or EngineUnavailable. What else is wrong with the request (a prompt that is
        too long) is raised by the stream.
        """
        self.check_open(params.n)
        stream = Stream(self, prompt_token_ids, params, self._name(request_id), news, owner, on_over)
        self._begin(stream)
        if max_seconds is not None:
            stream.timer = self._loop.call_later(max_seconds, self._time_out, stream, max_seconds)
        return stream

    def _time_out(self, stream: Stream, seconds: float) -> None:
        if stream.is_open:
            self.abort_in_engine(stream)
            stream.fail(RequestTimeout(f"the request was not done within the {seconds:g} s that are allowed here"))

    async def score(self, token_ids: Sequence[int], num_top: int = 0, request_id: str = "", owner: str = "") -> Score:
        """Log probabilities of the tokens of a text, and the num_top likeliest of each place. Raises as `open`."""
        self.check_open()
        scoring = Scoring(self, token_ids, num_top, self._name(request_id), owner)
        self._begin(scoring)
        return await scoring.result()

    def check_open(self, num_sequences: int = 1, within: float | None = None) -> None:
        """Raise EngineUnavailable or QueueFull if a request of so many sequences would not be taken now.

        within: seconds after which nobody waits for its first token any more.
        """
        if self.state == "draining":
            self.metrics.refused("unavailable")
            raise EngineUnavailable("the server is shutting down and takes no new requests", retry_after=1.0)
        if self.state == "dead":
            self.metrics.refused("unavailable")
            raise EngineUnavailable(self.reason)
        if self._num_sequences + num_sequences > self._max_sequences:
            self.metrics.refused("queue_full")
            raise QueueFull(
                f"{self._num_sequences} sequences are running or waiting, and {self._max_sequences} are let in; try"
                " again later"
            )
        limits = [limit for limit in (within, self._max_queue_seconds) if limit is not None]
        if limits and (wait := self.queue.seconds(time.monotonic())) > min(limits):
            self.metrics.refused("queue_time")
            raise QueueFull(
                f"{self.queue.num_waiting} sequences wait, and the next would wait about {wait:.1f} s, longer than the"
                f" {min(limits):.3g} s that it may; try again later",
                retry_after=wait - min(limits),
            )

    async def stats(self) -> EngineStats:
        """The engine's counters of now. Raises EngineUnavailable if it does not answer."""
        if self.client is None:
            raise EngineUnavailable(f"the engine is {self.state}")
        try:
            return await asyncio.to_thread(self.client.stats)
        except InfercError as error:
            raise EngineUnavailable(str(error)) from None

    def abort(self, request_id: str, owner: str | None = None) -> bool:
        """End a request from outside of its stream, if it is this owner's (None: whosoever); whether it was running."""
        work = self._works.get(request_id)
        if work is None or not work.is_open or owner not in (None, work.owner):
            return False
        self.abort_in_engine(work)
        work.fail(RequestAborted(f"request {request_id!r} was aborted"))
        return True

    def abort_in_engine(self, work: Work, index: int | None = None) -> None:
        if self.client is not None and work.engine_id and work.request_id not in self._parked:
            self.client.abort(work.engine_id, index)

    def forget(self, work: Work) -> None:
        if self._works.get(work.request_id) is work:
            del self._works[work.request_id]
            self._parked.pop(work.request_id, None)
            self._num_sequences -= work.num_sequences
            if isinstance(work, Stream):
                self.queue.left(work.num_waiting)
                self.metrics.ended(work.ended())
                work.on_over(work.num_output)
                if work.timer is not None:
                    work.timer.cancel()
        if not self._works:
            self._idle.set()

    async def wait_until_idle(self) -> bool:
        return await self._idle.wait()

    async def drain(self, limit_seconds: float) -> bool:
        """Take no more requests and let the running ones end, at most this long. Whether all did."""
        if self.state != "dead":
            self.state = "draining"
        try:
            await asyncio.wait_for(self._idle.wait(), limit_seconds)
        except asyncio.TimeoutError:
            late = EngineUnavailable("the server shut down before the request was done")
            for work in list(self._works.values()):
                self.abort_in_engine(work)
                work.fail(late)
            return False
        return True

    def _name(self, request_id: str) -> str:
        request_id = request_id or f"r-{secrets.token_hex(8)}"
        if request_id in self._works:
            raise RequestIdInUse(f"request id {request_id!r} is in use; give every request its own")
        return request_id

    def _begin(self, work: Work) -> None:
        self._works[work.request_id] = work
        self._num_sequences += work.num_sequences
        if isinstance(work, Stream):
            self.queue.came(work.num_sequences, work.opened_at)
        self._idle.clear()
        try:
            self._start(work)
        except BaseException:
            self.forget(work)
            raise

    def _start(self, work: Work) -> None:
        """Start it, or let it wait for an engine."""
        client = self.client
        if client is not None and client.stopped is None:
            work.num_starts += 1
            with suppress(InfercError):  # it has died just now
                work.start(client, partial(self._sink, work, work.num_starts))
                return
            work.num_starts -= 1
        self._parked[work.request_id] = work
        if self.state == "asleep":
            self.wanted()

    # -------------------------------------------------------------------------------------- the engine's life

    def attach(self, client: EngineLike) -> None:
        """There is an engine: start what waits for one."""
        self.client = client
        if self.state != "draining":
            self.state = "serving"
        parked, self._parked = self._parked, {}
        for work in parked.values():
            self._start(work)

    def detach(self, state: State, reason: str = "") -> None:
        """The engine is gone, and what it sent has been taken or is on its way here. `dead`: there is no other."""
        self.client = None
        if self.state != "draining" or state == "dead":
            self.state = state
        if state == "dead":
            self.reason = reason
            self._fail_all(self._parked.values())
        elif self._parked and state == "asleep":
            self.wanted()

    def _fail_all(self, works: Iterable[Work]) -> None:
        for work in list(works):
            work.fail(EngineUnavailable(self.reason))

    def _sink(self, work: Work, start: int, event: Event) -> None:
        """Called on the engine client's thread. All events of a step wake the loop once."""
        self._incoming.append((work, start, event))
        if not self._is_woken:
            self._is_woken = True
            # Raises RuntimeError once the loop is closed: nobody is left to hear it then.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        self._is_woken = False  # before taking: what comes from here on wakes the loop again
        incoming, now = self._incoming, time.monotonic()
        while incoming:
            work, start, event = incoming.popleft()
            if start != work.num_starts:
                continue  # of an engine before
            if isinstance(event, Failed):
                self._fail(work, event)
            else:
                work.take_event(event, now)

    def _fail(self, work: Work, event: Failed) -> None:
        error = event.error
        if event.is_request_error or isinstance(error, RequestError | GenerationError | ObjectiveError):
            work.fail(error)
        elif self.state == "dead" or not work.can_start or work.num_starts >= MAX_STARTS:
            work.fail(EngineUnavailable(event.reason, retry_after=1.0))
        elif work.is_open and self._works.get(work.request_id) is work:
            log.warning("request %s: %s; it is started again", work.request_id, event.reason)
            self._start(work)
