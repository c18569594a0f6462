"""The engine for asyncio: requests in from any task, text out as async iterators.

The engine runs in a process of its own, which may die and be started again (supervisor.py). One thread here waits for
what it sends; everything else happens on the event loop, so nothing needs a lock.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Literal, TypeVar

from inferc.errors import GenerationError, InfercError, ObjectiveError, RequestError
from inferc.runtime.engine.engine import EngineStats
from inferc.runtime.engine.loop import Embedded, Event, Failed, Scored, Sink, Stats
from inferc.runtime.engine.scoring import Score
from inferc.runtime.step.sampling_params import MAX_ITEMS, SamplingParams
from inferc.runtime.text.tokenizer import Text
from inferc.serve.errors import EngineUnavailable, NoPlace, QueueFull, RequestAborted, RequestIdInUse, RequestTimeout
from inferc.serve.models.metrics import Ended, ModelMetrics
from inferc.serve.models.queue_forecast import QueueForecast
from inferc.serve.models.streams import EngineLike, Errand, ModelFacts, Stream, Work

log = logging.getLogger(__name__)

MAX_SEQUENCES = 1024  # of all requests, running and waiting; more are refused
MAX_LISTED = 16 * MAX_ITEMS  # token ids in the parameters of them all; each takes some 40 bytes
STATS_SECONDS = 10.0  # for the engine to tell its counters
TAKEN_AT_ONCE = 8  # requests that the engine has something for, before others have their turn of the event loop
MAX_STARTS = 3  # of a request whose engines die: after that, it may be what they die of
Result = TypeVar("Result")


@dataclass(frozen=True)
class Leaving:
    """Why no more requests are taken, in words for clients. late: for those whose requests had no time to end."""

    now: str
    late: str


SHUTDOWN = Leaving(
    "the server is shutting down and takes no new requests", "the server shut down before the request was done"
)
UNLOAD = Leaving(
    "the model is being unloaded and takes no new requests", "the model was unloaded before the request was done"
)
State = Literal["starting", "serving", "asleep", "draining", "damaged", "dead"]
CLOSED: tuple[State, ...] = ("damaged", "dead")  # nothing is taken, and nothing waits


class AsyncEngine:
    """Requests by id, on one event loop. What the engine says comes in by `_sink`, from a thread of its client's.

    While there is no engine (it starts, starts again, or sleeps) requests wait for it: `attach` starts them. One of which
    nothing has come is started again when its engine dies, MAX_STARTS times in all.

    text may be set later, before the first request. wanted: called when a request waits for an engine that sleeps; rested: when
    nothing is at work any more. used_at: when a request last began or ended, or the engine came, on the monotonic clock.
    """

    text: Text

    def __init__(
        self,
        text: Text | None,
        facts: ModelFacts,
        max_sequences: int = MAX_SEQUENCES,
        wanted: Callable[[], None] = lambda: None,
        metrics: ModelMetrics | None = None,
        on_over: Callable[[Stream, Ended], None] = lambda stream, ended: None,
        max_queue_seconds: float | None = None,
    ) -> None:
        """on_over hears of every request that is over. max_queue_seconds: until the first token, as far as can be foreseen; who would wait longer is refused."""
        self.client: EngineLike | None = None
        if text is not None:
            self.text = text
        self.facts = facts
        self.state: State = "starting"
        self.reason = ""  # of being dead or damaged
        self._leaving = SHUTDOWN  # why it drains
        self.metrics = metrics or ModelMetrics()
        self.queue = QueueForecast()
        self._on_over = on_over
        self._max_queue_seconds = max_queue_seconds
        self.wanted = wanted
        self.rested: Callable[[], None] = lambda: None
        self.used_at = time.monotonic()
        self._is_held = False  # what comes waits, though there is an engine
        self._rest = asyncio.Event()
        self._rest.set()
        self._loop = asyncio.get_running_loop()
        self._max_sequences = max_sequences
        self._works: dict[str, Work] = {}
        self._parked: dict[str, Work] = {}  # of these, which wait for an engine
        self._num_sequences = 0
        self._num_listed = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._incoming: deque[tuple[Work, int, Event]] = deque()  # from the engine client's thread
        self._untaken: dict[
            Work, list[tuple[int, Event]]
        ] = {}  # of these, those that the loop has seen, the oldest first
        self._is_woken = False

    @property
    def num_requests(self) -> int:
        return len(self._works)

    @property
    def refusal(self) -> str | None:
        """Why no requests are taken, in words for clients; None: they are, or wait."""
        if self.state == "draining":
            return self._leaving.now
        return self.reason if self.state in CLOSED else None

    @property
    def is_at_rest(self) -> bool:
        """Whether the engine has nothing to do: what there is waits for it."""
        return len(self._works) == len(self._parked)

    @property
    def oldest_at(self) -> float:
        """When the oldest request that is at work came; of none, now."""
        works = (work for name, work in self._works.items() if name not in self._parked)
        return next((work.opened_at for work in works), time.monotonic())

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
        self.check_open(params.n, num_listed=params.num_listed)
        stream = Stream(self, prompt_token_ids, params, self._name(request_id), news, owner, on_over)
        self._begin(stream)
        if max_seconds is not None:
            stream.timer = self._loop.call_later(max_seconds, self._time_out, stream, max_seconds)
        return stream

    def _time_out(self, stream: Stream, seconds: float) -> None:
        stream.end(RequestTimeout(f"the request was not done within the {seconds:g} s that are allowed here"))

    async def score(
        self, token_ids: Sequence[int], num_top: int = 0, request_id: str = "", owner: str = "", cache_salt: str = ""
    ) -> Score:
        """Log probabilities of the tokens of a text, and the num_top likeliest of each place. Raises as `open`."""

        def send(client: EngineLike, sink: Sink) -> str:
            return client.score(token_ids, sink, num_top, cache_salt)

        def found(event: Event) -> Score | None:
            return event.score if isinstance(event, Scored) else None

        return await self._run(Errand(self, send, found, self._name(request_id), owner))

    async def embed(self, token_ids: Sequence[int], request_id: str = "", owner: str = "") -> list[float]:
        """The vector of a text. Raises as `open`, and RequestError for a model that makes none."""

        def send(client: EngineLike, sink: Sink) -> str:
            return client.embed(token_ids, sink)

        def found(event: Event) -> list[float] | None:
            return event.vector if isinstance(event, Embedded) else None

        return await self._run(Errand(self, send, found, self._name(request_id), owner))

    async def _run(self, errand: Errand[Result]) -> Result:
        self.check_open()
        self._begin(errand)
        return await errand.result()

    def check_open(self, num_sequences: int = 1, within: float | None = None, num_listed: int = 0) -> None:
        """Raise EngineUnavailable or QueueFull if a request of so many sequences would not be taken now, and RequestError if never.

        within: seconds after which nobody waits for its first token any more. num_listed: token ids in its parameters, for each
        prompt anew.
        """
        if (refusal := self.refusal) is not None:
            self.metrics.refused("unavailable")
            raise EngineUnavailable(refusal, retry_after=1.0 if self.state == "draining" else None)
        if num_sequences > self._max_sequences:  # it would never be let in
            raise RequestError(
                f"prompt: found {num_sequences} sequences (prompts times n), and the server lets in {self._max_sequences};"
                " send fewer at once"
            )
        if self._num_sequences + num_sequences > self._max_sequences:
            self.metrics.refused("queue_full")
            raise QueueFull(
                f"{self._num_sequences} sequences are running or waiting, and {self._max_sequences} are let in; try"
                " again later"
            )
        if num_listed > MAX_LISTED:
            raise RequestError(
                f"prompt: the parameters have {num_listed} token ids in lists, those of each prompt counted, and at most"
                f" {MAX_LISTED} are allowed; send fewer prompts at once"
            )
        if self._num_listed + num_listed > MAX_LISTED:
            self.metrics.refused("queue_full")
            raise QueueFull(
                f"the parameters of what is running or waiting have {self._num_listed} token ids in lists, and {MAX_LISTED} are"
                " let in; try again later"
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
        """The engine's counters of now. Raises EngineUnavailable if it does not answer."""
        if (client := self.client) is None:
            raise EngineUnavailable(f"the engine is {self.state}")
        answer: asyncio.Future[Event] = self._loop.create_future()

        def take(event: Event) -> None:
            if not answer.done():
                answer.set_result(event)

        def sink(event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                self._loop.call_soon_threadsafe(take, event)

        try:
            asked = client.ask_stats(sink)
        except InfercError as error:
            raise EngineUnavailable(str(error)) from None
        try:
            await asyncio.wait((answer,), timeout=STATS_SECONDS)
        finally:
            if not answer.done():
                answer.cancel()
                client.abort(asked)
        if answer.cancelled():
            raise EngineUnavailable(f"the engine did not answer within {STATS_SECONDS:g} s; a step may be running")
        event = answer.result()
        if isinstance(event, Stats):
            return event.stats
        raise EngineUnavailable(event.reason if isinstance(event, Failed) else "the engine did not tell its counters")

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
            self._num_listed -= work.num_listed
            if isinstance(work, Stream):
                self.queue.left(work.num_waiting)
                ended = work.ended()
                self.metrics.ended(ended)
                self._on_over(work, ended)
                work.on_over(work.num_output)
                if work.timer is not None:
                    work.timer.cancel()
        if not self._works:
            self._idle.set()
        self._note_use()

    async def wait_until_at_rest(self) -> bool:
        return await self._rest.wait()

    def _note_use(self) -> None:
        """A request has begun, ended, or waits now."""
        self.used_at = time.monotonic()
        if self.is_at_rest:
            self._rest.set()
            self.rested()
        else:
            self._rest.clear()

    async def drain(self, limit_seconds: float, leaving: Leaving = SHUTDOWN) -> bool:
        """Take no more requests and let the running ones end, at most this long. Whether all did."""
        self._leaving = leaving
        if self.state != "dead":
            self.state = "draining"
        try:
            await asyncio.wait_for(self._idle.wait(), limit_seconds)
        except asyncio.TimeoutError:
            late = EngineUnavailable(leaving.late)
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
        self._num_listed += work.num_listed
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
        if client is not None and client.stopped is None and not self._is_held:
            work.num_starts += 1
            with suppress(InfercError):  # it has died just now
                work.start(client, partial(self._sink, work, work.num_starts))
                self._note_use()
                return
            work.num_starts -= 1
        self._parked[work.request_id] = work
        self._note_use()
        if self.state == "asleep":
            self.wanted()

    # -------------------------------------------------------------------------------------- the engine's life

    def attach(self, client: EngineLike) -> None:
        """There is an engine: start what waits for one."""
        self.client = client
        self.used_at = time.monotonic()
        self.reason = ""
        if self.state != "draining":
            self.state = "serving"
        self._start_parked()

    def hold(self) -> None:
        """Start nothing from now on, until `release`, or until there is another engine after a sleep."""
        self._is_held = True

    def release(self) -> None:
        self._is_held = False
        if self.client is not None:
            self._start_parked()

    def refuse_parked(self, error: NoPlace) -> None:
        """There will be no engine soon for what waits for one."""
        parked, self._parked = self._parked, {}
        for work in parked.values():
            self.metrics.refusals["unavailable"] += 1  # its end is counted as any other's
            work.fail(error)

    def _start_parked(self) -> None:
        parked, self._parked = self._parked, {}
        for work in parked.values():
            if work.is_open:  # not one that was aborted or late, and that its reader has not closed yet
                self._start(work)

    def detach(self, state: State, reason: str = "") -> None:
        """The engine is gone, and what it sent has been taken or is on its way here. `dead`: there is no other; `damaged`:
        there is none until the artifact's files are as they were."""
        self.client = None
        if self.state != "draining" or state == "dead":
            self.state = state
        if state in CLOSED:
            self.reason = reason
            self._fail_all(self._parked.values())
        elif self._parked and state == "asleep":
            self.wanted()

    def _fail_all(self, works: Iterable[Work]) -> None:
        for work in list(works):
            work.fail(EngineUnavailable(self.reason))

    def _sink(self, work: Work, start: int, event: Event) -> None:
        """Called on the engine client's thread. The events of a step wake the loop once."""
        self._incoming.append((work, start, event))
        if not self._is_woken:
            self._is_woken = True
            # Raises RuntimeError once the loop is closed: nobody is left to hear it then.
            with suppress(RuntimeError):
                self._loop.call_soon_threadsafe(self._take)

    def _take(self) -> None:
        """What has come for some requests; for the others once their readers, and whoever else waits for the loop, have had a turn.

        All that has come for a request meanwhile is taken together, so a loop that lags behind has fewer pieces to send.
        """
        self._is_woken = False  # before taking: what comes from here on wakes the loop again
        while self._incoming:
            work, start, event = self._incoming.popleft()
            self._untaken.setdefault(work, []).append((start, event))
        now = time.monotonic()
        for work in list(islice(self._untaken, TAKEN_AT_ONCE)):
            for start, event in self._untaken.pop(work):
                if start != work.num_starts:
                    continue  # of an engine before
                if isinstance(event, Failed):
                    self._fail(work, event)
                else:
                    work.take_event(event, now)
        if self._untaken and not self._is_woken:
            self._is_woken = True
            self._loop.call_soon(self._take)

    def _fail(self, work: Work, event: Failed) -> None:
        error = event.error
        if event.is_request_error or isinstance(error, RequestError | GenerationError | ObjectiveError):
            work.fail(error)
        elif self.state in CLOSED or not work.can_start:
            work.fail(EngineUnavailable(event.reason, retry_after=1.0))
        elif work.num_starts >= MAX_STARTS:  # to try it again would cost all others the next engines
            died = f"the engine died {work.num_starts} times while it worked on this request; it is not started again"
            log.error("request %s: %s: %s", work.request_id, event.reason, died)
            work.fail(GenerationError(died))
        elif work.is_open and self._works.get(work.request_id) is work:
            log.warning("request %s: %s; it is started again", work.request_id, event.reason)
            self._start(work)
