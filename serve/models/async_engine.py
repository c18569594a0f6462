"""The asyncio front end of the engine: any task may submit requests, and text comes back through async iterators.

The engine runs in a process of its own, which may die and be restarted (supervisor.py). One thread here waits for
its messages. Everything else happens on the event loop, so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Literal, TypeVar

from inferc.errors import GenerationError, InfercError, ObjectiveError, RequestError
from inferc.runtime.engine.beam_search import BeamSearchParams
from inferc.runtime.engine.loop import Embedded, Event, Failed, Scored, Sink, Stats
from inferc.runtime.engine.scoring import Score
from inferc.runtime.engine.stats import EngineStats
from inferc.runtime.step.sampling_params import MAX_ITEMS, SamplingParams
from inferc.runtime.text.tokenizer import Text
from inferc.serve.errors import (
    EngineUnavailable,
    NoRoomToWake,
    QueueFull,
    RequestAborted,
    RequestIdInUse,
    RequestTimeout,
)
from inferc.serve.models.metrics import Ended, ModelMetrics
from inferc.serve.models.queue_forecast import QueueForecast
from inferc.serve.models.search_stream import SearchStream
from inferc.serve.models.streams import EngineLike, EngineTask, Kind, ModelFacts, ScoringTask, Stream

log = logging.getLogger(__name__)

MAX_SEQUENCES = 1024  # running and waiting sequences of all requests together; a request beyond that is refused
MAX_LISTED = 16 * MAX_ITEMS  # token ids in the parameters of all requests together; each takes about 40 bytes
STATS_SECONDS = 10.0  # time limit for the engine's answer to a request for its counters
TAKEN_AT_ONCE = 8  # requests whose events are handled before other tasks get a turn of the event loop
MAX_STARTS = 3  # starts of one request whose engine dies each time: beyond that, it may be the cause of the deaths
Result = TypeVar("Result")


@dataclass(frozen=True)
class Leaving:
    """The reason why no more requests are accepted, worded for clients.

    now: the text for a new request. late: the text for a running request that did not end in time.
    """

    now: str
    late: str


SHUTDOWN = Leaving(
    "the server is shutting down and takes no new requests", "the server shut down before the request was done"
)
UNLOAD = Leaving(
    "the model is being unloaded and takes no new requests", "the model was unloaded before the request was done"
)
State = Literal["starting", "serving", "asleep", "draining", "damaged", "dead"]
CLOSED: tuple[State, ...] = ("damaged", "dead")  # states in which requests are refused, and none waits for an engine


class AsyncEngine:
    """The requests of a model by id, on one event loop; the engine's events come in through `_sink`.

    `_sink` is called on a thread of the engine's client. While there is no engine (it starts, restarts, or sleeps)
    requests wait for it: `attach` starts them. A request that has brought no output yet is started again when its
    engine dies, MAX_STARTS times in all.

    text may be set later, before the first request.
    requested is called when a request waits for an engine that sleeps.
    on_idle is called when no request is running any more.
    used_at is when a request last began or ended, or an engine was attached, on the monotonic clock.
    """

    text: Text

    def __init__(
        self,
        text: Text | None,
        facts: ModelFacts,
        max_sequences: int = MAX_SEQUENCES,
        requested: Callable[[], None] = lambda: None,
        metrics: ModelMetrics | None = None,
        on_over: Callable[[Stream, Ended], None] = lambda stream, ended: None,
        max_queue_seconds: float | None = None,
    ) -> None:
        """Set up an engine front end on the running event loop, without an engine yet.

        on_over is called for every request that is over.
        max_queue_seconds: a request is refused if its forecast time to the first token is longer; None: no limit.
        """
        self.client: EngineLike | None = None
        if text is not None:
            self.text = text
        self.facts = facts
        self.state: State = "starting"
        self.reason = ""  # why the state is "dead" or "damaged"
        self._leaving = SHUTDOWN  # why the state is "draining"
        self.metrics = metrics or ModelMetrics()
        self.queue = QueueForecast()
        self._on_over = on_over
        self._max_queue_seconds = max_queue_seconds
        self.requested = requested
        self.on_idle: Callable[[], None] = lambda: None
        self.used_at = time.monotonic()
        self._is_held = False  # new requests wait even though there is an engine
        self._idle = asyncio.Event()
        self._idle.set()
        self._loop = asyncio.get_running_loop()
        self._max_sequences = max_sequences
        self._tasks: dict[str, EngineTask] = {}
        self._parked: dict[str, EngineTask] = {}  # the part of `_tasks` that waits for an engine
        self.num_lost = 0  # requests that failed because an engine ended
        self._num_sequences = 0
        self._num_listed = 0
        self._drained = asyncio.Event()
        self._drained.set()
        self._incoming: deque[tuple[EngineTask, int, Event]] = deque()  # filled by the engine client's thread
        # Events that the event loop has moved out of `_incoming` and not handled yet, the oldest request first.
        self._untaken: dict[EngineTask, list[tuple[int, Event]]] = {}
        self._is_woken = False

    @property
    def num_requests(self) -> int:
        return len(self._tasks)

    @property
    def refusal(self) -> str | None:
        """The reason why no requests are accepted, worded for clients; None while they are accepted or may wait."""
        if self.state == "draining":
            return self._leaving.now
        return self.reason if self.state in CLOSED else None

    @property
    def is_idle(self) -> bool:
        """True if the engine has nothing to do: every open request waits for an engine."""
        return len(self._tasks) == len(self._parked)

    @property
    def tasks(self) -> list[EngineTask]:
        """The open requests, in the order in which they were opened."""
        return list(self._tasks.values())

    def is_parked(self, task: EngineTask) -> bool:
        """Return whether a request waits for an engine."""
        return task.request_id in self._parked

    @property
    def oldest_at(self) -> float:
        """The time at which the oldest running request was opened; the present time if none runs."""
        tasks = (task for name, task in self._tasks.items() if name not in self._parked)
        return next((task.opened_at for task in tasks), time.monotonic())

    @property
    def num_sequences(self) -> int:
        """The number of sequences of all requests, running and waiting."""
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
        kind: Kind = "completion",
        marks: Mapping[int, str] | None = None,
        beams: BeamSearchParams | None = None,
    ) -> Stream:
        """Start a request and return its stream, which the caller must close when done with it.

        beams: the answers are those of a beam search. news, owner, on_over, kind, marks: as in Stream. max_seconds: the
        request fails with RequestTimeout after that long. Raises RequestIdInUse, QueueFull or EngineUnavailable. What
        else is wrong with the request (a prompt that is too long, for example) is raised by the stream.
        """
        self.check_open(params.n if beams is None else beams.beam_width, num_listed=params.num_listed)
        name = self._name(request_id)
        of_stream: dict[str, Any] = {"news": news, "owner": owner, "on_over": on_over, "kind": kind, "marks": marks}
        stream = (
            Stream(self, prompt_token_ids, params, name, **of_stream)
            if beams is None
            else SearchStream(self, prompt_token_ids, params, beams, self.facts, name, **of_stream)
        )
        self._begin(stream)
        if max_seconds is not None:
            stream.timer = self._loop.call_later(max_seconds, self._time_out, stream, max_seconds)
        return stream

    def _time_out(self, stream: Stream, seconds: float) -> None:
        stream.end(RequestTimeout(f"the request was not done within the {seconds:g} s that are allowed here"))

    async def score(
        self,
        token_ids: Sequence[int],
        num_top: int = 0,
        request_id: str = "",
        owner: str = "",
        cache_salt: str = "",
        first: int = 1,
        adapter: str = "",
    ) -> Score:
        """Return the log probabilities of a text's tokens from `first` on, and the num_top likeliest at each position.

        Raises the same errors as `open`.
        """

        def send(client: EngineLike, sink: Sink) -> str:
            return client.score(token_ids, sink, num_top, cache_salt, first, adapter)

        def found(event: Event) -> Score | None:
            return event.score if isinstance(event, Scored) else None

        return await self._run(ScoringTask(self, send, found, self._name(request_id), owner, "score", len(token_ids)))

    async def embed(self, token_ids: Sequence[int], request_id: str = "", owner: str = "") -> list[float]:
        """Return the embedding vector of a text.

        Raises the same errors as `open`, and RequestError for a model that makes no vectors.
        """

        def send(client: EngineLike, sink: Sink) -> str:
            return client.embed(token_ids, sink)

        def found(event: Event) -> list[float] | None:
            return event.vector if isinstance(event, Embedded) else None

        return await self._run(
            ScoringTask(self, send, found, self._name(request_id), owner, "embedding", len(token_ids))
        )

    async def _run(self, task: ScoringTask[Result]) -> Result:
        self.check_open()
        self._begin(task)
        return await task.result()

    def check_open(self, num_sequences: int = 1, within: float | None = None, num_listed: int = 0) -> None:
        """Raise EngineUnavailable or QueueFull if a request would be refused now, RequestError if it always would be.

        within: the client waits at most this many seconds for the first token.
        num_listed: token ids in lists of the request's parameters, counted once per prompt.
        """
        if (refusal := self.refusal) is not None:
            self.metrics.refused("unavailable")
            raise EngineUnavailable(refusal, retry_after=1.0 if self.state == "draining" else None)
        if num_sequences > self._max_sequences:  # the request could never be accepted
            raise RequestError(
                f"prompt: found {num_sequences} sequences (prompts times n), and the server takes"
                f" {self._max_sequences};"
                " send fewer at once"
            )
        if self._num_sequences + num_sequences > self._max_sequences:
            self.metrics.refused("queue_full")
            raise QueueFull(
                f"{self._num_sequences} sequences are running or waiting, and {self._max_sequences} are admitted; try"
                " again later"
            )
        if num_listed > MAX_LISTED:
            raise RequestError(
                f"prompt: the parameters have {num_listed} token ids in lists, those of each prompt counted, and at"
                f" most {MAX_LISTED} are allowed; send fewer prompts at once"
            )
        if self._num_listed + num_listed > MAX_LISTED:
            self.metrics.refused("queue_full")
            raise QueueFull(
                f"the parameters of what is running or waiting have {self._num_listed} token ids in lists, and"
                f" {MAX_LISTED} are admitted; try again later"
            )
        limits = [limit for limit in (within, self._max_queue_seconds) if limit is not None]
        num_running = self._num_sequences - self.queue.num_waiting
        if limits and (wait := self.queue.seconds(time.monotonic(), num_running)) > min(limits):
            self.metrics.refused("queue_time")
            raise QueueFull(
                f"{self.queue.num_waiting} sequences wait, and the next would wait about {wait:.1f} s, longer than the"
                f" {min(limits):.3g} s that it may; try again later",
                retry_after=wait - min(limits),
            )

    async def stats(self) -> EngineStats:
        """Return the engine's present counters.

        Raises EngineUnavailable if the engine does not answer.
        """
        event = await self._ask(lambda client, sink: client.ask_stats(sink), STATS_SECONDS)
        if event is None:
            raise EngineUnavailable(f"the engine did not answer within {STATS_SECONDS:g} s; a step may be running")
        if isinstance(event, Stats):
            return event.stats
        raise EngineUnavailable(event.reason if isinstance(event, Failed) else "the engine did not tell its counters")

    async def load_adapter(self, name: str, path: str) -> None:
        """Have the engine load an adapter from a folder.

        Raises RequestError for one that cannot be loaded, EngineUnavailable if there is no engine.
        """
        _check_done(await self._ask(lambda client, sink: client.load_adapter(name, path, sink)))

    async def unload_adapter(self, name: str) -> None:
        """Have the engine take an adapter away from new requests; raises as `load_adapter` does."""
        _check_done(await self._ask(lambda client, sink: client.unload_adapter(name, sink)))

    async def _ask(self, send: Callable[[EngineLike, Sink], str], seconds: float | None = None) -> Event | None:
        """Send the engine something that is no request, and return its answer; None if it takes longer than `seconds`.

        Raises EngineUnavailable if there is no engine.
        """
        if (client := self.client) is None:
            raise EngineUnavailable(f"the engine is {self.state}")
        answer: asyncio.Future[Event] = self._loop.create_future()

        def take(event: Event) -> None:
            if not answer.done():
                answer.set_result(event)

        def sink(event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed, so nobody waits for the answer
                self._loop.call_soon_threadsafe(take, event)

        try:
            asked = send(client, sink)
        except InfercError as error:
            raise EngineUnavailable(str(error)) from None
        try:
            await asyncio.wait((answer,), timeout=seconds)
        finally:
            if not answer.done():
                answer.cancel()
                client.abort(asked)
        return None if answer.cancelled() else answer.result()

    def abort(self, request_id: str, owner: str | None = None) -> bool:
        """Abort a request by its id, if it belongs to `owner` (None: any owner), and return whether it was running."""
        task = self._tasks.get(request_id)
        if task is None or not task.is_open or owner not in (None, task.owner):
            return False
        self.abort_in_engine(task)
        task.fail(RequestAborted(f"request {request_id!r} was aborted"))
        return True

    def abort_in_engine(self, task: EngineTask, index: int | None = None) -> None:
        if self.client is not None and task.request_id not in self._parked:
            task.abort_on(self.client, index)

    def forget(self, task: EngineTask) -> None:
        if self._tasks.get(task.request_id) is task:
            del self._tasks[task.request_id]
            self._parked.pop(task.request_id, None)
            self._num_sequences -= task.num_sequences
            self._num_listed -= task.num_listed
            if isinstance(task, Stream):
                self.queue.left(task.num_waiting)
                ended = task.ended()
                self.metrics.ended(ended)
                self._on_over(task, ended)
                task.on_over(task.num_output)
                if task.timer is not None:
                    task.timer.cancel()
        if not self._tasks:
            self._drained.set()
        self._note_use()

    async def wait_until_idle(self) -> bool:
        return await self._idle.wait()

    def _note_use(self) -> None:
        """Note that a request has begun, has ended, or has started to wait for an engine."""
        self.used_at = time.monotonic()
        if self.is_idle:
            self._idle.set()
            self.on_idle()
        else:
            self._idle.clear()

    async def drain(self, limit_seconds: float, leaving: Leaving = SHUTDOWN) -> bool:
        """Accept no more requests, wait at most limit_seconds for the running ones, and return whether all ended."""
        self._leaving = leaving
        if self.state != "dead":
            self.state = "draining"
        try:
            async with asyncio.timeout(limit_seconds):
                await self._drained.wait()
        except TimeoutError:
            late = EngineUnavailable(leaving.late)
            for task in list(self._tasks.values()):
                self.abort_in_engine(task)
                task.fail(late)
            return False
        return True

    def _name(self, request_id: str) -> str:
        request_id = request_id or f"r-{secrets.token_hex(8)}"
        if request_id in self._tasks:
            raise RequestIdInUse(f"request id {request_id!r} is in use; give every request its own")
        return request_id

    def _begin(self, task: EngineTask) -> None:
        self._tasks[task.request_id] = task
        self._num_sequences += task.num_sequences
        self._num_listed += task.num_listed
        if isinstance(task, Stream):
            self.queue.came(task.num_waiting, task.opened_at)
        self._drained.clear()
        try:
            self._start(task)
        except BaseException:
            self.forget(task)
            raise

    def _start(self, task: EngineTask) -> None:
        """Start a request on the engine, or let it wait for one."""
        client = self.client
        if client is not None and client.stopped is None and not self._is_held:
            task.num_starts += 1
            with suppress(InfercError):  # the engine has died just now
                task.start(client, partial(self._sink, task, task.num_starts))
                self._note_use()
                return
            task.num_starts -= 1
        self._parked[task.request_id] = task
        self._note_use()
        if self.state == "asleep":
            self.requested()

    def start_again(self, task: EngineTask) -> None:
        """Start a request that found its engine gone between two of its steps."""
        if task.is_open and self._tasks.get(task.request_id) is task:
            self._start(task)

    # -------------------------------------------------------------------------------------- the engine's life

    def attach(self, client: EngineLike) -> None:
        """Use this engine from now on, and start the requests that wait for one."""
        self.client = client
        self.used_at = time.monotonic()
        self.reason = ""
        if self.state != "draining":
            self.state = "serving"
        self._start_parked()

    def hold(self) -> None:
        """Start no more requests until `release` is called; new ones wait, although there is an engine."""
        self._is_held = True

    def release(self) -> None:
        self._is_held = False
        if self.client is not None:
            self._start_parked()

    def refuse_parked(self, error: NoRoomToWake) -> None:
        """Fail the requests that wait for an engine, as there will be none soon."""
        parked, self._parked = self._parked, {}
        for task in parked.values():
            self.metrics.refusals["unavailable"] += 1  # its outcome is counted when it ends, as any request's is
            task.fail(error)

    def _start_parked(self) -> None:
        parked, self._parked = self._parked, {}
        for task in parked.values():
            if task.is_open:  # False: it was aborted or timed out, and its reader has not closed it yet
                self._start(task)

    def detach(self, state: State, reason: str = "") -> None:
        """Note that the engine is gone, and go into `state`; its events have been taken, or are on their way here.

        "dead": no other engine will come. "damaged": none will come until the artifact's files are as they were.
        """
        self.client = None
        if self.state != "draining" or state == "dead":
            self.state = state
        if state in CLOSED:
            self.reason = reason
            self._fail_all(self._parked.values())
        elif self._parked and state == "asleep":
            self.requested()

    def _fail_all(self, tasks: Iterable[EngineTask]) -> None:
        for task in list(tasks):
            task.fail(EngineUnavailable(self.reason))

    def _sink(self, task: EngineTask, start: int, event: Event) -> None:
        """Take an event on the engine client's thread; all events of a step wake the event loop once."""
        self._incoming.append((task, start, event))
        if not self._is_woken:
            self._is_woken = True
            # Raises RuntimeError once the loop is closed: nobody is left to take the event then.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        """Handle the events of at most TAKEN_AT_ONCE requests, and leave the rest to a later turn of the event loop.

        In between, the readers of those requests and all other tasks get their turn. All events that have come for a
        request are handled together, so an event loop that lags behind has fewer messages to send.
        """
        self._is_woken = False  # reset before events are taken: an event that comes from here on wakes the loop again
        while self._incoming:
            task, start, event = self._incoming.popleft()
            self._untaken.setdefault(task, []).append((start, event))
        now = time.monotonic()
        for task in list(islice(self._untaken, TAKEN_AT_ONCE)):
            for start, event in self._untaken.pop(task):
                if start != task.num_starts:
                    continue  # the event is of an earlier start, on an engine that has died
                if isinstance(event, Failed):
                    self._fail(task, event)
                else:
                    task.take_event(event, now)
        if self._untaken and not self._is_woken:
            self._is_woken = True
            self._loop.call_soon(self._take)

    def _fail(self, task: EngineTask, event: Failed) -> None:
        error = event.error
        if event.is_request_error or isinstance(error, RequestError | GenerationError | ObjectiveError):
            task.fail(error)
        elif self.state in CLOSED or not task.can_start:
            self.num_lost += 1
            task.fail(EngineUnavailable(event.reason, retry_after=1.0))
        elif task.num_starts >= MAX_STARTS:  # another try might kill the next engine too
            died = f"the engine died {task.num_starts} times while it worked on this request; it is not started again"
            log.error("request %s: %s: %s", task.request_id, event.reason, died)
            self.num_lost += 1
            task.fail(GenerationError(died))
        elif task.is_open and self._tasks.get(task.request_id) is task:
            log.warning("request %s: %s; it is started again", task.request_id, event.reason)
            self._start(task)


def _check_done(event: Event | None) -> None:
    """Raise the error of an adapter that was not loaded, or not unloaded."""
    if isinstance(event, Failed):
        raise event.error if event.is_request_error else EngineUnavailable(event.reason)
