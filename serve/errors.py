"""The errors for which a server refuses a request; statuses.py has the status of each for clients."""

from __future__ import annotations

from inferc.errors import InfercError, RequestError


class EngineUnavailable(InfercError):
    """An error that says that the engine takes no requests: the server shuts down, or the engine died.

    retry_after: seconds until the engine may be back.
    """

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NoRoomToWake(EngineUnavailable):
    """An error that says that the model sleeps, and that none of the awake models made room in time."""


class QueueFull(InfercError):
    """An error that says that too many sequences are running or waiting.

    retry_after: seconds until there may be room.
    """

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestAborted(InfercError):
    """An error that says that the request was ended by somebody other than its reader."""


class RequestIdInUse(RequestError):
    """An error that says that another request with the same id is still running."""


class RequestTimeout(InfercError):
    """An error that says that the request was not done within its time."""


class EventsOff(InfercError):
    """An error that says that KV events are asked for, and that the engine does not collect them."""


class BatchesGone(InfercError):
    """An error that says that batches of KV events are not kept any more, or never existed."""


class NotServed(RequestError):
    """An error that says that the request names a model that this server does not have."""


class AdaptersFixed(InfercError):
    """A request to load an adapter, of a server that was given no folder of adapters."""


class ModelsFixed(InfercError):
    """An error that says that the server can load no other models, as it was given no folder of models."""


class Unauthenticated(InfercError):
    """An error that says that the request has no API key, or one that is unknown."""


class Forbidden(InfercError):
    """An error that says that the API key does not permit this call."""


class RateLimited(InfercError):
    """An error that says that the API key has reached its rate limit, or its number of requests at once.

    retry_after: seconds until the next request may succeed.
    """

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after
