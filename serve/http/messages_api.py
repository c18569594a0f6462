"""The routes of Anthropic's Messages API over the models of a server."""

from __future__ import annotations

import secrets
from collections.abc import AsyncGenerator, Iterable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from inferc.runtime.anthropic.answer import Content, error_body, message, stop_of, usage_body
from inferc.runtime.anthropic.request import COUNT_URL, MESSAGES_URL, parse_messages
from inferc.runtime.openai.answer import Answer
from inferc.runtime.openai.request import model_of
from inferc.runtime.step.sampling_params import of_chat
from inferc.serve.answering.answering import Answering
from inferc.serve.http.answers import STREAMED, Json, answered, num_input_tokens
from inferc.serve.http.bodies import described, read_body
from inferc.serve.models.models import Models
from inferc.serve.models.served_model import ServedModel
from inferc.serve.security.access import CALLER
from inferc.serve.statuses import to_client_error


def messages_routes(models: Models) -> APIRouter:
    """Return the routes of all paths of the API."""
    routes = APIRouter()

    @routes.post(MESSAGES_URL, tags=["anthropic"], responses=STREAMED, openapi_extra=described("MessageBody"))
    async def create_message(http: Request) -> Response:
        """Answer a conversation, by the model's chat template."""
        body = await read_body(http)
        model = models.get(model_of(body.values))
        defaults = CALLER.get().limits.defaults(of_chat(model.engine.facts.defaults))
        request = await body.read_as(partial(parse_messages, defaults=defaults))
        form = _MessageForm(secrets.token_hex(12), model.name)
        return await answered(http, model, request, f"msg_{form.name}", form)

    @routes.post(COUNT_URL, tags=["anthropic"], openapi_extra=described("CountBody"))
    async def count_tokens(http: Request) -> Json:
        """Count the tokens of a conversation, as the model would get them."""
        body = await read_body(http)
        model = models.get(model_of(body.values))
        request = await body.read_as(partial(parse_messages, counts=True))
        return Json(await num_input_tokens(http, model, request))

    return routes


def listed(models: Models) -> dict[str, Any]:
    """Return the models of a server as Anthropic's list of them."""
    found = [model_body(model) for model in (*models.served, *models.adapted)]
    ends = {"first_id": found[0]["id"], "last_id": found[-1]["id"]} if found else {"first_id": None, "last_id": None}
    return {"data": found, "has_more": False, **ends}


def model_body(model: ServedModel) -> dict[str, Any]:
    """Return a model as Anthropic's object."""
    return {
        "id": model.name,
        "type": "model",
        "display_name": model.name,
        "created_at": datetime.fromtimestamp(model.info.created, UTC).isoformat(),
        "lifecycle": "active",
        "max_input_tokens": model.engine.facts.max_model_len,
        "max_tokens": model.engine.facts.max_model_len,
    }


@dataclass(frozen=True)
class _MessageForm:
    """The form of a message: one object, or a stream of typed events; name: the random part of its id."""

    name: str
    model: str

    def whole(self, answering: Answering, answers: list[Answer]) -> dict[str, Any]:
        (output,) = answers[0].outputs
        request, content = answering.request, Content(answering.calls)
        content.push(output.text, is_last=True, reasoning="".join(answers[0].reasoning))
        stop = stop_of(request, output.finish_reason, output.stop, content.has_calls)
        return message(self.name, self.model, answers[0].usage, content.blocks, stop, request.warnings)

    async def events(self, answering: Answering) -> AsyncGenerator[bytes, None]:
        """Yield the events of the stream; an error before the first is raised, a later one is the event `error`."""
        request, content, count, has_begun = answering.request, Content(answering.calls), 0, False
        try:
            async with aclosing(answering.deltas()) as deltas:
                async for _, _, delta in deltas:
                    count += len(delta.token_ids)
                    usage, events = answering.usage_of(0, count), list[Mapping[str, Any]]()
                    if not has_begun:
                        empty = message(self.name, self.model, usage, warnings=request.warnings)
                        events.append({"type": "message_start", "message": empty})
                    events += content.push(delta.text, delta.finish_reason is not None, delta.reasoning)
                    if delta.finish_reason is not None:
                        stop = stop_of(request, delta.finish_reason, delta.stop, content.has_calls)
                        events.append({"type": "message_delta", "delta": stop, "usage": usage_body(usage)})
                        events.append({"type": "message_stop"})
                    has_begun = True
                    if events:  # none while a call may begin
                        yield _encoded(events)
        except Exception as error:
            if not has_begun:
                raise
            found = to_client_error(error)
            yield _encoded([error_body(found.status.http, found.message)])
        finally:
            answering.close()


def _encoded(events: Iterable[Mapping[str, Any]]) -> bytes:
    return b"".join(b"event: %s\ndata: %s\n\n" % (each["type"].encode(), msgspec.json.encode(each)) for each in events)
