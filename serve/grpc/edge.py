"""The edge of the gRPC server around every call: its API key, its message, its errors as a status, and its metrics."""

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
from inferc.serve.statuses import to_client_error
from inferc.serve.under_way import UnderWay
from inferc.system.logging import REQUEST_ID, REQUEST_ID_FORM

# OPEN: methods that need no key, which are those of health probes and of reflection. FOR_ADMINS: methods that need a
# key with admin, which change what is served or reveal what others asked.
OPEN = frozenset(("ServerLive", "ServerReady", "Check", "Watch", "List", "ServerReflectionInfo"))
FOR_ADMINS = frozenset(
    (
        "LoadModel",
        "UnloadModel",
        "SleepModel",
        "WakeModel",
        "LoadAdapter",
        "UnloadAdapter",
        "SubscribeKvEvents",
        "RepositoryModelLoad",
        "RepositoryModelUnload",
    )
)
# Size of a request, which gRPC copies on the event loop; a million tokens take a fifth of it.
MAX_MESSAGE_BYTES = 32 << 20
# A message up to this size does not count for the memory bound; calls without a key may send no larger one.
SMALL_BYTES = 64 << 10
# Bound on the memory for messages, in messages of the largest size; also the number of messages that may be on their
# way.
MESSAGES_AT_ONCE = 16
# A message that comes within this time takes no place; a client on a busy machine is some tenths of a second late.
AT_ONCE_SECONDS = 1.0
TURNS = 3  # turns that a late event loop gets, to take the messages that had come within that time
MESSAGE_SECONDS = 30.0  # time limit for a message that has a place
# A call that its client ends so shortly before its deadline counts as one that is over because of the deadline.
LATE_SECONDS = 0.1

Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
Ended: TypeAlias = Callable[[str, str], None]


class Arrivals:
    """The reader of the messages of calls, which bounds their memory together.

    gRPC buffers an incomplete message, and does not tell how much it has buffered. So a message that does not come at
    once takes one of MESSAGES_AT_ONCE places, for at most message_seconds.
    """

    def __init__(
        self,
        max_bytes: int = MAX_MESSAGE_BYTES,
        at_once_seconds: float = AT_ONCE_SECONDS,
        message_seconds: float = MESSAGE_SECONDS,
    ) -> None:
        """Set the bounds; max_bytes: the size of one message."""
        self.max_bytes, self.at_once_seconds, self.message_seconds = max_bytes, at_once_seconds, message_seconds
        self.num_slow = 0  # messages on their way that have taken a place
        self._num_held = 0  # bytes of large messages of calls that are under way

    @asynccontextmanager
    async def message(self, context: Context) -> AsyncIterator[bytes]:
        """Read the single message of a call, and count its memory while the body runs; raises the errors of `read`."""
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
        """Yield all messages of a call, each of which has its own time limit; raises the errors of `read`."""
        while (data := await self.read(context)) is not None:
            yield data

    async def read(self, context: Context) -> bytes | None:
        """Read the next message of a call; None: there is none.

        Raises RequestError if it is too large, RequestTimeout if it takes too long, and QueueFull if all places are
        taken.
        """
        with _OnItsWay(self):
            data = await context.read()
        if not isinstance(data, bytes):
            return None
        if len(data) > self.max_bytes:
            raise RequestError(f"the message has {len(data)} bytes; at most {self.max_bytes} are taken here")
        return data


class _OnItsWay(AbstractContextManager[None]):
    """The context in which a task waits for a message; one that is slow to arrive takes a place of its `Arrivals`.

    It ends the waiting with an error if the message takes too long, or if all places are taken. It works without a
    second task: each further turn of the event loop per call would delay health probes.
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
    """The context around every call of a method: it finds the caller, turns errors into a status, and calls `ended`."""

    def __init__(
        self,
        method: MethodDescriptor,
        access: Access,
        ended: Ended,
        keyed: Arrivals,
        keyless: Arrivals,
        under_way: UnderWay,
    ) -> None:
        """Prepare the context for a method.

        keyed, keyless: the readers for the messages of methods that need a key, and of methods that need none.
        under_way: counts the calls whose single message has come.
        """
        self._method, self._access, self._ended = method.full_name, access, ended
        self._is_open, self._is_for_admins = method.name in OPEN, method.name in FOR_ADMINS
        self._arrivals = keyless if self._is_open else keyed
        self._under_way = under_way

    @asynccontextmanager
    async def around(self, context: Context) -> AsyncIterator[None]:
        code = "CANCELLED"  # the status code that is counted if none of the ends below is reached
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
            found = to_client_error(error)
            code = found.status.grpc
            after = found.retry_after
            trailing = () if after is None else (("retry-after", f"{after:g}"),)
            try:
                await context.abort(grpc.StatusCode[code], found.message, trailing)
            except (
                grpc.aio.InternalError
            ):  # gRPC has ended the call itself, for example for a message that is too large
                raise asyncio.CancelledError from None
        finally:
            self._ended(self._method, code)

    @asynccontextmanager
    async def message(self, context: Context) -> AsyncIterator[bytes]:
        """Read the message of a call that has a single one, and count the call as under way while it is answered."""
        async with self._arrivals.message(context) as data:
            if self._is_open:  # not counted: a health watch may last for ever
                yield data
            else:
                with self._under_way.one():
                    yield data

    def messages(self, context: Context, plain: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Return the messages of a call that has many.

        plain: the messages as gRPC reads them, without a time limit, which is used for callers that have shown a key.
        """
        return self._arrivals.messages(context) if self._is_open else plain


def _header(context: Context, name: str) -> str:
    """Return a header of a call if it is a valid request id, else ""."""
    for key, value in context.invocation_metadata() or ():
        if key == name and isinstance(value, str) and REQUEST_ID_FORM.fullmatch(value):
            return value
    return ""


def _secret(context: Context) -> str | None:
    """Return the API key that came with a call, or None."""
    for name, value in context.invocation_metadata() or ():
        if name == "authorization" and isinstance(value, str):
            return secret_of(value)
        if name == "x-api-key" and isinstance(value, str):
            return value
    return None
