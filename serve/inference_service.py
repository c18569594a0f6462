"""The methods of inferc.v1.InferenceService, over the models of a server."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator
from contextlib import closing

from inferc import __version__
from inferc.errors import RequestError
from inferc.runtime.engine import EngineStats
from inferc.runtime.sampling_params import changed
from inferc.runtime.step import Logprobs
from inferc.serve import protocol, text_calls
from inferc.serve.access import CALLER
from inferc.serve.embedding import embed
from inferc.serve.kv_events import EventsOff
from inferc.serve.models import ModelEntry, Models, ServedModel
from inferc.serve.protos.inferc.v1 import inference_pb2 as pb
from inferc.serve.streams import Piece


class InferenceService:
    """One method for each of the service's; errors are those of statuses.py."""

    def __init__(self, models: Models) -> None:
        self.models = models

    # ------------------------------------------------------------------------------------------- generating

    async def generate(self, request: pb.GenerateRequest) -> AsyncGenerator[pb.GenerateResponse, None]:
        model = self.models.get(request.model)
        engine = model.engine
        defaults = CALLER.get().limits.defaults(engine.facts.defaults)
        params = changed(protocol.sampling_params(request.sampling, defaults), tap=request.tap)
        model.check_open(params)  # before the work that a prompt is
        prompt = await self._prompt(model, request)
        prompt_logprobs: list[Logprobs] = []
        if top := protocol.num_top(request, "prompt_logprobs", 0):
            name = protocol.request_id(request)
            prompt_logprobs = (await model.score(prompt, top, name, cache_salt=params.cache_salt)).rows
        usage = pb.Usage(prompt_tokens=len(prompt))
        running = params.n
        # Closed also when the client went away or its deadline passed: the blocks come free at once.
        with closing(model.open(prompt, params, protocol.request_id(request))) as stream:
            async for piece in stream:
                usage.output_tokens += len(piece.token_ids)
                running -= piece.finish_reason is not None
                usage.cached_tokens = stream.num_cached
                usage.forgotten_tokens = sum(stream.num_forgotten.values())
                response = _response(stream.request_id, piece, None if running else usage)
                if prompt_logprobs:
                    response.prompt_logprobs.extend(protocol.logprobs(prompt_logprobs))
                    prompt_logprobs = []
                yield response

    async def complete(self, request: pb.GenerateRequest) -> pb.CompleteResponse:
        answer = pb.CompleteResponse()
        outputs: dict[int, pb.Completion] = {}
        texts: dict[int, list[str]] = {}
        async for message in self.generate(request):
            output = outputs.setdefault(message.index, pb.Completion())
            texts.setdefault(message.index, []).append(message.text)
            output.token_ids.extend(message.token_ids)
            output.logprobs.extend(message.logprobs)
            output.finish_reason = message.finish_reason
            answer.prompt_logprobs.extend(message.prompt_logprobs)
            answer.request_id = message.request_id
            if message.HasField("usage"):
                answer.usage.CopyFrom(message.usage)
        for index, output in sorted(outputs.items()):
            output.text = "".join(texts[index])
            answer.outputs.append(output)
        return answer

    async def score(self, request: pb.ScoreRequest) -> pb.ScoreResponse:
        model = self.models.get(request.model)
        top = protocol.num_top(request, "top_logprobs", 1)
        ids = await self._prompt(model, request)
        score = await model.score(ids, top, protocol.request_id(request), request.cache_salt)
        return pb.ScoreResponse(token_ids=ids, logprobs=protocol.logprobs(score.rows))

    async def embed(self, request: pb.EmbedRequest) -> pb.EmbedResponse:
        model = self.models.get(request.model)
        inputs: list[str | list[int]] = []
        for number, each in enumerate(request.inputs):
            kind = each.WhichOneof("input")
            if kind is None:
                raise RequestError(f"inputs[{number}] is empty; set text or token_ids")
            if kind == "token_ids":
                model.check_length(len(each.token_ids.ids), room=0)
            inputs.append(each.text if kind == "text" else list(each.token_ids.ids))
        vectors = await embed(model, inputs, request.dimensions if request.HasField("dimensions") else None)
        return pb.EmbedResponse(
            embeddings=[pb.Embedding(values=row) for row in vectors.values.tolist()],
            usage=pb.Usage(prompt_tokens=vectors.num_tokens),
        )

    async def abort(self, request: pb.AbortRequest) -> pb.AbortResponse:
        caller = CALLER.get()
        owner = None if caller.key is None or caller.key.admin else caller.name
        found = [model.engine.abort(request.request_id, owner) for model in self.models.served]
        return pb.AbortResponse(aborted=any(found))

    # ------------------------------------------------------------------------------------------------- text

    async def tokenize(self, request: pb.TokenizeRequest) -> pb.TokenizeResponse:
        model = self.models.get(request.model)
        if request.WhichOneof("prompt") == "chat":
            ids = await text_calls.tokenize_chat(model, protocol.chat_messages(request.chat))
        elif request.WhichOneof("prompt") == "text":
            special = request.add_special_tokens if request.HasField("add_special_tokens") else True
            ids = await text_calls.tokenize(model, request.text, special)
        else:
            raise RequestError("the request has no prompt; set text or chat")
        return pb.TokenizeResponse(token_ids=ids)

    async def detokenize(self, request: pb.DetokenizeRequest) -> pb.DetokenizeResponse:
        model = self.models.get(request.model)
        skip = request.skip_special_tokens if request.HasField("skip_special_tokens") else True

        def made() -> pb.DetokenizeResponse:
            text = model.decode(request.token_ids, skip)
            return pb.DetokenizeResponse(text=text, raw=b"".join(map(model.engine.text.token_bytes, request.token_ids)))

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
            disk_usage=stats.lower_usage,
            blocks_stored=stats.num_stored,
            blocks_found_on_disk=stats.num_raised,
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
                pb.ModelStatus(model=entry.name, state=entry.state, reason=reason_of(entry))
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

    def subscribe_kv_events(self, request: pb.SubscribeKvEventsRequest) -> AsyncGenerator[pb.KvEventBatch, None]:
        """The batches that follow; which is the first is settled when this returns."""
        events = self.models.get(request.model).kv_events
        if events is None:
            raise EventsOff("this server does not collect KV events; start it with --kv-events grpc, or an endpoint")
        start = request.start_sequence if request.HasField("start_sequence") else events.end
        return protocol.kv_batches(events.follow(start), events.epoch)

    async def _prompt(self, model: ServedModel, request: pb.GenerateRequest | pb.ScoreRequest) -> list[int]:
        kind = request.WhichOneof("prompt")
        if kind == "token_ids":
            model.check_length(len(request.token_ids.ids), room=1 if isinstance(request, pb.GenerateRequest) else 0)
            return list(request.token_ids.ids)
        if kind == "text":
            return await model.encode(request.text)
        if kind == "chat":
            goes_on = isinstance(request, pb.GenerateRequest)
            variables = {"add_generation_prompt": goes_on}
            return await model.encode_chat(protocol.chat_messages(request.chat), variables)
        raise RequestError("the request has no prompt; set one of text, token_ids or chat")


async def engine_stats(model: ServedModel) -> EngineStats:
    """The engine's counters of now; of a model that sleeps all are 0. Raises EngineUnavailable."""
    return EngineStats() if model.state == "asleep" else await model.engine.stats()


def reason_of(entry: ModelEntry) -> str:
    """Why a model is not served, as the caller may know it: why one cannot be loaded names files of the server."""
    key = CALLER.get().key
    if entry.state != "unloaded" or not entry.reason or (key is not None and key.admin):
        return entry.reason
    return "it cannot be loaded; the server's log has the details"


def _response(request_id: str, piece: Piece, usage: pb.Usage | None) -> pb.GenerateResponse:
    return pb.GenerateResponse(
        request_id=request_id,
        index=piece.index,
        text=piece.text,
        token_ids=piece.token_ids,
        logprobs=protocol.logprobs(piece.logprobs) if piece.logprobs else None,
        finish_reason=protocol.FINISH_REASONS[piece.finish_reason],
        usage=usage,
    )
