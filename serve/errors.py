"""What a server refuses and why: the errors that clients are told of, each with its row in statuses.py."""

from __future__ import annotations

from inferc.errors import InfercError, RequestError


class EngineUnavailable(InfercError):
    """The engine takes no requests: the server shuts down, or the engine died. retry_after: seconds until it may be back."""

    def __init__(self, message: str, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class NoPlace(EngineUnavailable):
    """The model sleeps, and none of those that are awake made room in time."""


class QueueFull(InfercError):
    """Too many sequences are running or waiting. retry_after: seconds until there may be room."""

    def __init__(self, message: str, retry_after: float = 1.0) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class RequestAborted(InfercError):
    """Somebody else ended the request."""


class RequestIdInUse(RequestError):
    """A request of this id is still running."""


class RequestTimeout(InfercError):
    """A request was not done within its time."""


class EventsOff(InfercError):
    """Nobody collects them."""


class BatchesGone(InfercError):
    """The batches that a subscriber asks for are not kept any more, or were never there."""


class NotServed(RequestError):
    """The request names a model that this server does not have."""


class ModelsFixed(InfercError):
    """The server was not told where other models are."""


class Unauthenticated(InfercError):
    """No key, or none that is known."""


class Forbidden(InfercError):
    """The key is not for this."""


class RateLimited(InfercError):
    """The key has asked too often, or for too much at once. retry_after: seconds until it may again."""

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(message)
        self.retry_after = retry_after
