"""When each token of a run was there: what a peer's engine fills. Needs nothing but Python."""

from __future__ import annotations

import time
from collections.abc import Sequence

Prompts = Sequence[Sequence[int]]


class Recorder:
    """When each request's tokens were there; what an engine's `run` fills."""

    def __init__(self, count: int) -> None:
        self.arrivals: list[list[float]] = [[] for _ in range(count)]

    def add(self, request: int, tokens: int = 1) -> None:
        self.arrivals[request].extend([time.perf_counter()] * tokens)
