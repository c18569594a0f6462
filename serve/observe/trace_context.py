"""The trace that a call belongs to, as the client's W3C Trace Context headers state it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextvars import ContextVar
from types import MappingProxyType

PARENT, STATE = "traceparent", "tracestate"
TRACE_CONTEXT: ContextVar[Mapping[str, str]] = ContextVar("TRACE_CONTEXT", default=MappingProxyType({}))


def note_trace(headers: Iterable[tuple[str, str]]) -> None:
    """Keep the trace headers of a call; several `tracestate` headers are joined into one list."""
    found: dict[str, str] = {}
    for name, value in headers:
        if name == PARENT:
            found[PARENT] = value
        elif name == STATE:
            found[STATE] = f"{found[STATE]},{value}" if STATE in found else value
    TRACE_CONTEXT.set(found)
