"""The answers to generating requests over HTTP, as one object or as server-sent events, for all of the HTTP APIs."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing
from functools import partial
from typing import Any, Protocol

import msgspec
from fastapi import Request, Response

from inferc.runtime.openai.answer import Answer
from inferc.runtime.openai.reasoning_wishes import as_the_model_can
from inferc.runtime.openai.request import OpenAIRequest
from inferc.serve.answering.answering import MANY_ENTRIES, Answering
from inferc.serve.http.edge import ClientLeft, Receive, Scope, Send, while_client_waits
from inferc.serve.models import text_calls
from inferc.serve.models.long_texts import in_text_thread
from inferc.serve.models.served_model import ServedModel

STREAMED: dict[int | str, dict[str, Any]] = {
    200: {"description": "The answer; with `stream` server-sent events.", "content": {"text/event-stream": {}}}
}
WRITTEN_AT_ONCE = 1 << 18  # bytes written in one call, which takes a fraction of a millisecond


async def _write(send: Send, data: bytes, more: bool) -> None:
    """Write a part of a body, a long one in pieces as the client reads it, so that the loop never copies it all."""
    if len(data) <= WRITTEN_AT_ONCE:
        await send({"type": "http.response.body", "body": data, "more_body": more})
        return
    view = memoryview(data)
    for at in range(0, len(view), WRITTEN_AT_ONCE):
        part = view[at : at + WRITTEN_AT_ONCE]
        await send({"type": "http.response.body", "body": part, "more_body": more or at + len(part) < len(view)})


class Json(Response):
    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return msgspec.json.encode(content)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        await _write(send, bytes(self.body), more=False)


class Events(Response):
    """A response of server-sent events.

    The first event is made before the headers are sent, so that an earlier error gets a status of its own.
    """

    def __init__(self, first: bytes, rest: AsyncGenerator[bytes, None]) -> None:
        super().__init__(media_type="text/event-stream", headers={"cache-control": "no-cache"})
        del self.headers["content-length"]
        self._first, self._rest = first, rest

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            async with while_client_waits(receive), aclosing(self._rest) as rest:
                await _write(send, self._first, more=True)
                async for data in rest:
                    # This waits while the client does not read; the streams merge the deltas that come meanwhile.
                    await _write(send, data, more=True)
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        except ClientLeft:
            return


class Form(Protocol):
    """The protocol of an API's form of answers: one object with everything, or events while the output grows.

    `events` closes the request when it is over; an error before the first event is raised.
    """

    def whole(self, answering: Answering, answers: list[Answer]) -> dict[str, Any]: ...

    def events(self, answering: Answering) -> AsyncGenerator[bytes, None]: ...


def _whole(form: Form, answering: Answering, answers: list[Answer]) -> Json:
    return Json(form.whole(answering, answers))


def _num_entries(answering: Answering, answers: list[Answer]) -> int:
    """Return about how many tokens an answer lists, including likely tokens."""
    outputs = sum(len(output.token_ids) for answer in answers for output in answer.outputs)
    return answering.num_entries + outputs * (1 + (answering.params.logprobs or 0))


async def answered(http: Request, model: ServedModel, request: OpenAIRequest, name: str, form: Form) -> Response:
    """Answer a request for text in the form of its route, whole or as a stream of events.

    name: the answer's id (PREFIX-… or PREFIX_…), from which the request's name in the engine is made.
    """
    given = http.scope["request_id"]
    prefix, random = name[:-24], name[-24:]
    # A client may use its request id several times; in the engine each request needs an id of its own.
    answering = Answering(model, request, f"{prefix}{given}-{random[:8]}" if given else name)
    http.scope["started"]()  # the rest waits for threads and the engine, not for the event loop
    is_handed_over = False
    try:
        async with while_client_waits(http.receive):
            await answering.start()
            if not request.stream:
                answers = await answering.answers()
                make = partial(_whole, form, answering, answers)
                return make() if _num_entries(answering, answers) <= MANY_ENTRIES else await in_text_thread(make)
            events = form.events(answering)
            first = await anext(events)
        is_handed_over = True
        return Events(first, events)
    finally:
        if not is_handed_over:
            answering.close()


async def num_input_tokens(http: Request, model: ServedModel, request: OpenAIRequest) -> dict[str, Any]:
    """Return how many tokens the model gets of a conversation, as `input_tokens`, with any warnings."""
    if request.tools is not None:
        model.engine.text.check_calls()
    request = as_the_model_can(request, model.engine.text)
    (messages,) = request.prompts
    http.scope["started"]()
    async with while_client_waits(http.receive):
        ids = await text_calls.tokenize_chat(model, messages, request.template)  # type: ignore[arg-type]
    return {"input_tokens": len(ids), **({"warnings": request.warnings} if request.warnings else {})}
