"""The methods of inferc.v1.InferenceService over the models of a server."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing, closing
from dataclasses import replace
from functools import partial

from inferc.errors import RequestError
from inferc.runtime.engine.stats import EngineStats
from inferc.runtime.openai.reasoning_wishes import template_with_effort
from inferc.runtime.reasoning.reasoning import reasoning_of
from inferc.runtime.step.plan import Logprobs
from inferc.runtime.step.sampling_params import changed, check_name
from inferc.runtime.text.turns import Known
from inferc.runtime.tools.tools import held
from inferc.serve.answering.entry_limits import check_entries, check_likely
from inferc.serve.answering.reasoning import ReasoningApart
from inferc.serve.errors import EventsOff
from inferc.serve.grpc import protocol
from inferc.serve.grpc.answers import Answer, joined, slices
from inferc.serve.grpc.chats import Calls, Conversation, conversation_of, whole_calls
from inferc.serve.models import text_calls
from inferc.serve.models.embedding import Vectors, check_embeds, embed
from inferc.serve.models.long_texts import in_text_thread
from inferc.serve.models.models import ModelEntry, Models
from inferc.serve.models.served_model import ServedModel
from inferc.serve.models.streams import Delta, Kind
from inferc.serve.protos.inferc.v1 import inference_pb2 as pb
from inferc.serve.security.access import CALLER
from inferc.version import __version__

LARGE_SAMPLING_BYTES = 1 << 14  # sampling parameters of this size take milliseconds to check


class InferenceService:
    """The implementation of the service: one method for each RPC; errors become the statuses of statuses.py."""

    def __init__(self, models: Models) -> None:
        self.models = models

    # ------------------------------------------------------------------------------------------- generating

    async def generate(self, request: pb.GenerateRequest) -> AsyncGenerator[Answer, None]:
        async with aclosing(self._answers(request)) as answers:
            async for response, rows in answers:
                if rows:
                    yield await joined(_with_prompt(response, rows), _num_entries(rows))
                else:
                    yield response

    async def complete(self, request: pb.GenerateRequest) -> Answer:
        answer = pb.CompleteResponse()
        outputs: dict[int, pb.Completion] = {}
        texts: dict[int, list[str]] = {}
        thoughts: dict[int, list[str]] = {}
        calls: dict[int, list[pb.ToolCallPart]] = {}
        rows: list[Logprobs] = []
        async with aclosing(self._answers(request, is_whole=True)) as answers:
            async for response, prompt_rows in answers:
                output = outputs.setdefault(response.index, pb.Completion())
                texts.setdefault(response.index, []).append(response.text)
                thoughts.setdefault(response.index, []).append(response.reasoning)
                calls.setdefault(response.index, []).extend(response.tool_calls)
                output.token_ids.extend(response.token_ids)
                output.logprobs.extend(response.logprobs)
                output.finish_reason = response.finish_reason
                rows += prompt_rows
                answer.request_id = response.request_id
                if response.HasField("usage"):
                    answer.usage.CopyFrom(response.usage)
        for index, output in outputs.items():
            output.text = "".join(texts[index])
            output.reasoning = "".join(thoughts[index])
            output.tool_calls.extend(whole_calls(calls[index]))
        num_entries = answer.usage.output_tokens * (1 + request.sampling.logprobs) + _num_entries(rows)
        return await joined(_whole(answer, [output for _, output in sorted(outputs.items())], rows), num_entries)

    async def _answers(
        self, request: pb.GenerateRequest, is_whole: bool = False
    ) -> AsyncGenerator[tuple[pb.GenerateResponse, list[Logprobs]], None]:
        """Yield the output delta by delta; the first one has the prompt's log probabilities if they are asked for.

        is_whole: the deltas will be joined, so together they may have no more entries than one answer.
        """
        model = self.models.get(request.model)
        engine = model.engine
        defaults = CALLER.get().limits.defaults(engine.facts.defaults)
        read = partial(protocol.sampling_params, request.sampling, defaults)
        is_large = request.sampling.ByteSize() > LARGE_SAMPLING_BYTES
        params = changed(await in_text_thread(read) if is_large else read(), tap=request.tap)
        if (beams := protocol.beams_of(request.sampling)) is not None:
            _check_beside_beams(request, is_whole)
        chat = await conversation_of(request.chat) if request.WhichOneof("prompt") == "chat" else None
        tools = None if chat is None else chat.tools
        params, form = held(params, tools, lambda: engine.text, chat is not None and chat.reasoning == "in_text")
        calls = Calls(form) if form else None
        model.check_open(params, 1, 0 if beams is None else beams.beam_width)  # before the work on the prompt
        if chat is not None:
            if (limit := chat.max_reasoning_tokens) is not None:
                engine.text.check_reasoning()
            chat = replace(chat, template=template_with_effort(chat.template, engine.text) or chat.template)
        prompt = await self._prompt(model, request, chat)
        if params.has_texts:
            params = await model.spelled(params)
        apart = None
        if chat is not None:
            reasoning, params = reasoning_of(engine.text, prompt, params, limit, None if form is None else form.begun)
            apart = None if reasoning is None else ReasoningApart(reasoning, chat.reasoning)
        rows: list[Logprobs] = []
        if top := protocol.num_top(request, "prompt_logprobs", 0):
            name = protocol.request_id(request)
            check_entries(len(prompt) * (1 + top))
            if len(prompt) > 1:  # the first token has nothing before it
                rows = (await model.score(prompt, top, name, cache_salt=params.cache_salt)).rows
        usage, running, num_likely = pb.Usage(prompt_tokens=len(prompt)), params.n, 0
        # The stream is also closed when the client left or its deadline passed, which frees its KV blocks at once.
        kind: Kind = "completion" if chat is None else "chat"
        marks = {**(form.marks if form else {}), **((apart.marks if apart else None) or {})}
        opened = model.open(prompt, params, protocol.request_id(request), kind=kind, marks=marks, beams=beams)
        with closing(opened) as stream:
            async for raw in stream:
                delta = raw if apart is None else apart.of(raw.index, raw)
                if is_whole:
                    num_likely += len(delta.logprobs) * (1 + (params.logprobs or 0))
                    check_likely(num_likely, [stream])
                usage.output_tokens += len(delta.token_ids)
                running -= delta.finish_reason is not None
                if apart is not None:
                    usage.reasoning_tokens = apart.num_tokens
                usage.cached_tokens = stream.num_cached
                usage.forgotten_tokens = sum(stream.num_forgotten.values())
                unread = delta if calls is None else replace(delta, text="")  # `calls` reads it, marks and all
                response = _response(stream.request_id, unread, None if running else usage)
                if calls is not None:
                    calls.read(response, delta)
                yield response, rows
                rows = []

    async def score(self, request: pb.ScoreRequest) -> Answer:
        model = self.models.get(request.model)
        top = protocol.num_top(request, "top_logprobs", 1)
        check_name("cache_salt", request.cache_salt)
        chat = await conversation_of(request.chat) if request.WhichOneof("prompt") == "chat" else None
        ids = await self._prompt(model, request, chat)
        first = request.first if request.HasField("first") else 1
        check_entries((len(ids) - first) * (1 + top))
        name, salt = protocol.request_id(request), request.cache_salt
        rows = (await model.score(ids, top, name, salt, first=first)).rows
        return await joined(_scores(ids, rows), len(ids) + _num_entries(rows))

    async def embed(self, request: pb.EmbedRequest) -> Answer:
        model = self.models.get(request.model)
        check_embeds(model)
        protocol.check_embed(request)
        inputs = await in_text_thread(lambda: [_input_of(at, each) for at, each in enumerate(request.inputs)])
        vectors = await embed(model, inputs, request.dimensions if request.HasField("dimensions") else None)
        return await joined(_embeddings(vectors), vectors.values.size)

    async def abort(self, request: pb.AbortRequest) -> pb.AbortResponse:
        owner = CALLER.get().sees
        found = [model.engine.abort(request.request_id, owner) for model in self.models.served]
        return pb.AbortResponse(aborted=any(found))

    # ------------------------------------------------------------------------------------------------- text

    async def tokenize(self, request: pb.TokenizeRequest) -> Answer:
        model = self.models.get(request.model)
        if request.WhichOneof("prompt") == "chat":
            chat = await conversation_of(request.chat)
            goes_on = request.add_generation_prompt if request.HasField("add_generation_prompt") else True
            variables = {**chat.variables, "add_generation_prompt": goes_on}
            known = Known(request.num_known, request.mark)
            ids = await text_calls.tokenize_chat(model, chat.messages, variables, known)
        elif request.WhichOneof("prompt") == "text":
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            ids = await text_calls.tokenize(model, request.text, special)
        else:
            raise RequestError("the request has no prompt; set text or chat")
        return await joined((pb.TokenizeResponse(token_ids=part) for part in slices(ids)), len(ids))

    async def detokenize(self, request: pb.DetokenizeRequest) -> Answer:
        model = self.models.get(request.model)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True

        def made() -> bytes:
            text = model.decode(request.token_ids, skip)
            raw = b"".join(map(model.engine.text.token_bytes, request.token_ids))
            return pb.DetokenizeResponse(text=text, raw=raw).SerializeToString()

        return await text_calls.detokenize(model, request.token_ids, made)

    # ----------------------------------------------------------------------------------------------- models

    async def get_model_info(self, request: pb.GetModelInfoRequest) -> pb.GetModelInfoResponse:
        model = self.models.get(request.model)
        facts = model.engine.facts
        return pb.GetModelInfoResponse(
            model=model.name,
            server_version=__version__,
            model_type=model.info.model_type,
            dtype=model.info.dtype,
            max_model_len=facts.max_model_len,
            vocab_size=facts.vocab_size,
            eos_token_ids=facts.eos_token_ids,
            has_chat_template=model.engine.text.has_chat_template,
            defaults=protocol.default_params(facts.defaults),
            max_num_seqs=model.info.max_num_seqs,
            embeds=model.embeds,
        )

    async def get_loads(self, request: pb.GetLoadsRequest) -> pb.GetLoadsResponse:
        model = self.models.get(request.model)
        stats = await engine_stats(model)
        return pb.GetLoadsResponse(
            num_running=stats.num_running,
            num_waiting=stats.num_waiting,
            kv_usage=stats.kv_usage,
            num_requests=model.engine.num_requests,
            prompt_tokens=stats.prompt_tokens,
            output_tokens=stats.output_tokens,
            num_preemptions=stats.num_preemptions,
            admitted_tokens=stats.admitted_tokens,
            cached_tokens=stats.cached_tokens,
            num_refused=stats.num_refused,
            disk_usage=stats.offload_usage,
            blocks_stored=stats.num_stored,
            blocks_found_on_disk=stats.num_loaded,
            blocks_swapped=stats.num_swapped,
            blocks_spilled=stats.num_spilled,
            blocks_damaged=stats.num_damaged,
            length_error=stats.length_error,
            length_error_of_mean=stats.length_error_of_mean,
            step_cost_error=stats.cost_error,
            num_restarts=model.supervisor.num_restarts,
        )

    async def list_models(self, request: pb.ListModelsRequest) -> pb.ListModelsResponse:
        return pb.ListModelsResponse(
            models=[
                pb.ModelStatus(model=entry.name, state=entry.state, reason=reason_of(entry), adapters=entry.adapters)
                for entry in self.models.entries()
            ]
        )

    async def load_model(self, request: pb.LoadModelRequest) -> pb.LoadModelResponse:
        started = time.monotonic()
        await self.models.load(request.model)
        return pb.LoadModelResponse(seconds=time.monotonic() - started)

    async def unload_model(self, request: pb.UnloadModelRequest) -> pb.UnloadModelResponse:
        await self.models.unload(request.model)
        return pb.UnloadModelResponse()

    async def sleep_model(self, request: pb.SleepModelRequest) -> pb.SleepModelResponse:
        await self.models.sleep(request.model)
        return pb.SleepModelResponse()

    async def wake_model(self, request: pb.WakeModelRequest) -> pb.WakeModelResponse:
        started = time.monotonic()
        await self.models.wake(request.model)
        return pb.WakeModelResponse(seconds=time.monotonic() - started)

    async def load_adapter(self, request: pb.LoadAdapterRequest) -> pb.LoadAdapterResponse:
        started = time.monotonic()
        await self.models.load_adapter(request.adapter, request.path, request.model)
        return pb.LoadAdapterResponse(seconds=time.monotonic() - started)

    async def unload_adapter(self, request: pb.UnloadAdapterRequest) -> pb.UnloadAdapterResponse:
        await self.models.unload_adapter(request.adapter, request.model)
        return pb.UnloadAdapterResponse()

    def subscribe_kv_events(self, request: pb.SubscribeKvEventsRequest) -> AsyncGenerator[pb.KvEventBatch, None]:
        """Return the batches of KV events to come; which one is the first is decided before this returns."""
        events = self.models.get(request.model).kv_events
        if events is None:
            raise EventsOff("this server does not collect KV events; start it with --kv-events grpc, or an endpoint")
        start = request.start_sequence if request.HasField("start_sequence") else events.end
        return protocol.kv_batches(events.follow(start), events.epoch)

    async def _prompt(
        self, model: ServedModel, request: pb.GenerateRequest | pb.ScoreRequest, chat: Conversation | None
    ) -> list[int]:
        kind = request.WhichOneof("prompt")
        if kind == "token_ids":
            model.check_length(len(request.token_ids.ids), room=1 if isinstance(request, pb.GenerateRequest) else 0)
            return list(request.token_ids.ids)
        if kind == "text":
            return await model.encode(request.text)
        if chat is not None:
            goes_on = isinstance(request, pb.GenerateRequest)
            return await model.encode_chat(chat.messages, {**chat.variables, "add_generation_prompt": goes_on})
        raise RequestError("the request has no prompt; set one of text, token_ids or chat")


def _check_beside_beams(request: pb.GenerateRequest, is_whole: bool) -> None:
    """Raise RequestError for what of a request does not go with a beam search."""
    if not is_whole:
        raise RequestError("beam_search: its answers are known when it ends; call Complete, or leave it out")
    if request.tap:
        raise RequestError("tap: of a beam search no values are kept; leave one of them out")
    if request.chat.tools or request.chat.HasField("max_reasoning_tokens"):
        raise RequestError(
            "beam_search: a search is held to no form; leave it out, or the chat's tools and max_reasoning_tokens"
        )


async def engine_stats(model: ServedModel) -> EngineStats:
    """Return the engine's present counters, all 0 if the model sleeps; raises EngineUnavailable."""
    return EngineStats() if model.state == "asleep" else await model.engine.stats()


def reason_of(entry: ModelEntry) -> str:
    """Return why a model is not served, as far as the caller may know: load errors name files of the server."""
    key = CALLER.get().key
    if entry.state != "unloaded" or not entry.reason or (key is not None and key.admin):
        return entry.reason
    return "it cannot be loaded; the server's log has the details"


def _response(request_id: str, delta: Delta, usage: pb.Usage | None) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        request_id=request_id,
        index=delta.index,
        text=delta.text,
        reasoning=delta.reasoning,
        token_ids=delta.token_ids,
        logprobs=protocol.logprobs(delta.logprobs) if delta.logprobs else None,
        finish_reason=protocol.FINISH_REASONS[delta.finish_reason],
        usage=usage,
    )


# -------------------------------------------------------------------------------------- answers of many entries


def _num_entries(rows: Sequence[Logprobs]) -> int:
    return len(rows) * (1 + len(rows[0].top)) if rows else 0


def _rows(rows: Sequence[Logprobs]) -> Iterator[list[pb.TokenLogprobs]]:
    return (protocol.logprobs(part) for part in slices(rows, 1 + len(rows[0].top) if rows else 1))


def _with_prompt(response: pb.GenerateResponse, rows: Sequence[Logprobs]) -> Iterator[pb.GenerateResponse]:
    yield response
    for part in _rows(rows):
        yield pb.GenerateResponse(prompt_logprobs=part)


def _whole(
    answer: pb.CompleteResponse, outputs: Sequence[pb.Completion], rows: Sequence[Logprobs]
) -> Iterator[pb.CompleteResponse]:
    yield answer
    for output in outputs:
        yield pb.CompleteResponse(outputs=[output])
    for part in _rows(rows):
        yield pb.CompleteResponse(prompt_logprobs=part)


def _scores(ids: Sequence[int], rows: Sequence[Logprobs]) -> Iterator[pb.ScoreResponse]:
    for part in slices(ids):
        yield pb.ScoreResponse(token_ids=part)
    for of_part in _rows(rows):
        yield pb.ScoreResponse(logprobs=of_part)


def _input_of(number: int, given: pb.EmbedInput) -> str | list[int]:
    """Return the prompt of a request, which is a text or token ids; raises RequestError."""
    kind = given.WhichOneof("input")
    if kind is None:
        raise RequestError(f"inputs[{number}] is empty; set text or token_ids")
    return given.text if kind == "text" else list(given.token_ids.ids)


def _embeddings(vectors: Vectors) -> Iterator[pb.EmbedResponse]:
    for row in vectors.values:
        yield pb.EmbedResponse(embeddings=[pb.Embedding(values=row.tolist())])
    yield pb.EmbedResponse(usage=pb.Usage(prompt_tokens=vectors.num_tokens))
