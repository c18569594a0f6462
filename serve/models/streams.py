"""The requests that run in an engine: streams of generated deltas, tasks with a single result, and their ends."""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, NamedTuple, Protocol, TypeAlias, TypeVar

from inferc.errors import InfercError, ObjectiveError, RequestError
from inferc.runtime.engine.loop import Event, Sink
from inferc.runtime.step.plan import Logprobs
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.sequence import Output
from inferc.runtime.text.text_stream import TextStream
from inferc.runtime.text.tokenizer import Text
from inferc.serve.errors import NoRoomToWake, QueueFull, RequestAborted, RequestTimeout
from inferc.serve.models.metrics import Ended, ModelMetrics, Outcome
from inferc.serve.models.queue_forecast import ARRIVED_AT, QueueForecast

# Tokens and likely tokens (log probabilities) of one delta, from which an event is made in some milliseconds.
LIKELY_AT_ONCE = 1 << 12
# Tokens and likely tokens of an answer that its reader may leave unread; each takes about 120 bytes.
MAX_UNREAD = 1 << 20
Kind = Literal["chat", "completion", "score", "embedding"]  # what a request asks for


@dataclass(frozen=True)
class Delta:
    """The part of output `index` that came since its previous delta; an output's last delta has a finish_reason."""

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None
    logprobs: list[Logprobs]
    stop: str | int | None = None  # the stop string or the end token that ended the output
    reasoning: str = ""  # what came before the text, where that is read apart (serve/answering)


@dataclass
class _Pending:
    """The part of an output that the reader has not taken yet."""

    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Logprobs] = field(default_factory=list)
    num_likely: int = 0  # tokens and likely tokens in `logprobs`
    finish_reason: str | None = None
    stop: str | int | None = None
    shows: bool = False  # has something for the reader: text, log probabilities or the end

    def delta(self, index: int) -> Delta:
        return Delta(index, "".join(self.texts), self.token_ids, self.finish_reason, self.logprobs, self.stop)


class EngineLike(Protocol):
    """The protocol of an engine for AsyncEngine (EngineClient): no method blocks; sinks are called on any thread."""

    @property
    def stopped(self) -> str | None: ...

    def add(self, prompt_token_ids: Sequence[int], params: SamplingParams, sink: Sink, name: str = "") -> str: ...

    def score(
        self, token_ids: Sequence[int], sink: Sink, num_top: int, cache_salt: str, first: int, adapter: str, /
    ) -> str: ...

    def abort(self, request_id: str, index: int | None = None) -> None: ...

    def embed(self, token_ids: Sequence[int], sink: Sink) -> str: ...

    def load_adapter(self, name: str, path: str, sink: Sink) -> str: ...

    def unload_adapter(self, name: str, sink: Sink) -> str: ...

    def ask_stats(self, sink: Sink) -> str: ...


class StreamOwner(Protocol):
    """The protocol of the owner of streams: the part of AsyncEngine that its streams use."""

    text: Text
    metrics: ModelMetrics
    queue: QueueForecast

    def abort_in_engine(self, task: EngineTask, index: int | None = None) -> None: ...

    def forget(self, task: EngineTask) -> None: ...

    def start_again(self, task: EngineTask) -> None: ...


@dataclass(frozen=True)
class ModelFacts:
    """The facts about a model that the server needs."""

    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...] = ()
    defaults: Mapping[str, Any] = field(default_factory=dict)  # default sampling parameters


class StepNote(NamedTuple):
    """A step that brought tokens of a request, noted for its trace.

    at: when the tokens came here, on the monotonic clock. step: the engine's number of the step. seconds: its time on
    the device. output and num_tokens: the index of the output, and how many tokens it got.
    """

    at: float
    step: int
    seconds: float
    output: int
    num_tokens: int


class RequestTracer(Protocol):
    """A protocol for a recorder of request traces, as in serve/observe/tracing.py."""

    def begin(self, stream: Stream, model: str) -> None:
        """Begin to record a request's trace, if the request is to be traced."""

    def end(self, stream: Stream, ended: Ended, model: str, request_id: str) -> None:
        """Finish the trace of a request that is over."""


class Stream:
    """The answer to one request as a stream of deltas, which can be iterated once.

    request_id is the client's name for the request. The engine's own id (`engine_id`) is never used twice, so events
    that are still on their way for an earlier request of the same name cannot come here. Deltas that the reader has
    not taken are merged, up to LIKELY_AT_ONCE likely tokens each, so that a slow reader stalls nobody. A request
    whose reader leaves more than MAX_UNREAD likely tokens unread is ended.

    news: an event that is set when there is something to take; several streams that are read together share one.
    """

    def __init__(
        self,
        engine: StreamOwner,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str,
        news: asyncio.Event | None = None,
        owner: str = "",
        on_over: Callable[[int], None] = lambda output_tokens: None,
        kind: Kind = "completion",
        marks: Mapping[int, str] | None = None,
    ) -> None:
        """Create a stream that has not been started.

        marks: as in Detokenizer. owner: the API key's name of the caller, who may abort it.
        on_over is called once, when the request is over, with the number of its output tokens.
        """
        self.request_id = request_id
        self.owner = owner
        self.on_over = on_over
        self.kind, self.priority, self.adapter = kind, params.priority, params.adapter
        self.timer: asyncio.TimerHandle | None = None  # ends the request at its time limit
        self.traced: object = None  # the tracer's own state for this request
        self.steps: list[StepNote] | None = None  # recorded if the request is traced
        self.engine_id = ""  # empty until the request is started
        self.num_starts = 0
        self.num_sequences = params.n
        self.num_listed = params.num_listed
        self.prompt_len = len(prompt_token_ids)
        self.opened_at = time.monotonic()
        self.arrived_at = (
            ARRIVED_AT.get() or self.opened_at
        )  # when it came to the server, before its prompt was tokenized
        self._first_at = [math.nan] * params.n
        self._last_at = [math.nan] * params.n
        self._counts = [0] * params.n
        self._queue_seconds: float | None = None
        self._reason = ""  # finish reason of the last output that ended
        self.num_cached = 0  # tokens of the prompt that were in the prefix cache
        self.num_forgotten: dict[int, int] = {}  # by output: earlier tokens that its last token did not attend to
        self._engine = engine
        # None once output has come: the request cannot be restarted from then on.
        self._prompt: Sequence[int] | None = prompt_token_ids
        self._params = params
        self._texts = [TextStream(engine.text, params, marks) for _ in range(params.n)]
        self._running = set(range(params.n))
        self._pending: dict[int, deque[_Pending]] = {}
        self._num_unread = 0  # tokens and likely tokens in `_pending`
        self._error: InfercError | None = None
        self._news = news or asyncio.Event()

    @property
    def is_open(self) -> bool:
        return bool(self._running) and self._error is None

    def ended(self) -> Ended:
        """Return the facts to be counted about this request, which is over."""
        outcome: Outcome = "left"
        if isinstance(self._error, RequestAborted):
            outcome = "aborted"
        elif isinstance(self._error, RequestError):
            outcome = "invalid"
        elif isinstance(self._error, ObjectiveError | QueueFull | NoRoomToWake):
            outcome = "refused"
        elif self._error is not None:
            outcome = "error"
        elif not self._running:
            outcome = "length" if self._reason == "length" else "stop"
        return Ended(
            outcome,
            self.arrived_at,
            self.prompt_len,
            self.num_cached,
            self._first_at,
            self._last_at,
            self._counts,
            self._queue_seconds,
            self._params.ttft_ms,
            self._params.tbt_ms,
            "objective" if isinstance(self._error, ObjectiveError) else "",
            self.opened_at - self.arrived_at,
        )

    @property
    def num_waiting(self) -> int:
        """The number of outputs that have no token yet."""
        return self._counts.count(0)

    @property
    def num_output(self) -> int:
        """The number of tokens of all outputs so far."""
        return sum(self._counts)

    @property
    def can_start(self) -> bool:
        """True if the request can be started, or restarted: no output has come for its reader."""
        return self._prompt is not None

    def start(self, client: EngineLike, sink: Sink) -> None:
        assert self._prompt is not None
        self.engine_id = client.add(self._prompt, self._params, sink, self.request_id)

    def abort_on(self, client: EngineLike, index: int | None = None) -> None:
        """Abort what runs on an engine; index: one of the outputs alone."""
        if self.engine_id:
            client.abort(self.engine_id, index)

    def take_event(self, event: Event, now: float) -> None:
        if isinstance(event, Output):
            self.push(event, now)

    def push(self, output: Output, now: float) -> None:
        """Take the output of a step, which came at time `now` of the monotonic clock."""
        if output.index not in self._running or self._error is not None:  # it ended while this event was on its way
            return
        self._prompt = None
        if output.num_cached is not None and output.index == 0:
            self.num_cached, self._queue_seconds = output.num_cached, output.queue_seconds
        delta = self._texts[output.index].push(output.token_ids, output.finish_reason)
        token_ids = output.token_ids[: delta.num_tokens]
        self._count(output.index, len(token_ids), now)
        if self.steps is not None:
            self.steps.append(StepNote(now, output.step, output.step_seconds, output.index, len(token_ids)))
        if output.num_forgotten:
            self.num_forgotten[output.index] = output.num_forgotten
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason
            self._running.discard(output.index)
            if output.finish_reason is None:
                self._engine.abort_in_engine(self, output.index)
        waiting = self._pending.get(output.index)
        if waiting is None:
            waiting = self._pending[output.index] = deque((_Pending(),))
        elif waiting[-1].num_likely >= LIKELY_AT_ONCE:
            waiting.append(_Pending())
        pending = waiting[-1]
        pending.texts.append(delta.text)
        pending.token_ids += token_ids
        if output.logprobs:
            pending.logprobs += output.logprobs[: len(token_ids)]
            self._count_likely(pending, len(token_ids) * (1 + (self._params.logprobs or 0)))
        pending.finish_reason, pending.stop = delta.finish_reason, delta.stop
        # Tokens without text so far (half a character, the start of a possible stop string) wait for the next tokens.
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
                self._engine.metrics.ttft.observe(now - self.arrived_at)
        self._counts[index] += num_tokens
        self._last_at[index] = now

    def _count_likely(self, pending: _Pending, count: int) -> None:
        pending.num_likely += count
        self._num_unread += count
        if self._num_unread > MAX_UNREAD:
            unread = f"{self._num_unread} tokens and likely tokens of this answer wait to be read; read faster"
            self.end(RequestTimeout(unread))

    def fail(self, error: InfercError) -> None:
        self._error = self._error or error
        self._news.set()

    def end(self, error: InfercError) -> None:
        """End the request with this error, if it still runs."""
        if self.is_open:
            self._engine.abort_in_engine(self)
            self.fail(error)

    def close(self) -> None:
        """End the request if it still runs; every reader must call this when done, whatever happened."""
        if self.is_open:
            self._engine.abort_in_engine(self)
        self._engine.forget(self)

    def take(self) -> Delta | None:
        """Return the next delta of one of the outputs, or None; once all are taken, raise the error of the request."""
        for index in sorted(self._pending) if len(self._pending) > 1 else self._pending:
            waiting = self._pending[index]
            if waiting[0].shows:
                pending = waiting.popleft()
                if not waiting:
                    del self._pending[index]
                self._num_unread -= pending.num_likely
                return pending.delta(index)
        if self._error is not None:
            raise self._error
        return None

    @property
    def is_done(self) -> bool:
        """True if all outputs have ended and all their deltas were taken."""
        return not self._running and not self._pending

    def __aiter__(self) -> Stream:
        return self

    async def __anext__(self) -> Delta:
        while True:
            await self._news.wait()
            if (delta := self.take()) is not None:
                return delta
            if not self._running:
                raise StopAsyncIteration
            self._news.clear()


Result = TypeVar("Result")


class ScoringTask(Generic[Result]):
    """A text that the engine computes for one result (scores or a vector), for which `result` waits.

    send: submits the text to an engine, by the EngineLike method of its kind.
    found: returns the result from an event, or None for an event of another kind.
    """

    num_sequences = 1
    num_listed = num_output = priority = 0
    can_start = True

    def __init__(
        self,
        engine: StreamOwner,
        send: Callable[[EngineLike, Sink], str],
        found: Callable[[Event], Result | None],
        request_id: str,
        owner: str,
        kind: Kind,
        prompt_len: int,
    ) -> None:
        self.request_id, self.owner, self.kind, self.prompt_len = request_id, owner, kind, prompt_len
        self.engine_id = ""
        self.num_starts = 0
        self.opened_at = self.arrived_at = time.monotonic()
        self._engine, self._send, self._found = engine, send, found
        self._result: asyncio.Future[Result] = asyncio.get_running_loop().create_future()

    @property
    def is_open(self) -> bool:
        return not self._result.done()

    def start(self, client: EngineLike, sink: Sink) -> None:
        self.engine_id = self._send(client, sink)

    def abort_on(self, client: EngineLike, index: int | None = None) -> None:
        if self.engine_id:
            client.abort(self.engine_id, index)

    def take_event(self, event: Event, now: float) -> None:
        found = self._found(event)
        if found is not None and not self._result.done():
            self._result.set_result(found)

    def fail(self, error: InfercError) -> None:
        if not self._result.done():
            self._result.set_exception(error)

    async def result(self) -> Result:
        """Wait for the result and return it; if the waiting is cancelled, the task is aborted in the engine."""
        try:
            return await self._result
        finally:
            if self.is_open or self._result.cancelled():
                self._engine.abort_in_engine(self)
            self._engine.forget(self)


EngineTask: TypeAlias = Stream | ScoringTask[Any]
