"""The commands to an engine in a process of its own, and its events, as messages between the processes.

A message is MessagePack. A command's is the list of its name and fields, of a union that msgspec knows the types of; an
event's is (kind, value), where values are dataclasses as maps of their fields. Rows of log probabilities come in parts,
each a message of its own, so that the reader lets other threads run between them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any, get_type_hints

import msgspec
import numpy as np

from inferc.runtime.engine.loop import (
    Abort,
    AdapterDone,
    Add,
    Command,
    Embedded,
    EmbedText,
    Event,
    Events,
    Failed,
    GetStats,
    LoadAdapter,
    Scored,
    ScoredRows,
    ScoreText,
    Shutdown,
    Stats,
    UnloadAdapter,
)
from inferc.runtime.engine.scoring import Score
from inferc.runtime.kv_cache.events import CacheEvent, Cleared, KvBatch, Removed, Stored
from inferc.runtime.step.sampling_params import SamplingParams, changed
from inferc.runtime.step.sequence import Output, Row, StepOutputs

ENTRIES_OF_PART = 1 << 12  # tokens of a part, with their likely ones: a millisecond or two


# -------------------------------------------------------------------------------------------------- commands


class _Add(msgspec.Struct, array_like=True, tag=True):
    """The message of an Add. params: the fields of its SamplingParams, as a message of their own."""

    request_id: str
    prompt_token_ids: list[int]
    params: msgspec.Raw
    name: str


# The fields of SamplingParams without its checks: they were checked when the request was made.
_TYPES = get_type_hints(SamplingParams)
_Params = msgspec.defstruct(
    "_Params",
    [(each.name, _TYPES[each.name]) for each in dataclasses.fields(SamplingParams) if each.name != "logits_processors"],
    array_like=True,
)
_PARAMS: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_Params)
_COMMAND = msgspec.msgpack.Decoder(
    _Add | Abort | ScoreText | EmbedText | LoadAdapter | UnloadAdapter | GetStats | Shutdown
)
_PLAIN_PARAMS = SamplingParams()


def encode_command(command: Command) -> bytes:
    """Encode a command as the bytes of a message; a list of a million ids takes some milliseconds."""
    if not isinstance(command, Add):
        return _dump(command)
    values = dict(vars(command.params))
    assert not values.pop("logits_processors"), "functions are for an engine in the caller's process"
    params = msgspec.Raw(_dump(_Params(**values)))
    return _dump(_Add(command.request_id, command.prompt_token_ids, params, command.name))


def decode_command(message: bytes) -> Command:
    """Decode a message of `encode_command`."""
    found: _Add | Command = _COMMAND.decode(message)
    if not isinstance(found, _Add):
        return found
    params = changed(_PLAIN_PARAMS, **msgspec.structs.asdict(_PARAMS.decode(found.params)))
    return Add(found.request_id, found.prompt_token_ids, params, found.name)


# ---------------------------------------------------------------------------------------------------- events


@dataclasses.dataclass(frozen=True)
class Name:
    """The name of the sequence that an output belongs to, in place of the engine's Sequence in the client's process."""

    request_id: str
    index: int


class _Step(msgspec.Struct, array_like=True):
    """The message of a StepOutputs.

    ids: int32 token ids.
    rows: (request id, index) of each row; None if they are those of the step before it.
    """

    number: int
    seconds: float
    ids: bytes
    others: list[tuple[int, Output | None]]
    rows: list[tuple[str, int]] | None = None


class _Batch(msgspec.Struct, array_like=True):
    """The message of a KvBatch."""

    time: float
    events: list[tuple[str, msgspec.Raw]]


EVENTS: tuple[type[Event], ...] = (Output, Failed, ScoredRows, Scored, Embedded, AdapterDone, Stats)
CACHE_EVENTS: tuple[type[CacheEvent], ...] = (Stored, Removed, Cleared)
DECODERS: dict[str, msgspec.msgpack.Decoder[Any]] = {
    kind.__name__: msgspec.msgpack.Decoder(kind) for kind in (*EVENTS, *CACHE_EVENTS, _Step, _Batch)
}
_MESSAGE = msgspec.msgpack.Decoder(tuple[str, msgspec.Raw])


class EventWriter:
    """An encoder of events as messages; a step's rows are named only when they change, otherwise a step is its ids."""

    def __init__(self) -> None:
        self._seqs: Sequence[Row] | None = None

    def encode(self, events: Events) -> Iterator[bytes]:
        """Yield the messages of some events; each must be sent before the next is taken."""
        if isinstance(events, KvBatch):
            changes = [(type(event).__name__, msgspec.Raw(_dump(event))) for event in events.events]
            yield _message(_Batch(events.time, changes))
        elif isinstance(events, StepOutputs):
            yield _message(self._step(events))
        else:
            for event in events:
                yield from _messages(event)

    def _step(self, outputs: StepOutputs) -> _Step:
        ids = outputs.token_ids.astype(np.int32, copy=False).tobytes()
        step = _Step(outputs.step, outputs.step_seconds, ids, list(outputs.others.items()))
        if outputs.seqs is not self._seqs:
            self._seqs = outputs.seqs
            step.rows = [(seq.request_id, seq.index) for seq in outputs.seqs]
        return step


class EventReader:
    """A decoder of the messages of an EventWriter, in their order."""

    def __init__(self) -> None:
        self._names: list[Name] = []

    def decode(self, message: bytes) -> Events:
        kind, raw = _MESSAGE.decode(message)
        value = DECODERS[kind].decode(raw)
        if isinstance(value, _Step):
            if value.rows is not None:
                self._names = [Name(*row) for row in value.rows]
            ids = np.frombuffer(value.ids, np.int32)
            return StepOutputs(self._names, ids, dict(value.others), value.number, value.seconds)
        if isinstance(value, _Batch):
            return KvBatch(value.time, [DECODERS[name].decode(event) for name, event in value.events])
        return [value]


def _messages(event: Event) -> Iterator[bytes]:
    if isinstance(event, Failed):
        # A path in the message may have bytes that are no text.
        event = dataclasses.replace(event, reason=event.reason.encode(errors="backslashreplace").decode())
    elif isinstance(event, ScoredRows):
        at_once = max(1, ENTRIES_OF_PART // (1 + len(event.rows[0].top)))
        for at in range(0, len(event.rows), at_once):
            yield _message(ScoredRows(event.request_id, event.rows[at : at + at_once]))
        return
    elif isinstance(event, Scored) and event.score.rows:  # the rows contain all of the Score
        yield from _messages(ScoredRows(event.request_id, event.score.rows))
        event = Scored(event.request_id, Score([], []))
    yield _message(event)


def _message(value: Any) -> bytes:
    return _dump((type(value).__name__, value))


def _plain(value: Any) -> float:
    """Convert a statistic that numpy computed to a plain float."""
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"found {type(value).__name__} in an event; events hold plain numbers")


_dump = msgspec.msgpack.Encoder(enc_hook=_plain).encode
