"""The models of a server by name, which can be loaded and unloaded while it runs."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal
from weakref import WeakValueDictionary

from inferc.errors import ConfigError, InfercError, RequestError, shown
from inferc.runtime.adapters.store import parse_adapters
from inferc.runtime.artifact.load import load_artifact
from inferc.serve.errors import EngineUnavailable, ModelsFixed, NotServed
from inferc.serve.kv_events.log import KvEventLog
from inferc.serve.models.adapted_model import AdaptedModel
from inferc.serve.models.adapters import find_adapter
from inferc.serve.models.async_engine import CLOSED, SHUTDOWN, UNLOAD
from inferc.serve.models.residency import Residency
from inferc.serve.models.served_model import NAME, ModelOptions, ModelSource, ServedModel
from inferc.serve.models.streams import RequestTracer
from inferc.serve.models.tasks import all_ended

log = logging.getLogger(__name__)

ModelState = Literal["unloaded", "loading", "starting", "serving", "asleep", "draining", "damaged", "dead", "unloading"]


@dataclass(frozen=True)
class ModelEntry:
    """An entry of the list of models; `reason` says why the model is not served, if that is due to an error."""

    name: str
    state: ModelState
    reason: str = ""
    adapters: tuple[str, ...] = ()  # of a loaded model


class Models:
    """The models by name; those given at the start, and those in `folder`, can be loaded.

    adapter_folder: where adapters are that clients may load.

    on_change is called whenever a model is loaded, is unloaded, or changes its state.
    """

    def __init__(
        self,
        sources: Sequence[ModelSource],
        options: ModelOptions,
        folder: Path | None = None,
        on_change: Callable[[], None] = lambda: None,
        tracing: RequestTracer | None = None,
        adapter_folder: Path | None = None,
    ) -> None:
        names = [source.name for source in sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"two models are named {twice[0]}; name one of them otherwise with NAME=OUT")
        if both := sorted(set(names) & parse_adapters(options.engine.adapters).keys()):
            raise ConfigError(f"a model and an adapter are named {both[0]}; give the adapter another name")
        self.options = options
        self.folder, self.adapter_folder = folder, adapter_folder
        self.on_change = on_change
        self._tracing = tracing
        self._sources = {source.name: source for source in sources}
        self._served: dict[str, ServedModel] = {}
        self._busy: dict[str, ModelState] = {}  # models that are being loaded or unloaded
        self._reasons: dict[str, str] = {}  # by name: why the last attempt to load it failed
        self._unloading: dict[str, asyncio.Task[None]] = {}
        self._adding: set[str] = set()  # names of adapters that are being loaded
        self._locks = WeakValueDictionary[str, asyncio.Lock]()  # one for each name that is being loaded or unloaded
        self._logs: dict[str, KvEventLog] = {}  # logs that outlive their models, since a publisher reads them
        self._residency = Residency(options.max_awake, options.drain_seconds)
        self._is_leaving = False  # the server is shutting down

    # -------------------------------------------------------------------------------------------- look-ups

    def get(self, name: str = "") -> ServedModel:
        """Return the model for requests that name `name`; "" stands for the first one that is not being unloaded.

        Raises NotServed or EngineUnavailable.
        """
        if not name and self._served:
            return next(iter((*self._staying, *self._served.values())))
        if (model := self._served.get(name)) is not None:
            return model
        if (adapted := self._adapted(name)) is not None:
            return adapted
        if self._busy.get(name) == "loading":
            raise EngineUnavailable(f"model {shown(name, 150)} is being loaded", retry_after=1.0)
        if not name:
            raise EngineUnavailable("no model is loaded", retry_after=1.0)
        raise NotServed(f"model {shown(name, 150)} is not served here; this server has {self._listed()}{self._other()}")

    def _adapted(self, name: str) -> ServedModel | None:
        """Return the model as the adapter of this name answers; None without such an adapter."""
        for model in self._served.values():
            if name in model.adapters:
                return AdaptedModel(model, model.adapters[name])
        return None

    @property
    def adapted(self) -> list[AdaptedModel]:
        """The adapters of the served models, which requests name as models."""
        return [AdaptedModel(model, each) for model in self._served.values() for each in model.adapters]

    @property
    def served(self) -> list[ServedModel]:
        return list(self._served.values())

    @property
    def _staying(self) -> list[ServedModel]:
        """The loaded models that are not being unloaded."""
        return [model for name, model in self._served.items() if name not in self._unloading]

    @property
    def is_serving(self) -> bool:
        """True if there is a model, and every model that is not being unloaded takes requests."""
        models = self._staying
        return bool(models) and all(model.is_ready for model in models)

    @property
    def is_broken(self) -> bool:
        return any(model.state == "dead" for model in self._served.values())

    def entries(self) -> list[ModelEntry]:
        """Return an entry for each model that is loaded or can be loaded."""
        names = {**dict.fromkeys(self._served), **dict.fromkeys(self._sources), **dict.fromkeys(self._in_folder())}
        return [self._entry(name) for name in names]

    def _entry(self, name: str) -> ModelEntry:
        if name in self._busy:
            return ModelEntry(name, self._busy[name])
        if (model := self._served.get(name)) is not None:
            adapters = tuple(each.name for each in model.adapters)
            return ModelEntry(name, model.state, model.engine.reason, adapters)
        return ModelEntry(name, "unloaded", self._reasons.get(name, ""))

    def event_log(self, name: str) -> KvEventLog:
        """Return the log that takes the KV events of this model whenever it is loaded."""
        return self._logs.setdefault(name, KvEventLog())

    def _open_log(self, name: str) -> KvEventLog:
        """Return the log for a model that is being loaded: the one from `event_log` if there is one, or a new one."""
        events = self._logs.get(name) or KvEventLog()
        events.reopen()
        return events

    def _options_of(self, name: str) -> ModelOptions:
        """Return the options of a model; of several models, each gets its own folder for KV on disk (never shared)."""
        engine = self.options.engine
        if engine.kv_disk is None or (len(self._sources) == 1 and self.folder is None):
            return self.options
        return dataclasses.replace(
            self.options, engine=dataclasses.replace(engine, kv_disk=str(Path(engine.kv_disk) / name))
        )

    def _in_folder(self) -> list[str]:
        if self.folder is None:
            return []
        try:
            return sorted(
                path.name
                for path in self.folder.iterdir()
                if NAME.fullmatch(path.name) and (path / "engine.json").is_file()
            )
        except OSError as error:
            log.warning("the folder of models cannot be read: %s", error)
            return []

    def _listed(self) -> str:
        return ", ".join(map(shown, self._served)) or "none"

    def _other(self) -> str:
        """Return the adapters for the message that lists what is served."""
        names = [shown(each.name) for each in self.adapted]
        return f", and the adapters {', '.join(names)}" if names else ""

    # ------------------------------------------------------------------------------------- loading, unloading

    async def load_all(self) -> None:
        """Load the models given at the start, one after another, so that each measures the memory that is left."""
        for name in self._sources:
            await self.load(name)

    async def load(self, name: str) -> None:
        """Load a model that was given at the start or lies in the folder, unless it is loaded.

        A loaded model that was given up, or whose files are damaged, is unloaded first. A model that is being
        unloaded is loaded again after that. Raises NotServed for an unknown name, EngineUnavailable while the server
        shuts down, and the error for which the artifact cannot be loaded.
        """
        async with self._lock(name):
            if (unloading := self._unloading.get(name)) is not None:
                await asyncio.wait((unloading,))
            self._check_stays()
            old = self._served.get(name)
            if old is not None and old.state not in CLOSED:
                return
            source = self._source(name)
            if name in self._adding or self._adapted(name) is not None:
                raise RequestError(f"an adapter is named {shown(name, 150)}; unload it before you load the model")
            if old is not None:
                await asyncio.shield(self._begin_unload(name, old))
            self._reasons.pop(name, None)
            self._set_busy(name, "loading")
            try:
                model = await self._load(source)
            except InfercError as error:
                self._reasons[name] = str(error)
                raise
            finally:
                self._set_busy(name, None)
            if self._is_leaving:
                await model.close()
                self._check_stays()
            self._served[name] = model

    def _check_stays(self) -> None:
        if self._is_leaving:
            raise EngineUnavailable("the server is shutting down and loads no models", retry_after=1.0)

    async def _load(self, source: ModelSource) -> ServedModel:
        artifact = await asyncio.to_thread(load_artifact, source.path, trusted_keys=self.options.engine.trusted_keys)
        events = self._open_log(source.name) if self.options.engine.kv_events else None
        options = self._options_of(source.name)
        model = ServedModel(source, artifact, options, events, self.on_change, self._tracing, self._residency)
        await model.start()
        return model

    async def unload(self, name: str) -> None:
        """Accept no more requests for a model, let its running ones end, and free its memory.

        The unloading goes on even if its caller is cancelled; a second call waits for the same unloading. Raises
        NotServed.
        """
        if name not in self._unloading:
            async with self._lock(name):  # wait for a load that is under way
                if (model := self._served.get(name)) is None:
                    raise NotServed(f"model {shown(name, 150)} is not loaded; this server has {self._listed()}")
                if name not in self._unloading:
                    self._begin_unload(name, model)
        await asyncio.shield(self._unloading[name])

    def _begin_unload(self, name: str, model: ServedModel) -> asyncio.Task[None]:
        task = self._unloading[name] = asyncio.create_task(self._unload(name, model))
        self._set_busy(name, "unloading")
        return task

    async def _unload(self, name: str, model: ServedModel) -> None:
        try:
            await model.engine.drain(self.options.drain_seconds, UNLOAD)
            await model.close()
        finally:
            self._served.pop(name, None)
            del self._unloading[name]
            self._set_busy(name, None)

    async def load_adapter(self, name: str, path: str, model: str = "") -> None:
        """Load a LoRA adapter from the folder of adapters, for a model ("": the first).

        The loading goes on even if its caller is cancelled. Raises AdaptersFixed, RequestError, NotServed or
        EngineUnavailable.
        """
        base = self._base(model)
        folder = find_adapter(self.adapter_folder, path or name)
        names = self._served.keys() | self._sources.keys() | self._busy.keys() | self._adding
        if name in names or self._adapted(name) is not None:
            raise RequestError(f"there is {shown(name, 150)} already; unload it first, or give this one another name")
        self._adding.add(name)
        await asyncio.shield(asyncio.ensure_future(self._load_adapter(base, name, folder)))

    async def _load_adapter(self, base: ServedModel, name: str, folder: Path) -> None:
        try:
            await base.supervisor.wake()
            await base.load_adapter(name, folder)
        finally:
            self._adding.discard(name)

    async def unload_adapter(self, name: str, model: str = "") -> None:
        """Take a LoRA adapter away from new requests, as `load_adapter` loads one; raises as it does."""
        base = self._base(model)
        if name not in base.adapters:
            known = ", ".join(shown(each.name) for each in base.adapters) or "none"
            raise NotServed(f"adapter {shown(name, 150)} is not loaded; model {base.name} has {known}")
        await base.supervisor.wake()
        await asyncio.shield(asyncio.ensure_future(base.unload_adapter(name)))

    def _base(self, model: str) -> ServedModel:
        found = self.get(model)
        if isinstance(found, AdaptedModel):
            raise RequestError(f"model {shown(model, 150)} is an adapter itself; name {found.base_name}")
        return found

    async def sleep(self, name: str) -> None:
        """Free a model's memory until a request needs it; raises NotServed or EngineUnavailable."""
        await self.get(name).supervisor.sleep()

    async def wake(self, name: str) -> None:
        """Wake a model, and return when it takes requests."""
        await self.get(name).supervisor.wake()

    async def drain(self, limit_seconds: float) -> bool:
        """Accept no requests and load no models any more, and return whether all running requests ended in time."""
        self._is_leaving = True
        return all(await all_ended(model.engine.drain(limit_seconds) for model in self._served.values()))

    async def close(self) -> None:
        """Close all models, also those after one that fails to close, whose error is raised then."""
        self._is_leaving = True
        models, self._served = list(self._served.values()), {}  # including those that are being unloaded
        unloading = list(self._unloading.values())
        for task in unloading:
            task.cancel()
        await asyncio.gather(*unloading, return_exceptions=True)
        await all_ended(model.close(SHUTDOWN) for model in models)

    def _source(self, name: str) -> ModelSource:
        if (source := self._sources.get(name)) is not None:
            return source
        if self.folder is None:
            raise ModelsFixed(
                f"model {shown(name, 150)} is unknown, and this server was not told where others are; start it with"
                " --model-folder DIR"
            )
        if not NAME.fullmatch(name) or name in (".", "..") or not (self.folder / name / "engine.json").is_file():
            found = ", ".join(map(shown, self._in_folder())) or "none"
            raise NotServed(f"there is no model {shown(name, 150)} to load; there are {found}")
        return ModelSource(name, self.folder / name)

    def _set_busy(self, name: str, state: ModelState | None) -> None:
        self._busy.pop(name, None)
        if state is not None:
            self._busy[name] = state
        self.on_change()

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())
