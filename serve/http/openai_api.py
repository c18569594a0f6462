"""The routes of OpenAI's HTTP API over the models of a server, with those of vLLM's additions that clients use."""

from __future__ import annotations

import base64
import secrets
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from inferc.runtime.openai.answer import Answer, response_body
from inferc.runtime.openai.reasoning import with_reasoning
from inferc.runtime.openai.reasoning_wishes import template_with_effort
from inferc.runtime.openai.request import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    OpenAIRequest,
    model_of,
    parse_request,
)
from inferc.runtime.openai.text_requests import read_detokenize, read_embedding, read_tokenize
from inferc.runtime.openai.tool_calls import with_calls
from inferc.runtime.step.sampling_params import from_chat, of_chat
from inferc.serve.answering.answering import MANY_ENTRIES, Answering
from inferc.serve.answering.logprobs_json import chat_lists, json_items, json_list
from inferc.serve.http import messages_api
from inferc.serve.http.answers import STREAMED, Json, answered
from inferc.serve.http.bodies import described, read_body
from inferc.serve.http.edge import body_of, is_anthropics, while_client_waits
from inferc.serve.http.openai_chunks import DONE, Chunks, event
from inferc.serve.http.responses_api import responses_routes
from inferc.serve.models import text_calls
from inferc.serve.models.adapted_model import AdaptedModel
from inferc.serve.models.embedding import Vectors, check_embeds, embed
from inferc.serve.models.long_texts import BY_TURNS, in_text_thread
from inferc.serve.models.models import Models
from inferc.serve.models.served_model import ServedModel
from inferc.serve.security.access import CALLER
from inferc.version import __version__

OWNER = "inferc"


def openai_routes(models: Models) -> APIRouter:
    """Return the routes of all paths of the API."""
    routes = APIRouter()

    # ------------------------------------------------------------------------------------------ generating

    @routes.post(COMPLETIONS, tags=["openai"], responses=STREAMED, openapi_extra=described("CompletionBody"))
    async def completions(request: Request) -> Response:
        """Continue one prompt or several."""
        return await _generate(models, COMPLETIONS, request)

    @routes.post(CHAT, tags=["openai"], responses=STREAMED, openapi_extra=described("ChatBody"))
    async def chat_completions(request: Request) -> Response:
        """Answer a conversation, by the model's chat template."""
        return await _generate(models, CHAT, request)

    routes.include_router(responses_routes(models))

    @routes.post(EMBEDDINGS, tags=["openai"], response_model=None, openapi_extra=described("EmbeddingBody"))
    async def embeddings(http: Request) -> Response:
        """Compute the embedding vectors of texts, for models that make them."""
        body = await read_body(http)
        request = await body.read_as(read_embedding)
        model = models.get(request.model)
        check_embeds(model)
        http.scope["started"]()  # the rest waits for the engine, not for the event loop
        async with while_client_waits(http.receive):
            vectors = await embed(model, request.inputs, request.dimensions)
        return await in_text_thread(partial(_embeddings, model.name, vectors, request.encoding_format))

    # -------------------------------------------------------------------------------------------- models

    @routes.get("/v1/models", tags=["openai"])
    async def list_models(http: Request) -> Json:
        """List the models that are served."""
        if is_anthropics(http.scope):
            return Json(messages_api.listed(models))
        return Json({"object": "list", "data": [_model(model) for model in (*models.served, *models.adapted)]})

    @routes.get("/v1/models/{name:path}", tags=["openai"])
    async def get_model(http: Request, name: str) -> Json:
        model = models.get(name)
        return Json(messages_api.model_body(model) if is_anthropics(http.scope) else _model(model))

    # ---------------------------------------------------------------------------------------------- text

    @routes.post("/tokenize", tags=["text"], openapi_extra=described("TokenizeBody"))
    async def tokenize(http: Request) -> Json:
        """Return the token ids of a prompt or a conversation, as the model would get them."""
        body = await read_body(http)
        request = await body.read_as(read_tokenize)
        model, prompt = models.get(request.model), request.prompt
        text = model.engine.text
        if request.has_tools:
            text.check_calls()
        http.scope["started"]()
        async with while_client_waits(http.receive):
            if isinstance(prompt, str):
                ids = await text_calls.tokenize(model, prompt, request.add_special_tokens)
            else:
                template = template_with_effort(request.template, text) or request.template
                ids = await text_calls.tokenize_chat(model, prompt, template)
            make = partial(_tokens, model, ids, request.return_token_strs)
            return make() if len(ids) <= MANY_ENTRIES else await BY_TURNS.run(make)

    @routes.post("/detokenize", tags=["text"], openapi_extra=described("DetokenizeBody"))
    async def detokenize(http: Request) -> Json:
        """Return the text of token ids."""
        body = await read_body(http)
        request = await body.read_as(read_detokenize)
        model = models.get(request.model)
        http.scope["started"]()
        skip, ids = request.skip_special_tokens, request.tokens
        async with while_client_waits(http.receive):
            return await text_calls.detokenize(model, ids, lambda: Json({"prompt": model.decode(ids, skip)}))

    @routes.get("/tokenizer_info", tags=["text"])
    async def tokenizer_info(model: str = "") -> Json:
        """Return the special tokens and the chat template of a model."""
        served = models.get(model)
        text, facts = served.engine.text, served.engine.facts
        return Json(
            {
                **text.facts,
                "tokenizer_class": "PreTrainedTokenizerFast",
                "model_max_length": facts.max_model_len,
                "vocab_size": facts.vocab_size,
                "eos_token_ids": list(facts.eos_token_ids),
                "chat_template": text.template_source,
                "sampling_defaults": _sampling_defaults(served),
            }
        )

    # -------------------------------------------------------------------------------------------- server

    @routes.get("/health", tags=["server"], response_class=Response)
    @routes.get("/ready", include_in_schema=False)
    @routes.head("/health", include_in_schema=False)
    @routes.head("/ready", include_in_schema=False)
    async def health() -> Response:
        """Answer with status 200 while requests are accepted, else with 503."""
        return Response(status_code=200 if models.is_serving else 503)

    @routes.get("/live", tags=["server"], response_class=Response)
    @routes.head("/live", include_in_schema=False)
    async def live() -> Response:
        """Answer with status 200 as long as the server needs no restart, and with 503 once an engine was given up."""
        return Response(status_code=503 if models.is_broken else 200)

    @routes.get("/version", tags=["server"])
    async def version() -> Json:
        return Json({"version": __version__})

    return routes


SHOWN_DEFAULTS = (
    "temperature",
    "top_p",
    "top_k",
    "min_p",
    "typical_p",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
)


def _sampling_defaults(model: ServedModel) -> dict[str, Any]:
    """Return the sampling parameters of a chat that gives none."""
    params = from_chat({}, of_chat(model.engine.facts.defaults))
    return {name: getattr(params, name) for name in SHOWN_DEFAULTS}


def _model(model: ServedModel) -> dict[str, Any]:
    parent = model.base_name if isinstance(model, AdaptedModel) else None
    return {
        "id": model.name,
        "object": "model",
        "created": model.info.created,
        "owned_by": OWNER,
        "root": parent or model.name,
        "parent": parent,
        "max_model_len": model.engine.facts.max_model_len,
    }


def _embeddings(model: str, vectors: Vectors, form: str) -> Json:
    """Return the answer, encoded a vector at a time: all at once would block other threads for a third of a second."""
    data = []
    for index, row in enumerate(vectors.values):
        value: Any = row.tolist() if form == "float" else base64.b64encode(row.astype("<f4").tobytes()).decode()
        data.append({"object": "embedding", "index": index, "embedding": msgspec.Raw(msgspec.json.encode(value))})
    usage = {"prompt_tokens": vectors.num_tokens, "total_tokens": vectors.num_tokens}
    return Json({"object": "list", "data": data, "model": model, "usage": usage})


def _tokens(model: ServedModel, ids: list[int], is_spelled: bool) -> Json:
    """Return the answer of a /tokenize call."""

    def spelled(part: Sequence[int]) -> list[str]:
        return [model.engine.text.token_bytes(token).decode(errors="replace") for token in part]

    facts = {"count": len(ids), "max_model_len": model.engine.facts.max_model_len}
    strings = {"token_strs": json_list(json_items(ids, spelled))} if is_spelled else {}
    return Json({**facts, "tokens": json_list(json_items(ids)), **strings})


async def _generate(models: Models, url: str, http: Request) -> Response:
    body = await read_body(http)
    model = models.get(model_of(body.values))
    of_model = model.engine.facts.defaults
    defaults = CALLER.get().limits.defaults(of_chat(of_model) if url == CHAT else of_model)
    request = await body.read_as(partial(parse_request, url, is_served=True, defaults=defaults))
    form = _Completions(secrets.token_hex(12), int(time.time()), model)
    return await answered(http, model, request, form.id_of(request), form)


@dataclass(frozen=True)
class _Completions:
    """The form of completions and chat completions: one object, or a stream of chunks.

    name: the random part of the answer's id.
    """

    name: str
    created: int
    model: ServedModel

    def id_of(self, request: OpenAIRequest) -> str:
        return f"{'chatcmpl' if request.kind == 'chat' else 'cmpl'}-{self.name}"

    def whole(self, answering: Answering, answers: list[Answer]) -> dict[str, Any]:
        """Return the answer as one object, with log probabilities that were encoded as JSON in parts."""
        request, token = answering.request, answering.token
        outputs = [output for answer in answers for output in answer.outputs]
        plain = [replace(each, outputs=[replace(output, logprobs=None) for output in each.outputs]) for each in answers]
        found = response_body(request, plain, self.name, self.model.name, self.created, token)
        if answering.calls is not None:
            found["choices"] = [with_calls(choice, answering.calls) for choice in found["choices"]]
        if request.kind == "chat":
            thoughts = [each for answer in answers for each in answer.reasoning]
            choices = zip(found["choices"], thoughts, strict=True)
            found["choices"] = [with_reasoning(choice, thought) for choice, thought in choices]
        for index, (choice, output) in enumerate(zip(found["choices"], outputs, strict=True)):
            if request.kind == "completion":
                choice.update(answering.prompt_json(index // request.num_outputs).choice(output, token))
            elif output.logprobs is not None:
                choice["logprobs"] = chat_lists(output.logprobs, token)
        of_chat = answering.prompt_json(0).fields if request.kind == "chat" else {}
        warnings = {"warnings": request.warnings} if request.warnings else {}
        return {**found, **of_chat, **warnings, "system_fingerprint": self.model.fingerprint}

    async def events(self, answering: Answering) -> AsyncGenerator[bytes, None]:
        """Yield the events of the stream; an error before the first is raised, a later one is an event of its own."""
        head = {
            "id": self.id_of(answering.request),
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": self.model.fingerprint,
        }
        options = answering.request.stream_options
        continuous = options.continuous_usage_stats
        chunks = Chunks(answering.request, head, answering.token, answering.calls)
        counts: dict[int, int] = {}
        has_begun = False
        try:
            async with aclosing(answering.deltas()) as deltas:
                async for number, index, delta in deltas:
                    counts[number] = counts.get(number, 0) + len(delta.token_ids)
                    usage = answering.usage_of(number, counts[number]) if continuous else None
                    prompt_json = answering.prompt_json(number)
                    if answering.num_entries > MANY_ENTRIES and not chunks.has_begun(index):
                        encoded = await in_text_thread(partial(chunks.of, index, delta, prompt_json, usage))
                    else:
                        encoded = chunks.of(index, delta, prompt_json, usage)
                    if encoded:  # nothing while a call may begin
                        yield encoded
                    has_begun = True
            if options.include_usage:
                yield chunks.usage(answering.usage(counts))
        except Exception as error:
            if not has_begun:
                raise
            yield event(body_of(error))
        finally:
            answering.close()
        yield DONE
