"""The trace that a call belongs to, as its client named it in the header `traceparent` (W3C Trace Context)."""

from __future__ import annotations

from contextvars import ContextVar

TRACE_PARENT: ContextVar[str] = ContextVar("TRACE_PARENT", default="")
