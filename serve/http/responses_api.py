"""The routes of OpenAI's Responses API over a server's models: text, reasoning, calls of tools, without storage."""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncGenerator, Callable, Iterable, Iterator, Sequence
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
from inferc.runtime.openai.response_items import Event, Items, whole_items
from inferc.runtime.openai.responses import (
    INPUT_TOKENS,
    RESPONSES,
    ResponseHead,
    ResponseRequest,
    parse_response_request,
    status_of,
)
from inferc.runtime.step.plan import Logprobs
from inferc.runtime.step.sampling_params import of_chat
from inferc.serve.answering.answering import MANY_ENTRIES, Answering, Growing
from inferc.serve.answering.logprobs_json import chat_lists
from inferc.serve.http.answers import STREAMED, Json, answered, num_input_tokens
from inferc.serve.http.bodies import described, read_body
from inferc.serve.http.edge import body_of
from inferc.serve.models.long_texts import in_text_thread
from inferc.serve.models.models import Models
from inferc.serve.security.access import CALLER


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

    @routes.post(INPUT_TOKENS, tags=["openai"], openapi_extra=described("ResponseBody"))
    async def count_input_tokens(http: Request) -> Json:
        """Count the tokens of a conversation, as the model would get them."""
        body = await read_body(http)
        model = models.get(model_of(body.values))
        request = (await body.read_as(parse_response_request)).chat
        return Json({"object": "response.input_tokens", **await num_input_tokens(http, model, request)})

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
            self.created,
            self.model,
            replace(self.request, chat=answering.request),
            float(params.temperature),
            float(params.top_p),
        )

    def whole(self, answering: Answering, answers: list[Answer]) -> dict[str, Any]:
        (output,) = answers[0].outputs
        status = status_of(output)
        rows, thought = _logprobs(output, answering), "".join(answers[0].reasoning)
        items = whole_items(self.name, answering.calls, output.text, status, rows, thought)
        return self._head(answering).response(status, items, _usage(output, answering))

    async def events(self, answering: Answering) -> AsyncGenerator[bytes, None]:
        """Yield the events of the stream; an error before the first is raised, a later one is the event `failed`."""
        head, output = self._head(answering), Growing(0)
        items, events, rows = Items(self.name, answering.calls, answering.may_reason), _Events(), _TextRows(answering)
        begun, num_entries = b"", 0
        try:
            async with aclosing(answering.deltas()) as deltas:
                async for _, _, piece in deltas:
                    num_entries += answering.num_likely(piece)
                    answering.check_likely(num_entries)
                    begin = b"" if begun else _begin(events, head, items)
                    begun = begun or begin
                    output.add(piece)
                    is_last = piece.finish_reason is not None
                    listed = chat_logprobs(rows.of(piece.logprobs, is_last), answering.token)["content"]
                    if data := begin + events.all(items.push(piece.text, is_last, listed, piece.reasoning)):
                        yield data
            ends = _ends(events, head, items, output.so_far(), answering)
            while data := await _made(partial(next, ends, b""), num_entries):
                yield data
        except Exception as error:
            if not begun:
                raise
            yield await _made(partial(_failed, events, head, items, output.so_far(), answering, error), num_entries)
        finally:
            answering.close()


async def _made(make: Callable[[], bytes], num_entries: int) -> bytes:
    """Return the result of `make`, which runs on a thread if it is about many tokens and likely tokens."""
    return make() if num_entries <= MANY_ENTRIES else await in_text_thread(make)


class _Events:
    """The encoder of a response's events, which numbers them."""

    def __init__(self) -> None:
        self._count = 0

    def of(self, kind: str, **fields: Any) -> bytes:
        body = {"type": kind, "sequence_number": self._count, **fields}
        self._count += 1
        return b"event: %s\ndata: %s\n\n" % (kind.encode(), msgspec.json.encode(body))

    def all(self, events: Iterable[Event]) -> bytes:
        return b"".join(self.of(kind, **fields) for kind, fields in events)


class _TextRows:
    """The log probabilities of the tokens of an answer's text, without those of the reasoning before it."""

    def __init__(self, answering: Answering) -> None:
        self._answering = answering
        self._num_before = 0  # the tokens that were told or left out
        self._held: list[Logprobs] = []

    def of(self, rows: Sequence[Logprobs], is_last: bool) -> list[Logprobs]:
        """Return those that can be told with the next rows; is_last: no more follow."""
        self._held += rows
        begins = self._answering.num_before(0, is_last)
        if begins is None:
            return []
        found = self._held[max(0, begins - self._num_before) :]
        self._num_before += len(self._held)
        self._held = []
        return found


def _begin(events: _Events, head: ResponseHead, items: Items) -> bytes:
    response = head.response("in_progress")
    first = [(f"response.{kind}", {"response": response}) for kind in ("created", "in_progress")]
    return events.all([*first, *items.begin()])


def _logprobs(output: CompletionOutput, answering: Answering) -> msgspec.Raw:
    """Return the log probabilities of the tokens of an answer's text as JSON, which is encoded in parts."""
    rows = (output.logprobs or [])[answering.num_before(0, is_whole=True) :]
    found: msgspec.Raw = chat_lists(rows, answering.token)["content"]
    return found


def _ends(
    events: _Events, head: ResponseHead, items: Items, output: CompletionOutput, answering: Answering
) -> Iterator[bytes]:
    """Yield the last events, each of which has the whole text and all log probabilities; each is made on demand."""
    status = status_of(output)
    for kind, fields in items.end(status, _logprobs(output, answering)):
        yield events.of(kind, **fields)
    response = head.response(status, items.so_far(status), _usage(output, answering))
    yield events.of(f"response.{status}", response=response)


def _failed(
    events: _Events,
    head: ResponseHead,
    items: Items,
    output: CompletionOutput,
    answering: Answering,
    error: Exception,
) -> bytes:
    found = body_of(error)["error"]
    kind = "rate_limit_exceeded" if found["type"] == "rate_limit_error" else "server_error"
    message = found["message"].encode("ascii", "backslashreplace").decode()  # it may quote half of a surrogate pair
    so_far = items.so_far("incomplete", _logprobs(output, answering))
    response = head.response("failed", so_far, _usage(output, answering), {"code": kind, "message": message})
    return events.of("response.failed", response=response)


def _usage(output: CompletionOutput, answering: Answering) -> Usage:
    return answering.usage_of(0, len(output.token_ids))
