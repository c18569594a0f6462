"""The limit of open files of the server, and the number of connections that follows from it (each is an open file)."""

from __future__ import annotations

import logging
import resource
from contextlib import suppress
from dataclasses import dataclass

log = logging.getLogger(__name__)

RESERVE = 512  # libraries, weights, pipes, listening sockets, and clients that are about to be refused
MOST_CONNECTIONS = 1 << 16  # used if the system does not limit open files


@dataclass(frozen=True)
class ConnectionLimits:
    """The number of connections that each endpoint takes at the same time; a gRPC connection has many streams."""

    http: int
    grpc: int


def allow_open_files(num_streams: int) -> ConnectionLimits:
    """Raise the soft limit of open files as far as needed and allowed, and return the number of connections that fit.

    Needed are num_streams connections that stream over HTTP, as many idle ones, and as many to gRPC. The hard limit
    is the bound. A warning is logged if not even the streams fit.
    """
    needed, wanted = num_streams + RESERVE, 3 * num_streams + RESERVE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # the system may have further limits
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        log.warning(
            "%d files may be open, and %d streams take %d: connections beyond that are not taken;"
            " raise the hard limit (ulimit -Hn, LimitNOFILE= of systemd)",
            allowed,
            num_streams,
            needed,
        )
    return _limits(MOST_CONNECTIONS if allowed == resource.RLIM_INFINITY else allowed)


def _limits(allowed: int) -> ConnectionLimits:
    """Split the open files into connections: all but RESERVE, or a third of all files if that is more.

    With few files, the reserve needs fewer, too. Two thirds of the connections are for HTTP, one third for gRPC.
    """
    connections = min(max(allowed - RESERVE, allowed // 3), MOST_CONNECTIONS)
    return ConnectionLimits(http=connections - connections // 3, grpc=connections // 3)
