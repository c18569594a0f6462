"""The models of a server by name, which can be loaded and unloaded while it runs."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal
from weakref import WeakValueDictionary

from inferc.config import EngineConfig
from inferc.errors import ConfigError, InfercError, RequestError, shown
from inferc.runtime.artifact.load import Artifact, load_artifact
from inferc.runtime.engine.load import model_defaults, model_limits
from inferc.runtime.engine.process import EngineProcess
from inferc.runtime.engine.scoring import Score
from inferc.runtime.step.prompt_limits import check_length
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.text.control_tokens import InText
from inferc.runtime.text.tokenizer import Text
from inferc.serve.errors import EngineUnavailable, ModelsFixed, NotServed, RateLimited
from inferc.serve.kv_events.log import KvEventLog
from inferc.serve.models.artifact_watch import ArtifactWatch
from inferc.serve.models.async_engine import CLOSED, MAX_SEQUENCES, SHUTDOWN, UNLOAD, AsyncEngine, Leaving, State
from inferc.serve.models.long_texts import BY_TURNS, check_characters, in_text_thread, num_characters
from inferc.serve.models.metrics import Ended, ModelMetrics, Objectives
from inferc.serve.models.queue_forecast import WITHIN
from inferc.serve.models.rendering import Rendering
from inferc.serve.models.residency import Residency
from inferc.serve.models.streams import ModelFacts, RequestTracer, Stream
from inferc.serve.models.supervisor import HANG_SECONDS, Supervisor
from inferc.serve.models.tasks import deadline, gather_some
from inferc.serve.security.access import CALLER, Caller
from inferc.system.logging import REQUEST_ID, LogFormat

log = logging.getLogger(__name__)

# Characters of a text that is tokenized on the event loop: less time than a thread costs. A megabyte takes a second.
SHORT_TEXT = 500
TEXTS_AT_ONCE = 128  # texts of one embedding call in the engine at once: enough to fill steps, with room for others
NAME = re.compile(r"[\w.:@+-]{1,128}")
ModelState = Literal["unloaded", "loading", "starting", "serving", "asleep", "draining", "damaged", "dead", "unloading"]


@dataclass(frozen=True)
class ModelSource:
    """An artifact's path, and the name that clients use for it; ConfigError if the name is not valid."""

    name: str
    path: Path

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise ConfigError(
                f"model name {self.name!r}: expected letters, digits and _ . : @ + -, at most 128; name it with"
                " NAME=OUT"
            )

    @staticmethod
    def parse(text: str) -> ModelSource:
        """Parse OUT (which is named as its folder), or NAME=OUT."""
        name, equals, path = text.partition("=")
        if equals and "/" not in name:
            return ModelSource(name, Path(path))
        return ModelSource(Path(text).resolve().name, Path(text))


@dataclass(frozen=True)
class ModelOptions:
    """The options with which all models of a server run."""

    engine: EngineConfig = dataclasses.field(default_factory=EngineConfig)
    max_sequences: int = MAX_SEQUENCES
    max_queue_seconds: float | None = None  # refuse a request whose forecast time to the first token is longer
    hang_seconds: float = HANG_SECONDS
    drain_seconds: float = 30.0  # for running requests to end when a model is unloaded, or makes room for another
    max_awake: int | None = None  # the most models awake at the same time; others sleep until a request needs them
    objectives: Objectives = dataclasses.field(default_factory=Objectives)  # latency objectives of goodput
    special_tokens_in_text: InText = "allow"
    log_format: LogFormat = "text"
    log_requests: bool = False  # log each request at INFO when it is over


@dataclass(frozen=True)
class ModelInfo:
    """The facts about a model for clients, beside the limits that the engine itself knows."""

    name: str
    model_type: str
    dtype: str
    max_num_seqs: int
    created: int  # seconds since 1970, when it was loaded


class ServedModel:
    """A loaded model: its tokenizer and chat template here, its engine in a process that a supervisor keeps running."""

    def __init__(
        self,
        source: ModelSource,
        artifact: Artifact,
        options: ModelOptions,
        kv_events: KvEventLog | None,
        on_state: Callable[[], None],
        tracing: RequestTracer | None = None,
        residency: Residency | None = None,
        launch: Callable[..., EngineProcess] = EngineProcess,
    ) -> None:
        config = options.engine
        limits = model_limits(artifact)
        facts = ModelFacts(limits.vocab_size, limits.max_model_len, limits.eos_token_ids, model_defaults(artifact))
        self.source, self.artifact, self.config = source, artifact, config
        self._tracing = tracing
        self._special_tokens_in_text = options.special_tokens_in_text
        self.pooling = limits.pooling
        self._log_level = logging.INFO if options.log_requests else logging.DEBUG
        self.info = ModelInfo(
            source.name,
            artifact.model.model_type,
            artifact.config.dtype,
            config.max_num_seqs,
            int(time.time()),
        )
        self.engine = AsyncEngine(
            None,
            facts,
            options.max_sequences,
            metrics=ModelMetrics(options.objectives),
            on_over=self._over,
            max_queue_seconds=options.max_queue_seconds,
        )
        self._rendering = Rendering()
        self.kv_events = kv_events
        # A restarted engine checks the manifest's hash: it starts only with the artifact whose tokenizer is loaded
        # here.
        expected = {"path": str(source.path), "manifest_sha256": artifact.manifest.sha256}
        arguments = {**expected, **dataclasses.asdict(config)}
        on_kv_events = None if self.kv_events is None else self.kv_events.add

        def start(on_stop: Callable[[str], None]) -> EngineProcess:
            def stopped(reason: str) -> None:
                if kv_events is not None:
                    kv_events.clear()
                on_stop(reason)

            return launch(arguments, on_stop=stopped, on_kv_events=on_kv_events, log_format=options.log_format)

        watch = ArtifactWatch(artifact)
        self.supervisor = Supervisor(self.engine, start, options.hang_seconds, lambda _: on_state(), residency, watch)

    @property
    def name(self) -> str:
        return self.source.name

    def _over(self, stream: Stream, ended: Ended) -> None:
        """Write a request that is over to the trace and the log."""
        if self._tracing is not None:
            self._tracing.end(stream, ended, self.name, REQUEST_ID.get() or stream.request_id)
        if not log.isEnabledFor(self._log_level):
            return
        first, now = ended.first_at[0], time.monotonic()
        log.log(
            self._log_level,
            "request over: %s",
            ended.outcome,
            extra={
                "request_id": REQUEST_ID.get() or stream.request_id,
                "engine_request_id": stream.request_id,
                "model": self.name,
                "key": stream.owner,
                "prompt_tokens": ended.prompt_tokens,
                "cached_tokens": ended.cached_tokens,
                "output_tokens": sum(ended.output_tokens),
                "queue_ms": None if ended.queue_seconds is None else round(1e3 * ended.queue_seconds, 2),
                "ttft_ms": None if math.isnan(first) else round(1e3 * (first - ended.opened_at), 2),
                "total_ms": round(1e3 * (now - ended.opened_at), 2),
            },
        )

    @property
    def fingerprint(self) -> str:
        """The artifact's id, for OpenAI's system_fingerprint: with equal fingerprints a seed gives equal answers."""
        return f"inferc-{self.artifact.manifest.sha256[:12]}"

    async def encode(self, text: str, add_special_tokens: bool = True, is_prompt: bool = True) -> list[int]:
        """Return the token ids of a text; a long one is tokenized on a thread, so that nobody else waits.

        is_prompt: refuse a text that is too long for the model's context.
        """
        limit = self.engine.facts.max_model_len if is_prompt else None
        return await _beside(text, partial(self.engine.text.encode, text, add_special_tokens, limit), is_prompt)

    async def encode_chat(
        self, messages: Sequence[dict[str, Any]], variables: Mapping[str, Any] | None = None, is_prompt: bool = True
    ) -> list[int]:
        """Return the token ids of a conversation, rendered by the model's chat template.

        Raises QueueFull if other conversations take too long, and RequestError for more characters than are tokenized
        at once.
        """

        def render() -> str:
            check_characters(num_characters(messages) + num_characters(variables), self.engine.facts.max_model_len)
            return self.engine.text.render_chat(messages, **(variables or {}))

        text = await self._rendering.run(render)
        limit = self.engine.facts.max_model_len if is_prompt else None
        return await _beside(text, partial(self.engine.text.encode_rendered, text, limit), is_prompt)

    def check_length(self, num_tokens: int, room: int = 1) -> None:
        """Raise RequestError if a prompt of so many tokens is too long, before any work on it."""
        try:
            check_length(num_tokens, self.engine.facts.max_model_len, room)
        except RequestError:
            if room:  # count it just as if the engine had refused it
                self.engine.metrics.outcomes["invalid"] += 1
            raise

    async def encode_all(self, texts: Sequence[str], add_special_tokens: bool = True) -> list[list[int]]:
        """Return the token ids of each text as `encode` does, on a thread if the texts are long together."""
        if sum(map(len, texts)) <= SHORT_TEXT:
            return [await self.encode(text, add_special_tokens) for text in texts]
        encode, limit = self.engine.text.encode, self.engine.facts.max_model_len
        return await in_text_thread(lambda: [encode(text, add_special_tokens, limit) for text in texts])

    def check_open(self, params: SamplingParams, num_prompts: int = 1) -> None:
        """Call AsyncEngine.check_open for one request per prompt, within the time that the caller has left."""
        self.engine.check_open(params.n * num_prompts, WITHIN.get(), params.num_listed * num_prompts)

    def open(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str = "",
        news: asyncio.Event | None = None,
    ) -> Stream:
        """Start a request in the caller's name, within its limits; raise as AsyncEngine.open and Caller.begin do."""
        caller = CALLER.get()
        params = self._begin(caller, len(prompt_token_ids), params)
        try:
            stream = self.engine.open(
                prompt_token_ids,
                params,
                request_id,
                news,
                caller.name,
                caller.end,
                max_seconds=caller.limits.max_request_seconds,
            )
            if self._tracing is not None:
                self._tracing.begin(stream, self.name)
            return stream
        except BaseException:
            caller.end(0)
            raise

    async def score(
        self, token_ids: Sequence[int], num_top: int, request_id: str = "", cache_salt: str = "", n: int = 1
    ) -> Score:
        """Call AsyncEngine.score within the limits of the caller; n: number of choices that report the scores."""
        caller = CALLER.get()
        params = self._begin(caller, len(token_ids), SamplingParams(max_tokens=1, n=n, cache_salt=cache_salt))
        try:
            async with deadline(caller.limits.max_request_seconds):
                return await self.engine.score(token_ids, num_top, request_id, caller.name, params.cache_salt)
        finally:
            caller.end(0)

    def count(self, prompt_len: int, n: int = 1) -> None:
        """Count a request of the caller for which nothing is computed; raises the same errors as Caller.begin."""
        caller = CALLER.get()
        self._begin(caller, prompt_len, SamplingParams(max_tokens=1, n=n))
        caller.end(0)

    async def embed(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Call AsyncEngine.embed for each text, TEXTS_AT_ONCE at a time; all together are one request of the caller."""
        caller, lengths = CALLER.get(), [len(each) for each in texts]
        self._begin(caller, max(lengths), SamplingParams(max_tokens=1), sum(lengths))
        try:
            async with deadline(caller.limits.max_request_seconds):
                return await gather_some(lambda ids: self.engine.embed(ids, "", caller.name), texts, TEXTS_AT_ONCE)
        finally:
            caller.end(0)

    @property
    def embeds(self) -> bool:
        """Whether the model makes embedding vectors of texts."""
        return self.pooling is not None

    def _begin(
        self, caller: Caller, prompt_len: int, params: SamplingParams, num_tokens: int | None = None
    ) -> SamplingParams:
        try:
            return caller.begin(prompt_len, params, num_tokens)
        except RateLimited:
            self.engine.metrics.refused("rate_limit")
            raise

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of token ids; raises RequestError for an id outside of the vocabulary."""
        limit = self.engine.facts.vocab_size
        for token in token_ids:
            if not 0 <= token < limit:
                raise RequestError(f"token id {token} is outside of the vocabulary [0, {limit})")
        return self.engine.text.decode(token_ids, skip_special_tokens)

    @property
    def state(self) -> State:
        return self.engine.state

    @property
    def is_ready(self) -> bool:
        """Whether the model takes requests, even if it has to wake up for them."""
        return self.state in ("serving", "asleep") or self.supervisor.is_waking

    async def start(self) -> None:
        """Load the tokenizer here and, at the same time, the weights in the engine's process; raise the first error."""
        starting = asyncio.create_task(self.supervisor.start())
        try:
            files, in_text = self.artifact.tokenizer, self._special_tokens_in_text
            self.engine.text = await asyncio.to_thread(Text, files, in_text)
            self.engine.text.check_stop_ids(self.artifact.model.eos_token_ids)
            await starting
        except BaseException:
            starting.cancel()
            with suppress(asyncio.CancelledError, InfercError):
                await starting
            await self.close()
            raise

    async def close(self, leaving: Leaving = UNLOAD) -> None:
        await self.supervisor.close()
        self._rendering.close(leaving)
        if hasattr(self.engine, "text"):
            await asyncio.to_thread(self.engine.text.close)
        if self.kv_events is not None:
            self.kv_events.close("the model was unloaded")


async def _beside(text: str, encode: Callable[[], list[int]], is_prompt: bool) -> list[int]:
    """Tokenize a text; a long one on a thread, and those that are not prompts one after another (BY_TURNS)."""
    if len(text) <= SHORT_TEXT:
        return encode()
    return await (in_text_thread(encode) if is_prompt else BY_TURNS.run(encode))


@dataclass(frozen=True)
class ModelEntry:
    """An entry of the list of models; `reason` says why the model is not served, if that is due to an error."""

    name: str
    state: ModelState
    reason: str = ""


class Models:
    """The models by name; those given at the start, and those in `folder`, can be loaded.

    on_change is called whenever a model is loaded, is unloaded, or changes its state.
    """

    def __init__(
        self,
        sources: Sequence[ModelSource],
        options: ModelOptions,
        folder: Path | None = None,
        on_change: Callable[[], None] = lambda: None,
        tracing: RequestTracer | None = None,
    ) -> None:
        names = [source.name for source in sources]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ConfigError(f"two models are named {twice[0]}; name one of them otherwise with NAME=OUT")
        self.options = options
        self.folder = folder
        self.on_change = on_change
        self._tracing = tracing
        self._sources = {source.name: source for source in sources}
        self._served: dict[str, ServedModel] = {}
        self._busy: dict[str, ModelState] = {}  # models that are being loaded or unloaded
        self._reasons: dict[str, str] = {}  # by name: why the last attempt to load it failed
        self._unloading: dict[str, asyncio.Task[None]] = {}
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
        if self._busy.get(name) == "loading":
            raise EngineUnavailable(f"model {shown(name, 150)} is being loaded", retry_after=1.0)
        if not name:
            raise EngineUnavailable("no model is loaded", retry_after=1.0)
        raise NotServed(f"model {shown(name, 150)} is not served here; this server has {self._listed()}")

    @property
    def served(self) -> list[ServedModel]:
        return list(self._served.values())

    @property
    def _staying(self) -> list[ServedModel]:
        """The loaded models that are not being unloaded."""
        return [model for name, model in self._served.items() if name not in self._unloading]

    @property
    def is_serving(self) -> bool:
        """Whether there is a model, and every model that is not being unloaded takes requests."""
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
            return ModelEntry(name, model.state, model.engine.reason)
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
        return ", ".join(map(repr, self._served)) or "none"

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

    async def sleep(self, name: str) -> None:
        """Free a model's memory until a request needs it; raises NotServed or EngineUnavailable."""
        await self.get(name).supervisor.sleep()

    async def wake(self, name: str) -> None:
        """Wake a model, and return when it takes requests."""
        await self.get(name).supervisor.wake()

    async def drain(self, limit_seconds: float) -> bool:
        """Accept no requests and load no models any more, and return whether all running requests ended in time."""
        self._is_leaving = True
        done = await asyncio.gather(*(model.engine.drain(limit_seconds) for model in self._served.values()))
        return all(done)

    async def close(self) -> None:
        self._is_leaving = True
        models, self._served = list(self._served.values()), {}  # including those that are being unloaded
        unloading = list(self._unloading.values())
        for task in unloading:
            task.cancel()
        await asyncio.gather(*unloading, return_exceptions=True)
        await asyncio.gather(*(model.close(SHUTDOWN) for model in models))

    def _source(self, name: str) -> ModelSource:
        if (source := self._sources.get(name)) is not None:
            return source
        if self.folder is None:
            raise ModelsFixed(
                f"model {shown(name, 150)} is unknown, and this server was not told where others are; start it with"
                " --model-folder DIR"
            )
        if not NAME.fullmatch(name) or name in (".", "..") or not (self.folder / name / "engine.json").is_file():
            found = ", ".join(map(repr, self._in_folder())) or "none"
            raise NotServed(f"there is no model {shown(name, 150)} to load; there are {found}")
        return ModelSource(name, self.folder / name)

    def _set_busy(self, name: str, state: ModelState | None) -> None:
        self._busy.pop(name, None)
        if state is not None:
            self._busy[name] = state
        self.on_change()

    def _lock(self, name: str) -> asyncio.Lock:
        return self._locks.setdefault(name, asyncio.Lock())
