"""The HTTP endpoint, which serves OpenAI's API (openai_api.py) and Anthropic's with FastAPI and uvicorn."""

from __future__ import annotations

import asyncio
import logging
import socket
import ssl
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware

from inferc.errors import InfercError
from inferc.serve.http.acceptor import Acceptor
from inferc.serve.http.adapters_api import adapters_routes
from inferc.serve.http.answers import Json
from inferc.serve.http.bodies import describe
from inferc.serve.http.connections import Connection, Connections
from inferc.serve.http.edge import MAX_BODY_BYTES, Edge, on_http_error, on_inferc_error, on_our_fault
from inferc.serve.http.messages_api import messages_routes
from inferc.serve.http.openai_api import openai_routes
from inferc.serve.http.slow_clients import Protocol
from inferc.serve.http.web_page import page_routes
from inferc.serve.models.models import Models
from inferc.serve.observe.history import MetricsHistory
from inferc.serve.observe.metrics_page import MetricsPage
from inferc.serve.observe.open_requests import open_requests
from inferc.serve.security.access import CALLER, Access
from inferc.serve.under_way import UnderWay
from inferc.version import __version__

# Longer than load balancers keep idle connections, so that none sends a request on a connection that is being closed.
KEEP_ALIVE_SECONDS = 75


def make_app(
    models: Models,
    metrics: MetricsPage,
    access: Access,
    max_body_bytes: int = MAX_BODY_BYTES,
    checks_host: bool = False,
    under_way: UnderWay | None = None,
    cors_origins: Sequence[str] = (),
    history: MetricsHistory | None = None,
) -> Any:
    """Make the ASGI application for a server's models; checks_host and under_way are those of Edge.

    cors_origins: the sites whose pages browsers let send requests here (`https://HOST`, or `*` for all). history: what
    the page's dashboard begins with.
    """
    app = FastAPI(
        title="inferc",
        description="OpenAI's interface and Anthropic's over compiled models.",
        version=__version__,
        # FastAPI's documentation pages load scripts from other hosts, so they are off; tools can read /openapi.json.
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # Edge strips trailing slashes
    )
    app.include_router(openai_routes(models))
    app.include_router(messages_routes(models))
    app.include_router(adapters_routes(models))
    app.include_router(page_routes(models))
    app.include_router(_requests_routes(models))
    describe(app)
    app.add_route("/metrics", _metrics_route(metrics), include_in_schema=False)
    if history is not None:
        app.add_route("/metrics/history", _history_route(history), include_in_schema=False)
    app.add_exception_handler(InfercError, on_inferc_error)
    app.add_exception_handler(HTTPException, on_http_error)
    app.add_exception_handler(Exception, on_our_fault)

    def ended(path: str, status: str) -> None:
        metrics.responses[path, status] += 1

    edge = Edge(app, max_body_bytes, access, ended, checks_host, under_way)
    if not cors_origins:
        return edge
    # CORS stands in front of the edge, because a browser asks without a key whether it may send a request with one.
    return CORSMiddleware(
        edge,
        allow_origins=cors_origins,
        allow_methods=["GET", "HEAD", "POST", "DELETE"],
        allow_headers=["*"],
        expose_headers=["x-request-id", "retry-after"],
    )


def _metrics_route(metrics: MetricsPage) -> Callable[[Request], Awaitable[Response]]:
    async def page(request: Request) -> Response:
        data, content_type = await metrics.render(request.headers.get("accept", ""))
        return Response(data, media_type=content_type)

    return page


def _history_route(history: MetricsHistory) -> Callable[[Request], Awaitable[Response]]:
    async def pages(request: Request) -> Response:
        text = await asyncio.to_thread(history.text)
        return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")

    return pages


def _requests_routes(models: Models) -> APIRouter:
    routes = APIRouter()

    @routes.get("/requests", tags=["server"])
    async def requests() -> Json:
        """List the requests that are open now, of all keys for a key with admin, else those of the caller's own."""
        return Json(await open_requests(models, CALLER.get().sees))

    return routes


class HttpServer(uvicorn.Server):
    """A uvicorn server for an application on a socket that is bound already; it does not handle signals."""

    def __init__(
        self,
        app: Any,
        listener: socket.socket,
        context: ssl.SSLContext | None = None,
        max_connections: int | None = None,
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        """Configure uvicorn.

        context: TLS; None: plain HTTP. max_connections: the most at the same time; None: any number. max_body_bytes:
        the application's limit.
        """
        self.connections = Connections(max_connections)
        config = uvicorn.Config(
            app,
            http=Protocol,
            ws="none",
            lifespan="off",
            log_config=None,
            log_level=logging.WARNING,
            access_log=False,
            server_header=False,
            timeout_keep_alive=KEEP_ALIVE_SECONDS,
        )
        config.load()
        config.ssl = context
        super().__init__(config)
        self._listener, self._max_body_bytes = listener, max_body_bytes
        self._acceptor: Acceptor | None = None  # while connections are taken

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup([])  # uvicorn accepts on no socket: the Acceptor does
        self._acceptor = Acceptor(self._listener, self.connections, self._begin, self.config.ssl is None)

    async def _begin(self, connection: Connection) -> None:
        config, state = self.config, self.lifespan.state
        make = partial(
            Protocol, config, self.server_state, state, connection=connection, max_body_bytes=self._max_body_bytes
        )
        await asyncio.get_running_loop().connect_accepted_socket(make, connection, ssl=config.ssl)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        if self._acceptor is not None:
            self._acceptor.close()
        await super().shutdown(sockets)

    async def run_until_stopped(self) -> None:
        """Serve until `stop` is called and the open requests have ended."""
        with suppress(SystemExit):  # uvicorn raises this if it could not start, which it has logged
            await self.serve([self._listener])

    def stop(self, at_once: bool = False) -> None:
        """Accept no more connections, and end when the open requests have ended; at_once: cut them off."""
        self.should_exit = True
        self.force_exit = self.force_exit or at_once
