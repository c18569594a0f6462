"""A server under limits of open files."""

import resource
import socket
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import psutil
import pytest
from http_calls import request
from serving import Server

from inferc.client import Client

WARNING = "files may be open, and 1024 streams take 1536: connections beyond that are not taken; raise the hard limit"


def under(limit: str) -> tuple[str, ...]:
    """Return the words in front of a command that start it with this limit."""
    return ("sh", "-c", f'ulimit {limit} && exec "$@"', "sh")


def limits(server: Server) -> tuple[int, int]:
    soft, hard = psutil.Process(server.process.pid).rlimit(resource.RLIMIT_NOFILE)
    return soft, hard


def test_the_soft_limit_is_raised_to_what_streams_take(tiny_artifact: Path) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    with Server(tiny_artifact, under=under("-Sn 128")) as server, ExitStack() as stack:
        want = 3584 if hard == resource.RLIM_INFINITY else min(3584, hard)
        assert limits(server) == (want, hard)
        place = urlsplit(server.url)
        assert place.hostname is not None and place.port is not None
        for _ in range(200):
            stack.enter_context(socket.create_connection((place.hostname, place.port), timeout=10))
        assert request(server.url, "/health").status == 200
        with Client(server.address) as client:
            assert client.complete("abc", max_tokens=2)
        assert (WARNING in server.log) == (want < 1536)


@pytest.mark.slow
def test_a_hard_limit_that_is_too_low_is_told(tiny_artifact: Path) -> None:
    with Server(tiny_artifact, under=under("-n 300")) as server:
        assert limits(server) == (300, 300)
        assert f"300 {WARNING}" in server.log
        assert request(server.url, "/health").status == 200


@pytest.mark.slow
def test_what_is_high_enough_stays(tiny_artifact: Path) -> None:
    with Server(tiny_artifact, under=under("-n 4000")) as server:
        assert limits(server) == (4000, 4000) and WARNING not in server.log


@pytest.mark.slow
def test_idle_connections_without_end_stop_nobody(tiny_artifact: Path) -> None:
    """Far more than there are files: the oldest give way, health answers, and the log stays short."""
    with Server(tiny_artifact, under=under("-n 300")) as server, ExitStack() as stack:
        place = urlsplit(server.url)
        assert place.hostname is not None and place.port is not None
        host, _, port = server.address.rpartition(":")
        for _ in range(400):
            stack.enter_context(socket.create_connection((place.hostname, place.port), timeout=10))
            stack.enter_context(socket.create_connection((host, int(port)), timeout=10))
        assert request(server.url, "/health").status == 200
        reply = request(server.url, "/v1/completions", {"prompt": "abc", "max_tokens": 2})
        assert reply.status == 200
        assert psutil.Process(server.process.pid).num_fds() < 290
        assert "Traceback" not in server.log and server.log.count("HTTP connections are open") == 1
        assert len(server.log) < 10_000
