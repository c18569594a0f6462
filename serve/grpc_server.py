"""The gRPC endpoint: inferc.v1.InferenceService, health and reflection over one AsyncEngine."""

from __future__ import annotations

import asyncio
import importlib.metadata
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import grpc.aio
from google.protobuf.message import DecodeError, Message
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from inferc.errors import ConfigError, GenerationError, ObjectiveError, RequestError
from inferc.serve import protocol
from inferc.serve.async_engine import AsyncEngine, EngineUnavailable, Piece, QueueFull, RequestAborted, RequestIdInUse
from inferc.serve.kv_events import BatchesGone, EventsOff, KvEventLog
from inferc.serve.protos.inferc.v1 import inference_pb2 as pb

log = logging.getLogger(__name__)

SERVICE = pb.DESCRIPTOR.services_by_name["InferenceService"].full_name
REPORTED = ("", SERVICE)  # the services that health speaks of; "" is the whole server
MAX_MESSAGE_BYTES = 64 << 20  # of a request; a prompt of a million tokens takes a tenth
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    ("grpc.so_reuseport", 0),  # a port in use is an error, not half of its traffic
]


class NotServed(RequestError):
    """The request names a model that this server does not have."""


# What each error of ours is on the wire. Any other exception is INTERNAL, and only the log tells more.
CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (NotServed, grpc.StatusCode.NOT_FOUND),
    (RequestIdInUse, grpc.StatusCode.ALREADY_EXISTS),
    (RequestError, grpc.StatusCode.INVALID_ARGUMENT),
    (QueueFull, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (ObjectiveError, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (RequestAborted, grpc.StatusCode.CANCELLED),
    (EngineUnavailable, grpc.StatusCode.UNAVAILABLE),
    (EventsOff, grpc.StatusCode.FAILED_PRECONDITION),
    (BatchesGone, grpc.StatusCode.OUT_OF_RANGE),
    (GenerationError, grpc.StatusCode.INTERNAL),
)

Context = grpc.aio.ServicerContext[Any, Any]


@dataclass(frozen=True)
class ModelInfo:
    """What GetModelInfo tells, beside the limits that the engine itself knows."""

    name: str
    model_type: str
    dtype: str
    max_num_seqs: int


class InferenceService:
    """The methods of inferc.v1.InferenceService."""

    def __init__(self, engine: AsyncEngine, info: ModelInfo, kv_events: KvEventLog | None = None) -> None:
        self.engine = engine
        self.info = info
        self.kv_events = kv_events

    async def generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse, None]:
        protocol.check_known(request)
        self._check_model(request.model)
        params = replace(protocol.sampling_params(request.sampling, self.engine.facts.defaults), tap=request.tap)
        self.engine.check_open(params.n)  # before the work that a prompt is
        prompt = await self._prompt(request)
        stream = self.engine.open(prompt, params, protocol.request_id(request))
        usage = pb.Usage(prompt_tokens=len(prompt))
        running = params.n
        try:
            async for piece in stream:
                usage.output_tokens += len(piece.token_ids)
                running -= piece.finish_reason is not None
                usage.cached_tokens = stream.num_cached
                usage.forgotten_tokens = sum(stream.num_forgotten.values())
                yield _response(stream.request_id, piece, None if running else usage)
        finally:  # also when the client went away or its deadline passed: the blocks come free at once
            stream.close()

    async def abort(self, request: pb.AbortRequest) -> pb.AbortResponse:
        return pb.AbortResponse(aborted=self.engine.abort(request.request_id))

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        self._check_model(request.model)
        text = self.engine.text
        if request.WhichOneof("prompt") == "chat":
            messages = protocol.chat_messages(request.chat)
            ids = await asyncio.to_thread(text.encode_chat, messages)
        elif request.WhichOneof("prompt") == "text":
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            ids = await asyncio.to_thread(text.encode, request.text, add_special_tokens=special)
        else:
            raise RequestError("the request has no prompt; set text or chat")
        return pb.TokenizeResponse(token_ids=ids)

    async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        self._check_model(request.model)
        limit = self.engine.facts.vocab_size
        for token in request.token_ids:
            if not 0 <= token < limit:
                raise RequestError(f"token id {token} is outside of the vocabulary [0, {limit})")
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True
        return pb.DetokenizeResponse(text=self.engine.text.decode(request.token_ids, skip_special_tokens=skip))

    async def get_model_info(self, request: pb.GetModelInfoRequest) -> pb.GetModelInfoResponse:
        self._check_model(request.model)
        return pb.GetModelInfoResponse(
            model=self.info.name,
            server_version=importlib.metadata.version("inferc"),
            model_type=self.info.model_type,
            dtype=self.info.dtype,
            max_model_len=self.engine.facts.max_model_len,
            vocab_size=self.engine.facts.vocab_size,
            eos_token_ids=self.engine.facts.eos_token_ids,
            has_chat_template=self.engine.text.has_chat_template,
            defaults=protocol.default_params(self.engine.facts.defaults),
            max_num_seqs=self.info.max_num_seqs,
        )

    async def get_loads(self, request: pb.GetLoadsRequest) -> pb.GetLoadsResponse:
        stats = await self.engine.stats()
        return pb.GetLoadsResponse(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            kv_usage=stats.kv_usage,
            num_requests=self.engine.num_requests,
            prompt_tokens=stats.prompt_tokens,
            output_tokens=stats.output_tokens,
            num_preemptions=stats.num_preemptions,
            admitted_tokens=stats.admitted_tokens,
            cached_tokens=stats.cached_tokens,
            num_refused=stats.num_refused,
            disk_usage=stats.lower_usage,
            blocks_stored=stats.num_stored,
            blocks_found_on_disk=stats.num_raised,
            blocks_swapped=stats.num_swapped,
            blocks_spilled=stats.num_spilled,
            blocks_damaged=stats.num_damaged,
            length_error=stats.length_error,
            length_error_of_mean=stats.length_error_of_mean,
            step_cost_error=stats.cost_error,
        )

    def subscribe_kv_events(self, request: pb.SubscribeKvEventsRequest) -> AsyncGenerator[pb.KvEventBatch, None]:
        """The batches that follow; which is the first is settled when this returns."""
        protocol.check_known(request)
        if self.kv_events is None:
            raise EventsOff("this server does not collect KV events; start it with --kv-events grpc, or an endpoint")
        events = self.kv_events
        start = request.start_sequence if request.HasField("start_sequence") else events.end
        return protocol.kv_batches(events.follow(start), events.epoch)

    def _check_model(self, name: str) -> None:
        if name not in ("", self.info.name):
            raise NotServed(f"model {name!r} is not served here; this server has {self.info.name!r}")

    async def _prompt(self, request: pb.GenerateRequest) -> list[int]:
        """The prompt's ids. Tokenizing takes a second for a megabyte, so a thread does it: nobody else waits."""
        kind = request.WhichOneof("prompt")
        limit = self.engine.facts.max_model_len
        if kind == "token_ids":
            return list(request.token_ids.ids)
        if kind == "text":
            return await asyncio.to_thread(self.engine.text.encode, request.text, max_tokens=limit)
        if kind == "chat":
            messages = protocol.chat_messages(request.chat)
            return await asyncio.to_thread(self.engine.text.encode_chat, messages, max_tokens=limit)
        raise RequestError("the request has no prompt; set one of text, token_ids or chat")


def _response(request_id: str, piece: Piece, usage: pb.Usage | None) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        request_id=request_id,
        index=piece.index,
        text=piece.text,
        token_ids=piece.token_ids,
        logprobs=protocol.logprobs(piece.logprobs),
        finish_reason=protocol.FINISH_REASONS[piece.finish_reason],
        usage=usage,
    )


class GrpcServer:
    """Listens on one port. Health follows the engine: SERVING while it takes requests.

    The port is taken at once, so that what is wrong with it is known before a model is loaded; calls are answered from
    `start` on. Raises ConfigError if there is no such port to have.
    """

    def __init__(self, host: str, port: int) -> None:
        self._server = grpc.aio.server(options=OPTIONS)
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
        address = f"[{host}]" if ":" in host else host
        try:
            bound = self._server.add_insecure_port(f"{address}:{port}")
        except RuntimeError:
            bound = 0
        if not bound:
            raise ConfigError(
                f"cannot listen on {address}:{port}: the port is in use or the host is not this machine's"
            )
        self.address = f"{address}:{bound}"

    async def start(self, engine: AsyncEngine, info: ModelInfo, kv_events: KvEventLog | None = None) -> None:
        self._add_service(InferenceService(engine, info, kv_events))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        names = (SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME)
        reflection.enable_server_reflection(names, self._server)
        await self.set_serving(True)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """What health says from now on, to those who watch it too."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in REPORTED:
            await self._health.set(name, status)

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, give running ones this long, then cut them off."""
        await self._server.stop(grace_seconds)

    def _add_service(self, service: InferenceService) -> None:
        unary: dict[str, tuple[type[Message], Callable[[Any], Awaitable[Message]]]] = {
            "Abort": (pb.AbortRequest, service.abort),
            "Tokenize": (pb.TokenizeRequest, service.tokenize),
            "Detokenize": (pb.DetokenizeRequest, service.detokenize),
            "GetModelInfo": (pb.GetModelInfoRequest, service.get_model_info),
            "GetLoads": (pb.GetLoadsRequest, service.get_loads),
        }
        handlers = {
            name: grpc.unary_unary_rpc_method_handler(_unary(kind, run), response_serializer=_serialize)
            for name, (kind, run) in unary.items()
        }
        handlers["Generate"] = grpc.unary_stream_rpc_method_handler(
            _streaming(pb.GenerateRequest, service.generate), response_serializer=_serialize
        )
        handlers["SubscribeKvEvents"] = grpc.unary_stream_rpc_method_handler(
            _streaming(pb.SubscribeKvEventsRequest, service.subscribe_kv_events, greets=True),
            response_serializer=_serialize,
        )
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _parse(kind: type[Message], data: bytes) -> Any:
    """A request of bytes that anybody may have sent. gRPC itself would answer UNKNOWN to what is no message."""
    try:
        return kind.FromString(data)
    except DecodeError as error:
        raise RequestError(f"the bytes are no {kind.DESCRIPTOR.full_name}: {error}") from None


def _unary(
    kind: type[Message], run: Callable[[Any], Awaitable[Message]]
) -> Callable[[bytes, Context], Awaitable[Message]]:
    async def handler(data: bytes, context: Context) -> Message:
        async with _errors_as_status(context):
            request = _parse(kind, data)
            protocol.check_known(request)
            return await run(request)

    return handler


def _streaming(
    kind: type[Message], run: Callable[[Any], AsyncGenerator[Message, None]], greets: bool = False
) -> Callable[[bytes, Context], Awaitable[None]]:
    """greets: send headers before the first message, which may be long in coming."""

    async def handler(data: bytes, context: Context) -> None:
        async with _errors_as_status(context), aclosing(run(_parse(kind, data))) as messages:
            if greets:
                await context.send_initial_metadata(())
            async for message in messages:
                # Waits while the client does not read; the stream behind `run` gathers what comes meanwhile.
                await context.write(message)

    return handler


@asynccontextmanager
async def _errors_as_status(context: Context) -> AsyncIterator[None]:
    try:
        yield
    except Exception as error:  # the edge of the process: whatever it is, the client gets a status
        for kind, code in CODES:
            if isinstance(error, kind):
                await context.abort(code, str(error))
        log.error("a call failed", exc_info=error)
        await context.abort(grpc.StatusCode.INTERNAL, "internal error; the server's log has the details")
