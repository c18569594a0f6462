"""`inferc.LLM`: an artifact as a Python object that generates text, with the engine in a thread of this process."""

from __future__ import annotations

import queue
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeAlias, cast, final

from inferc.errors import InfercError, RequestError
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.engine.engine import EngineStats
from inferc.runtime.engine.load import load_engine, model_defaults
from inferc.runtime.engine.loop import Embedded, EngineThread, Event, Failed, Scored
from inferc.runtime.engine.scoring import Score
from inferc.runtime.record.tapped import TappedSequence
from inferc.runtime.step.plan import Logprobs
from inferc.runtime.step.sampling_params import MAX_LOGPROBS, SamplingParams, from_chat, from_request
from inferc.runtime.step.sequence import Output
from inferc.runtime.text.tokenizer import Text, TextStream

Prompt: TypeAlias = str | Sequence[int]
Messages: TypeAlias = Sequence[dict[str, Any]]


@dataclass
class CompletionOutput:
    """The state of one sequence of a request; `stop` is the stop string or end token that ended it.

    num_forgotten_tokens: tokens of the prompt and the answer that the last token did not see (`kv_evict`): above 0, the
    answer is not the model's own.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    stop: str | int | None = None
    logprobs: list[Logprobs] | None = None
    num_forgotten_tokens: int = 0


@dataclass
class RequestOutput:
    """The answer to one prompt: `params.n` outputs.

    prompt: None if the prompt was given as token ids.
    num_cached_tokens: the number of prompt tokens that were found in the prefix cache.
    """

    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0

    @property
    def is_finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)


@final
class LLM:
    """A loaded artifact that generates text.

    `options` are the fields of EngineConfig (max_num_seqs, kv_memory_bytes, num_threads, …), `target`, and
    `special_tokens_in_text`: "allow", "refuse" or "escape" control tokens in prompts and messages. Use it as a context
    manager, or call `close`. Raises ConfigError or ArtifactError.
    """

    def __init__(self, path: str | Path, **options: Any) -> None:
        in_text = str(options.pop("special_tokens_in_text", "allow"))
        artifact = load_artifact(path, target=options.get("target"), trusted_keys=options.get("trusted_keys"))
        files = artifact.tokenizer
        self._text = Text(files, in_text) if files.has_tokenizer else None
        self._defaults = dict(model_defaults(artifact))
        self._client = EngineThread(lambda: load_engine(artifact, **options))

    @property
    def text(self) -> Text:
        """The tokenizer; raises RequestError if the artifact has none."""
        if self._text is None:
            raise RequestError("this artifact has no tokenizer: give prompts as token ids, and read token_ids")
        return self._text

    @property
    def defaults(self) -> dict[str, Any]:
        """The sampling parameters that the model's makers set, if they set any."""
        return dict(self._defaults)

    def sampling_params(self, **values: Any) -> SamplingParams:
        """Return SamplingParams with the model's own defaults for all parameters that are not given."""
        return from_request(values, self._defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = False,
    ) -> list[RequestOutput]:
        """Complete prompts (texts or lists of token ids) together, and return the answers in their order.

        params: one for all, or one for each; None takes the model's defaults.

        Raises RequestError for a prompt or a parameter that cannot be served; the other prompts are then aborted.
        """
        many = cast(
            "list[Prompt]",
            [prompts] if isinstance(prompts, str) or (prompts and _is_prompt(prompts)) else list(prompts),
        )
        each = params if isinstance(params, Sequence) else [params or self.sampling_params()] * len(many)
        if len(each) != len(many):
            raise RequestError(f"found {len(each)} sampling params for {len(many)} prompts; give one, or one for each")
        return self._run([_Request.begin(self, prompt, one) for prompt, one in zip(many, each, strict=True)], progress)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        params: SamplingParams | None = None,
        *,
        progress: bool = False,
        **template_options: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several with the model's chat template; a message has `role` and `content`.

        params: None takes the model's defaults, with which an answer may be as long as fits unless they limit it.
        """
        many = [messages] if messages and isinstance(messages[0], Mapping) else messages
        params = params or from_chat({}, self._defaults)
        prompts = [self.text.encode_chat(each, **template_options) for each in many]  # type: ignore[arg-type]
        return self._run([_Request.begin(self, prompt, params) for prompt in prompts], progress)

    async def stream(self, prompt: Prompt, params: SamplingParams | None = None) -> AsyncIterator[RequestOutput]:
        """Complete one prompt, and yield the answer so far whenever there is more; leaving the loop aborts it."""
        import asyncio  # imported here, because it is slow to import and few need it

        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()
        request = _Request.begin(self, prompt, params or self.sampling_params())

        def sink(event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed: there is no listener any more
                loop.call_soon_threadsafe(events.put_nowait, event)

        request_id = self._add(request, sink)
        try:
            while not request.answer.is_finished:
                if self._take(request_id, request, await events.get()):
                    yield request.answer
        finally:
            self._client.abort(request_id)

    def stream_sync(self, prompt: Prompt, params: SamplingParams | None = None) -> Iterator[RequestOutput]:
        """Yield the answer to one prompt like `stream`, for code without asyncio."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        request = _Request.begin(self, prompt, params or self.sampling_params())
        request_id = self._add(request, events.put)
        try:
            while not request.answer.is_finished:
                if self._take(request_id, request, events.get()):
                    yield request.answer
        finally:
            self._client.abort(request_id)

    def submit(
        self, prompt: Prompt, params: SamplingParams, done: Callable[[RequestOutput | InfercError], None]
    ) -> str:
        """Start to complete one prompt, and return an id.

        `done` gets the whole answer, or the error, on a thread of the engine's. Raises RequestError if `prompt` is no
        prompt, InfercError if the engine has stopped.
        """
        request = _Request.begin(self, prompt, params)

        def sink(event: Event) -> None:
            try:
                self._take(event.request_id or "", request, event)
            except InfercError as error:
                done(error)
            else:
                if request.answer.is_finished:
                    done(request.answer)

        return self._add(request, sink)

    def score(self, prompt: Prompt, num_top: int = 0) -> Score:
        """Return the log probability of each token of a text after its first, given the tokens before it.

        num_top: how many of the most likely tokens to return for each position.
        """
        if not 0 <= num_top <= MAX_LOGPROBS:
            raise RequestError(f"prompt_logprobs is {num_top}; expected 0 to {MAX_LOGPROBS}")
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._client.score(self._encode(prompt), events.put, num_top)
        event = events.get()
        if isinstance(event, Scored):
            return event.score
        raise _error(event)

    def embed(self, prompt: Prompt) -> list[float]:
        """Return the vector of a text, pooled as the model's makers say.

        Raises RequestError for a model that makes none.
        """
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self._client.embed(self._encode(prompt), events.put)
        event = events.get()
        if isinstance(event, Embedded):
            return event.vector
        raise _error(event)

    def tapped(self) -> list[TappedSequence]:
        """Return the kept values of requests with `SamplingParams(tap=True)` that have ended since the last call.

        The engine must have been told which values to keep: `LLM(path, tap=["layers.*.attention.out"])`.
        """
        return self._client.tapped()

    def stats(self) -> EngineStats:
        """Return the engine's present counters."""
        return self._client.stats()

    def close(self) -> None:
        """Stop the engine and free its memory."""
        self._client.close()
        if self._text is not None:
            self._text.close()

    def __enter__(self) -> LLM:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---------------------------------------------------------------------------------------------- inside

    def _encode(self, prompt: Prompt) -> list[int]:
        return self.text.encode(prompt) if isinstance(prompt, str) else list(prompt)

    def _add(self, request: _Request, sink: Callable[[Event], None]) -> str:
        return self._client.add(request.answer.prompt_token_ids, request.params, sink)

    def _run(self, requests: list[_Request], progress: bool) -> list[RequestOutput]:
        """Run all requests to their end; after an error the others are aborted."""
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        by_id: dict[str, _Request] = {}
        try:
            for request in requests:
                by_id[self._add(request, events.put)] = request
            open_ids = set(by_id)
            with _Progress(len(requests), progress) as bar:
                while open_ids:
                    event = events.get()
                    request_id = event.request_id or ""
                    self._take(request_id, by_id[request_id], event)
                    if by_id[request_id].answer.is_finished:
                        open_ids.discard(request_id)
                        bar.advance()
        finally:
            for request_id, request in by_id.items():
                if not request.answer.is_finished:
                    self._client.abort(request_id)
        return [request.answer for request in requests]

    def _take(self, request_id: str, request: _Request, event: Event) -> bool:
        """Add an event to its request's answer, and return whether there is anything new."""
        if not isinstance(event, Output):
            raise _error(event)
        output = request.answer.outputs[event.index]
        if output.finish_reason is not None:  # a stop string ended the sequence before this event came
            return False
        if event.index == 0 and event.num_cached is not None:
            request.answer.num_cached_tokens = event.num_cached
        output.num_forgotten_tokens = max(output.num_forgotten_tokens, event.num_forgotten)
        output.token_ids += event.token_ids
        if event.logprobs is not None:
            output.logprobs = (output.logprobs or []) + event.logprobs
        output.finish_reason = event.finish_reason
        stream = request.streams[event.index] if request.streams else None
        if stream is None:
            return True
        delta = stream.push(event.token_ids, event.finish_reason)
        output.text += delta.text
        output.finish_reason, output.stop = delta.finish_reason, delta.stop
        if delta.finish_reason is not None and event.finish_reason is None:
            self._client.abort(request_id, event.index)
        return bool(delta.text) or delta.finish_reason is not None


@dataclass
class _Request:
    params: SamplingParams
    answer: RequestOutput
    streams: list[TextStream]

    @staticmethod
    def begin(llm: LLM, prompt: Prompt, params: SamplingParams) -> _Request:
        """Make a request of a prompt.

        Raises RequestError for a prompt that is neither text nor token ids, or text without a tokenizer.
        """
        if not _is_prompt(prompt):
            raise RequestError(f"a prompt is a text or a list of token ids, found {prompt!r:.80}")
        text = llm._text
        if params.stop and text is None:
            raise RequestError("stop strings need a tokenizer, which this artifact does not have; use stop_token_ids")
        outputs = [CompletionOutput(index) for index in range(params.n)]
        answer = RequestOutput(prompt if isinstance(prompt, str) else None, llm._encode(prompt), outputs)
        return _Request(params, answer, [] if text is None else [TextStream(text, params) for _ in outputs])


@final
class _Progress:
    """A progress bar over requests, if it is wanted."""

    def __init__(self, total: int, is_wanted: bool) -> None:
        self._bar = None
        if is_wanted:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task("generate", total=total)

    def advance(self) -> None:
        if self._bar is not None:
            self._bar.advance(self._task)

    def __enter__(self) -> _Progress:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()


def _is_prompt(value: object) -> bool:
    """Return whether the value is a text or a list of token ids, and not a list of either."""
    if isinstance(value, str):
        return True
    return isinstance(value, Sequence) and all(isinstance(item, int) and not isinstance(item, bool) for item in value)


def _error(event: Event) -> InfercError:
    if isinstance(event, Failed):
        return event.error
    return InfercError(f"unexpected answer from the engine: {event}")
