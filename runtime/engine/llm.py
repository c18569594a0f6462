"""`inferc.LLM`: an artifact as a Python object that generates text, with the engine in a thread of this process."""

from __future__ import annotations

import queue
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeAlias, final

from inferc.errors import InfercError, RequestError, shown
from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.artifact.model_folder import artifact_of
from inferc.runtime.engine import keywords
from inferc.runtime.engine.absent import OF_LLM, absent
from inferc.runtime.engine.beam_search import BeamSearchOutput, BeamSearchParams, likely_by, search, with_texts
from inferc.runtime.engine.best_of import best, computed
from inferc.runtime.engine.chats import OF_CHAT, Chats
from inferc.runtime.engine.load import load_engine, model_defaults, model_limits
from inferc.runtime.engine.loop import AdapterDone, Embedded, EngineThread, Event, Failed, Scored
from inferc.runtime.engine.progress_bar import ProgressBar
from inferc.runtime.engine.prompts import ParsedPrompt, Prompt, parse_prompt, parse_prompts
from inferc.runtime.engine.request_output import (
    EmbeddingOutput,
    EmbeddingRequestOutput,
    OpenRequest,
    RequestOutput,
    prompt_ids,
    required,
)
from inferc.runtime.engine.scoring import Score
from inferc.runtime.engine.stats import EngineStats
from inferc.runtime.record.tapped import TappedSequence
from inferc.runtime.step.sampling_params import (
    MAX_LOGPROBS,
    SamplingParams,
    changed,
    check_integer,
    check_name,
    from_chat,
    from_request,
)
from inferc.runtime.step.sequence import Output
from inferc.runtime.text.hf_tokenizer import HfTokenizer
from inferc.runtime.text.named_forms import with_forms
from inferc.runtime.text.tokenizer import Text

Messages: TypeAlias = Sequence[dict[str, Any]]


@final
class LLM:
    """A loaded artifact that generates text.

    model: the artifact, or the folder of a Hugging Face model, which is compiled into a cache at its first use
    (`inferc cache list`). `options` are the fields of EngineConfig (max_num_seqs, kv_memory_bytes, num_threads, …),
    `target`, and `special_tokens_in_text`: "allow", "refuse" or "escape" control tokens in prompts and messages. Use it
    as a context manager, or call `close`. Raises ConfigError or ArtifactError.
    """

    def __init__(self, model: str | Path, **options: Any) -> None:
        options = keywords.engine_options(options)
        in_text = str(options.pop("special_tokens_in_text", "allow"))
        target = options.get("target")
        artifact = load_artifact(artifact_of(model, target), target=target, trusted_keys=options.get("trusted_keys"))
        files = with_forms(artifact.tokenizer, options.get("tool_format"), options.get("reasoning_format"))
        self._text = Text(files, in_text) if files.has_tokenizer else None
        self._defaults, self._model = dict(model_defaults(artifact)), model_limits(artifact)
        self._client = EngineThread(lambda: load_engine(artifact, **options))

    @property
    def text(self) -> Text:
        """The tokenizer; raises RequestError if the artifact has none."""
        return required(self._text)

    if not TYPE_CHECKING:  # a type checker knows the names that there are

        def __getattr__(self, name: str) -> Any:
            raise absent(self, name, OF_LLM)

    def get_tokenizer(self) -> HfTokenizer:
        """Return the tokenizer with the methods of transformers'; raise RequestError if the artifact has none."""
        return HfTokenizer(self.text)

    @property
    def defaults(self) -> dict[str, Any]:
        """The sampling parameters that the model's makers set, if they set any."""
        return dict(self._defaults)

    @property
    def end_token_ids(self) -> frozenset[int]:
        """The tokens with which the model ends an answer."""
        return frozenset(self._model.eos_token_ids)

    def get_default_sampling_params(self) -> SamplingParams:
        """Return the SamplingParams of a request that gives none."""
        return self.sampling_params()

    def sampling_params(self, **values: Any) -> SamplingParams:
        """Return SamplingParams with the model's own defaults for all parameters that are not given."""
        return from_request(values, self._defaults)

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt] | None = None,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        prompt_token_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        use_tqdm: bool = False,
        **others: Any,
    ) -> list[RequestOutput]:
        """Complete prompts together, and return the answers in their order.

        prompts: a text, a list of token ids, {"prompt": text} or {"prompt_token_ids": ids}, or a list of these;
        prompt_token_ids: lists of token ids instead. sampling_params: one for all, or one for each; None takes the
        model's defaults. use_tqdm: show a progress bar. others: vLLM's further parameters, with values that ask for
        nothing.

        Raises RequestError for a prompt or a parameter that cannot be served; the other prompts are then aborted.
        """
        known = ("prompts", "sampling_params", "prompt_token_ids", "use_tqdm")
        keywords.refuse("LLM.generate", others, known)
        many = parse_prompts(prompts, prompt_token_ids)
        each = self._params_of(sampling_params, len(many))
        return self._run([self._request(*pair) for pair in zip(many, each, strict=True)], use_tqdm)

    def beam_search(
        self, prompts: Prompt | Sequence[Prompt], params: BeamSearchParams, **others: Any
    ) -> list[BeamSearchOutput]:
        """Search for the likeliest answers as a whole, `beam_width` for each prompt, the best first.

        prompts: as in `generate`. Raises RequestError for a prompt or a parameter that cannot be served.
        """
        keywords.refuse("LLM.beam_search", others, ("prompts", "params"))
        ids = [prompt_ids(self._text, prompt) for prompt in parse_prompts(prompts, None)]
        found = search(ids, params, self._model.eos_token_ids, self._model.max_model_len, likely_by(self.generate))
        return with_texts(found, self._text)

    def chat(
        self,
        messages: Messages | Sequence[Messages],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_tqdm: bool = False,
        *,
        add_generation_prompt: bool = True,
        tools: Sequence[dict[str, Any]] | None = None,
        tool_choice: Any = None,
        parallel_tool_calls: bool = True,
        chat_template_kwargs: Mapping[str, Any] | None = None,
        separate_reasoning: bool = False,
        max_reasoning_tokens: int | None = None,
        **others: Any,
    ) -> list[RequestOutput]:
        """Answer one conversation or several with the model's chat template; a message has `role` and `content`.

        sampling_params: None takes the model's defaults, with which an answer may be as long as fits unless they limit
        it. tools: as OpenAI has them, for the template; calls in an answer are the `tool_calls` of its outputs, and in
        their text. tool_choice and parallel_tool_calls, OpenAI's too, hold answers to the tools; else they are free.
        The `reasoning` of an output is in its text, too, unless separate_reasoning: then a form begins behind it, as
        over HTTP, and it ends after max_reasoning_tokens. chat_template_kwargs: further variables of the template, as
        `enable_thinking`. use_tqdm, others: as in `generate`.
        """
        keywords.refuse("LLM.chat", others, OF_CHAT)
        chats = Chats(self.text, tools, tool_choice, parallel_tool_calls, separate_reasoning, max_reasoning_tokens)
        many = [messages] if messages and isinstance(messages[0], Mapping) else messages
        each = self._params_of(sampling_params or from_chat({}, self._defaults), len(many))
        of_request = {"add_generation_prompt": add_generation_prompt, "tools": chats.for_template}
        options = {**(chat_template_kwargs or {}), **of_request}
        prompts = [self.text.encode_chat(one, **options) for one in many]  # type: ignore[arg-type]
        requests = [
            self._request(ParsedPrompt(token_ids=ids), *chats.asked(ids, params))
            for ids, params in zip(prompts, each, strict=True)
        ]
        return chats.read(self._run(requests, use_tqdm))

    def stream(
        self,
        prompt: Prompt,
        sampling_params: SamplingParams | None = None,
        marks: Mapping[int, str] | None = None,
    ) -> Stream:
        """Complete one prompt, and iterate with `for` or `async for` over the answer as it grows.

        Each piece is the answer so far, and `new_text` of its outputs what is new. Leaving the loop aborts the request.
        marks: as in `submit`. Raises RequestError at once for what is no prompt.
        """
        params = sampling_params or self.sampling_params()
        return Stream(self, OpenRequest.begin(self._text, parse_prompt(prompt), params, marks))

    def submit(
        self,
        prompt: str | Sequence[int],
        params: SamplingParams,
        done: Callable[[RequestOutput | InfercError], None],
        marks: Mapping[int, str] | None = None,
    ) -> str:
        """Start to complete one prompt, and return an id.

        `done` gets the whole answer, or the error, on a thread of the engine's. marks: what the text has for tokens
        that are markers. Raises RequestError if `prompt` is no prompt, InfercError if the engine has stopped.
        """
        request = self._request(parse_prompt(prompt), params, marks)

        def sink(event: Event) -> None:
            try:
                self._take(request, event)
            except InfercError as error:
                done(error)
            else:
                if request.is_done:
                    done(_whole(request))

        self._add(request, sink)
        return request.id

    def load_adapter(self, name: str, path: str | Path) -> None:
        """Load a LoRA adapter from the folder that PEFT saved it to; requests name it in SamplingParams(adapter=…).

        The artifact must have room for adapters (`inferc compile --adapter-rank`). Running requests go on meanwhile.
        Raises RequestError for an adapter of another model or rank, a name in use, or files that are damaged.
        """
        self._change_adapters(lambda sink: self._client.load_adapter(name, str(Path(path).absolute()), sink))

    def unload_adapter(self, name: str) -> None:
        """Take a LoRA adapter away from new requests; its memory is freed when the running ones have ended.

        Raises RequestError if none of this name is loaded.
        """
        self._change_adapters(lambda sink: self._client.unload_adapter(name, sink))

    def _change_adapters(self, send: Callable[[Callable[[Event], None]], str]) -> None:
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        send(events.put)
        if not isinstance(event := events.get(), AdapterDone):
            raise _error(event)

    def score(
        self,
        prompt: str | Sequence[int],
        num_top: int = 0,
        *,
        first: int = 1,
        cache_salt: str = "",
        adapter: str = "",
    ) -> Score:
        """Return the log probability of each token of a text after its first, given the tokens before it.

        num_top: how many of the most likely tokens to return for each position. first: the first token to score; what
        the prefix cache has of the tokens before it, for this cache_salt, is not computed again. adapter: the name of a
        loaded LoRA adapter, with which it is scored.
        """
        check_integer("first", first, 1, 2**31 - 1)
        check_name("cache_salt", cache_salt)
        check_name("adapter", adapter)
        if type(num_top) is not int:
            raise RequestError(
                f"LLM.score: num_top is {shown(num_top)}; expected an integer. It scores one text's tokens; two texts"
                " are compared by their vectors, LLM.embed"
            )
        if not 0 <= num_top <= MAX_LOGPROBS:
            raise RequestError(f"prompt_logprobs is {num_top}; expected 0 to {MAX_LOGPROBS}")
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        ids = prompt_ids(self._text, parse_prompt(prompt))
        self._client.score(ids, events.put, num_top, cache_salt, first, adapter)
        event = events.get()
        if isinstance(event, Scored):
            return event.score
        raise _error(event)

    def embed(
        self, prompts: Prompt | Sequence[Prompt], *, use_tqdm: bool = False, **others: Any
    ) -> list[EmbeddingRequestOutput]:
        """Return the vector of each prompt, pooled as the model's makers say, as `outputs.embedding` of its answer.

        prompts, use_tqdm, others: as in `generate`. Raises RequestError for a model that makes none.
        """
        keywords.refuse("LLM.embed", others, ("prompts", "use_tqdm"))
        has_bar = keywords.is_bar(use_tqdm)
        texts = [prompt_ids(self._text, prompt) for prompt in parse_prompts(prompts)]
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        ids: list[str] = []
        vectors: dict[str, list[float]] = {}
        try:
            for text in texts:
                ids.append(self._client.embed(text, events.put))
            with ProgressBar(len(texts), has_bar) as bar:
                while len(vectors) < len(ids):
                    event = events.get()
                    if not isinstance(event, Embedded):
                        raise _error(event)
                    vectors[event.request_id] = event.vector
                    bar.advance()
        finally:
            for each in ids:
                if each not in vectors:
                    self._client.abort(each)
        return [
            EmbeddingRequestOutput(each, EmbeddingOutput(vectors[each]), text)
            for each, text in zip(ids, texts, strict=True)
        ]

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

    def _request(
        self, prompt: ParsedPrompt, params: SamplingParams, marks: Mapping[int, str] | None = None
    ) -> OpenRequest:
        """Return a request for a whole answer."""
        request = OpenRequest.begin(self._text, prompt, computed(params), marks)
        request.asked = changed(params)  # they may be changed while the request runs
        return request

    def _params_of(
        self, given: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int
    ) -> Sequence[SamplingParams]:
        """Return the parameters of each prompt; raise RequestError if there are not as many."""
        if not isinstance(given, Sequence):
            if given is not None and not isinstance(given, SamplingParams):
                raise RequestError(f"sampling_params: expected SamplingParams, found {shown(given)}")
            return [given or self.sampling_params()] * num_prompts
        if len(given) != num_prompts:
            raise RequestError(
                f"found {len(given)} sampling params for {num_prompts} prompts; give one, or one for each"
            )
        return given

    def _add(self, request: OpenRequest, sink: Callable[[Event], None]) -> None:
        """Start a request; all its events, also those of its prompt's scores, go to `sink`."""
        ids, params = request.answer.prompt_token_ids, request.params
        if params.prompt_logprobs is not None:
            if len(ids) < 2:  # the first token has nothing before it
                request.answer.prompt_logprobs = [None] * len(ids)
            else:
                wanted = max(1, params.prompt_logprobs), params.cache_salt, 1, params.adapter
                request.score_id = self._client.score(ids, sink, *wanted)
        request.id = request.answer.request_id = self._client.add(ids, params, sink)

    def _abort(self, request: OpenRequest) -> None:
        for each in filter(None, (request.id, request.score_id)):
            self._client.abort(each)

    def _run(self, requests: list[OpenRequest], progress: bool) -> list[RequestOutput]:
        """Run all requests to their end; after an error the others are aborted."""
        has_bar = keywords.is_bar(progress)
        events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        by_id: dict[str, OpenRequest] = {}
        try:
            for request in requests:
                self._add(request, events.put)
                by_id.update(dict.fromkeys(filter(None, (request.id, request.score_id)), request))
            num_open = len(requests)
            with ProgressBar(len(requests), has_bar) as bar:
                while num_open:
                    event = events.get()
                    request = by_id[event.request_id or ""]
                    self._take(request, event)
                    if request.is_done and not request.is_counted:
                        request.is_counted = True
                        num_open -= 1
                        bar.advance()
        finally:
            for request in requests:
                if not request.is_done:
                    self._abort(request)
        return [_whole(request) for request in requests]

    def _take(self, request: OpenRequest, event: Event) -> bool:
        """Add an event to its request's answer, and return whether there is anything new."""
        if isinstance(event, Scored):
            request.add_score(event.score)
            return request.is_done
        if not isinstance(event, Output):
            raise _error(event)
        output = request.answer.outputs[event.index]
        if output.finish_reason is not None:  # a stop string ended the sequence before this event came
            return False
        if event.index == 0 and event.num_cached is not None:
            request.answer.num_cached_tokens = event.num_cached
        output.num_forgotten_tokens = max(output.num_forgotten_tokens, event.num_forgotten)
        stream = request.streams[event.index] if request.streams else None
        delta = None if stream is None else stream.push(event.token_ids, event.finish_reason)
        num_tokens = len(event.token_ids) if delta is None else delta.num_tokens
        output.token_ids += event.token_ids[:num_tokens]
        if event.logprobs is not None:
            request.add_logprobs(output, event.logprobs[:num_tokens])
        output.finish_reason = event.finish_reason
        if delta is None:
            return True
        output.text += delta.text
        output.new_text += delta.text
        output.finish_reason, output.stop = delta.finish_reason, delta.stop
        if delta.finish_reason is not None and event.finish_reason is None:
            self._client.abort(event.request_id, event.index)  # `submit` may get it before it has the request's id
        return bool(delta.text) or delta.finish_reason is not None


@final
class Stream:
    """An answer as it grows, for `for` and for `async for`; leaving the loop aborts the request."""

    def __init__(self, llm: LLM, request: OpenRequest) -> None:
        self._llm, self._request = llm, request
        self._events: queue.SimpleQueue[Event | None] = queue.SimpleQueue()  # None: aborted

    def abort(self) -> None:
        """End a `for` loop over the answer, and the request with it; any thread may call this."""
        self._events.put(None)

    def __iter__(self) -> Iterator[RequestOutput]:
        request = self._begin(self._events.put)
        try:
            while not request.is_done and (event := self._events.get()) is not None:
                if self._llm._take(request, event):
                    yield request.answer
                    request.clear_new_text()
        finally:
            self._llm._abort(request)

    async def __aiter__(self) -> AsyncIterator[RequestOutput]:
        import asyncio  # imported here, because it is slow to import and few need it

        loop = asyncio.get_running_loop()
        events: asyncio.Queue[Event] = asyncio.Queue()

        def sink(event: Event) -> None:
            with suppress(RuntimeError):  # the loop is closed: there is no listener any more
                loop.call_soon_threadsafe(events.put_nowait, event)

        request = self._begin(sink)
        try:
            while not request.is_done:
                if self._llm._take(request, await events.get()):
                    yield request.answer
                    request.clear_new_text()
        finally:
            self._llm._abort(request)

    def _begin(self, sink: Callable[[Event], None]) -> OpenRequest:
        """Start the request; a stream is read once."""
        if self._request.id:
            raise RequestError("this stream was read already; call LLM.stream again")
        self._llm._add(self._request, sink)
        return self._request


def _whole(request: OpenRequest) -> RequestOutput:
    """Return the answer to a request that is done, with the best of its outputs if it asked for these."""
    request.answer.outputs = best(request.answer.outputs, request.asked or request.params)
    return request.answer


def _error(event: Event) -> InfercError:
    if isinstance(event, Failed):
        return event.error
    return InfercError(f"unexpected answer from the engine: {event}")
