"""A probe that measures how long a server's health checks take while the server is under load.

It runs in its own process and sends GET /health over a new connection each time and gRPC's health check over a kept
connection, in turn, fifty times per second.
"""

from __future__ import annotations

import http.client
import json
import subprocess
import sys
import threading
import time
from contextlib import AbstractContextManager
from pathlib import Path
from types import TracebackType
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

EVERY_SECONDS = 0.02
TIMEOUT = 30.0


class HealthProbe(AbstractContextManager["HealthProbe"]):
    """A context in which health checks are sent; `waits` holds their latencies afterwards.

    http, grpc: addresses of the server, HOST:PORT.
    """

    def __init__(self, http: str, grpc: str) -> None:
        command = [sys.executable, str(Path(__file__)), http, grpc]
        self._asking = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self._asking.stdin is not None and self._asking.stdout is not None
        self._stdin, self._stdout = self._asking.stdin, self._asking.stdout
        self._stdout.readline()
        self.waits: dict[str, Any] = {}

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stdin.close()
        said = self._stdout.readline()
        self._stdout.close()
        self._asking.wait()
        self.waits = json.loads(said) if said else {}


def ask_until_told(http_address: str, grpc_address: str) -> None:
    """Send health checks until standard input ends, then print quantiles of their latency in milliseconds as JSON.

    A failed check counts as an infinite latency.
    """
    waits: dict[str, list[float]] = {"http": [], "grpc": []}
    over = threading.Event()

    def wait_for_the_end() -> None:
        sys.stdin.read()
        over.set()

    threading.Thread(target=wait_for_the_end, daemon=True).start()
    with grpc.insecure_channel(grpc_address) as channel:
        health = health_pb2_grpc.HealthStub(channel)
        health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)
        print("ready", flush=True)
        while not over.is_set():
            for name, ask in (
                ("http", lambda: _ask_http(http_address)),
                ("grpc", lambda: health.Check(health_pb2.HealthCheckRequest(), timeout=TIMEOUT)),
            ):
                began = time.monotonic()
                try:
                    ask()
                    waits[name].append(1e3 * (time.monotonic() - began))
                except (OSError, http.client.HTTPException, grpc.RpcError):
                    waits[name].append(float("inf"))
            time.sleep(EVERY_SECONDS)
    print(json.dumps({"asked": len(waits["http"]), **{name: _figures(each) for name, each in waits.items()}}))


def _figures(waits: list[float]) -> dict[str, float]:
    """Return quantiles of the latencies in milliseconds."""
    if not waits:
        return {}
    quantiles = np.quantile(waits, (0.5, 0.99, 1.0), method="higher").tolist()
    return {name: round(each, 1) for name, each in zip(("p50", "p99", "max"), quantiles, strict=True)}


def _ask_http(address: str) -> None:
    connection = http.client.HTTPConnection(address, timeout=TIMEOUT)
    try:
        connection.request("GET", "/health")
        if connection.getresponse().status != 200:
            raise http.client.HTTPException("no health")
    finally:
        connection.close()


if __name__ == "__main__":
    ask_until_told(*sys.argv[1:])
