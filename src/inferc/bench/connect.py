"""From the address of a server to an endpoint that takes load."""

from __future__ import annotations

from inferc.bench.endpoints import Endpoint, Target
from inferc.bench.grpc_endpoint import GrpcEndpoint
from inferc.bench.workload import Prompt


async def connect(target: Target, probe: Prompt | None = None) -> Endpoint:
    """Ask the server what it has, and find out by requests of two tokens what it takes. probe: a prompt of the load, where it
    has no token ids. Raises RequestError or InfercError if it answers none."""
    if target.kind == "grpc":
        return await GrpcEndpoint.connect(target)
    from inferc.bench.http_endpoint import HttpEndpoint  # needs the extra `bench`

    return await HttpEndpoint.connect(target, probe)
