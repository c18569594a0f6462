"""`inferc serve`: the engine's process, the endpoints, and an orderly end."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from inferc.config import EngineConfig
from inferc.runtime.artifact import Artifact, load_artifact
from inferc.runtime.engine_process import EngineProcess
from inferc.runtime.load import model_defaults, model_limits
from inferc.runtime.text import Text
from inferc.serve.async_engine import AsyncEngine, ModelFacts
from inferc.serve.grpc_server import GrpcServer, ModelInfo

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
    artifact = await asyncio.to_thread(load_artifact, config.path)
    died = asyncio.Event()
    options = {"path": str(config.path), **dataclasses.asdict(config.engine)}
    process = EngineProcess(options, on_stop=lambda _: _set(loop, died))
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
        await server.start(engine, info)
        on_ready(server.address)
        watching = asyncio.create_task(engine.watch(died, lambda state: server.set_serving(state == "serving")))
        first = await stopping
        watching.cancel()
        await _drain(config, server, engine, first, signals)
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


async def _drain(
    config: ServeConfig, server: GrpcServer, engine: AsyncEngine, first: signal.Signals, signals: Signals
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
