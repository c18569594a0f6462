"""The engine loop on a thread of its own, and the client's side of it.

`run_engine` is the loop: commands in, events out. `EngineClient` is the caller's handle, whether the engine runs in a
thread (`EngineThread`) or in a process (process.py): a request has a sink, which is called with each of its events, on
a thread of the client's.
"""

from __future__ import annotations

import itertools
import logging
import queue
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import msgspec

from inferc import errors
from inferc.errors import GenerationError, InfercError, ObjectiveError, RequestError
from inferc.runtime.adapters.store import LoadedAdapter
from inferc.runtime.engine.engine import Engine, HalfAdded, Outputs
from inferc.runtime.engine.scoring import Score
from inferc.runtime.engine.stats import EngineStats
from inferc.runtime.kv_cache.events import KvBatch
from inferc.runtime.record.tapped import TappedSequence
from inferc.runtime.step.plan import Logprobs
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.sequence import Output, StepOutputs
from inferc.runtime.step.sequence import Sequence as TokenSequence

log = logging.getLogger(__name__)

BROKEN = (
    "the model's logits for this request hold no finite largest value: its weights are broken, its numbers overflow"
    " on this input, or penalties, biases and a form leave nothing to choose; try another input, penalty, form or dtype"
)
NO_ROOM = (
    "this engine takes no adapters: its artifact has no room for any, or its requests are recorded; compile the model"
    " with --adapter-rank, or leave --record out"
)
# Clients are told this; the actual reason contains our internal names.
NOT_BEGUN = "the engine cannot begin this request, by a mistake of its own; its log says which"


class Add(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str
    prompt_token_ids: list[int]
    params: SamplingParams
    name: str = ""  # the client's own name for the request


class Abort(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str
    index: int | None = None  # None: all sequences of the request


class ScoreText(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str
    token_ids: list[int]
    num_top: int = 0  # how many of the most likely tokens to return for each position
    cache_salt: str = ""
    first: int = 1  # the first token to score
    adapter: str = ""


class EmbedText(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str
    token_ids: list[int]


class LoadAdapter(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The command to load a LoRA adapter; the folder is read beside the steps."""

    request_id: str
    name: str
    path: str


class UnloadAdapter(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The command to take an adapter away from new requests; its memory is freed after the open ones."""

    request_id: str
    name: str


class GetStats(msgspec.Struct, frozen=True, array_like=True, tag=True):
    request_id: str


class Shutdown(msgspec.Struct, frozen=True, array_like=True, tag=True):
    drain: bool  # whether to finish the open requests first


class Wake(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The command to look again what there is to do; the engine's own threads give it."""


@dataclass(frozen=True)
class Failed:
    """The event that a request cannot be served, or, if it has no request id, that the engine has stopped.

    is_request_error: whether the request itself is at fault.
    """

    request_id: str | None
    reason: str
    is_request_error: bool = False
    kind: str = "InfercError"  # the name of the error in inferc.errors

    @property
    def error(self) -> InfercError:
        """The exception to raise for this event."""
        kind = RequestError if self.is_request_error else getattr(errors, self.kind, InfercError)
        return kind(self.reason)


@dataclass(frozen=True)
class ScoredRows:
    """An event with some rows of a text's Score, in order, sent before the Scored event that lacks them."""

    request_id: str
    rows: list[Logprobs]


@dataclass(frozen=True)
class Scored:
    request_id: str
    score: Score


@dataclass(frozen=True)
class Embedded:
    request_id: str
    vector: list[float]


@dataclass(frozen=True)
class AdapterDone:
    """The event that an adapter was loaded, or taken away."""

    request_id: str
    adapter: LoadedAdapter


@dataclass(frozen=True)
class Stats:
    request_id: str
    stats: EngineStats


Command: TypeAlias = Add | Abort | ScoreText | EmbedText | LoadAdapter | UnloadAdapter | GetStats | Shutdown | Wake
Event: TypeAlias = Output | Failed | ScoredRows | Scored | Embedded | AdapterDone | Stats
# The outputs of a step may come as a StepOutputs; a KvBatch, the step's changes to the cache, belongs to no request.
Events: TypeAlias = Iterable[Event] | KvBatch
Sink: TypeAlias = Callable[[Event], None]
Emit: TypeAlias = Callable[[Events], None]


def run_engine(engine: Engine, inbox: queue.SimpleQueue[Command], emit: Emit) -> None:
    """Step while there is work, and take commands between steps, until `Shutdown` or a failure of the engine."""
    stopping, collects = False, engine.collects_kv_events
    engine.grammars.wake = lambda: inbox.put(Wake())
    if engine.adapters is not None:
        engine.adapters.wake = engine.grammars.wake
    try:
        _tell(engine, emit)  # report that the cache is new
        while True:
            idle = not engine.has_work
            if idle and stopping:
                return
            pause = None if idle else engine.idle_seconds
            while not inbox.empty() or pause or (idle and not stopping):
                while idle and pause is None and inbox.empty() and engine.use_idle_time():
                    pass
                try:
                    command = inbox.get(timeout=pause)
                except queue.Empty:
                    break
                idle, pause = False, None
                if isinstance(command, Shutdown):
                    stopping = True
                    if not command.drain:
                        return
                else:
                    _obey(engine, command, emit)
            outputs = engine.step() if engine.has_work else []
            failed = _end_broken(engine, outputs)
            if outputs:
                emit(outputs)
            events: list[Event] = [*failed]
            events += [Failed(name, why, kind=ObjectiveError.__name__) for name, why in engine.take_refused()]
            events += [Failed(name, why, is_request_error=True) for name, why in engine.grammars.take_invalid()]
            events += [ScoredRows(request_id, rows) for request_id, rows in engine.take_score_rows()]
            events += [Scored(request_id, score) for request_id, score in engine.take_scores()]
            events += [Embedded(request_id, vector.tolist()) for request_id, vector in engine.take_embedded()]
            events += _adapters_done(engine)
            if events:
                emit(events)
            if collects:
                _tell(engine, emit)
    except InfercError as error:  # a damaged weight file, for example: the message says it all
        emit([Failed(None, f"the engine has stopped: {error}", kind=type(error).__name__)])
    except Exception as error:
        log.exception("the engine has stopped")
        emit([Failed(None, f"the engine has stopped: {error}")])
    finally:
        engine.close()


def _adapters_done(engine: Engine) -> list[Event]:
    """Put the adapters in place that were read, and free those that left; return the events of the former."""
    if engine.adapters is None:
        return []
    engine.release_adapters()
    return [
        Failed(request_id, str(found), is_request_error=True)
        if isinstance(found, InfercError)
        else AdapterDone(request_id, found)
        for request_id, found in engine.adapters.take_read()
    ]


def _tell(engine: Engine, emit: Emit) -> None:
    if (batch := engine.take_kv_events()) is not None:
        emit(batch)


def _end_broken(engine: Engine, outputs: Outputs) -> list[Failed]:
    """End the requests of sequences whose logits are not finite, and drop the outputs of these sequences."""
    failed = []
    contradictions: dict[str, str | None] = {}
    if isinstance(outputs, StepOutputs):
        broken = [
            row for row, output in outputs.others.items() if output is not None and output.finish_reason == "error"
        ]
        names = [outputs.seqs[row].request_id for row in broken]
        seqs = [seq for row in broken if isinstance(seq := outputs.seqs[row], TokenSequence)]
        contradictions = {seq.request_id: _contradiction(seq.params) for seq in seqs}
        outputs.others.update(dict.fromkeys(broken))
    else:
        names = [output.request_id for output in outputs if output.finish_reason == "error"]
        outputs[:] = [output for output in outputs if output.finish_reason != "error"]
    known = engine.take_row_errors()
    for name in names:
        engine.abort(name)
        contradiction = contradictions.get(name)
        if contradiction is not None and name not in known:
            failed.append(Failed(name, contradiction, is_request_error=True))
        else:
            failed.append(Failed(name, known.get(name, BROKEN), kind=GenerationError.__name__))
    return failed


def _contradiction(params: SamplingParams) -> str | None:
    """Return why nothing was left to choose, if a request has a form and rules out tokens of its own accord."""
    form, lists = params.structured_outputs, {"allowed_token_ids": params.allowed_token_ids}
    lists["banned_token_ids or bad_words"] = params.never_chosen
    given = [name for name, ids in lists.items() if ids]
    if form is None or not given:
        return None
    return (
        f"{given[0]}: it leaves none of the tokens that may come next in the form of {form.label}; leave one of them"
        " out, or allow the tokens of the form"
    )


def _obey(engine: Engine, command: Command, emit: Emit) -> None:
    try:
        if isinstance(command, Add):
            engine.add_request(command.request_id, command.prompt_token_ids, command.params, command.name)
        elif isinstance(command, Abort):
            engine.abort(command.request_id, command.index)
        elif isinstance(command, ScoreText):
            wanted = command.num_top, command.cache_salt, command.first, command.adapter
            engine.score(command.request_id, command.token_ids, *wanted)
        elif isinstance(command, EmbedText):
            engine.embed(command.request_id, command.token_ids)
        elif isinstance(command, LoadAdapter | UnloadAdapter):
            _change_adapters(engine, command, emit)
        elif isinstance(command, GetStats):
            emit([Stats(command.request_id, engine.stats())])
    except RequestError as error:
        emit([Failed(getattr(command, "request_id", None), str(error), is_request_error=True)])
    except ObjectiveError as error:
        emit([Failed(getattr(command, "request_id", None), str(error), kind=type(error).__name__)])
    except HalfAdded:
        raise
    except Exception:
        if not isinstance(command, Add | ScoreText | EmbedText):
            raise
        log.exception("request %s cannot be begun", command.request_id)
        engine.abort(command.request_id)
        emit([Failed(command.request_id, NOT_BEGUN, kind=GenerationError.__name__)])


def _change_adapters(engine: Engine, command: LoadAdapter | UnloadAdapter, emit: Emit) -> None:
    """Obey a command; raise RequestError where it cannot be obeyed."""
    adapters = engine.adapters
    if adapters is None:
        raise RequestError(NO_ROOM)
    if isinstance(command, LoadAdapter):
        adapters.begin_load(command.request_id, command.name, command.path)
    else:
        emit([AdapterDone(command.request_id, adapters.unload(command.name, engine.adapters_in_use()))])


@dataclass
class _Open:
    sink: Sink
    left: set[int]  # indices of its sequences that have not ended


class EngineClient:
    """The caller's side of an engine: the open requests and their sinks.

    It is thread-safe; subclasses transport commands and events. Every request gets its outputs until its last sequence
    has ended, or one `Failed`; after the whole request was aborted, nothing more. Ids are assigned here and never
    reused, so an event still in transit for an aborted request cannot reach another one.
    """

    def __init__(
        self,
        on_stop: Callable[[str], None] | None = None,
        on_kv_events: Callable[[KvBatch], None] | None = None,
    ) -> None:
        """Create a client without open requests.

        on_stop: called once, with the reason, when the engine has stopped for whatever reason.
        on_kv_events: called with the changes of each step to the prefix cache, if the engine collects them.
        """
        self._on_stop = on_stop
        self._on_kv_events = on_kv_events
        self._open: dict[str, _Open] = {}
        self._lock = threading.Lock()
        self._stopped: str | None = None  # why no request can be taken any more
        self._is_draining = False
        self._ids = itertools.count(1)

    @property
    def stopped(self) -> str | None:
        """The reason why the engine is not running any more, or None."""
        return self._stopped

    @property
    def num_open(self) -> int:
        return len(self._open)

    def add(self, prompt_token_ids: Sequence[int], params: SamplingParams, sink: Sink, name: str = "") -> str:
        """Start a request and return its id; its events come to `sink` from now on.

        name: the caller's own name for the request.

        Raises InfercError if the engine has stopped or is draining.
        """
        request_id = self._begin(sink, params.n)
        self._send(Add(request_id, list(prompt_token_ids), params, name))
        return request_id

    def abort(self, request_id: str, index: int | None = None) -> None:
        """End a request, or one of its sequences; its blocks are free before the next step."""
        self._end(request_id, index)
        if self._stopped is None:
            self._send(Abort(request_id, index))

    def score(
        self,
        token_ids: Sequence[int],
        sink: Sink,
        num_top: int = 0,
        cache_salt: str = "",
        first: int = 1,
        adapter: str = "",
    ) -> str:
        """Start scoring a text and return the request's id; `sink` gets one complete `Scored`, or `Failed`.

        first: the first token to score; all but the first of the text if not given. adapter: the LoRA adapter's name.
        """
        rows: list[Logprobs] = []

        def joined(event: Event) -> None:
            if isinstance(event, ScoredRows):
                rows.extend(event.rows)
                return
            if isinstance(event, Scored) and num_top:
                event = Scored(event.request_id, Score.of_rows([*rows, *event.score.rows]))
            sink(event)

        request_id = self._begin(joined, 1)
        self._send(ScoreText(request_id, list(token_ids), num_top, cache_salt, first, adapter))
        return request_id

    def embed(self, token_ids: Sequence[int], sink: Sink) -> str:
        """Start making a text's vector and return the request's id; `sink` gets one `Embedded` or `Failed`."""
        request_id = self._begin(sink, 1)
        self._send(EmbedText(request_id, list(token_ids)))
        return request_id

    def load_adapter(self, name: str, path: str, sink: Sink) -> str:
        """Start loading a LoRA adapter from a folder; `sink` gets one `AdapterDone` or `Failed`."""
        request_id = self._begin(sink, 1)
        self._send(LoadAdapter(request_id, name, path))
        return request_id

    def unload_adapter(self, name: str, sink: Sink) -> str:
        """Take a LoRA adapter away from new requests; `sink` gets one `AdapterDone` or `Failed`."""
        request_id = self._begin(sink, 1)
        self._send(UnloadAdapter(request_id, name))
        return request_id

    def ask_stats(self, sink: Sink) -> str:
        """Ask for the engine's counters, which it returns between two steps; `sink` gets one `Stats` or `Failed`."""
        request_id = self._begin(sink, 1, even_draining=True)
        self._send(GetStats(request_id))
        return request_id

    def stats(self, timeout: float = 10.0) -> EngineStats:
        """Return the engine's present counters; raise InfercError if it does not answer."""
        answer: queue.SimpleQueue[Event] = queue.SimpleQueue()
        request_id = self.ask_stats(answer.put)
        try:
            event = answer.get(timeout=timeout)
        except queue.Empty:
            self._end(request_id, None)
            raise InfercError(f"the engine did not answer within {timeout:g} s; a step may be running") from None
        if isinstance(event, Stats):
            return event.stats
        raise InfercError(event.reason if isinstance(event, Failed) else f"unexpected answer {event}")

    def drain(self) -> None:
        """Refuse new requests, finish the open ones, then stop; return at once (`join` waits)."""
        if not self._is_draining and self._stopped is None:
            self._is_draining = True
            self._send(Shutdown(drain=True))

    def close(self) -> None:
        """Stop now; open requests fail."""
        if self._stopped is None:
            self._send(Shutdown(drain=False))
        self.join()
        self._fail_all("the engine was closed")

    def join(self, timeout: float | None = None) -> None:
        raise NotImplementedError

    def _send(self, command: Command) -> None:
        raise NotImplementedError

    def _begin(self, sink: Sink, num_sequences: int, even_draining: bool = False) -> str:
        request_id = str(next(self._ids))
        with self._lock:
            if self._stopped is not None:
                raise InfercError(self._stopped)
            if self._is_draining and not even_draining:
                raise InfercError("the engine is draining and takes no more requests")
            self._open[request_id] = _Open(sink, set(range(num_sequences)))
        return request_id

    def _end(self, request_id: str, index: int | None) -> None:
        """Record that a sequence of a request has ended, or all of them if `index` is None."""
        with self._lock:
            entry = self._open.get(request_id)
            if entry is not None:
                entry.left = set() if index is None else entry.left - {index}
                if not entry.left:
                    del self._open[request_id]

    def _dispatch(self, events: Events) -> None:
        if isinstance(events, KvBatch):
            if self._on_kv_events is not None:
                self._on_kv_events(events)
            return
        for event in events:
            if event.request_id is None:
                self._fail_all(event.reason, event.kind)
                continue
            entry = self._open.get(event.request_id)
            if entry is None or (isinstance(event, Output) and event.index not in entry.left):
                continue  # the request was aborted while the event was in transit
            if isinstance(event, Output):
                if event.finish_reason is not None:
                    self._end(event.request_id, event.index)
            elif not isinstance(event, ScoredRows):
                self._end(event.request_id, None)
            entry.sink(event)

    def _fail_all(self, reason: str, kind: str = "InfercError") -> None:
        """Fail every open request, and all that will come, because the engine has stopped."""
        with self._lock:
            is_first = self._stopped is None
            self._stopped = self._stopped or reason
            open_requests, self._open = self._open, {}
        if is_first and self._on_stop is not None:
            self._on_stop(reason)
        for request_id, entry in open_requests.items():
            entry.sink(Failed(request_id, reason, kind=kind))


class EngineThread(EngineClient):
    """An engine in a thread of this process, which `make` builds before the constructor returns.

    Sinks are called on another thread, so that they cost the engine no time while a step runs.
    """

    def __init__(
        self,
        make: Callable[[], Engine],
        on_stop: Callable[[str], None] | None = None,
        on_kv_events: Callable[[KvBatch], None] | None = None,
    ) -> None:
        super().__init__(on_stop, on_kv_events)
        self._engine = make()
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._outbox: queue.SimpleQueue[Events | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="inferc-engine", daemon=True)
        self._reader = threading.Thread(target=self._read, name="inferc-engine-reader", daemon=True)
        for thread in (self._thread, self._reader):
            thread.start()

    def join(self, timeout: float | None = None) -> None:
        self._thread.join(timeout)
        self._reader.join(timeout)

    def tapped(self) -> list[TappedSequence]:
        """Return the values of tapped requests that have ended, each once."""
        self.stats()  # once it answers, the engine has seen every abort that was sent
        found: list[TappedSequence] = []
        while self._engine.taps is not None and not self._engine.taps.ended.empty():
            found += self._engine.taps.ended.get() or ()
        return found

    def _send(self, command: Command) -> None:
        self._inbox.put(command)

    def _run(self) -> None:
        run_engine(self._engine, self._inbox, self._outbox.put)
        self._outbox.put(None)

    def _read(self) -> None:
        while (events := self._outbox.get()) is not None:
            self._dispatch(events)
        self._fail_all("the engine was closed")
