"""The methods of grpc.health.v1.Health, for probes, and of server reflection, for tools that have no .proto files."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from typing import Any

from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection

from inferc.errors import shown
from inferc.serve.errors import NotServed

pb: Any = health_pb2  # whose stubs lack List
Response = pb.HealthCheckResponse


class HealthService:
    """The health service, which reports all of these services as SERVING while the server takes requests."""

    def __init__(self, services: Sequence[str]) -> None:
        self._services = services
        self._status = Response.NOT_SERVING
        self._changed = asyncio.Event()

    def set_serving(self, serving: bool) -> None:
        """Set the status that is reported from now on, and send it to the clients that watch it."""
        self._status = Response.SERVING if serving else Response.NOT_SERVING
        self._changed.set()
        self._changed = asyncio.Event()

    async def check(self, request: Any) -> Any:
        if request.service not in self._services:
            known = ", ".join(name for name in self._services if name)
            raise NotServed(f"service {shown(request.service, 150)} is not here; known: {known}")
        return Response(status=self._status)

    async def list(self, request: Any) -> Any:
        return pb.HealthListResponse(statuses={name: Response(status=self._status) for name in self._services})

    async def watch(self, request: Any) -> AsyncGenerator[Any, None]:
        is_known, last = request.service in self._services, None
        while True:
            changed, status = self._changed, self._status if is_known else Response.SERVICE_UNKNOWN
            if status != last:
                yield Response(status=status)
                last = status
            await changed.wait()


class ReflectionService:
    """The reflection service, which answers for these services by grpcio-reflection."""

    def __init__(self, services: Sequence[str]) -> None:
        # mypy does not see that `reflection` exports `aio`.
        self._servicer = reflection.aio.ReflectionServicer(services)  # type: ignore[attr-defined]

    def server_reflection_info(self, requests: AsyncIterator[Any]) -> AsyncGenerator[Any, None]:
        answers: AsyncGenerator[Any, None] = self._servicer.ServerReflectionInfo(requests, None)
        return answers
