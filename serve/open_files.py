"""How many files the server may have open: a client that streams has a connection, and each connection is one."""

from __future__ import annotations

import logging
import resource
from contextlib import suppress

log = logging.getLogger(__name__)

RESERVE = 512  # libraries, weights, pipes, sockets that listen, and clients that come to be refused


def allow_open_files(num_streams: int) -> None:
    """Raise the soft limit to what so many streams and as many idle connections take, up to the hard limit; where not even the
    streams fit, say so."""
    needed, wanted = num_streams + RESERVE, 2 * num_streams + RESERVE
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
