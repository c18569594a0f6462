"""`inferc serve`: the engine's process, the endpoints, and an orderly end."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from inferc.config import EngineConfig
from inferc.runtime.artifact import Artifact, load_artifact
from inferc.runtime.engine_process import EngineProcess
from inferc.runtime.load import model_defaults, model_limits
from inferc.runtime.text import Text
from inferc.serve.async_engine import AsyncEngine, ModelFacts
from inferc.serve.grpc_server import GrpcServer, ModelInfo

log = logging.getLogger(__name__)

CUT_SECONDS = 1.0  # for streams that were ended to hand their last message over


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
    artifact = await asyncio.to_thread(load_artifact, config.path)
    options = {"path": str(config.path), **dataclasses.asdict(config.engine)}
    # The two longest parts of starting, at once.
    starting = asyncio.create_task(asyncio.to_thread(EngineProcess, options))
    text = await asyncio.to_thread(Text, artifact.tokenizer_folder)
    process = await starting
    limits = model_limits(artifact)
    facts = ModelFacts(limits.vocab_size, limits.max_model_len, limits.eos_token_ids, model_defaults(artifact))
    try:
        return await _run(config, artifact, AsyncEngine(process, text, facts), on_ready)
    finally:
        await asyncio.to_thread(process.close)


async def _run(config: ServeConfig, artifact: Artifact, engine: AsyncEngine, on_ready: Callable[[str], None]) -> int:
    model_type, dtype = str(artifact.model["model_type"]), str(artifact.config["dtype"])
    info = ModelInfo(config.path.resolve().name, model_type, dtype, config.engine.max_num_seqs)
    server = GrpcServer(engine, info, config.host, config.grpc_port)
    signals: asyncio.Queue[signal.Signals] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    await server.start()
    on_ready(server.address)
    watching = asyncio.create_task(_report_death(engine, server))
    first = await signals.get()
    log.info(
        "%s: no new requests; %d running ones have %g s to end", first.name, engine.num_requests, config.drain_seconds
    )
    await server.set_serving(False)
    draining = asyncio.create_task(engine.drain(config.drain_seconds))
    again = asyncio.create_task(signals.get())
    await asyncio.wait((draining, again), return_when=asyncio.FIRST_COMPLETED)
    again.cancel()
    watching.cancel()
    if not draining.done():
        log.warning("a second signal: running requests are cut off")
        draining.cancel()
    await server.stop(CUT_SECONDS if draining.done() else 0)
    return 130 if first is signal.SIGINT else 0


async def _report_death(engine: AsyncEngine, server: GrpcServer) -> None:
    """The server stays up without its engine, so that health can say so and whoever supervises it decides."""
    await engine.watch()
    await server.set_serving(False)
