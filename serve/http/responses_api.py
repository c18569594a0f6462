"""The routes of OpenAI's Responses API over the models of a server, for text only and without storage."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from starlette.exceptions import HTTPException

from inferc.runtime.engine.request_output import CompletionOutput
from inferc.runtime.openai.answer import Answer, Usage, chat_logprobs
from inferc.runtime.openai.request import model_of
from inferc.runtime.openai.responses import (
    RESPONSES,
    ResponseHead,
    ResponseRequest,
    parse_response_request,
    status_of,
    text_part,
)
from inferc.runtime.step.sampling_params import of_chat
from inferc.serve.answering.answering import MANY_ENTRIES, Answering, Growing
from inferc.serve.answering.logprobs_json import chat_lists
from inferc.serve.http.answers import STREAMED, answered
from inferc.serve.http.bodies import described, read_body
from inferc.serve.http.edge import body_of
from inferc.serve.models.long_texts import in_text_thread
from inferc.serve.models.models import Models
from inferc.serve.security.access import CALLER

FIRST_PART: Mapping[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}


def responses_routes(models: Models) -> APIRouter:
    """Return the routes of all paths of the API."""
    routes = APIRouter()

    @routes.post(RESPONSES, tags=["openai"], responses=STREAMED, openapi_extra=described("ResponseBody"))
    async def create_response(http: Request) -> Response:
        """Answer a conversation; nothing of it is stored."""
        body = await read_body(http)
        model = models.get(model_of(body.values))
        defaults = CALLER.get().limits.defaults(of_chat(model.engine.facts.defaults))
        request = await body.read_as(partial(parse_response_request, defaults=defaults))
        form = _ResponseForm(secrets.token_hex(12), int(time.time()), model.name, request)
        return await answered(http, model, request.chat, f"resp_{form.name}", form)

    @routes.get(f"{RESPONSES}/{{response_id}}", tags=["openai"])
    @routes.delete(f"{RESPONSES}/{{response_id}}", tags=["openai"])
    @routes.post(f"{RESPONSES}/{{response_id}}/cancel", tags=["openai"])
    @routes.get(f"{RESPONSES}/{{response_id}}/input_items", tags=["openai"])
    async def stored_response(response_id: str) -> Response:
        """Answer with status 404, because responses are not stored."""
        raise HTTPException(
            404, f"there is no response {response_id!r:.80}: nothing is stored here; keep what {RESPONSES} answers"
        )

    return routes


@dataclass(frozen=True)
class _ResponseForm:
    """The form of a response: one object, or a stream of typed events; name: the random part of its ids."""

    name: str
    created: int
    model: str
    request: ResponseRequest

    def _head(self, answering: Answering) -> ResponseHead:
        params = answering.params
        return ResponseHead(
            f"resp_{self.name}",
            f"msg_{self.name}",
            self.created,
            self.model,
            self.request,
            float(params.temperature),
            float(params.top_p),
        )

    def whole(self, answering: Answering, answers: list[Answer]) -> dict[str, Any]:
        (output,) = answers[0].outputs
        return _whole(self._head(answering), _part(output, answering), output, answering)

    async def events(self, answering: Answering) -> AsyncGenerator[bytes, None]:
        """Yield the events of the stream; an error before the first is raised, a later one is the event `failed`."""
        head, output = self._head(answering), Growing(0)
        events = _Events(head.message_id)
        begun, num_entries = b"", 0
        try:
            async with aclosing(answering.deltas()) as deltas:
                async for _, _, piece in deltas:
                    num_entries += answering.num_likely(piece)
                    answering.check_likely(num_entries)
                    begin = b"" if begun else _begin(events, head)
                    begun = begun or begin
                    output.add(piece)
                    delta = b""
                    if piece.text or piece.logprobs:
                        rows = chat_logprobs(piece.logprobs, answering.token)["content"]
                        delta = events.of_part("response.output_text.delta", delta=piece.text, logprobs=rows)
                    if data := begin + delta:
                        yield data
            ends = _ends(events, head, output.so_far(), answering)
            while data := await _made(partial(next, ends, b""), num_entries):
                yield data
        except Exception as error:
            if not begun:
                raise
            yield await _made(partial(_failed, events, head, output.so_far(), answering, error), num_entries)
        finally:
            answering.close()


async def _made(make: Callable[[], bytes], num_entries: int) -> bytes:
    """Return the result of `make`, which runs on a thread if it is about many tokens and likely tokens."""
    return make() if num_entries <= MANY_ENTRIES else await in_text_thread(make)


class _Events:
    """The encoder of a response's events, which numbers them."""

    def __init__(self, message_id: str) -> None:
        self._message_id = message_id
        self._count = 0

    def of(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._count, **fields}
        self._count += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(body))

    def of_part(self, kind: str, **fields: Any) -> bytes:
        """Return an event about the single part of the single message."""
        return self.of(kind, item_id=self._message_id, output_index=0, content_index=0, **fields)


def _begin(events: _Events, head: ResponseHead) -> bytes:
    response = head.response("in_progress")
    return b"".join(
        (
            events.of("response.created", response=response),
            events.of("response.in_progress", response=response),
            events.of("response.output_item.added", output_index=0, item=head.message("in_progress")),
            events.of_part("response.content_part.added", part=FIRST_PART),
        )
    )


def _part(output: CompletionOutput, answering: Answering) -> dict[str, Any]:
    """Return the message's text part, whose log probabilities are JSON that was encoded in parts."""
    part = text_part(replace(output, logprobs=None), answering.token)
    return {**part, "logprobs": chat_lists(output.logprobs or (), answering.token)["content"]}


def _whole(
    head: ResponseHead, part: Mapping[str, Any], output: CompletionOutput, answering: Answering
) -> dict[str, Any]:
    """Return the complete response."""
    status = status_of(output)
    return head.response(status, [head.message(status, [part])], _usage(output, answering))


def _ends(events: _Events, head: ResponseHead, output: CompletionOutput, answering: Answering) -> Iterator[bytes]:
    """Yield the last events, each of which has the whole text and all log probabilities; each is made on demand."""
    part, status = _part(output, answering), status_of(output)
    yield events.of_part("response.output_text.done", text=part["text"], logprobs=part["logprobs"])
    yield events.of_part("response.content_part.done", part=part)
    yield events.of("response.output_item.done", output_index=0, item=head.message(status, [part]))
    yield events.of(f"response.{status}", response=_whole(head, part, output, answering))


def _failed(
    events: _Events, head: ResponseHead, output: CompletionOutput, answering: Answering, error: Exception
) -> bytes:
    found = body_of(error)["error"]
    kind = "rate_limit_exceeded" if found["type"] == "rate_limit_error" else "server_error"
    message = found["message"].encode("ascii", "backslashreplace").decode()  # it may quote half of a surrogate pair
    item = head.message("incomplete", [_part(output, answering)])
    response = head.response("failed", [item], _usage(output, answering), {"code": kind, "message": message})
    return events.of("response.failed", response=response)


def _usage(output: CompletionOutput, answering: Answering) -> Usage:
    return answering.usage_of(0, len(output.token_ids))
