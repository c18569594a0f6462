"""The gRPC endpoint with inferc.v1.InferenceService, the Open Inference Protocol, health and reflection."""

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
MAX_METADATA_BYTES = 64 << 10  # metadata of one call
MAX_STREAMS = 4096  # calls of one connection at the same time: four times the default number of sequences
WINDOW_BYTES = 16 << 10  # flow-control window: bytes of a call that are buffered until the call is read
OPTIONS = [
    ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
    ("grpc.max_send_message_length", -1),
    ("grpc.max_concurrent_streams", MAX_STREAMS),
    ("grpc.server.max_pending_requests", MAX_STREAMS),
    ("grpc.http2.lookahead_bytes", WINDOW_BYTES),
    ("grpc.http2.bdp_probe", 0),  # off: it would grow the window to megabytes
    # gRPC refuses calls at random between the soft and the hard limit, so both are the same, and the same as over HTTP.
    ("grpc.max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.absolute_max_metadata_size", MAX_METADATA_BYTES),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.min_ping_interval_without_data_ms", 5000),
    ("grpc.http2.max_ping_strikes", 0),
    ("grpc.so_reuseport", 0),
    # A connection whose client sends nothing is closed after this time.
    ("grpc.server_handshake_timeout_ms", 10_000),
]

Run: TypeAlias = Callable[[Any], Any]
Handler: TypeAlias = Callable[[AsyncIterator[bytes], Context], Awaitable[None]]


class GrpcServer:
    """The gRPC server on one port, whose health service reports SERVING while the models take requests.

    The port is bound at once, so that an error is known before a model is loaded; calls are answered after `start`.
    Raises ConfigError if the port cannot be had.
    """

    def __init__(
        self,
        host: str,
        port: int,
        credentials: grpc.ServerCredentials | None = None,
        max_connections: int | None = None,
    ) -> None:
        """Bind the port.

        credentials: for TLS; None: no TLS. max_connections: at the same time, further ones are closed at once; None:
        any number.
        """
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
        """Start to answer calls.

        ended is called for every call that is over, with its method and status code. under_way: counts the open calls.
        """
        under_way = under_way or UnderWay()
        # Two readers with separate bounds, so that calls without a key do not take the places of calls with one.
        keyed, keyless = Arrivals(), Arrivals(SMALL_BYTES)
        for service, methods in (
            (INFERENCE, InferenceService(models)),
            (KSERVE, KServeService(models)),
            (HEALTH, self._health),
            (REFLECTION, ReflectionService(SERVICES)),
        ):
            # Each RPC is handled by the method of `methods` with its name in snake case.
            handlers = {
                each.name: _handler(
                    each, getattr(methods, _snake_case(each.name)), Edge(each, access, ended, keyed, keyless, under_way)
                )
                for each in service.methods
            }
            self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service.full_name, handlers),))
        await self._server.start()

    def set_serving(self, serving: bool) -> None:
        """Set the status that the health service reports from now on, also to the clients that watch it."""
        self._health.set_serving(serving)

    async def stop(self, grace_seconds: float) -> None:
        """Refuse new calls, wait at most this long for running ones, then cut them off."""
        await self._server.stop(grace_seconds)


def _handler(method: MethodDescriptor, run: Run, edge: Edge) -> grpc.RpcMethodHandler[Any, Any]:
    """Make the handler of a method, which gRPC sees as one with a stream of requests.

    A single message looks the same on the wire. So it can be read by this code, after the API key was checked.
    """
    kind: type[Message] = GetMessageClass(method.input_type)
    if method.client_streaming:
        return grpc.stream_stream_rpc_method_handler(_both_streaming(kind, run, edge))
    if method.server_streaming:
        # The headers are sent before the first event, which may take long to come.
        greets = method.name == "SubscribeKvEvents"
        return grpc.stream_stream_rpc_method_handler(_streaming(kind, run, edge, greets))
    return grpc.stream_unary_rpc_method_handler(_unary(kind, run, edge))  # sends answer and status together


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
        # This waits while the client does not read; the stream behind `messages` merges the deltas that come meanwhile.
        await context.write(as_bytes(message))
