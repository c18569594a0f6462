"""The HTTP/1.1 protocol of uvicorn with bounds on clients that send slowly, send too much, or do not read."""

from __future__ import annotations

import asyncio
import time
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from inferc.serve.http.connections import Connection
from inferc.serve.http.edge import MAX_BODY_BYTES
from inferc.serve.http.upgrades import Upgrades
from inferc.serve.security.access import OPEN

MAX_HEAD_BYTES = 64 << 10  # size of a request's line and headers, and of the trailers after its body
# Time between two checks of a client. Within it a head must be complete, and the rest of a closed connection be read.
LOOK_SECONDS = 30.0
# Bytes of an incomplete body that must come, or of an answer that must be read, between two checks.
MIN_BYTES = 16 << 10
MAX_PIPELINED = 16  # requests that may wait behind the one that is being answered
BEGINS_AT_BYTES = 16 << 10  # the application is called when so much of the body has come, or all of it


class Protocol(HttpToolsProtocol):
    """A protocol that closes connections whose clients send or read next to nothing.

    It refuses heads that are too large (431), and requests for which there is no place (503).
    """

    def __init__(
        self,
        *args: Any,
        connection: Connection,
        max_body_bytes: int = MAX_BODY_BYTES,
        **kwargs: Any,
    ) -> None:
        """Set up the protocol for a connection; max_body_bytes: the application refuses larger bodies."""
        super().__init__(*args, **kwargs)
        self._connection, self._max_body_bytes = connection, max_body_bytes
        self._connections = connection.among
        self._is_lost = False
        self._is_refused = self._is_for_health = False  # facts about the last request
        self._looking: asyncio.TimerHandle | None = None  # the next check, while it is the client's turn
        self._is_deaf = False  # it sent too many requests at once: nothing more is read
        self._num_unsent = 0  # bytes that the client had not read at the last check
        self._is_in_head = self._is_in_body = False
        self._num_head = 0  # bytes of the head that the parser has reported
        self._num_unheard = 0  # bytes since the parser last reported something complete
        self._num_body = 0  # bytes of the body since the last check
        self._pieces: list[bytes] = []  # pieces of the body that the application has not got yet
        self._upgrades = Upgrades()
        self._held: tuple[Any, Any] | None = None  # the request whose start is held back until its body has come

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._connection.transport = transport
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._is_lost, self._held = True, None
        self._stop_looking()
        super().connection_lost(exc)
        self._unset_keepalive_if_required()

    def data_received(self, data: bytes) -> None:
        if self._is_deaf:
            return
        self._num_unheard += len(data)
        self._feed(data)
        self._pass_body_on()
        if self._num_unheard > MAX_HEAD_BYTES and not self._is_deaf:
            self._refuse(b"431 Request Header Fields Too Large")
        self._count()
        self._watch()

    def _feed(self, data: bytes) -> None:
        """Give received bytes to the HTTP parser, the head of each request on its own."""
        while data and not (self._is_deaf or self.transport.is_closing()):
            # The parser itself goes on with a body, or with a head that began in the same piece as the end of a body.
            is_begun = self._is_in_body or (self._is_in_head and not self._upgrades.is_within)
            piece, data = (data, b"") if is_begun else self._upgrades.passed_over(data)
            super().data_received(piece)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._num_unsent = self.transport.get_write_buffer_size()
        self._watch()

    def resume_writing(self) -> None:
        super().resume_writing()
        self._count()
        self._watch()

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self._watch()

    def on_message_begin(self) -> None:
        # `_num_unheard` is not reset: those bytes are the beginning of this head.
        self._is_in_head, self._num_head = True, 0
        super().on_message_begin()

    def on_url(self, url: bytes) -> None:
        self._count_head(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count_head(len(name) + len(value) + len(": \r\n"))
        if self._is_in_head:  # trailers after a body are ignored
            super().on_header(name, value)

    def _count_head(self, num_bytes: int) -> None:
        """Count bytes of a head or of trailers, and refuse it if too large; the error then ends the parser's work."""
        self._num_head += num_bytes
        if self._num_head > MAX_HEAD_BYTES:
            self._refuse(b"431 Request Header Fields Too Large")
            raise ValueError("the head is too large")

    def send_400_response(self, msg: str) -> None:
        if not (self._is_deaf or self.transport.is_closing()):  # otherwise it was refused with another status
            super().send_400_response(msg)

    def on_headers_complete(self) -> None:
        path = self.url.partition(b"?")[0].rstrip(b"/").decode("latin-1")
        self._is_for_health = path in OPEN
        may_ask = self._is_for_health or self._connections.may_ask(self._connection)
        if len(self.pipeline) == MAX_PIPELINED or (self._is_answering and not may_ask):
            self._is_deaf = True
            last = self.pipeline[0][0] if self.pipeline else self.cycle
            last.keep_alive = False  # its answer is the last one on this connection
            raise ValueError("too many requests at once")
        self._is_in_head, self._is_in_body, self._num_unheard, self._num_body = False, True, 0, 0
        if not may_ask:
            self._refuse_as_full()
            return
        scope: Any = self.scope  # Any, because its type has only ASGI's keys
        scope["arrived_at"] = time.monotonic()
        super().on_headers_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._count()
        self._watch()

    def _count(self) -> None:
        """Count the connection as idle, unless a complete request is being answered or an answer is not read yet."""
        is_working = self._is_answering and (self.pipeline or not self._is_in_body)
        if not (is_working or self.flow.write_paused or self.transport.is_closing()):
            self._connections.rest(self._connection)

    def on_body(self, body: bytes) -> None:
        self._num_unheard = 0
        self._num_body += len(body)
        self._pieces.append(body)

    def _pass_body_on(self) -> None:
        """Hand over the body's pieces that have come, as one: a client may send it in chunks of one byte."""
        pieces, self._pieces = self._pieces, []
        if pieces and not self._is_refused:
            super().on_body(b"".join(pieces))
            if self._held is not None and len(self._held[0].body) >= BEGINS_AT_BYTES:
                self._begin()

    def on_message_complete(self) -> None:
        self._pass_body_on()
        self._is_in_body, self._num_unheard, self._num_head = False, 0, 0
        self._stop_looking()  # the next wait for the client has its own timer
        if self._is_refused:
            return
        if self._is_for_health:
            self._connections.visit(self._connection)
        elif self._is_answering and not (self._connections.take_place(self._connection) or self.pipeline):
            self._held = None  # other requests have taken all places while its body came
            self._refuse_as_full()
            return
        super().on_message_complete()
        self._begin()

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        """Hold a request back until its body has come, so that no task of the application waits for it.

        A request that expects "100 Continue", or whose body is announced as too large, starts at once.
        """
        is_whole = not self._is_in_body or cycle is not self.cycle
        length = next((value for name, value in cycle.scope["headers"] if name == b"content-length"), b"0")
        is_too_large = length.isdigit() and int(length) > self._max_body_bytes
        if is_whole or is_too_large or cycle.waiting_for_100_continue or len(cycle.body) >= BEGINS_AT_BYTES:
            super()._start_asgi_task(cycle, app)
        else:
            self._held = cycle, app

    def _begin(self) -> None:
        """Start the application on the request that was held for its body, if one was."""
        held, self._held = self._held, None
        if held is not None:
            super()._start_asgi_task(*held)

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _is_expected_to_act(self) -> bool:
        """True if it is the client's turn to send or to read."""
        if self.transport.is_closing() or self.flow.write_paused:
            return True
        if self._is_in_body:
            return not self.pipeline  # otherwise it waits behind other requests, and is not read
        return not self._is_answering and self.timeout_keep_alive_task is None

    def _watch(self) -> None:
        """Start the timer of the next check if it is the client's turn and no timer runs; stop it if it is not."""
        if self._is_lost or not self._is_expected_to_act:
            self._stop_looking()
        elif self._looking is None:
            self._looking = self.loop.call_later(LOOK_SECONDS, self._look)

    def _stop_looking(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            self._looking = None

    def _look(self) -> None:
        self._looking = None
        if self.transport.is_closing():
            self.transport.abort()
        elif self.flow.write_paused:
            unsent, self._num_unsent = self._num_unsent, self.transport.get_write_buffer_size()
            if unsent - self._num_unsent < MIN_BYTES:
                self.transport.abort()
        elif self._is_in_body and (self._num_body >= MIN_BYTES or self.flow.read_paused):
            self._num_body = 0
        elif self._is_in_head or self._is_in_body or self._num_unheard:
            self._refuse(b"408 Request Timeout")
        else:  # it was opened and not used
            self.transport.close()
        self._watch()

    def _refuse_as_full(self) -> None:
        self._is_refused = True
        self._refuse(b"503 Service Unavailable\r\nretry-after: 1")

    def _refuse(self, status: bytes) -> None:
        """Close the connection, after an answer with this status unless another answer has begun."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(b"HTTP/1.1 " + status + b"\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
        self.transport.close()
        self._watch()
