"""A served model: its tokenizer here, its engine in a process of its own, and what clients are told of it."""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from inferc.config import EngineConfig
from inferc.errors import ConfigError, InfercError, RequestError
from inferc.runtime.artifact.load import Artifact
from inferc.runtime.engine.beam_search import BeamSearchParams
from inferc.runtime.engine.load import model_defaults, model_limits
from inferc.runtime.engine.process import EngineProcess
from inferc.runtime.engine.scoring import Score
from inferc.runtime.step.prompt_limits import check_length
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.text.control_tokens import InText
from inferc.runtime.text.named_forms import with_forms
from inferc.runtime.text.spelled import spelled
from inferc.runtime.text.tokenizer import Text
from inferc.runtime.text.turns import NOTHING, Known, render_behind
from inferc.serve.errors import RateLimited
from inferc.serve.kv_events.log import KvEventLog
from inferc.serve.models.adapters import ServedAdapters, state_of_files
from inferc.serve.models.artifact_watch import ArtifactWatch
from inferc.serve.models.async_engine import MAX_SEQUENCES, UNLOAD, AsyncEngine, Leaving, State
from inferc.serve.models.long_texts import BY_TURNS, check_characters, in_text_thread, num_characters
from inferc.serve.models.metrics import Ended, ModelMetrics, Objectives
from inferc.serve.models.queue_forecast import WITHIN
from inferc.serve.models.rendering import Rendering
from inferc.serve.models.residency import Residency
from inferc.serve.models.streams import Kind, ModelFacts, RequestTracer, Stream
from inferc.serve.models.supervisor import HANG_SECONDS, Supervisor
from inferc.serve.models.tasks import deadline, gather_some
from inferc.serve.security.access import CALLER
from inferc.system.logging import REQUEST_ID, LogFormat

log = logging.getLogger(__name__)

# Characters of a text that is tokenized on the event loop: less time than a thread costs. A megabyte takes a second.
SHORT_TEXT = 500
TEXTS_AT_ONCE = 128  # texts of one embedding call in the engine at once: enough to fill steps, with room for others
NAME = re.compile(r"[\w.:@+-]{1,128}")


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
        self.adapters = adapters = ServedAdapters(config.adapters)
        on_kv_events = None if self.kv_events is None else self.kv_events.add

        def start(on_stop: Callable[[str], None]) -> EngineProcess:
            def stopped(reason: str) -> None:
                if kv_events is not None:
                    kv_events.clear()
                on_stop(reason)

            now = {**arguments, "adapters": adapters.options()}
            return launch(now, on_stop=stopped, on_kv_events=on_kv_events, log_format=options.log_format)

        watch = ArtifactWatch(artifact)
        self.supervisor = Supervisor(self.engine, start, options.hang_seconds, lambda _: on_state(), residency, watch)

    @property
    def name(self) -> str:
        return self.source.name

    def _over(self, stream: Stream, ended: Ended) -> None:
        """Write a request that is over to the trace and the log."""
        model = stream.adapter or self.name  # as the request named it
        if self._tracing is not None:
            self._tracing.end(stream, ended, model, REQUEST_ID.get() or stream.request_id)
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
                "model": model,
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
        self,
        messages: Sequence[dict[str, Any]],
        variables: Mapping[str, Any] | None = None,
        is_prompt: bool = True,
        known: Known = NOTHING,
    ) -> list[int]:
        """Return the token ids of a conversation behind what is known, rendered by the model's chat template.

        Raises QueueFull if other conversations take too long, and RequestError for more characters than are tokenized
        at once.
        """

        def render() -> str:
            check_characters(num_characters(messages) + num_characters(variables), self.engine.facts.max_model_len)
            return render_behind(self.engine.text, messages, known, **(variables or {}))

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

    async def spelled(self, params: SamplingParams) -> SamplingParams:
        """Return a request's parameters with token ids instead of texts; raises RequestError for a text without any."""
        return await in_text_thread(partial(spelled, self.engine.text, params))

    def check_open(self, params: SamplingParams, num_prompts: int = 1, num_sequences: int = 0) -> None:
        """Call AsyncEngine.check_open for one request per prompt, within the time that the caller has left.

        num_sequences: those of each prompt, if they are not the `n` of the parameters.
        """
        count = num_sequences or params.n
        self.engine.check_open(count * num_prompts, WITHIN.get(), params.num_listed * num_prompts)

    def open(
        self,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        request_id: str = "",
        news: asyncio.Event | None = None,
        kind: Kind = "completion",
        marks: Mapping[int, str] | None = None,
        beams: BeamSearchParams | None = None,
    ) -> Stream:
        """Start a request in the caller's name, within its limits; raise as AsyncEngine.open and Caller.begin do.

        kind, marks: as in Stream. beams: as in AsyncEngine.open.
        """
        caller = CALLER.get()
        if beams is not None:
            caller.limits.check(len(prompt_token_ids), beams.beam_width)
        with self._refusals_counted():
            params = caller.begin(len(prompt_token_ids), params)
        try:
            stream = self.engine.open(
                prompt_token_ids,
                params,
                request_id,
                news,
                caller.name,
                caller.end,
                max_seconds=caller.limits.max_request_seconds,
                kind=kind,
                marks=marks,
                beams=beams,
            )
            if self._tracing is not None:
                self._tracing.begin(stream, self.name)
            return stream
        except BaseException:
            caller.end(0)
            raise

    async def score(
        self,
        token_ids: Sequence[int],
        num_top: int,
        request_id: str = "",
        cache_salt: str = "",
        n: int = 1,
        first: int = 1,
        adapter: str = "",
    ) -> Score:
        """Call AsyncEngine.score within the limits of the caller; n: number of choices that report the scores."""
        caller = CALLER.get()
        with self._refusals_counted():
            caller.begin_reading(len(token_ids), n)
        try:
            async with deadline(caller.limits.max_request_seconds):
                salt = caller.salt(cache_salt)
                return await self.engine.score(token_ids, num_top, request_id, caller.name, salt, first, adapter)
        finally:
            caller.end(0)

    def count(self, prompt_len: int, n: int = 1) -> None:
        """Count a request of the caller for which nothing is computed; raises as Caller.begin_reading does."""
        caller = CALLER.get()
        with self._refusals_counted():
            caller.begin_reading(prompt_len, n)
        caller.end(0)

    async def load_adapter(self, name: str, path: Path) -> None:
        """Load an adapter, which requests may then name as a model; it is loaded again if the engine starts again.

        Raises RequestError for one that cannot be loaded, EngineUnavailable if there is no engine.
        """
        files = state_of_files(path)
        try:
            await self.engine.load_adapter(name, str(path))
        except RequestError as error:  # a client knows the adapter by its name there
            raise RequestError(str(error).replace(str(path), path.name)) from None
        self.adapters.add(name, path, files)

    async def unload_adapter(self, name: str) -> None:
        """Take an adapter away from new requests; raises as `load_adapter` does."""
        await self.engine.unload_adapter(name)
        self.adapters.remove(name)

    async def embed(self, texts: Sequence[Sequence[int]]) -> list[list[float]]:
        """Call AsyncEngine.embed for each text, TEXTS_AT_ONCE at a time; all together are one request of the caller."""
        caller, lengths = CALLER.get(), [len(each) for each in texts]
        with self._refusals_counted():
            caller.begin_reading(max(lengths), num_tokens=sum(lengths))
        try:
            async with deadline(caller.limits.max_request_seconds):
                return await gather_some(lambda ids: self.engine.embed(ids, "", caller.name), texts, TEXTS_AT_ONCE)
        finally:
            caller.end(0)

    @property
    def embeds(self) -> bool:
        """True if the model makes embedding vectors of texts."""
        return self.pooling is not None

    @contextmanager
    def _refusals_counted(self) -> Iterator[None]:
        """Count what is refused inside because the caller's key has used up its rate."""
        try:
            yield
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
        """True if the model takes requests, even if it has to wake up for them."""
        return self.state in ("serving", "asleep") or self.supervisor.is_waking

    async def start(self) -> None:
        """Load the tokenizer here and, at the same time, the weights in the engine's process; raise the first error."""
        starting = asyncio.create_task(self.supervisor.start())
        try:
            self.engine.text = await asyncio.to_thread(self._load_text)
            self.engine.text.check_stop_ids(self.artifact.model.eos_token_ids)
            await starting
        except BaseException:
            starting.cancel()
            with suppress(asyncio.CancelledError, InfercError):
                await starting
            await self.close()
            raise

    def _load_text(self) -> Text:
        files = with_forms(self.artifact.tokenizer, self.config.tool_format, self.config.reasoning_format)
        return Text(files, self._special_tokens_in_text)

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
