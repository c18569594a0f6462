"""What surrounds every gRPC call: its key, the message that it brings, its errors as a status, and what is counted of it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AbstractContextManager, asynccontextmanager
from typing import Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.descriptor import MethodDescriptor

from inferc.errors import InfercError, RequestError
from inferc.serve.errors import QueueFull, RequestTimeout
from inferc.serve.models.queue_forecast import ARRIVED_AT, WITHIN
from inferc.serve.observe.trace_context import note_trace
from inferc.serve.security.access import CALLER, Access, secret_of
from inferc.serve.statuses import told
from inferc.serve.under_way import UnderWay
from inferc.system.logging import REQUEST_ID, REQUEST_ID_FORM

# Methods that need no key: what probes ask, and what tells of the services. Methods that need a key with admin: those that
# change what is served, and those that tell what others asked.
OPEN = frozenset(("ServerLive", "ServerReady", "Check", "Watch", "List", "ServerReflectionInfo"))
FOR_ADMINS = frozenset(
    (
        "LoadModel",
        "UnloadModel",
        "SleepModel",
        "WakeModel",
        "SubscribeKvEvents",
        "RepositoryModelLoad",
        "RepositoryModelUnload",
    )
)
MAX_MESSAGE_BYTES = 32 << 20  # of a request, which gRPC copies on the event loop; a million tokens are a fifth
SMALL_BYTES = 64 << 10  # of a message that no other stands in the way of, and of the largest that takes no key
MESSAGES_AT_ONCE = 16  # of the largest size, in memory
AT_ONCE_SECONDS = 1.0  # what has come by then takes no place: a client on a busy machine is some tenths late
TURNS = 3  # of an event loop that is late, until it has heard of what had come by then
MESSAGE_SECONDS = 30.0  # for a message to come whole
LATE_SECONDS = 0.1  # before its deadline here, a call that its client ends is one whose deadline is over there

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Ended: TypeAlias = Callable[[str, str], None]


class Arrivals:
    """The messages of calls, read as they come and bounded together.

    gRPC keeps what it has of a message until that is whole, and tells nobody how much it is. So one that does not come at
    once takes a place, of which there are few, for as long as its time.
    """

    def __init__(
        self,
        max_bytes: int = MAX_MESSAGE_BYTES,
        at_once_seconds: float = AT_ONCE_SECONDS,
        message_seconds: float = MESSAGE_SECONDS,
    ) -> None:
        """max_bytes: of a message."""
        self.max_bytes, self.at_once_seconds, self.message_seconds = max_bytes, at_once_seconds, message_seconds
        self.num_slow = 0  # messages that have a place
        self._num_held = 0  # bytes of large messages of calls that are under way

    @asynccontextmanager
    async def message(self, context: Context) -> AsyncIterator[bytes]:
        """The one message of a call, which counts for as long as that is under way. Raises as `read`."""
        data = await self.read(context)
        if data is None:
            raise RequestError("the call has no message; send one")
        num_large = len(data) if len(data) > SMALL_BYTES else 0
        if num_large and self._num_held + num_large > MESSAGES_AT_ONCE * MAX_MESSAGE_BYTES:
            raise QueueFull("the server holds too much of others' messages; try again later")
        self._num_held += num_large
        try:
            yield data
        finally:
            self._num_held -= num_large

    async def messages(self, context: Context) -> AsyncGenerator[bytes, None]:
        """All messages of a call, each within its time. Raises as `read`."""
        while (data := await self.read(context)) is not None:
            yield data

    async def read(self, context: Context) -> bytes | None:
        """The next message of a call; None: there is none. Raises RequestError where it is too large, RequestTimeout, and QueueFull
        where others have all places."""
        with _OnItsWay(self):
            data = await context.read()
        if not isinstance(data, bytes):
            return None
        if len(data) > self.max_bytes:
            raise RequestError(f"the message has {len(data)} bytes; at most {self.max_bytes} are taken here")
        return data


class _OnItsWay(AbstractContextManager[None]):
    """Where a task waits for a message, which takes a place if it does not come at once: ends the waiting by the error of a time that is
    over, or of places that all are taken.

    It needs no other task: each turn of the event loop that a call takes more is felt by whoever asks for health.
    """

    def __init__(self, arrivals: Arrivals) -> None:
        self._arrivals = arrivals
        self._loop, self._task = asyncio.get_running_loop(), asyncio.current_task()
        self._handle: asyncio.Handle | None = None
        self._has_place = False
        self._error: InfercError | None = None

    def __enter__(self) -> None:
        self._handle = self._loop.call_later(self._arrivals.at_once_seconds, self._is_late, TURNS)

    def _is_late(self, turns: int) -> None:
        if turns:
            self._handle = self._loop.call_soon(self._is_late, turns - 1)
        elif self._arrivals.num_slow == MESSAGES_AT_ONCE:
            self._end(QueueFull(f"{MESSAGES_AT_ONCE} messages are on their way to the server already; try again later"))
        else:
            self._arrivals.num_slow += 1
            self._has_place = True
            seconds = self._arrivals.message_seconds
            late = RequestTimeout(f"the message was not whole within {seconds:g} s")
            self._handle = self._loop.call_later(seconds, self._end, late)

    def _end(self, error: InfercError) -> None:
        self._error = error
        assert self._task is not None
        self._task.cancel()

    def __exit__(self, kind: type[BaseException] | None, *of_error: object) -> None:
        assert self._handle is not None
        self._handle.cancel()
        self._arrivals.num_slow -= self._has_place
        if self._error is not None and kind is asyncio.CancelledError:
            raise self._error from None


class Edge:
    """Around every call of a method: who calls is known, errors become a status, and `ended` hears of it."""

    def __init__(
        self,
        method: MethodDescriptor,
        access: Access,
        ended: Ended,
        keyed: Arrivals,
        keyless: Arrivals,
        under_way: UnderWay,
    ) -> None:
        """keyed, keyless: what messages of methods that need a key, and of those that need none, are read by. under_way: counts calls
        whose one message has come."""
        self._method, self._access, self._ended = method.full_name, access, ended
        self._is_open, self._is_for_admins = method.name in OPEN, method.name in FOR_ADMINS
        self._arrivals = keyless if self._is_open else keyed
        self._under_way = under_way

    @asynccontextmanager
    async def around(self, context: Context) -> AsyncIterator[None]:
        code = "CANCELLED"  # unless one of the ends below is reached
        try:
            ARRIVED_AT.set(time.monotonic())
            REQUEST_ID.set(_header(context, "x-request-id"))
            metadata = context.invocation_metadata() or ()
            note_trace((name, value) for name, value in metadata if isinstance(value, str))
            if not self._is_open:
                caller = self._access.caller(_secret(context))
                if self._is_for_admins:
                    caller.check_admin()
                CALLER.set(caller)
                WITHIN.set(context.time_remaining())
            yield
            code = "OK"
        except asyncio.CancelledError:
            left = context.time_remaining()
            if left is not None and left < LATE_SECONDS:
                code = "DEADLINE_EXCEEDED"
            raise
        except Exception as error:  # noqa: BLE001 (the edge of the process: whatever it is, the client gets a status)
            found = told(error)
            code = found.status.grpc
            after = found.retry_after
            trailing = () if after is None else (("retry-after", f"{after:g}"),)
            try:
                await context.abort(grpc.StatusCode[code], found.message, trailing)
            except grpc.aio.InternalError:  # gRPC has ended the call by itself, as one whose message is too large
                raise asyncio.CancelledError from None
        finally:
            self._ended(self._method, code)

    @asynccontextmanager
    async def message(self, context: Context) -> AsyncIterator[bytes]:
        """The message of a call that has one, while it is answered."""
        async with self._arrivals.message(context) as data:
            if self._is_open:  # of health, which may be watched for ever
                yield data
            else:
                with self._under_way.one():
                    yield data

    def messages(self, context: Context, plain: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Those of a call that has many. plain: as gRPC reads them; who has shown a key may take any time between two."""
        return self._arrivals.messages(context) if self._is_open else plain


def _header(context: Context, name: str) -> str:
    """What a client says of a call in a word, if it is one."""
    for key, value in context.invocation_metadata() or ():
        if key == name and isinstance(value, str) and REQUEST_ID_FORM.fullmatch(value):
            return value
    return ""


def _secret(context: Context) -> str | None:
    """The API key that came with a call."""
    for name, value in context.invocation_metadata() or ():
        if name == "authorization" and isinstance(value, str):
            return secret_of(value)
        if name == "x-api-key" and isinstance(value, str):
            return value
    return None
