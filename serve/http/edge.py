"""The edge of the HTTP server around every request: its id, API key and limits, errors, and clients that disconnect."""

from __future__ import annotations

import asyncio
import difflib
import json
import logging
import math
import secrets
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, MutableMapping
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import Any, TypeAlias

from fastapi import Request, Response
from starlette.exceptions import HTTPException

from inferc.errors import InfercError, shown
from inferc.runtime.anthropic import answer as of_messages
from inferc.runtime.anthropic.request import MESSAGES_URL
from inferc.runtime.openai.answer import field_of
from inferc.serve.errors import EngineUnavailable, Unauthenticated
from inferc.serve.http.address import is_of_this_network
from inferc.serve.http.web_page import is_page
from inferc.serve.models.async_engine import SHUTDOWN
from inferc.serve.models.queue_forecast import ARRIVED_AT
from inferc.serve.observe.trace_context import note_trace
from inferc.serve.security.access import ANYBODY, CALLER, OPEN, Access, secret_of
from inferc.serve.statuses import OUR_FAULT, ClientError, to_client_error
from inferc.serve.under_way import UnderWay
from inferc.system.logging import REQUEST_ID, REQUEST_ID_FORM

log = logging.getLogger(__name__)

Scope: TypeAlias = MutableMapping[str, Any]
Receive: TypeAlias = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send: TypeAlias = Callable[[MutableMapping[str, Any]], Awaitable[None]]

MAX_BODY_BYTES = 64 << 20
LONGEST_PATH = 80  # characters of an unknown path that are compared with the known ones
STARTS_AT_ONCE = 8
# Size up to which a body is short: a longer one takes milliseconds to read. STARTS_AT_ONCE requests with a short body
# may start at the same time, but only one with a long body.
SHORT_BYTES = 8 << 10
BODIES_AT_ONCE = 16  # bound on the memory for bodies, in bodies of the largest size
RETRY = {"retry-after": "1"}
CLIENT_LEFT = 499  # status for logs and metrics; no client reads it
KINDS = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


class ClientLeft(InfercError):
    """An error that says that the client closed its connection before it was answered."""


class Edge:
    """The ASGI middleware around the application.

    It gives every request an id (the answer's `x-request-id`, and `scope["request_id"]` if the client sent one),
    checks the API key, refuses bodies that are too large, and turns every exception into an answer.
    """

    def __init__(
        self,
        app: Callable[[Scope, Receive, Send], Awaitable[None]],
        max_body_bytes: int,
        access: Access,
        ended: Callable[[str, str], None] = lambda path, status: None,
        checks_host: bool = False,
        under_way: UnderWay | None = None,
    ) -> None:
        """Wrap an ASGI application.

        ended is called for every response that began, with the path of its route and its status.
        checks_host: refuse requests that a web page from another site could send (DNS rebinding).
        under_way: counts the requests whose body has come.
        """
        self._app, self._access, self.ended = app, access, ended
        # Streams end in waves, and their clients send new requests in waves. At most so many requests start at the same
        # time, and the others wait, so that a wave does not delay all other tasks of the event loop.
        self._gate, self._gate_of_long = asyncio.Semaphore(STARTS_AT_ONCE), asyncio.Semaphore(1)
        self.max_body_bytes = max_body_bytes
        self.num_held = 0  # bytes of the bodies of all requests that are under way
        self._checks_host = checks_host
        self.under_way = under_way or UnderWay()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        ARRIVED_AT.set(scope.get("arrived_at") or time.monotonic())  # when its head had come, as the protocol notes
        scope["path"] = scope["path"].rstrip("/") or "/"  # no redirect: behind a proxy, its scheme might be wrong
        given = dict(scope["headers"]).get(b"x-request-id", b"").decode("latin-1")
        scope["request_id"] = given if REQUEST_ID_FORM.fullmatch(given) else ""
        name = scope["request_id"] or f"req-{secrets.token_hex(12)}"
        REQUEST_ID.set(name)
        of_trace = ((name.decode("latin-1"), value) for name, value in scope["headers"] if name.startswith(b"trace"))
        note_trace((name, value.decode("latin-1")) for name, value in of_trace)
        exchange = _Exchange(self, scope, receive, send, name)
        scope["started"] = exchange.started
        try:
            self._admit(scope, exchange)
            await self._app(scope, exchange.receive, exchange.send)
        except Unauthenticated as error:
            await response_of(to_client_error(error), scope)(scope, receive, exchange.send)
        except HTTPException as error:
            await error_of_http(error, scope)(scope, receive, exchange.send)
        except asyncio.CancelledError:  # only the shutdown cancels; uvicorn would log this as a fault
            if not exchange.has_begun:
                found = to_client_error(EngineUnavailable(SHUTDOWN.late))
                await response_of(found, scope)(scope, receive, exchange.send)
        except Exception:
            log.exception("an HTTP request failed")
            if not exchange.has_begun:
                await error_response(scope, 500, OUR_FAULT, "server_error")(scope, receive, exchange.send)
        finally:
            exchange.close()

    def _admit(self, scope: Scope, exchange: _Exchange) -> None:
        """Find out who asks; raise HTTPException or Unauthenticated for a request that is not taken."""
        headers = dict(scope["headers"])
        host = headers.get(b"host", b"").decode("latin-1")
        if self._checks_host and not is_of_this_network(host):
            raise HTTPException(
                403,
                f"Host: found {host!r:.80}, and a server without keys answers to this machine's names only,"
                " for its user's sake: ask localhost or an address, or serve with --api-keys, or with --insecure if"
                " something in front checks who asks",
            )
        length = headers.get(b"content-length", b"0")
        if length.isdigit() and int(length) > self.max_body_bytes:
            raise self.too_large()
        if scope["path"] not in OPEN and not is_page(scope["path"]):
            exchange.caller = self._access.caller(_secret(headers))
            CALLER.set(exchange.caller)

    def gate_for(self, num_bytes: int) -> asyncio.Semaphore:
        """Return the gate in which a request holds a place while it starts, by the size of its body."""
        return self._gate if num_bytes <= SHORT_BYTES else self._gate_of_long

    def too_large(self) -> HTTPException:
        limit = self.max_body_bytes
        return HTTPException(413, f"the body has more than {limit} bytes; send fewer prompts at once, or token ids")


class _Exchange:
    """One request at the edge: the bytes of its body, its place while it starts, the headers of its answer."""

    def __init__(self, edge: Edge, scope: Scope, receive: Receive, send: Send, name: str) -> None:
        self._edge, self._scope, self._receive, self._send, self._name = edge, scope, receive, send, name
        self.caller = ANYBODY
        self.has_begun = False  # the answer
        self._size = 0  # bytes of the body that have come
        self._held = 0  # bytes of the body that this request still holds
        self._gate: asyncio.Semaphore | None = None  # the gate in which it holds a place
        self._is_counted = False

    def started(self) -> None:
        """Give the place in the gate to the next request."""
        if self._gate is not None:
            self._gate.release()
            self._gate = None

    def close(self) -> None:
        self._let_go()
        self.started()
        if self._is_counted:
            self._edge.under_way.end()

    def _let_go(self) -> None:
        self._edge.num_held, self._held = self._edge.num_held - self._held, 0

    async def receive(self) -> MutableMapping[str, Any]:
        """Receive a part of the body; raise HTTPException for too much of it."""
        edge, message = self._edge, await self._receive()
        count = len(message.get("body", b""))
        self._size, self._held, edge.num_held = self._size + count, self._held + count, edge.num_held + count
        if self._size > edge.max_body_bytes:
            raise edge.too_large()
        if edge.num_held > BODIES_AT_ONCE * edge.max_body_bytes:
            raise HTTPException(503, "the server holds too much of others' bodies; try again later", RETRY)
        if self._size and not message.get("more_body", False) and message["type"] == "http.request":
            self._is_counted = True
            edge.under_way.begin()
            gate = edge.gate_for(self._size)
            await gate.acquire()  # only now, when the whole body is here: no slow client holds a place
            self._gate = gate
        return message

    async def send(self, message: MutableMapping[str, Any]) -> None:
        """Send a part of the answer, whose headers get the request's id and the caller's limits."""
        if message["type"] == "http.response.start":
            self.has_begun = True
            headers = message.get("headers", ())
            if any(name == b"content-length" for name, _ in headers):  # the answer is complete: the body is not needed
                self._let_go()
            route = self._scope.get("route")
            self._edge.ended("other" if route is None else route.path, str(message["status"]))
            name = self._name.encode("latin-1")
            names = (b"x-request-id", b"request-id") if is_anthropics(self._scope) else (b"x-request-id",)
            message["headers"] = [*headers, *((each, name) for each in names), *self.caller.headers()]
        await self._send(message)


def _secret(headers: Mapping[bytes, bytes]) -> str | None:
    """Return the API key that came with a request, or None."""
    if b"authorization" in headers:
        return secret_of(headers[b"authorization"].decode("latin-1"))
    return headers[b"x-api-key"].decode("latin-1") if b"x-api-key" in headers else None


# ------------------------------------------------------------------------------------------------- errors


def is_anthropics(scope: Scope) -> bool:
    """Return whether a request is one of Anthropic's API, by its path or its header: its answers have other forms."""
    path: str = scope["path"]
    if path == MESSAGES_URL or path.startswith(f"{MESSAGES_URL}/"):
        return True
    return any(name == b"anthropic-version" for name, _ in scope["headers"])


def error_response(
    scope: Scope,
    status: int,
    message: str,
    kind: str,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Response:
    body: dict[str, Any] = {"error": {"message": message, "type": kind, "param": param, "code": code}}
    if is_anthropics(scope):
        body = of_messages.error_body(status, message)
    # Encoded in ASCII: a message may quote half of a surrogate pair that the client sent.
    return Response(json.dumps(body).encode(), status, headers, "application/json")


def response_of(found: ClientError, scope: Scope) -> Response:
    status, headers = found.status, {}
    if status.http == 401:
        headers["www-authenticate"] = "Bearer"
    if status.http == 429 and found.retry_after is None:
        # A header of the clients of OpenAI and Anthropic, which otherwise retry every 429.
        headers["x-should-retry"] = "false"
    if found.retry_after is not None:
        headers["retry-after"] = str(max(1, math.ceil(found.retry_after)))  # the standard wants whole seconds
    param = field_of(found.message)
    return error_response(scope, status.http, found.message, status.kind, param, status.code, headers)


def body_of(error: Exception) -> dict[str, Any]:
    """Return OpenAI's error object for an error in the middle of a stream."""
    found = to_client_error(error)
    code = found.status.code or found.status.http
    return {
        "error": {
            "message": found.message,
            "type": found.status.kind,
            "param": field_of(found.message),
            "code": code,
        }
    }


async def on_inferc_error(request: Request, error: Exception) -> Response:
    if isinstance(error, ClientLeft):
        return Response(status_code=CLIENT_LEFT)
    return response_of(to_client_error(error), request.scope)


async def on_our_fault(request: Request, error: Exception) -> Response:
    """Answer an unexpected exception with status 500; the caller of the application still gets the exception."""
    return error_response(request.scope, 500, OUR_FAULT, "server_error")


def error_of_http(error: HTTPException, scope: Scope) -> Response:
    kind = KINDS.get(error.status_code, "invalid_request_error" if error.status_code < 500 else "server_error")
    return error_response(scope, error.status_code, str(error.detail), kind, headers=error.headers)


async def on_http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.detail == HTTPStatus(error.status_code).phrase:  # of the router, which says no more
        error = HTTPException(error.status_code, _no_route(request, error), error.headers)
    return error_of_http(error, request.scope)


def _no_route(request: Request, error: HTTPException) -> str:
    """Return what is wrong with a request that no route takes, and the path that was probably meant."""
    path = request.scope["path"]
    if error.status_code == 405:
        return f"{shown(path)} takes {(error.headers or {}).get('Allow', 'another method')}, found {request.method}"
    paths = request.app.openapi()["paths"]
    # The base URL of a client of OpenAI's ends with /v1, that of Anthropic's does not: each has been given the other's.
    near = [each for each in (f"/v1{path}", path.replace("/v1/v1", "/v1", 1)) if each in paths]
    near = near or difflib.get_close_matches(path[:LONGEST_PATH], paths, 1, 0.8)
    hint = f"did you mean {near[0]}?" if near else "/openapi.json lists those that there are"
    return f"there is no path {shown(path)} here; {hint}"


# ------------------------------------------------------------------------------------------ clients that leave


@asynccontextmanager
async def while_client_waits(receive: Receive) -> AsyncIterator[None]:
    """Cancel the body of the `with` when the client closes its connection, and raise ClientLeft from it then.

    The body of the request must have been read.
    """
    task, has_left = asyncio.current_task(), False
    assert task is not None

    async def watch() -> None:
        nonlocal has_left
        while (await receive())["type"] != "http.disconnect":
            pass
        has_left = True
        task.cancel()

    watching = asyncio.create_task(watch())
    try:
        yield
    except asyncio.CancelledError:
        if has_left:
            raise ClientLeft("the client left") from None
        raise
    finally:
        watching.cancel()
