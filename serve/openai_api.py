"""OpenAI's HTTP interface over the models of a server, and vLLM's additions that clients use."""

from __future__ import annotations

import asyncio
import base64
import importlib.metadata
import secrets
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from inferc.errors import RequestError
from inferc.runtime.openai_answer import response_body
from inferc.runtime.openai_request import CHAT, COMPLETIONS, EMBEDDINGS, embedding_inputs, parse_request
from inferc.serve.embedding import embed
from inferc.serve.http_bodies import ChatBody, CompletionBody, DetokenizeBody, EmbeddingBody, Sampling, TokenizeBody
from inferc.serve.http_edge import ClientLeft, Receive, Scope, Send, body_of, while_client_waits
from inferc.serve.models import Models, NotServed, ServedModel
from inferc.serve.openai_answering import Answering
from inferc.serve.openai_chunks import DONE, Chunks, event
from inferc.serve.streams import Piece

OWNER = "inferc"
STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer; with `stream` server-sent events.", "content": {"text/event-stream": {}}}
}


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)


class Events(Response):
    """Server-sent events. The first one was made before the headers are sent, so an error before it is no stream."""

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with while_client_waits(receive), aclosing(self._rest) as rest:
                await send({"type": "http.response.body", "body": self._first, "more_body": True})
                async for data in rest:
                    # Waits while the client does not read; the streams gather what comes meanwhile.
                    await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientLeft:
            return


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
        if not name:
            raise NotServed("the path names no model; GET /v1/models lists them")
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
            ids = await model.encode(body.prompt, body.add_special_tokens is not False, is_prompt=False)
        else:
            request = parse_request(CHAT, body.said(), is_served=True)
            messages: Any = request.prompts[0]
            ids = await model.encode_chat(messages, is_prompt=False, **request.template)
        found: dict[str, Any] = {"count": len(ids), "max_model_len": model.engine.facts.max_model_len, "tokens": ids}
        if body.return_token_strs:
            found["token_strs"] = [model.engine.text.token_bytes(token).decode(errors="replace") for token in ids]
        return Json(found)

    @routes.post("/detokenize", tags=["text"])
    async def detokenize(body: DetokenizeBody, http: Request) -> Json:
        """The text of token ids."""
        model = models.get(body.model or "")
        http.scope["started"]()
        skip = bool(body.skip_special_tokens)
        # In a thread, as there may be millions of them.
        return Json({"prompt": await asyncio.to_thread(model.decode, body.tokens, skip)})

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


async def _generate(models: Models, url: str, body: Sampling, http: Request) -> Response:
    model = models.get(body.model or "")
    request = parse_request(url, body.said(), is_served=True)
    prefix = "chatcmpl" if request.kind == "chat" else "cmpl"
    given = http.scope["request_id"]
    name = secrets.token_hex(12)
    # A client may use its id for several requests; the engine's are one by one.
    answering = Answering(model, request, f"{prefix}-{given}-{name[:8]}" if given else f"{prefix}-{name}")
    http.scope["started"]()  # what follows waits for others: threads, the engine
    created = int(time.time())
    is_handed_over = False
    try:
        async with while_client_waits(http.receive):
            await answering.start()
            if not body.stream:
                answers = await answering.answers()
                found = response_body(request, answers, name, model.name, created, answering.token)
                return Json({**found, "system_fingerprint": model.fingerprint})
            head = {
                "id": f"{prefix}-{name}",
                "created": created,
                "model": model.name,
                "system_fingerprint": model.fingerprint,
            }
            events = _events(answering, head, body)
            first = await anext(events)
        is_handed_over = True
        return Events(first, events)
    finally:
        if not is_handed_over:
            answering.close()


async def _events(answering: Answering, head: dict[str, Any], body: Sampling) -> AsyncGenerator[bytes, None]:
    """The stream's events; what is wrong before the first of them is raised, later it is an event of its own."""
    options = body.stream_options
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
