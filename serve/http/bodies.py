"""The JSON bodies of HTTP requests: their parsing (of large ones on a thread) and their schemas in `/openapi.json`.

Which fields are allowed is in one table for all code that takes them (runtime/openai/fields.py, and Anthropic's in
runtime/anthropic/fields.py).
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextvars import copy_context
from dataclasses import dataclass
from email.message import Message
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from inferc.errors import RequestError, shown
from inferc.runtime.anthropic import fields as anthropic_fields
from inferc.runtime.openai import fields as openai_fields
from inferc.runtime.openai.fields import Fields
from inferc.serve.http import large_json
from inferc.serve.http.edge import ClientLeft

SMALL_BYTES = 64 << 10  # a body up to this size is parsed on the event loop, in some milliseconds at most
NO_OBJECT = "the body is no JSON object; send one"
# Large bodies are parsed one at a time: several busy threads would compete for the GIL, and delay the event loop.
_LARGE = ThreadPoolExecutor(1, "inferc-bodies")
Result = TypeVar("Result")


@dataclass(frozen=True)
class Body:
    """The JSON object of a request."""

    values: Mapping[str, Any]
    is_large: bool

    async def read_as(self, make: Callable[[Mapping[str, Any]], Result]) -> Result:
        """Return the result of `make` on the values; it runs on a thread if the body is large."""
        if not self.is_large:
            return make(self.values)
        return await asyncio.get_running_loop().run_in_executor(_LARGE, copy_context().run, make, self.values)


async def read_body(request: Request) -> Body:
    """Read and parse the body of a request.

    Raises RequestError for a body that is no JSON object, HTTPException for a compressed one, and ClientLeft.
    """
    try:
        data = await request.body()
    except ClientDisconnect:
        raise ClientLeft("the client left before all of its body was here") from None
    if (encoding := request.headers.get("content-encoding", "")) not in ("", "identity"):
        raise HTTPException(415, f"the body is encoded (content-encoding: {encoding:.40}); send it as it is")
    if not data:
        raise RequestError(NO_OBJECT)
    given = request.headers.get("content-type", "")
    if not _is_json(given):
        found = f"content-type is {shown(given)}" if given else "the header content-type is missing"
        raise RequestError(f"{found}; send content-type: application/json")
    is_large = len(data) > SMALL_BYTES
    if is_large:
        request.scope["started"]()  # large bodies have a queue of their own: small ones do not wait for them
        value = await asyncio.get_running_loop().run_in_executor(_LARGE, _parse, data)
    else:
        value = _parse(data)
    if not isinstance(value, dict):
        raise RequestError(NO_OBJECT)
    return Body(value, is_large)


def _is_json(content_type: str) -> bool:
    """Return whether a content type is JSON; no other is accepted.

    A browser lets a page of another site send this type only after asking the server (CORS).
    """
    message = Message()
    message["content-type"] = content_type
    return content_type != "" and (
        message.get_content_type() == "application/json"
        or (message.get_content_maintype() == "application" and message.get_content_subtype().endswith("+json"))
    )


def _parse(data: bytes) -> Any:
    """Parse JSON; raise RequestError if it is none, or too deep or too large."""
    try:
        return json.loads(data) if len(data) <= SMALL_BYTES else large_json.loads(data)
    except json.JSONDecodeError as error:
        where = "" if len(data) > SMALL_BYTES else f" at character {error.pos}"
        raise RequestError(f"the body is not JSON: {error.msg}{where}") from None
    except UnicodeDecodeError as error:
        raise RequestError(f"the body is not JSON: it is not {error.encoding}: {error.reason}") from None
    except RecursionError:
        raise RequestError("the body is not JSON that is read here: it is nested too deeply") from None
    except ValueError as error:  # a number that cannot be read
        raise RequestError(f"the body is not JSON that is read here: {str(error).partition(';')[0]}") from None


# ------------------------------------------------------------------------------------------------- description

BODIES: Mapping[str, Fields] = {
    "CompletionBody": openai_fields.COMPLETION,
    "ChatBody": openai_fields.CHAT,
    "ResponseBody": openai_fields.RESPONSE,
    "MessageBody": anthropic_fields.MESSAGE,
    "CountBody": anthropic_fields.COUNT,
    "TokenizeBody": openai_fields.TOKENIZE,
    "DetokenizeBody": openai_fields.DETOKENIZE,
    "EmbeddingBody": openai_fields.EMBEDDING,
    "LoadAdapterBody": openai_fields.LOAD_ADAPTER,
    "UnloadAdapterBody": openai_fields.UNLOAD_ADAPTER,
}


def described(name: str) -> dict[str, Any]:
    """Return the OpenAPI entry of a route's body, which refers to a schema that `describe` adds."""
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {"requestBody": {"required": True, "content": content}}


def describe(app: FastAPI) -> None:
    """Add the schemas of all bodies to the OpenAPI description of an application."""
    plain = app.openapi

    def openapi() -> dict[str, Any]:
        found = plain()
        schemas = found.setdefault("components", {}).setdefault("schemas", {})
        if not schemas.keys() >= BODIES.keys():  # FastAPI makes it once, and keeps it
            schemas.update({name: _schema(name, fields) for name, fields in BODIES.items()})
        return found

    app.openapi = openapi  # type: ignore[method-assign]  # the way in which FastAPI documents it


def _schema(name: str, fields: Fields) -> dict[str, Any]:
    properties: dict[str, Any] = {}
    for each, field in fields.items():
        schema = field.kind.schema
        if schema and not field.is_required:
            schema = {"anyOf": [schema, {"type": "null"}]}
        properties[each] = {**schema, **({"description": field.note} if field.note else {})}
    required = [each for each, field in fields.items() if field.is_required]
    return {
        "title": name,
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": True,  # except fields that would change the answer, which are refused by name
    }
