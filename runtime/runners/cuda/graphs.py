"""CUDA graphs of decode steps, one for each size (bucket), captured once and run for all lengths."""

from __future__ import annotations

import logging
from collections.abc import Callable
from ctypes import c_void_p

from inferc.runtime.runners.cuda import memory
from inferc.runtime.runners.cuda.driver import Driver, OutOfMemory
from inferc.runtime.runners.cuda.engines import NotCapturable
from inferc.runtime.runners.cuda.inputs import Capacity
from inferc.runtime.runners.cuda.launches import Launches

log = logging.getLogger(__name__)


class StepGraphs:
    """bind: the launches of steps of a size. Those of powers of two are captured by `capture_first`, the others when they are needed."""

    def __init__(
        self, driver: Driver, stream: c_void_p, bind: Callable[[Capacity], Launches], max_num_seqs: int
    ) -> None:
        self._driver, self._stream, self._bind = driver, stream, bind
        self._graphs: dict[tuple[Capacity, bool], c_void_p | None] = {}  # None: there was no memory for it
        self._buckets = memory.buckets(max_num_seqs)

    @property
    def num_captured(self) -> int:
        return sum(map(bool, self._graphs.values()))

    def bucket_for(self, num_seqs: int) -> Capacity | None:
        """The smallest bucket with room for so many sequences of one new token each."""
        size = next((size for size in self._buckets if size >= num_seqs), None)
        return None if size is None else Capacity(size, size, size)

    def capture_first(self) -> None:
        for size in self._buckets:
            if size & (size - 1) == 0:
                self.find(Capacity(size, size, size), shares=False)

    def find(self, capacity: Capacity, shares: bool) -> c_void_p | None:
        """The graph of a bucket, the launches of its largest step; None if the device has no memory for it.

        shares: sequences share a prefix.
        """
        key = capacity, shares
        if key not in self._graphs:
            counts = {"num_tokens": capacity.tokens, "num_rows": capacity.rows, "num_seqs": capacity.seqs}
            launches = self._bind(capacity)
            try:
                launches.prepare_graph(self._stream, counts)
                with self._driver.capture(self._stream) as captured:
                    launches.run(self._stream, counts, shares=shares, captured=True)
                self._graphs[key] = captured.graph
            except OutOfMemory:
                self._do_without(key)
            except NotCapturable as error:
                self._do_without(key, str(error))
        return self._graphs[key]

    def run(self, capacity: Capacity, shares: bool) -> bool:
        """Launch the graph of a bucket; False if there is none."""
        graph = self.find(capacity, shares)
        if graph is None:
            return False
        try:
            self._driver.launch_graph(graph, self._stream)
        except OutOfMemory:
            self._driver.wait(self._stream)
            self._driver.call("cuGraphExecDestroy", graph)
            self._do_without((capacity, shares))
            return False
        return True

    def milliseconds(self, capacity: Capacity, shares: bool, repeats: int) -> float:
        """Of the device for one step of a bucket, as often as its graph runs back to back. Raises ValueError if there is none."""
        graph = self.find(capacity, shares)
        if graph is None:
            raise ValueError(f"there is no graph for a bucket of {capacity.seqs}: the device has no memory for it")
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

    def _do_without(self, key: tuple[Capacity, bool], reason: str = "") -> None:
        """Have the steps of a graph run kernel by kernel from now on. reason: there is another than memory."""
        if None not in self._graphs.values() and reason:
            log.warning(
                "%s: steps of %d sequences, and others like them, run without a CUDA graph", reason, key[0].seqs
            )
        elif None not in self._graphs.values():
            log.warning(
                "the device has no memory for a CUDA graph: steps of %d sequences, and of other numbers whose graphs find none,"
                " run kernel by kernel, which is slower; a lower --kv-memory leaves them more",
                key[0].seqs,
            )
        self._graphs[key] = None
