"""The gRPC endpoint: inferc.v1.InferenceService, the Open Inference Protocol, health and reflection over a server's models."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health, health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from inferc.errors import ConfigError
from inferc.log_format import REQUEST_ID, REQUEST_ID_FORM
from inferc.serve.access import CALLER, Access, secret_of
from inferc.serve.admission import ARRIVED_AT, WITHIN
from inferc.serve.grpc_messages import read
from inferc.serve.inference_service import InferenceService
from inferc.serve.kserve_service import KServeService
from inferc.serve.models import Models
from inferc.serve.protos.inferc.v1 import inference_pb2 as pb
from inferc.serve.protos.inference import grpc_service_pb2 as kserve_pb
from inferc.serve.statuses import told
from inferc.serve.trace_context import note_trace

log = logging.getLogger(__name__)

INFERENCE: ServiceDescriptor = pb.DESCRIPTOR.services_by_name["InferenceService"]
KSERVE: ServiceDescriptor = kserve_pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
SERVICE = INFERENCE.full_name
# The services that health speaks of; "" is the whole server.
REPORTED = ("", SERVICE, KSERVE.full_name, health.SERVICE_NAME, reflection.SERVICE_NAME)
# Methods that need no key: what probes ask. Methods that need a key with admin: those that change what is served, and
# those that tell what others asked.
OPEN = frozenset(("ServerLive", "ServerReady"))
FOR_ADMINS = frozenset(
    (
        *("LoadModel", "UnloadModel", "SleepModel", "WakeModel", "SubscribeKvEvents"),
        *("RepositoryModelLoad", "RepositoryModelUnload"),
    )
)
MAX_MESSAGE_BYTES = 32 << 20  # of a request, which gRPC copies on the event loop; a million tokens are a fifth
MAX_METADATA_BYTES = 64 << 10  # of a call
LATE_SECONDS = 0.1  # before its deadline here, a call that its client ends is one whose deadline is over there
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    # Between the two gRPC refuses some calls and not others; these are the same for all, and as much as HTTP's.
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
    # Who opens a connection and says nothing loses it.
    ("grpc.server_handshake_timeout_ms", 10_000),
]

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Run: TypeAlias = Callable[[Any], Any]
Ended: TypeAlias = Callable[[str, str], None]


class GrpcServer:
    """Listens on one port. Health follows the models: SERVING while they take requests.

    The port is taken at once, so that what is wrong with it is known before a model is loaded; calls are answered from
    `start` on. Raises ConfigError if there is no such port to have.
    """

    def __init__(
        self,
        host: str,
        port: int,
        credentials: grpc.ServerCredentials | None = None,
        max_connections: int | None = None,
    ) -> None:
        """credentials: of TLS. max_connections: at the same time, others are closed at once; None: any number."""
        more = [] if max_connections is None else [("grpc.max_allowed_incoming_connections", max_connections)]
        self._server = grpc.aio.server(options=[*OPTIONS, *more])
        self._health = health.aio.HealthServicer()  # type: ignore[attr-defined]  # the stubs lack it
        address = f"[{host}]" if ":" in host else host
        try:
            if credentials is None:
                bound = self._server.add_insecure_port(f"{address}:{port}")
            else:
                bound = self._server.add_secure_port(f"{address}:{port}", credentials)
        except RuntimeError:
            bound = 0
        if not bound:
            raise ConfigError(
                f"cannot listen on {address}:{port}: the port is in use or the host is not this machine's"
            )
        self.address = f"{address}:{bound}"

    async def start(self, models: Models, access: Access, ended: Ended = lambda method, code: None) -> None:
        """ended: hears of every call that is over, by method and status code."""
        for service, methods in ((INFERENCE, InferenceService(models)), (KSERVE, KServeService(models))):
            self._server.add_generic_rpc_handlers((_handlers(service, methods, access, ended),))
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        reflection.enable_server_reflection(REPORTED[1:], self._server)
        await self._server.start()

    async def set_serving(self, serving: bool) -> None:
        """What health says from now on, to those who watch it too."""
        status = health_pb2.HealthCheckResponse.SERVING if serving else health_pb2.HealthCheckResponse.NOT_SERVING
        for name in REPORTED:
            await self._health.set(name, status)

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, give running ones this long, then cut them off."""
        await self._server.stop(grace_seconds)


def _handlers(
    service: ServiceDescriptor, methods: object, access: Access, ended: Ended
) -> grpc.GenericRpcHandler[Any, Any]:
    """Every method of a service, by the method of `methods` that has its name in lower case."""
    handlers = {
        method.name: _handler(method, getattr(methods, _snake_case(method.name)), _Edge(method, access, ended))
        for method in service.methods
    }
    return grpc.method_handlers_generic_handler(service.full_name, handlers)


def _handler(method: MethodDescriptor, run: Run, edge: _Edge) -> grpc.RpcMethodHandler[Any, Any]:
    kind: type[Message] = GetMessageClass(method.input_type)
    if method.client_streaming:
        return grpc.stream_stream_rpc_method_handler(_both_streaming(kind, run, edge), response_serializer=_serialize)
    if method.server_streaming:
        # Headers go out before the first event, which may be long in coming.
        greets = method.name == "SubscribeKvEvents"
        return grpc.unary_stream_rpc_method_handler(_streaming(kind, run, edge, greets), response_serializer=_serialize)
    return grpc.unary_unary_rpc_method_handler(_unary(kind, run, edge), response_serializer=_serialize)


def _snake_case(name: str) -> str:
    return "".join(f"_{char.lower()}" if char.isupper() else char for char in name).lstrip("_")


def _serialize(message: Message) -> bytes:
    return message.SerializeToString()


def _unary(
    kind: type[Message], run: Callable[[Any], Awaitable[Message]], edge: _Edge
) -> Callable[[bytes, Context], Awaitable[Message]]:
    async def handler(data: bytes, context: Context) -> Message:
        async with edge.around(context):
            return await run(await read(kind, data))

    return handler


def _streaming(
    kind: type[Message], run: Callable[[Any], AsyncGenerator[Message, None]], edge: _Edge, greets: bool
) -> Callable[[bytes, Context], Awaitable[None]]:
    async def handler(data: bytes, context: Context) -> None:
        async with edge.around(context), aclosing(run(await read(kind, data))) as messages:
            if greets:
                await context.send_initial_metadata(())
            await _write(messages, context)

    return handler


def _both_streaming(
    kind: type[Message], run: Callable[[AsyncIterator[Any]], AsyncGenerator[Message, None]], edge: _Edge
) -> Callable[[AsyncIterator[bytes], Context], Awaitable[None]]:
    async def parsed(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in requests:
            yield await read(kind, data)

    async def handler(requests: AsyncIterator[bytes], context: Context) -> None:
        async with edge.around(context), aclosing(run(parsed(requests))) as messages:
            await _write(messages, context)

    return handler


async def _write(messages: AsyncIterator[Message], context: Context) -> None:
    async for message in messages:
        # Waits while the client does not read; the stream behind `messages` gathers what comes meanwhile.
        await context.write(message)


class _Edge:
    """Around every call of a method: who calls is known, errors become a status, and `ended` hears of it."""

    def __init__(self, method: MethodDescriptor, access: Access, ended: Ended) -> None:
        self._method, self._access, self._ended = method.full_name, access, ended
        self._is_open, self._is_for_admins = method.name in OPEN, method.name in FOR_ADMINS

    @asynccontextmanager
    async def around(self, context: Context) -> AsyncIterator[None]:
        code = "CANCELLED"  # unless one of the ends below is reached
        try:
            ARRIVED_AT.set(time.monotonic())
            REQUEST_ID.set(_header(context, "x-request-id"))
            metadata = context.invocation_metadata() or ()
            note_trace((name, value) for name, value in metadata if isinstance(value, str))
            if not self._is_open:
                caller = self._access.caller(_secret(context))
                if self._is_for_admins:
                    caller.check_admin()
                CALLER.set(caller)
                WITHIN.set(context.time_remaining())
            yield
            code = "OK"
        except asyncio.CancelledError:
            left = context.time_remaining()
            if left is not None and left < LATE_SECONDS:
                code = "DEADLINE_EXCEEDED"
            raise
        except Exception as error:  # noqa: BLE001 (the edge of the process: whatever it is, the client gets a status)
            found = told(error)
            code = found.status.grpc
            after = found.retry_after
            trailing = () if after is None else (("retry-after", f"{after:g}"),)
            await context.abort(grpc.StatusCode[code], found.message, trailing)
        finally:
            self._ended(self._method, code)


def _header(context: Context, name: str) -> str:
    """What a client says of a call in a word, if it is one."""
    for key, value in context.invocation_metadata() or ():
        if key == name and isinstance(value, str) and REQUEST_ID_FORM.fullmatch(value):
            return value
    return ""


def _secret(context: Context) -> str | None:
    """The API key that came with a call."""
    for name, value in context.invocation_metadata() or ():
        if name == "authorization" and isinstance(value, str):
            return secret_of(value)
        if name == "x-api-key" and isinstance(value, str):
            return value
    return None
