"""OpenAI's HTTP interface over the models of a server, and vLLM's additions that clients use."""

from __future__ import annotations

import asyncio
import base64
import importlib.metadata
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from fastapi import APIRouter, Request, Response

from inferc.errors import RequestError
from inferc.runtime.openai_answer import Answer, response_body
from inferc.runtime.openai_request import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    OpenAIRequest,
    embedding_inputs,
    parse_request,
)
from inferc.serve import text_calls
from inferc.serve.embedding import embed
from inferc.serve.http_answers import STREAMED, Json, answered
from inferc.serve.http_bodies import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, Sampling, TokenizeBody
from inferc.serve.http_edge import body_of, while_client_waits
from inferc.serve.models import Models, ServedModel
from inferc.serve.openai_answering import Answering
from inferc.serve.openai_chunks import DONE, Chunks, event
from inferc.serve.responses_api import responses_routes
from inferc.serve.streams import Piece

OWNER = "inferc"


def openai_routes(models: Models) -> APIRouter:
    """Every path of the interface."""
    routes = APIRouter()

    # ------------------------------------------------------------------------------------------ generating

    @routes.post(COMPLETIONS, tags=["openai"], response_model=None, responses=STREAMED)
    async def completions(body: CompletionBody, request: Request) -> Response:
        """Continue one prompt or several."""
        return await _generate(models, COMPLETIONS, body, request)

    @routes.post(CHAT, tags=["openai"], response_model=None, responses=STREAMED)
    async def chat_completions(body: ChatBody, request: Request) -> Response:
        """Answer a conversation, by the model's chat template."""
        return await _generate(models, CHAT, body, request)

    routes.include_router(responses_routes(models))

    @routes.post(EMBEDDINGS, tags=["openai"], response_model=None)
    async def embeddings(body: EmbeddingBody, request: Request) -> Response:
        """Vectors of texts, where the model makes them."""
        model = models.get(body.model or "")
        form = body.encoding_format or "float"
        if form not in ("float", "base64"):
            raise RequestError(f"encoding_format is {form!r:.40}; expected float or base64")
        inputs = embedding_inputs(body.input, body.said())
        request.scope["started"]()  # what follows waits for the engine
        async with while_client_waits(request.receive):
            vectors = await embed(model, inputs, body.dimensions)
        rows: list[Any] = vectors.values.tolist()
        if form == "base64":
            rows = [base64.b64encode(row.astype("<f4").tobytes()).decode() for row in vectors.values]
        usage = {"prompt_tokens": vectors.num_tokens, "total_tokens": vectors.num_tokens}
        data = [{"object": "embedding", "index": index, "embedding": row} for index, row in enumerate(rows)]
        return Json({"object": "list", "data": data, "model": model.name, "usage": usage})

    # -------------------------------------------------------------------------------------------- models

    @routes.get("/v1/models", tags=["openai"])
    async def list_models() -> Json:
        """The models that are served."""
        return Json({"object": "list", "data": [_model(model) for model in models.served]})

    @routes.get("/v1/models/{name:path}", tags=["openai"])
    async def get_model(name: str) -> Json:
        return Json(_model(models.get(name)))

    # ---------------------------------------------------------------------------------------------- text

    @routes.post("/tokenize", tags=["text"])
    async def tokenize(body: TokenizeBody, http: Request) -> Json:
        """Token ids of a prompt or a conversation, as the model would get them."""
        model = models.get(body.model or "")
        http.scope["started"]()
        if (body.prompt is None) == (body.messages is None):
            raise RequestError("prompt: expected one of prompt and messages")
        if body.prompt is not None:
            ids = await text_calls.tokenize(model, body.prompt, body.add_special_tokens is not False)
        else:
            request = parse_request(CHAT, body.said(), is_served=True)
            messages: Any = request.prompts[0]
            ids = await text_calls.tokenize_chat(model, messages, request.template)
        found: dict[str, Any] = {"count": len(ids), "max_model_len": model.engine.facts.max_model_len, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = await asyncio.to_thread(_spelled, model, ids)
        return Json(found)

    @routes.post("/detokenize", tags=["text"])
    async def detokenize(body: DetokenizeBody, http: Request) -> Json:
        """The text of token ids."""
        model = models.get(body.model or "")
        http.scope["started"]()
        skip = bool(body.skip_special_tokens)
        return Json(
            {"prompt": await text_calls.detokenize(model, body.tokens, lambda: model.decode(body.tokens, skip))}
        )

    @routes.get("/tokenizer_info", tags=["text"])
    async def tokenizer_info(model: str = "") -> Json:
        """Special tokens and the chat template."""
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
            }
        )

    # -------------------------------------------------------------------------------------------- server

    @routes.get("/health", tags=["server"], response_class=Response)
    @routes.get("/ready", tags=["server"], include_in_schema=False)
    async def health() -> Response:
        """200 while requests are taken, else 503."""
        return Response(status_code=200 if models.is_serving else 503)

    @routes.get("/live", tags=["server"], response_class=Response)
    async def live() -> Response:
        """200 as long as the server needs no restart: 503 once an engine was given up."""
        return Response(status_code=503 if models.is_broken else 200)

    @routes.get("/version", tags=["server"])
    async def version() -> Json:
        return Json({"version": importlib.metadata.version("inferc")})

    return routes


def _model(model: ServedModel) -> dict[str, Any]:
    return {
        "id": model.name,
        "object": "model",
        "created": model.info.created,
        "owned_by": OWNER,
        "root": model.name,
        "parent": None,
        "max_model_len": model.engine.facts.max_model_len,
    }


def _spelled(model: ServedModel, ids: list[int]) -> list[str]:
    return [model.engine.text.token_bytes(token).decode(errors="replace") for token in ids]


async def _generate(models: Models, url: str, body: Sampling, http: Request) -> Response:
    model = models.get(body.model or "")
    request = parse_request(url, body.said(), is_served=True)
    form = _Completions(secrets.token_hex(12), int(time.time()), model, body)
    return await answered(http, model, request, form.id_of(request), form, bool(body.stream))


@dataclass(frozen=True)
class _Completions:
    """Completions and chats: an object, or its chunks. name: makes its id."""

    name: str
    created: int
    model: ServedModel
    body: Sampling

    def id_of(self, request: OpenAIRequest) -> str:
        return f"{'chatcmpl' if request.kind == 'chat' else 'cmpl'}-{self.name}"

    def whole(self, answering: Answering, answers: list[Answer]) -> dict[str, Any]:
        found = response_body(answering.request, answers, self.name, self.model.name, self.created, answering.token)
        return {**found, "system_fingerprint": self.model.fingerprint}

    async def events(self, answering: Answering) -> AsyncGenerator[bytes, None]:
        """The stream's events; what is wrong before the first of them is raised, later it is an event of its own."""
        head = {
            "id": self.id_of(answering.request),
            "created": self.created,
            "model": self.model.name,
            "system_fingerprint": self.model.fingerprint,
        }
        options = self.body.stream_options
        with_usage = options is not None and bool(options.include_usage)
        continuous = options is not None and bool(options.continuous_usage_stats)
        chunks = Chunks(answering.request, head, answering.token, with_usage, continuous)
        counts: dict[int, int] = {}
        has_begun = False
        try:
            if not answering.request.generates:
                last, count = Piece(0, "", [], "length", []), answering.params.n
                for index in range(len(answering.request.prompts) * count):
                    number = index // count
                    usage = answering.usage(counts)[number] if continuous else None
                    yield chunks.of(index, last, answering.echoed(number), usage)
            async with aclosing(answering.pieces()) as pieces:
                async for number, index, piece in pieces:
                    counts[number] = counts.get(number, 0) + len(piece.token_ids)
                    usage = answering.usage(counts)[number] if continuous else None
                    yield chunks.of(index, piece, answering.echoed(number), usage)
                    has_begun = True
            if with_usage:
                yield chunks.usage(answering.usage(counts))
        except Exception as error:
            if not has_begun:
                raise
            yield event(body_of(error))
        finally:
            answering.close()
        yield DONE
