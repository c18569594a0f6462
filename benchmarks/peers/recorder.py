"""The record of when each token of a run arrived, filled by a peer's engine; it needs only Python."""

from __future__ import annotations

import time
from collections.abc import Sequence

Prompts = Sequence[Sequence[int]]


class Recorder:
    """The arrival times of each request's tokens, filled by an engine's `run`."""

    def __init__(self, count: int) -> None:
        self.arrivals: list[list[float]] = [[] for _ in range(count)]

    def add(self, request: int, tokens: int = 1) -> None:
        self.arrivals[request].extend([time.perf_counter()] * tokens)
