"""The server behind `inferc serve`: it loads the models, runs the HTTP and gRPC endpoints, and shuts down in order."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import logging
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from inferc.errors import ConfigError
from inferc.serve.grpc.server import GrpcServer
from inferc.serve.http import address as http_address
from inferc.serve.kv_events.log import KvPublisherConfig
from inferc.serve.memory import spare_the_collector, tidy
from inferc.serve.models.models import Models
from inferc.serve.models.served_model import ModelOptions, ModelSource
from inferc.serve.models.tasks import gather
from inferc.serve.observe.history import MetricsHistory
from inferc.serve.observe.metrics_page import MetricsPage
from inferc.serve.open_files import ConnectionLimits, allow_open_files
from inferc.serve.security.access import Access, Limits
from inferc.serve.signals import Signals, handlers_kept
from inferc.serve.under_way import UnderWay

if TYPE_CHECKING:
    from inferc.serve.http.server import HttpServer
    from inferc.serve.kv_events.publisher import KvPublisher
    from inferc.serve.observe.tracing import Tracing
    from inferc.serve.security.tls import Certificates

log = logging.getLogger(__name__)

LAG_SECONDS, LAG_EVERY_SECONDS = 1.0, 0.05
# The interpreter's switch interval: how long the event loop waits for a thread that computes before it gets its turn,
# which happens about ten times per request.
SWITCH_SECONDS = 0.001
CUT_SECONDS = 1.0  # time for streams that were ended to send their last message


@dataclass(frozen=True)
class ServeConfig:
    """The configuration of a server: what it serves, where, and to whom."""

    models: tuple[ModelSource, ...]
    host: str = "127.0.0.1"
    grpc_port: int = 50051  # 0 takes a free one
    http_port: int | None = 8000  # None: no HTTP
    options: ModelOptions = dataclasses.field(default_factory=ModelOptions)
    model_folder: Path | None = None  # folder of artifacts that clients can load later, by name
    adapter_folder: Path | None = None  # folder of LoRA adapters that clients can load later
    kv_publisher: KvPublisherConfig | None = None  # publishes the KV events that the engine collects
    metrics_compat: Literal["none", "vllm"] = "none"  # other software whose metric names are served too
    api_keys: Path | None = None  # the file of API keys; None: no key is needed
    limits: Limits = dataclasses.field(default_factory=Limits)  # limits of every request
    max_body_bytes: int = 64 << 20  # bytes of an HTTP request's body
    tls_cert: Path | None = None  # PEM file
    tls_key: Path | None = None
    tls_client_ca: Path | None = None  # accept only clients with a certificate of these authorities
    otlp_endpoint: str | None = None  # an OpenTelemetry collector, http://HOST:4318
    trace_ratio: float = 1.0  # share of requests traced, of those whose client did not decide it
    insecure: bool = False  # listen beyond the loopback interface although no key is needed
    cors_origins: tuple[str, ...] = ()  # the sites whose pages may send requests from a browser; "*": all

    def __post_init__(self) -> None:
        engine = self.options.engine
        if self.kv_publisher is not None and not engine.kv_events:
            raise ConfigError("kv_publisher has nothing to publish: set kv_events in the engine's config")
        self._check_access()
        for origin in self.cors_origins:
            if origin != "*" and not re.fullmatch(r"[a-z][a-z0-9+.-]*://[^/\s]+", origin):
                raise ConfigError(f"--cors-origin {origin}: expected SCHEME://HOST or SCHEME://HOST:PORT, or *")
        if not self.models and self.model_folder is None:
            raise ConfigError("nothing to serve: give an artifact, or --model-folder DIR to load from")
        if self.model_folder is not None and not self.model_folder.is_dir():
            raise ConfigError(f"--model-folder {self.model_folder} is not a folder; give one that has artifacts in it")
        if self.adapter_folder is not None and not self.adapter_folder.is_dir():
            raise ConfigError(f"--adapter-folder {self.adapter_folder} is not a folder; give one with adapters in it")
        if len(self.models) != 1 or self.model_folder is not None:
            for name, value in (
                ("--record", engine.record),
                ("--tap", engine.tap),
                ("--adapter", engine.adapters),
                ("--kv-events ENDPOINT", self.kv_publisher),
            ):
                if value:
                    raise ConfigError(f"{name} is for a server of one model; serve it alone")

    @property
    def is_open(self) -> bool:
        """True if anybody may send requests, which is allowed because only this machine reaches the server."""
        return self.api_keys is None and self.tls_client_ca is None and not self.insecure

    def _check_access(self) -> None:
        if (self.tls_cert is None) != (self.tls_key is None):
            raise ConfigError("--tls-cert and --tls-key go together; give both")
        if self.tls_client_ca is not None and self.tls_cert is None:
            raise ConfigError("--tls-client-ca needs --tls-cert and --tls-key: clients are asked for theirs within TLS")
        if self.insecure:
            return
        if self.is_open and not http_address.is_loopback(self.host):
            raise ConfigError(
                f"--host {self.host} can be reached from elsewhere, and anybody could ask: give --api-keys FILE or"
                " --tls-client-ca FILE, or --insecure if something in front of it checks who asks"
            )
        if self.kv_publisher is not None:
            for endpoint in (self.kv_publisher.endpoint, self.kv_publisher.replay or "ipc://none"):
                host = endpoint.removeprefix("tcp://").rpartition(":")[0]
                if endpoint.startswith("tcp://") and not http_address.is_loopback(host):
                    raise ConfigError(
                        f"{endpoint} can be reached from elsewhere, and ZeroMQ subscribers see everybody's prompts"
                        " without a key: use the loopback interface, or --insecure in a network where all may see them"
                    )


@dataclass(frozen=True)
class Addresses:
    """The addresses on which a server listens, as HOST:PORT."""

    grpc: str
    http: str | None


def serve(config: ServeConfig, on_ready: Callable[[Addresses], None]) -> int:
    """Serve until SIGTERM or ^C, and return an exit code; `on_ready` is called once requests are taken.

    The handlers of both signals are restored on return. Raises ArtifactError or ConfigError if the server cannot start.
    """
    with handlers_kept():
        return asyncio.run(_serve(config, on_ready))


async def _serve(config: ServeConfig, on_ready: Callable[[Addresses], None]) -> int:
    limits = allow_open_files(config.options.max_sequences * max(1, len(config.models)))
    signals = Signals()
    try:
        server = _Server(config, limits)
        try:
            return await server.run(signals, on_ready)
        finally:
            await server.close()
    finally:
        signals.close()


class _Server:
    """The parts of a running server; its ports are bound at once, before any model is loaded."""

    def __init__(self, config: ServeConfig, limits: ConnectionLimits) -> None:
        self.config, self._limits = config, limits
        self._tracing = self._open_tracing()
        self.models = Models(
            config.models,
            config.options,
            config.model_folder,
            self._on_change,
            tracing=self._tracing,
            adapter_folder=config.adapter_folder,
        )
        self.access = Access(config.api_keys, config.limits)
        self.metrics = MetricsPage(self.models, config.metrics_compat)
        self._history = MetricsHistory(self.metrics)
        self._certificates = self._open_certificates()
        self._publisher = self._open_publisher()
        credentials = None if self._certificates is None else self._certificates.grpc_credentials()
        self.grpc = GrpcServer(config.host, config.grpc_port, credentials, limits.grpc)
        self._listener = None if config.http_port is None else http_address.bind(config.host, config.http_port)
        self._http: HttpServer | None = None
        self._http_task: asyncio.Task[None] | None = None
        self._under_way = UnderWay()
        self._changed = asyncio.Event()
        self._is_draining = False

    def _called(self, method: str, code: str) -> None:
        self.metrics.calls[method, code] += 1

    async def _measure_lag(self) -> None:
        """Measure, for ever, how late the event loop is, which delays every request."""
        while True:
            worst, end = 0.0, time.monotonic() + LAG_SECONDS
            while (now := time.monotonic()) < end:
                await asyncio.sleep(LAG_EVERY_SECONDS)
                worst = max(worst, time.monotonic() - now - LAG_EVERY_SECONDS)
            self.metrics.lag_seconds = worst

    def _is_idle(self) -> bool:
        return not any(model.engine.num_requests for model in self.models.served)

    def _on_change(self) -> None:
        self._changed.set()

    def _open_tracing(self) -> Tracing | None:
        if self.config.otlp_endpoint is None:
            return None
        from inferc.serve.observe.tracing import Tracing

        return Tracing(self.config.otlp_endpoint, self.config.trace_ratio)

    def _open_certificates(self) -> Certificates | None:
        if self.config.tls_cert is None or self.config.tls_key is None:
            return None
        from inferc.serve.security.tls import Certificates, TlsFiles

        return Certificates(TlsFiles(self.config.tls_cert, self.config.tls_key, self.config.tls_client_ca))

    def _open_publisher(self) -> KvPublisher | None:
        if self.config.kv_publisher is None:
            return None
        from inferc.serve.kv_events.publisher import KvPublisher

        return KvPublisher(self.config.kv_publisher, self.models.event_log(self.config.models[0].name))

    async def run(self, signals: Signals, on_ready: Callable[[Addresses], None]) -> int:
        stopping = asyncio.create_task(signals.get())
        loading = asyncio.create_task(self._load())
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            log.info("%s while loading", stopping.result().name)
            loading.cancel()
            with suppress(asyncio.CancelledError):
                await loading
            return _exit_code(stopping.result())
        if (failed := loading.exception()) is not None:
            stopping.cancel()
            raise failed
        await self.grpc.start(self.models, self.access, self._called, self._under_way)
        if self._listener is not None:
            self._start_http(self._listener)
        works = [self._report_health(), self._measure_lag(), self._history.run(), tidy(self._is_idle)]
        if self._certificates is not None:
            works.append(self._certificates.follow())
        tasks = [asyncio.create_task(work) for work in works]
        sys.setswitchinterval(SWITCH_SECONDS)
        spare_the_collector()
        on_ready(self.addresses)
        first = await stopping
        was_broken = self.models.is_broken
        await self._drain(first, signals)
        for task in tasks:
            task.cancel()
        # The exit code tells a process supervisor that an engine was given up, so that this is no orderly end.
        return 1 if was_broken else _exit_code(first)

    def _start_http(self, listener: socket.socket) -> None:
        from inferc.serve.http.server import HttpServer, make_app

        context = None if self._certificates is None else self._certificates.ssl_context
        config = self.config
        app = make_app(
            self.models,
            self.metrics,
            self.access,
            config.max_body_bytes,
            checks_host=config.is_open and context is None,
            under_way=self._under_way,
            cors_origins=config.cors_origins,
            history=self._history,
        )
        self._http = HttpServer(app, listener, context, self._limits.http, config.max_body_bytes)
        self._http_task = asyncio.create_task(self._http.run_until_stopped())

    @property
    def addresses(self) -> Addresses:
        return Addresses(self.grpc.address, None if self._listener is None else http_address.name_of(self._listener))

    async def close(self) -> None:
        await self.grpc.stop(0)
        if self._http is not None and self._http_task is not None:
            self._http.stop(at_once=True)
            await self._http_task
        if self._listener is not None:
            self._listener.close()
        await self.models.close()
        if self._publisher is not None:
            await asyncio.to_thread(self._publisher.close)
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)

    async def _load(self) -> None:
        if self._publisher is not None:
            self._publisher.start()
        if self._listener is not None:  # import the HTTP modules (a third of a second) while the engine starts
            importing = asyncio.to_thread(importlib.import_module, "inferc.serve.http.server")
            await gather((self.models.load_all(), importing))
        else:
            await self.models.load_all()

    async def _report_health(self) -> None:
        """Update the health service, for ever, as soon as the state of a model changes."""
        while True:
            self._changed.clear()
            self.grpc.set_serving(self.models.is_serving and not self._is_draining)
            await self._changed.wait()

    async def _end_requests(self, limit_seconds: float) -> None:
        """Wait at most this long for the requests that are being answered.

        First the engines finish their requests, then the rest of the answers is written.
        """
        end = time.monotonic() + limit_seconds
        try:
            await self.models.drain(limit_seconds)
        finally:  # subscriptions to KV events would otherwise never end
            for model in self.models.served:
                if model.kv_events is not None:
                    model.kv_events.close("the server is shutting down")
        await self._under_way.over(end - time.monotonic())

    async def _drain(self, first: signal.Signals, signals: Signals) -> None:
        limit = self.config.options.drain_seconds
        count = sum(model.engine.num_requests for model in self.models.served)
        log.info("%s: no new requests; %d running ones have %g s to end", first.name, count, limit)
        self._is_draining = True
        self.grpc.set_serving(False)
        draining = asyncio.create_task(self._end_requests(limit))
        again = asyncio.create_task(signals.get())
        await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        if not draining.done():
            log.warning("a second signal: running requests are cut off")
            draining.cancel()
        ending = [asyncio.ensure_future(self.grpc.stop(CUT_SECONDS if draining.done() else 0))]
        if self._http is not None and self._http_task is not None:
            self._http.stop(at_once=not draining.done())
            ending.append(self._http_task)
        await asyncio.wait(ending, timeout=2 * CUT_SECONDS)


def _exit_code(number: signal.Signals) -> int:
    return 130 if number is signal.SIGINT else 0
