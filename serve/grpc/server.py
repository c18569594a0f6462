"""The gRPC endpoint: inferc.v1.InferenceService, the Open Inference Protocol, health and reflection over a server's models."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor, ServiceDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2

from inferc.errors import ConfigError
from inferc.serve.grpc.answers import Answer, as_bytes
from inferc.serve.grpc.edge import MAX_MESSAGE_BYTES, SMALL_BYTES, Arrivals, Context, Edge, Ended
from inferc.serve.grpc.health import HealthService, ReflectionService
from inferc.serve.grpc.inference_service import InferenceService
from inferc.serve.grpc.kserve_service import KServeService
from inferc.serve.grpc.messages import read
from inferc.serve.models.models import Models
from inferc.serve.protos.inferc.v1 import inference_pb2 as pb
from inferc.serve.protos.inference import grpc_service_pb2 as kserve_pb
from inferc.serve.security.access import Access
from inferc.serve.under_way import UnderWay

INFERENCE: ServiceDescriptor = pb.DESCRIPTOR.services_by_name["InferenceService"]
KSERVE: ServiceDescriptor = kserve_pb.DESCRIPTOR.services_by_name["GRPCInferenceService"]
HEALTH: ServiceDescriptor = health_pb2.DESCRIPTOR.services_by_name["Health"]
REFLECTION: ServiceDescriptor = reflection_pb2.DESCRIPTOR.services_by_name["ServerReflection"]
SERVICE = INFERENCE.full_name
SERVICES = (SERVICE, KSERVE.full_name, HEALTH.full_name, REFLECTION.full_name)
MAX_METADATA_BYTES = 64 << 10  # of a call
MAX_STREAMS = 4096  # calls of a connection at the same time: four times as many as sequences
WINDOW_BYTES = 16 << 10  # what is held of a call that is not read; more of a message comes once it is
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.server.max_pending_requests", MAX_STREAMS),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ("grpc.http2.bdp_probe", 0),  # it would make of the window megabytes
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

Run: TypeAlias = Callable[[Any], Any]
Handler: TypeAlias = Callable[[AsyncIterator[bytes], Context], Awaitable[None]]


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
        self._health = HealthService(("", *SERVICES))  # "" is the whole server
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

    async def start(
        self,
        models: Models,
        access: Access,
        ended: Ended = lambda method, code: None,
        under_way: UnderWay | None = None,
    ) -> None:
        """ended: hears of every call that is over, by method and status code. under_way: counts those that are not."""
        under_way = under_way or UnderWay()
        # Who needs no key is in nobody's way who has one.
        keyed, keyless = Arrivals(), Arrivals(SMALL_BYTES)
        for service, methods in (
            (INFERENCE, InferenceService(models)),
            (KSERVE, KServeService(models)),
            (HEALTH, self._health),
            (REFLECTION, ReflectionService(SERVICES)),
        ):
            # Every method of a service, by the method of `methods` that has its name in lower case.
            handlers = {
                each.name: _handler(
                    each, getattr(methods, _snake_case(each.name)), Edge(each, access, ended, keyed, keyless, under_way)
                )
                for each in service.methods
            }
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
        await self._server.start()

    def set_serving(self, serving: bool) -> None:
        """What health says from now on, to those who watch it too."""
        self._health.set_serving(serving)

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, give running ones this long, then cut them off."""
        await self._server.stop(grace_seconds)


def _handler(method: MethodDescriptor, run: Run, edge: Edge) -> grpc.RpcMethodHandler[Any, Any]:
    """To gRPC all requests are streams, on which a single message looks the same: so it is read here, after the key."""
    kind: type[Message] = GetMessageClass(method.input_type)
    if method.client_streaming:
        return grpc.stream_stream_rpc_method_handler(_both_streaming(kind, run, edge))
    if method.server_streaming:
        # Headers go out before the first event, which may be long in coming.
        greets = method.name == "SubscribeKvEvents"
        return grpc.stream_stream_rpc_method_handler(_streaming(kind, run, edge, greets))
    return grpc.stream_unary_rpc_method_handler(_unary(kind, run, edge))  # whose answer and status go out together


def _snake_case(name: str) -> str:
    return "".join(f"_{char.lower()}" if char.isupper() else char for char in name).lstrip("_")


def _unary(
    kind: type[Message], run: Callable[[Any], Awaitable[Answer]], edge: Edge
) -> Callable[[AsyncIterator[bytes], Context], Awaitable[bytes]]:
    async def handler(_: AsyncIterator[bytes], context: Context) -> bytes:
        async with edge.around(context), edge.message(context) as data:
            return as_bytes(await run(await read(kind, data)))

    return handler


def _streaming(
    kind: type[Message],
    run: Callable[[Any], AsyncGenerator[Answer, None]],
    edge: Edge,
    greets: bool,
) -> Handler:
    async def handler(_: AsyncIterator[bytes], context: Context) -> None:
        async with (
            edge.around(context),
            edge.message(context) as data,
            aclosing(run(await read(kind, data))) as messages,
        ):
            if greets:
                await context.send_initial_metadata(())
            await _write(messages, context)

    return handler


def _both_streaming(
    kind: type[Message],
    run: Callable[[AsyncIterator[Any]], AsyncGenerator[Answer, None]],
    edge: Edge,
) -> Handler:
    async def parsed(requests: AsyncIterator[bytes]) -> AsyncIterator[Any]:
        async for data in requests:
            yield await read(kind, data)

    async def handler(requests: AsyncIterator[bytes], context: Context) -> None:
        async with edge.around(context), aclosing(run(parsed(edge.messages(context, requests)))) as messages:
            await _write(messages, context)

    return handler


async def _write(messages: AsyncIterator[Answer], context: Context) -> None:
    async for message in messages:
        # Waits while the client does not read; the stream behind `messages` gathers what comes meanwhile.
        await context.write(as_bytes(message))
