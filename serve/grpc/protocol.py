"""The conversions between the messages of inference.proto and the runtime's own types."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from typing import Any

import numpy as np
from google.protobuf.message import Message

from inferc.errors import RequestError
from inferc.runtime.engine.beam_search import BeamSearchParams
from inferc.runtime.kv_cache.events import CacheEvent, Removed, Stored
from inferc.runtime.openai.beams import check_beside_beams, search_of
from inferc.runtime.openai.request import MAX_PROMPTS
from inferc.runtime.openai.text_requests import check_dimensions
from inferc.runtime.step.plan import Logprobs
from inferc.runtime.step.sampling_params import MAX_LOGPROBS, SamplingParams, check_num_items, from_request
from inferc.runtime.step.structured_outputs import StructuredOutputs
from inferc.serve.kv_events.log import Numbered, block_number
from inferc.serve.protos.inferc.v1 import inference_pb2 as pb

FINISH_REASONS = {
    None: pb.FINISH_REASON_UNSPECIFIED,
    "stop": pb.FINISH_REASON_STOP,
    "length": pb.FINISH_REASON_LENGTH,
    "tool_calls": pb.FINISH_REASON_TOOL_CALLS,
}
EARLY_STOPPING: dict[int, Any] = {
    pb.EARLY_STOPPING_FALSE: False,
    pb.EARLY_STOPPING_TRUE: True,
    pb.EARLY_STOPPING_NEVER: "never",
}
MAX_REQUEST_ID = 128


def sampling_params(message: pb.SamplingParams, defaults: Mapping[str, Any]) -> SamplingParams:
    """Return the sampling parameters that the client set, over the model's generation defaults.

    Raises a RequestError that names the field at fault.
    """
    values: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.name == "logit_bias":
            check_num_items(field.name, len(value))
            values["logit_bias"] = dict(value)
        elif field.name == "structured_outputs":
            values["structured_outputs"] = _structured_outputs(value)
        elif field.name == "bad_words_ids":
            check_num_items(field.name, sum(max(1, len(word.ids)) for word in value))
            values[field.name] = tuple(tuple(word.ids) for word in value)
        elif field.name == "dry_sequence_breakers":
            values[field.name] = tuple(value.texts)
        elif field.name not in ("unlimited", "beam_search"):
            if not isinstance(value, (bool, int, float, str)):
                check_num_items(field.name, len(value))  # before the items are copied one by one
                value = tuple(value)
            values[field.name] = value
    if message.unlimited:
        if message.HasField("max_tokens"):
            raise RequestError("max_tokens and unlimited are both set; leave one out")
        values["max_tokens"] = None
    return from_request(values, defaults)


def beams_of(message: pb.SamplingParams) -> BeamSearchParams | None:
    """Return the beam search that a request asks for, or None; raise RequestError for what does not go with one."""
    if not message.HasField("beam_search"):
        return None
    asked = message.beam_search
    given: dict[str, Any] = {}
    if asked.HasField("length_penalty"):
        given["length_penalty"] = asked.length_penalty
    if asked.HasField("early_stopping"):
        given["early_stopping"] = EARLY_STOPPING.get(asked.early_stopping, asked.early_stopping)
    said = {field.name: value for field, value in message.ListFields()}
    check_beside_beams({name: said[name] for name in said.keys() - {"beam_search", "unlimited"}})
    return search_of(said.get("n"), asked.width if asked.HasField("width") else None, given)


def _structured_outputs(message: pb.StructuredOutputs) -> StructuredOutputs:
    values = {field.name: value for field, value in message.ListFields()}
    if "choice" in values:
        check_num_items("structured_outputs.choice", len(message.choice))
        values["choice"] = tuple(message.choice)
    return StructuredOutputs(**values)


def check_embed(message: pb.EmbedRequest) -> None:
    """Raise RequestError for a number of texts or of dimensions that is out of range."""
    if not 1 <= len(message.inputs) <= MAX_PROMPTS:
        raise RequestError(f"input: found {len(message.inputs)} texts; expected 1 to {MAX_PROMPTS}")
    if message.HasField("dimensions"):
        check_dimensions(message.dimensions)


def num_top(message: Message, field: str, default: int) -> int:
    """Return how many likeliest tokens are asked for at each position; raises RequestError."""
    if not message.HasField(field):
        return default
    found = int(getattr(message, field))
    if not 1 <= found <= MAX_LOGPROBS:
        raise RequestError(f"{field} is {found}; expected 1 to {MAX_LOGPROBS}")
    return found


def request_id(message: pb.GenerateRequest | pb.ScoreRequest) -> str:
    return checked_id("request_id", message.request_id)


def checked_id(name: str, given: str) -> str:
    """Return a client's id of its request, which every part of the answer repeats; RequestError if it is too long."""
    if len(given) > MAX_REQUEST_ID:
        raise RequestError(f"{name} has {len(given)} characters; at most {MAX_REQUEST_ID} are allowed")
    return given


def logprobs(found: Iterable[Logprobs]) -> list[pb.TokenLogprobs]:
    return [
        pb.TokenLogprobs(
            token_id=one.token_id,
            logprob=one.logprob,
            rank=one.rank,
            top=[pb.TokenLogprob(token_id=token, logprob=logprob) for token, logprob in one.top],
        )
        for one in found
    ]


def default_params(defaults: Mapping[str, Any]) -> pb.SamplingParams:
    """Return a model's generation defaults as the message that GetModelInfo shows."""
    values = dict(defaults)
    if words := values.get("bad_words_ids"):
        values["bad_words_ids"] = [pb.TokenIds(ids=word) for word in words]
    return pb.SamplingParams(**values)


async def kv_batches(batches: AsyncGenerator[Numbered, None], epoch: int) -> AsyncGenerator[pb.KvEventBatch, None]:
    async with aclosing(batches):
        async for numbered in batches:
            events = [_kv_event(event) for event in numbered.batch.events]
            yield pb.KvEventBatch(sequence=numbered.sequence, epoch=epoch, time=numbered.batch.time, events=events)


def _kv_event(event: CacheEvent) -> pb.KvEvent:
    if isinstance(event, Stored):
        stored = pb.KvBlocksStored(
            block_hashes=map(block_number, event.names),
            parent_block_hash=None if event.parent is None else block_number(event.parent),
            token_ids=np.frombuffer(event.token_ids, "<i4").tolist(),
            block_size=event.block_size,
            medium=event.medium,
            cache_salt=event.salt,
            adapter=event.adapter,
        )
        return pb.KvEvent(stored=stored)
    if isinstance(event, Removed):
        return pb.KvEvent(removed=pb.KvBlocksRemoved(block_hashes=map(block_number, event.names), medium=event.medium))
    return pb.KvEvent(cleared=pb.KvBlocksCleared())
