"""Models that are loaded and unloaded while a server runs, over scripted engine processes."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import pytest
from scripted_models import settle, until
from scripted_process import Process
from virtual_time import run

from inferc.config import EngineConfig
from inferc.errors import InfercError, RequestError
from inferc.runtime.adapters.store import LoadedAdapter
from inferc.runtime.engine.loop import AdapterDone
from inferc.runtime.engine.scoring import Score
from inferc.runtime.kv_cache.events import Cleared, KvBatch
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.serve.errors import EngineUnavailable
from inferc.serve.kv_events.log import KvEventLog
from inferc.serve.models import models as served_models
from inferc.serve.models.adapters import ServedAdapters
from inferc.serve.models.async_engine import AsyncEngine
from inferc.serve.models.models import Models
from inferc.serve.models.rendering import Rendering
from inferc.serve.models.residency import Residency
from inferc.serve.models.served_model import ModelInfo, ModelOptions, ModelSource, ServedModel
from inferc.serve.models.streams import ModelFacts
from inferc.serve.models.supervisor import Supervisor


class Scripted(ServedModel):
    """A model whose engine does what the test says, without an artifact. latest: the last one that was made."""

    latest: ClassVar[Scripted]
    may_start: ClassVar[bool] = True

    def __init__(
        self,
        source: ModelSource,
        artifact: object,
        options: ModelOptions,
        kv_events: KvEventLog | None,
        on_state: Callable[[], None],
        tracing: object,
        residency: Residency,
    ) -> None:
        Scripted.latest = self
        self.source, self.kv_events = source, kv_events
        self.processes: list[Process] = []
        self._rendering = Rendering()
        self.engine = AsyncEngine(None, ModelFacts(128, 64))
        self.info = ModelInfo(source.name, "", "", 1, 0)
        self.adapters = ServedAdapters(())
        self.supervisor = Supervisor(self.engine, self._launch, on_state=lambda _: on_state(), residency=residency)

    def _launch(self, on_stop: Callable[[str], None]) -> Process:
        self.processes.append(Process(on_stop))
        if not self.may_start:
            self.processes[-1].start_gate.close()
        return self.processes[-1]

    async def start(self) -> None:
        await self.supervisor.start()


@pytest.fixture(autouse=True)
def script(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(served_models, "load_artifact", lambda path, **options: None)
    monkeypatch.setattr(served_models, "ServedModel", Scripted)
    monkeypatch.setattr(Scripted, "may_start", True)


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


def test_nothing_is_kept_of_a_name_that_no_model_has() -> None:
    async def work() -> None:
        models = await loaded("a")
        for change in (models.load, models.unload):
            with pytest.raises(InfercError, match=r'^model "x+…'):
                await change("x" * 200)
        await models.unload("a")
        assert not models._locks  # names are of any length, and anybody's
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


def test_who_asks_a_model_that_is_unloaded_is_told_so() -> None:
    async def work() -> None:
        models = await loaded("a", "b", drain_seconds=0.05)
        model = scripted(models, "a")
        request = await asked(model)
        unloading = asyncio.create_task(models.unload("a"))
        await settle()
        with pytest.raises(
            EngineUnavailable, match="^the model is being unloaded and takes no new requests$"
        ) as raised:
            models.get("a").check_open(SamplingParams())
        assert raised.value.retry_after is not None
        with pytest.raises(EngineUnavailable, match="^the model is being unloaded and takes no new requests$"):
            await models.wake("a")
        with pytest.raises(EngineUnavailable, match="^the model was unloaded before the request was done$"):
            await request
        await unloading
        await models.close()

    run(work())


# ---------------------------------------------------------------------------------------------------- loading


def test_a_server_that_shuts_down_loads_nothing() -> None:
    async def work() -> None:
        models = await loaded("a", "b")
        await models.unload("b")
        assert await models.drain(1.0)
        with pytest.raises(EngineUnavailable, match="^the server is shutting down and loads no models$"):
            await models.load("b")
        with pytest.raises(EngineUnavailable, match="^the server is shutting down and takes no new requests$"):
            models.get("a").check_open(SamplingParams())
        await models.close()

    run(work())


def test_what_is_being_loaded_as_the_server_shuts_down_is_ended() -> None:
    async def work() -> None:
        models = await loaded("a", "b")
        before = scripted(models, "b")
        await models.unload("b")
        Scripted.may_start = False
        loading = asyncio.create_task(models.load("b"))
        await until(lambda: Scripted.latest is not before and bool(Scripted.latest.processes))
        late = Scripted.latest
        draining = asyncio.create_task(models.drain(1.0))
        await settle()
        Scripted.may_start = True
        late.processes[0].start_gate.open()
        with pytest.raises(EngineUnavailable, match="shutting down"):
            await loading
        assert await draining and late.processes[0].closed and [model.name for model in models.served] == ["a"]
        await models.close()

    run(work())


def test_one_that_was_given_up_is_loaded_anew() -> None:
    async def work() -> None:
        models = await loaded("a", "b")
        old = scripted(models, "a")
        old.engine.detach("dead", "it died too often")
        assert models.is_broken
        await models.load("a")
        assert scripted(models, "a") is not old and old.processes[0].closed
        assert models.is_serving and not models.is_broken
        await models.load("a")
        assert len(scripted(models, "a").processes) == 1, "it is there"
        await models.close()

    run(work())


def test_a_load_waits_for_an_unload() -> None:
    async def work() -> None:
        models = await loaded("a")
        old = scripted(models, "a")
        request = await asked(old)
        unloading = asyncio.create_task(models.unload("a"))
        await settle()
        loading = asyncio.create_task(models.load("a"))
        await settle()
        assert not loading.done()
        old.processes[0].answer()
        await asyncio.gather(request, unloading, loading)
        assert scripted(models, "a") is not old and models.is_serving
        await models.close()

    run(work())


# -------------------------------------------------------------------------------------------------- KV events


def test_a_published_log_goes_on_when_its_model_is_loaded_again() -> None:
    async def work() -> None:
        models = Models([ModelSource("a", Path("a"))], ModelOptions(engine=EngineConfig(kv_events=True)))
        published = models.event_log("a")
        await models.load_all()
        published.add(KvBatch(1.0, [Cleared()]))
        before = published.follow(0)
        assert (await anext(before)).sequence == 0
        await models.unload("a")
        assert (await anext(before)).batch.events == [Cleared()]
        with pytest.raises(EngineUnavailable, match="the model was unloaded"):
            await anext(before)
        published.add(KvBatch(2.0, [Cleared()]))
        assert published.end == 2, "nothing comes of a model that is not there"
        await models.load("a")
        assert models.get("a").kv_events is published
        published.add(KvBatch(3.0, [Cleared()]))
        assert [numbered.sequence for numbered in published.read(0)] == [0, 1, 2]
        await models.close()

    run(work())


def test_a_log_that_nobody_publishes_ends_with_its_model() -> None:
    async def work() -> None:
        models = await loaded("a", engine=EngineConfig(kv_events=True))
        first = models.get("a").kv_events
        await models.unload("a")
        await models.load("a")
        second = models.get("a").kv_events
        assert first is not None and second is not None and first.epoch != second.epoch
        await models.close()

    run(work())


# -------------------------------------------------------------------------------------------------- adapters

DONE = AdapterDone("1", LoadedAdapter("x", 1, "", "", 0))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("x", "y"):
        (tmp_path / name).mkdir()
        for file in ("adapter_config.json", "adapter_model.safetensors"):
            (tmp_path / name / file).write_bytes(b"{}")
    return tmp_path


async def _serving(folder: Path, *names: str) -> Models:
    models = await loaded(*names)
    models.adapter_folder = folder
    return models


async def _load(models: Models, name: str, model: str = "") -> None:
    """Load an adapter, with what the engine answers."""
    task = asyncio.create_task(models.load_adapter(name, name, model))
    await settle()
    ((what, sink),) = scripted(models, model).processes[-1].changes
    scripted(models, model).processes[-1].changes.clear()
    assert what == f"load {name}"
    sink(DONE)
    await task


def test_a_load_and_an_unload_go_on_when_their_caller_is_gone(folder: Path) -> None:
    async def work() -> None:
        models = await _serving(folder, "a")
        model = scripted(models, "a")
        for change, expected in ((models.load_adapter("x", "x"), ["x"]), (models.unload_adapter("x"), [])):
            task = asyncio.create_task(change)
            await settle()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            ((_, sink),) = model.processes[0].changes
            model.processes[0].changes.clear()
            sink(DONE)
            await settle()
            assert [each.name for each in model.adapters] == expected
        await models.close()

    run(work())


def test_one_name_is_one_model_or_one_adapter_also_while_it_is_loaded(folder: Path) -> None:
    async def work() -> None:
        models = await _serving(folder, "a", "b")
        loading = asyncio.create_task(models.load_adapter("x", "x", "a"))
        await settle()
        with pytest.raises(RequestError, match='there is "x" already'):
            await models.load_adapter("x", "y", "b")
        scripted(models, "a").processes[0].changes.pop()[1](DONE)
        await loading
        with pytest.raises(RequestError, match='there is "x" already'):
            await models.load_adapter("x", "y", "b")
        models._sources["x"] = ModelSource("x", Path("x"))  # as one in the folder of models is
        with pytest.raises(InfercError, match='an adapter is named "x"; unload it before'):
            await models.load("x")
        await models.close()

    run(work())


@pytest.mark.parametrize("how", ["gone", "written anew", "one file gone"])
def test_an_engine_starts_again_without_adapters_whose_files_are_others(
    folder: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    async def work() -> None:
        models = await _serving(folder, "a")
        model = scripted(models, "a")
        for name in ("x", "y"):
            await _load(models, name, "a")
        assert model.adapters.options() == [f"{name}={folder / name}" for name in ("x", "y")]
        if how == "gone":
            shutil.rmtree(folder / "x")
        elif how == "written anew":
            (folder / "x" / "adapter_model.safetensors").write_bytes(b"damaged")
        else:
            (folder / "x" / "adapter_model.safetensors").unlink()
        assert model.adapters.options() == [f"y={folder / 'y'}"]
        assert [each.name for each in model.adapters] == ["y"]
        assert "adapter x is served no more: its files in" in caplog.text
        await models.close()

    run(work())
