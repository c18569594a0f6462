"""An engine process that does what the test says."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from virtual_time import Gate

from inferc.errors import InfercError
from inferc.runtime.engine.loop import Failed, Scored, Sink, Stats
from inferc.runtime.engine.scoring import Score
from inferc.runtime.engine.stats import EngineStats
from inferc.runtime.step.sampling_params import SamplingParams


class Process:
    """Starts and ends as soon as `start_gate` and `end_gate` are open; error: what it fails to start by."""

    def __init__(self, on_stop: Callable[[str], None], error: InfercError | OSError | None = None) -> None:
        self.stopped: str | None = None
        self.is_hung = False
        self.closed = False
        self.sinks: list[Sink] = []  # of what was begun and not answered
        self.changes: list[tuple[str, Sink]] = []  # of adapters that were not answered
        self.start_gate, self.end_gate = Gate(), Gate()
        self._on_stop, self._error = on_stop, error

    def wait_until_ready(self) -> None:
        self.start_gate.wait()
        if self._error is not None:
            self.closed = True
            raise self._error

    def add(self, prompt_token_ids: Any, params: SamplingParams, sink: Sink, name: str = "") -> str:
        raise NotImplementedError

    def score(
        self,
        token_ids: Any,
        sink: Sink,
        num_top: int = 0,
        cache_salt: str = "",
        first: int = 1,
        adapter: str = "",
    ) -> str:
        self.sinks.append(sink)
        return str(len(self.sinks))

    def load_adapter(self, name: str, path: str, sink: Sink) -> str:
        self.changes.append((f"load {name}", sink))
        return f"load-{name}"

    def unload_adapter(self, name: str, sink: Sink) -> str:
        self.changes.append((f"unload {name}", sink))
        return f"unload-{name}"

    def embed(self, token_ids: Any, sink: Sink) -> str:
        raise NotImplementedError

    def abort(self, request_id: str, index: int | None = None) -> None:
        pass

    def answer(self) -> None:
        """The oldest of what was begun."""
        self.sinks.pop(0)(Scored("1", Score([-1.0], [2])))

    def ask_stats(self, sink: Sink) -> str:
        if not self.is_hung:
            sink(Stats("stats", EngineStats()))
        return "stats"

    def die(self, reason: str) -> None:
        self.stopped = reason
        sinks, self.sinks = self.sinks, []
        for sink in sinks:
            sink(Failed("1", reason))
        self._on_stop(reason)

    def kill(self, reason: str) -> None:
        self.die(reason)

    def close(self) -> None:
        self.start_gate.open()
        self.end_gate.wait()
        self.closed = True
