"""The function that turns the address of a server into an endpoint that load can be sent to."""

from __future__ import annotations

from inferc.bench.endpoints import Endpoint, Target
from inferc.bench.grpc_endpoint import GrpcEndpoint
from inferc.bench.workload import Prompt


async def connect(target: Target, probe: Prompt | None = None) -> Endpoint:
    """Ask the server about its model, and find out by requests of two tokens which request fields it accepts.

    probe: a prompt of the load, if the load consists of texts rather than token ids.
    Raises RequestError or InfercError if the server answers none of these requests.
    """
    if target.kind == "grpc":
        return await GrpcEndpoint.connect(target)
    from inferc.bench.http_endpoint import HttpEndpoint  # needs the extra `bench`

    return await HttpEndpoint.connect(target, probe)
