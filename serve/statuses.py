"""What each error of ours is for a client: one table for gRPC and HTTP.

Anything that is not here is our fault, and only the log tells more.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from inferc.errors import ArtifactError, ConfigError, GenerationError, ObjectiveError, RequestError, UnsupportedError
from inferc.runtime.text.template_process import NoProcess
from inferc.serve.errors import (
    BatchesGone,
    EngineUnavailable,
    EventsOff,
    Forbidden,
    ModelsFixed,
    NotServed,
    QueueFull,
    RateLimited,
    RequestAborted,
    RequestIdInUse,
    RequestTimeout,
    Unauthenticated,
)

log = logging.getLogger(__name__)

# Until whoever watches /live has started a server again whose engine was given up; and where else nobody knows.
GIVEN_UP_SECONDS = 30.0
MAX_MESSAGE = 2000  # characters: gRPC sends it as a header
OUR_FAULT = "internal error; the server's log has the details"


@dataclass(frozen=True)
class Status:
    """grpc: the name of the code. http: the status. kind and code: as in OpenAI's error object."""

    grpc: str
    http: int
    kind: str
    code: str | None = None


# Of a model that was to be loaded. Their messages name files of the server, so they are for its log alone.
NOT_LOADABLE = (ArtifactError, ConfigError, UnsupportedError)
INTERNAL = Status("INTERNAL", 500, "server_error")
STATUSES: tuple[tuple[type[Exception], Status], ...] = (
    (Unauthenticated, Status("UNAUTHENTICATED", 401, "authentication_error", "invalid_api_key")),
    (Forbidden, Status("PERMISSION_DENIED", 403, "permission_error", "forbidden")),
    (RateLimited, Status("RESOURCE_EXHAUSTED", 429, "rate_limit_error", "rate_limit_exceeded")),
    (NotServed, Status("NOT_FOUND", 404, "invalid_request_error", "model_not_found")),
    (RequestIdInUse, Status("ALREADY_EXISTS", 409, "invalid_request_error", "request_id_in_use")),
    (RequestError, Status("INVALID_ARGUMENT", 400, "invalid_request_error")),
    (QueueFull, Status("RESOURCE_EXHAUSTED", 429, "rate_limit_error", "queue_full")),
    (ObjectiveError, Status("RESOURCE_EXHAUSTED", 429, "rate_limit_error", "objective_not_met")),
    (RequestAborted, Status("CANCELLED", 499, "server_error", "aborted")),
    (EngineUnavailable, Status("UNAVAILABLE", 503, "server_error", "unavailable")),
    (NoProcess, Status("UNAVAILABLE", 503, "server_error", "unavailable")),
    (RequestTimeout, Status("DEADLINE_EXCEEDED", 504, "server_error", "timeout")),
    (EventsOff, Status("FAILED_PRECONDITION", 400, "invalid_request_error")),
    (ModelsFixed, Status("FAILED_PRECONDITION", 400, "invalid_request_error")),
    (BatchesGone, Status("OUT_OF_RANGE", 400, "invalid_request_error")),
    (GenerationError, INTERNAL),
)


@dataclass(frozen=True)
class Told:
    """An error as a client is told of it. retry_after: seconds until another try is worth while, where that is known."""

    status: Status
    message: str
    retry_after: float | None = None


def told(error: Exception) -> Told:
    """What to tell a client; logs what is our fault."""
    for kind, status in STATUSES:
        if isinstance(error, kind):
            retry_after = getattr(error, "retry_after", None)
            if retry_after is None and isinstance(error, EngineUnavailable):
                retry_after = GIVEN_UP_SECONDS
            return Told(status, _sendable(str(error)), retry_after)
    if isinstance(error, NOT_LOADABLE):
        log.error("%s", error)
        status = Status("FAILED_PRECONDITION", 409, "invalid_request_error", "model_not_loadable")
        return Told(status, "the model cannot be loaded; the server's log has the details")
    log.error("a call failed", exc_info=error)
    return Told(INTERNAL, OUR_FAULT)


def _sendable(message: str) -> str:
    """A message that every protocol can carry: it may quote half of a surrogate pair, or a name of any length, that a client sent."""
    return message[:MAX_MESSAGE].encode("utf-8", "backslashreplace").decode()
