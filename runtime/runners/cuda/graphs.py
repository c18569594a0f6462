"""The CUDA graphs of decode steps: one per batch size (bucket), captured once and run for all sequence lengths."""

from __future__ import annotations

import logging
from collections.abc import Callable
from ctypes import c_void_p
from typing import TypeAlias

from inferc.runtime.runners.cuda.capacity import Capacity, buckets
from inferc.runtime.runners.cuda.driver import Driver, OutOfMemory
from inferc.runtime.runners.cuda.engines import NotCapturable
from inferc.runtime.runners.cuda.launches import Launches, Part

log = logging.getLogger(__name__)


_Key: TypeAlias = tuple[Capacity, bool, Part, bool]


class StepGraphs:
    """The CUDA graphs of a runner, by bucket.

    bind: returns the launches for steps of a size. `capture_first` captures the buckets that are powers of two; the
    others are captured when they are first needed.
    """

    def __init__(
        self, driver: Driver, stream: c_void_p, bind: Callable[[Capacity], Launches], max_num_seqs: int
    ) -> None:
        self._driver, self._stream, self._bind = driver, stream, bind
        # None: the device had no memory for the graph, or an engine cannot be captured.
        self._graphs: dict[_Key, c_void_p | None] = {}
        self._buckets = buckets(max_num_seqs)

    @property
    def num_captured(self) -> int:
        return sum(map(bool, self._graphs.values()))

    def bucket_for(self, num_seqs: int) -> Capacity | None:
        """Return the smallest bucket with room for this many sequences of one new token each, or None."""
        size = next((size for size in self._buckets if size >= num_seqs), None)
        return None if size is None else Capacity(size, size, size)

    def capture_first(self) -> None:
        for size in self._buckets:
            if size & (size - 1) == 0:
                self.find(Capacity(size, size, size), shares=False)

    def find(self, capacity: Capacity, shares: bool, part: Part = "whole", adapted: bool = False) -> c_void_p | None:
        """Return the graph of a bucket, capturing the launches of its largest step if needed.

        Return None if the device has no memory for it, or an engine cannot be captured. shares: sequences share a
        prefix. part: the part of the step that the graph is of. adapted: sequences have adapters.
        """
        key = capacity, shares, part, adapted
        if key not in self._graphs:
            counts = {"num_tokens": capacity.tokens, "num_rows": capacity.rows, "num_seqs": capacity.seqs}
            launches = self._bind(capacity)
            try:
                launches.prepare_graph(self._stream, counts)
                with self._driver.capture(self._stream) as captured:
                    launches.run(self._stream, counts, shares=shares, adapted=adapted, captured=True, part=part)
                self._graphs[key] = captured.graph
            except OutOfMemory:
                self._do_without(key)
            except NotCapturable as error:
                self._do_without(key, str(error))
        return self._graphs[key]

    def run(self, capacity: Capacity, shares: bool, part: Part = "whole", adapted: bool = False) -> bool:
        """Launch the graph of a bucket, and return whether there is one."""
        graph = self.find(capacity, shares, part, adapted)
        if graph is None:
            return False
        try:
            self._driver.launch_graph(graph, self._stream)
        except OutOfMemory:
            self._driver.wait(self._stream)
            self._driver.call("cuGraphExecDestroy", graph)
            self._do_without((capacity, shares, part, adapted))
            return False
        return True

    def milliseconds(self, capacity: Capacity, shares: bool, repeats: int) -> float:
        """Return the device's milliseconds per step of a bucket, measured over `repeats` back-to-back graph launches.

        Raises ValueError if there is no graph.
        """
        graph = self.find(capacity, shares)
        if graph is None:
            why = "the device had no memory for it, or it cannot be captured; a warning said which"
            raise ValueError(f"there is no graph for a bucket of {capacity.seqs}: {why}")
        start, end = (self._driver.new_event(timed=True) for _ in range(2))
        self._driver.record(start, self._stream)
        for _ in range(repeats):
            self._driver.launch_graph(graph, self._stream)
        self._driver.record(end, self._stream)
        self._driver.wait_event(end)
        spent = self._driver.milliseconds(start, end) / repeats
        for event in (start, end):
            self._driver.call("cuEventDestroy_v2", event)
        return spent

    def close(self) -> None:
        for graph in filter(None, self._graphs.values()):
            self._driver.call("cuGraphExecDestroy", graph)
        self._graphs.clear()

    def _do_without(self, key: _Key, reason: str = "") -> None:
        """Run the steps of a graph kernel by kernel from now on. reason: why, if not for lack of memory."""
        if None not in self._graphs.values() and reason:
            log.warning(
                "%s: steps of %d sequences, and others like them, run without a CUDA graph", reason, key[0].seqs
            )
        elif None not in self._graphs.values():
            log.warning(
                "the device has no memory for a CUDA graph: steps of %d sequences, and of other numbers whose graphs"
                " find none, run kernel by kernel, which is slower; a lower --kv-memory leaves them more",
                key[0].seqs,
            )
        self._graphs[key] = None
