"""The clients of a running server: the typed clients, offline batches, and metrics read from outside.

`from inferc.client import Client`. The clients are imported at their first use: they need the `serve` extra, which the
modules beside them do not.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from inferc.client.client import (
        SERVICE,
        AsyncClient,
        Client,
        Completion,
        Delta,
        Prompt,
        Score,
        ServerError,
        Tls,
    )

__all__ = ["SERVICE", "AsyncClient", "Client", "Completion", "Delta", "Prompt", "Score", "ServerError", "Tls"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'inferc.client' has no attribute {name!r}")
    return getattr(import_module("inferc.client.client"), name)


def __dir__() -> list[str]:
    return __all__
