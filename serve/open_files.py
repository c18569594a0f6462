"""How many files the server may have open: a client that streams has a connection, and each connection is one."""

from __future__ import annotations

import logging
import resource
from contextlib import suppress
from dataclasses import dataclass

log = logging.getLogger(__name__)

RESERVE = 512  # libraries, weights, pipes, sockets that listen, and clients that come to be refused
MOST_CONNECTIONS = 1 << 16  # where files are not limited


@dataclass(frozen=True)
class Places:
    """How many connections each endpoint takes at the same time. gRPC has many streams on one."""

    http: int
    grpc: int


def allow_open_files(num_streams: int) -> Places:
    """Raise the soft limit to what so many streams over HTTP, as many idle connections and as many to gRPC take, up to the hard
    limit; where not even the streams fit, say so. Returns the places that there are then."""
    needed, wanted = num_streams + RESERVE, 3 * num_streams + RESERVE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        with suppress(OSError, ValueError):  # a system may have limits beside these
            resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    allowed = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if allowed != resource.RLIM_INFINITY and allowed < needed:
        log.warning(
            "%d files may be open, and %d streams take %d: connections beyond that are not taken; raise the hard limit (ulimit -Hn,"
            " LimitNOFILE= of systemd)",
            allowed,
            num_streams,
            needed,
        )
    return _places(MOST_CONNECTIONS if allowed == resource.RLIM_INFINITY else allowed)


def _places(allowed: int) -> Places:
    """Of so many open files, all but the reserve; a third where that is more, as few files allow few of anything."""
    connections = min(max(allowed - RESERVE, allowed // 3), MOST_CONNECTIONS)
    return Places(http=connections - connections // 3, grpc=connections // 3)
