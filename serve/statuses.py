"""The table that maps each error to its gRPC and HTTP status for clients.

An error that is not in the table is a fault of the server; its details are only in the log.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from inferc.errors import ArtifactError, ConfigError, GenerationError, ObjectiveError, RequestError, UnsupportedError
from inferc.serve.errors import (
    AdaptersFixed,
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
from inferc.system.worker_process import NoProcess

log = logging.getLogger(__name__)

# The retry_after of EngineUnavailable errors that state none. It is the time in which an orchestrator that probes /live
# restarts a server whose engine was given up.
GIVEN_UP_SECONDS = 30.0
MAX_MESSAGE = 2000  # characters: gRPC sends it as a header
OUR_FAULT = "internal error; the server's log has the details"


@dataclass(frozen=True)
class Status:
    """The status of an error for clients.

    grpc: the name of the gRPC status code. http: the HTTP status. kind and code: the `type` and `code` of OpenAI's
    error object.
    """

    grpc: str
    http: int
    kind: str
    code: str | None = None


# The errors of a model that cannot be loaded. Their messages name files of the server, so only the log shows them.
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
    (AdaptersFixed, Status("FAILED_PRECONDITION", 400, "invalid_request_error")),
    (ModelsFixed, Status("FAILED_PRECONDITION", 400, "invalid_request_error")),
    (BatchesGone, Status("OUT_OF_RANGE", 400, "invalid_request_error")),
    (GenerationError, INTERNAL),
)


@dataclass(frozen=True)
class ClientError:
    """An error in the form in which a client gets it.

    retry_after: seconds until another try makes sense; None if that is unknown, or if no retry helps.
    """

    status: Status
    message: str
    retry_after: float | None = None


def to_client_error(error: Exception) -> ClientError:
    """Return an error in the form for clients, and log it if it is a fault of the server."""
    for kind, status in STATUSES:
        if isinstance(error, kind):
            retry_after = getattr(error, "retry_after", None)
            if retry_after is None and isinstance(error, EngineUnavailable):
                retry_after = GIVEN_UP_SECONDS
            return ClientError(status, _sendable(str(error)), retry_after)
    if isinstance(error, NOT_LOADABLE):
        log.error("%s", error)
        status = Status("FAILED_PRECONDITION", 409, "invalid_request_error", "model_not_loadable")
        return ClientError(status, "the model cannot be loaded; the server's log has the details")
    log.error("a call failed", exc_info=error)
    return ClientError(INTERNAL, OUR_FAULT)


def _sendable(message: str) -> str:
    """Return a message in a form that every protocol can carry.

    It may quote what a client sent: half of a surrogate pair, which is escaped, or a very long name, which is cut.
    """
    return message[:MAX_MESSAGE].encode("utf-8", "backslashreplace").decode()
