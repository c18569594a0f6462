"""`inferc serve`: the engine's process, the endpoints, and an orderly end."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from inferc.config import EngineConfig
from inferc.errors import ConfigError
from inferc.runtime.artifact import Artifact, load_artifact
from inferc.runtime.engine_process import EngineProcess
from inferc.runtime.load import model_defaults, model_limits
from inferc.runtime.text import Text
from inferc.serve.async_engine import AsyncEngine, ModelFacts
from inferc.serve.grpc_server import GrpcServer, ModelInfo
from inferc.serve.kv_events import KvEventLog, KvPublisherConfig

log = logging.getLogger(__name__)

CUT_SECONDS = 1.0  # for streams that were ended to hand their last message over

Signals: TypeAlias = asyncio.Queue[signal.Signals]


@dataclass(frozen=True)
class ServeConfig:
    """What to serve and where."""

    path: Path  # of the artifact
    host: str = "127.0.0.1"
    grpc_port: int = 50051  # 0 takes a free one
    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    drain_seconds: float = 30.0  # for running requests to end after SIGTERM
    kv_publisher: KvPublisherConfig | None = None  # of what the engine collects under `kv_events`

    def __post_init__(self) -> None:
        if self.kv_publisher is not None and not self.engine.kv_events:
            raise ConfigError("kv_publisher has nothing to publish: set kv_events in the engine's config")


def serve(config: ServeConfig, on_ready: Callable[[str], None]) -> int:
    """Serve until SIGTERM or ^C; `on_ready` gets the gRPC address once requests are taken. Returns an exit code.

    Raises ArtifactError or ConfigError if it cannot start.
    """
    return asyncio.run(_serve(config, on_ready))


async def _serve(config: ServeConfig, on_ready: Callable[[str], None]) -> int:
    loop = asyncio.get_running_loop()
    signals: Signals = asyncio.Queue()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    server = GrpcServer(config.host, config.grpc_port)
    events = KvEventLog() if config.engine.kv_events else None
    with _publishing(config, events):
        return await _run(config, on_ready, signals, server, events)


async def _run(
    config: ServeConfig,
    on_ready: Callable[[str], None],
    signals: Signals,
    server: GrpcServer,
    events: KvEventLog | None,
) -> int:
    loop = asyncio.get_running_loop()
    artifact = await asyncio.to_thread(load_artifact, config.path)
    died = asyncio.Event()
    options = {"path": str(config.path), **dataclasses.asdict(config.engine)}

    def on_stop(reason: str) -> None:
        _set(loop, died)
        if events is not None:
            events.close(reason)

    process = EngineProcess(options, on_stop=on_stop, on_kv_events=None if events is None else events.add)
    try:
        loading = asyncio.create_task(_load(artifact, process))
        stopping = asyncio.create_task(signals.get())
        await asyncio.wait((loading, stopping), return_when=asyncio.FIRST_COMPLETED)
        if not loading.done():
            log.info("%s while loading", stopping.result().name)
            process.close()  # which ends the wait for it
            await asyncio.wait((loading,))
            loading.exception()
            return _exit_code(stopping.result())
        engine, info = loading.result(), _model_info(config, artifact)
        await server.start(engine, info, events)
        on_ready(server.address)
        watching = asyncio.create_task(engine.watch(died, lambda state: server.set_serving(state == "serving")))
        first = await stopping
        watching.cancel()
        await _drain(config, server, engine, events, first, signals)
        # Whoever supervises us must not take a dead engine for an orderly end.
        return 1 if engine.state == "dead" else _exit_code(first)
    finally:
        await server.stop(0)
        await asyncio.to_thread(process.close)


async def _load(artifact: Artifact, process: EngineProcess) -> AsyncEngine:
    """The two longest parts of starting, at once: the tokenizer here, the weights in the engine's process."""
    ready = asyncio.to_thread(process.wait_until_ready)
    text, _ = await asyncio.gather(asyncio.to_thread(Text, artifact.tokenizer_folder), ready)
    limits = model_limits(artifact)
    facts = ModelFacts(limits.vocab_size, limits.max_model_len, limits.eos_token_ids, model_defaults(artifact))
    return AsyncEngine(process, text, facts)


@contextmanager
def _publishing(config: ServeConfig, events: KvEventLog | None) -> Iterator[None]:
    """KV events go out over ZeroMQ inside, if the config says so."""
    if config.kv_publisher is None or events is None:
        yield
        return
    from inferc.serve.kv_publisher import KvPublisher

    publisher = KvPublisher(config.kv_publisher, events)
    publisher.start()
    try:
        yield
    finally:
        publisher.close()


async def _drain(
    config: ServeConfig,
    server: GrpcServer,
    engine: AsyncEngine,
    events: KvEventLog | None,
    first: signal.Signals,
    signals: Signals,
) -> None:
    log.info(
        "%s: no new requests; %d running ones have %g s to end", first.name, engine.num_requests, config.drain_seconds
    )
    await server.set_serving(False)
    draining = asyncio.create_task(engine.drain(config.drain_seconds))
    again = asyncio.create_task(signals.get())
    await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    if not draining.done():
        log.warning("a second signal: running requests are cut off")
        draining.cancel()
    if events is not None:
        events.close("the server is shutting down")  # ends subscriptions, which would go on for ever
    await server.stop(CUT_SECONDS if draining.done() else 0)


def _model_info(config: ServeConfig, artifact: Artifact) -> ModelInfo:
    model_type, dtype = str(artifact.model["model_type"]), str(artifact.config["dtype"])
    return ModelInfo(config.path.resolve().name, model_type, dtype, config.engine.max_num_seqs)


def _set(loop: asyncio.AbstractEventLoop, event: asyncio.Event) -> None:
    """From another thread."""
    with suppress(RuntimeError):  # the loop is closed: nobody waits any more
        loop.call_soon_threadsafe(event.set)


def _exit_code(number: signal.Signals) -> int:
    return 130 if number is signal.SIGINT else 0
