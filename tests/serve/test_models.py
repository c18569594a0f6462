"""Models that are loaded and unloaded while a server runs, over scripted engine processes."""

import asyncio
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from scripted_models import run, settle
from scripted_process import Process

from inferc.runtime.scoring import Score
from inferc.serve import models as served_models
from inferc.serve import supervisor
from inferc.serve.async_engine import AsyncEngine
from inferc.serve.awake import Places
from inferc.serve.kv_events import KvEventLog
from inferc.serve.models import ModelOptions, Models, ModelSource, ServedModel
from inferc.serve.streams import ModelFacts
from inferc.serve.supervisor import Supervisor


class Scripted(ServedModel):
    """A model whose engine does what the test says, without an artifact."""

    def __init__(
        self,
        source: ModelSource,
        artifact: object,
        options: ModelOptions,
        kv_events: KvEventLog | None,
        on_state: Callable[[], None],
        tracing: object,
        places: Places,
    ) -> None:
        self.source, self.kv_events = source, kv_events
        self.processes: list[Process] = []
        self.engine = AsyncEngine(None, ModelFacts(128, 64))
        self.supervisor = Supervisor(self.engine, self._launch, on_state=lambda _: on_state(), places=places)

    def _launch(self, on_stop: Callable[[str], None]) -> Process:
        self.processes.append(Process(on_stop))
        return self.processes[-1]

    async def start(self) -> None:
        await self.supervisor.start()


@pytest.fixture(autouse=True)
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(supervisor, "PING_SECONDS", 0.005)
    monkeypatch.setattr(supervisor, "MAX_PAUSE_SECONDS", 0.001)
    monkeypatch.setattr(served_models, "load_artifact", lambda path: None)
    monkeypatch.setattr(served_models, "ServedModel", Scripted)


async def loaded(*names: str, **options: Any) -> Models:
    models = Models([ModelSource(name, Path(name)) for name in names], ModelOptions(**options))
    await models.load_all()
    return models


def scripted(models: Models, name: str) -> Scripted:
    model = models.get(name)
    assert isinstance(model, Scripted)
    return model


async def asked(model: ServedModel) -> asyncio.Task[Score]:
    """A request that runs until the test answers it."""
    task = asyncio.create_task(model.engine.score([1, 2]))
    await settle()
    return task


# -------------------------------------------------------------------------------------------------- unloading


def test_an_unload_that_nobody_waits_for_any_more_goes_on() -> None:
    async def work() -> None:
        models = await loaded("a", "b")
        model = scripted(models, "a")
        request = await asked(model)
        unloading = asyncio.create_task(models.unload("a"))
        await settle()
        unloading.cancel()
        with pytest.raises(asyncio.CancelledError):
            await unloading
        assert not request.done() and [entry.state for entry in models.entries()] == ["unloading", "serving"]
        again = asyncio.create_task(models.unload("a"))  # waits for the same
        await settle()
        model.processes[0].answer()
        await request
        await again
        assert [entry.state for entry in models.entries()] == ["serving", "unloaded"] and model.processes[0].closed
        await models.load("a")
        await models.close()

    run(work())


def test_the_end_of_the_server_does_not_wait_for_an_unload() -> None:
    async def work() -> None:
        models = await loaded("a")
        model = scripted(models, "a")
        request = await asked(model)
        unloading = asyncio.create_task(models.unload("a"))
        await settle()
        await models.close()
        assert model.processes[0].closed
        with pytest.raises(asyncio.CancelledError):
            await unloading
        request.cancel()

    run(work())


def test_a_server_serves_while_one_of_its_models_is_unloaded() -> None:
    async def work() -> None:
        models = await loaded("a", "b")
        first, second = scripted(models, "a"), scripted(models, "b")
        request = await asked(first)
        unloading = asyncio.create_task(models.unload("a"))
        await settle()
        assert models.is_serving and models.get() is second, "who names no model gets one that takes requests"
        also = asyncio.create_task(models.unload("b"))
        await settle()
        assert not models.is_serving
        first.processes[0].answer()
        await asyncio.gather(request, unloading, also)
        assert not models.is_serving
        await models.close()

    run(work())
