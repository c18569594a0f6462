"""A KV cache offload tier without files: copies are made at random times, and stored blocks outlive the engine."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Callable, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from inferc.runtime.offload.manager import Done
from inferc.runtime.scheduler.config import SchedulerConfig
from inferc.runtime.step.plan import I32


class FakeMover:
    """`damaged` places fail their check, `fails` makes every copy fail. rate: seconds a byte that it says it takes."""

    def __init__(self, seed: int = 0, rate: float = 1e-12) -> None:
        self.rng = random.Random(seed)
        self.seconds_per_byte = rate
        self.fails = False
        self.damaged: set[tuple[int, int]] = set()
        self.stored: dict[tuple[int, int], tuple[bytes, list[int]]] = {}  # by group and place, for later runs
        self.num_copies = self.num_checks = self.num_read_ahead = 0
        self.closed = False
        self._copied: dict[tuple[int, int], list[int]] = {}
        self._jobs: deque[Callable[[], Done | None]] = deque()
        self._done: list[Done] = []

    def attach(self, pools: Sequence[NDArray[np.int64]], config: SchedulerConfig) -> None:
        """A new engine's pools; what is stored lies behind their arenas."""
        self._pools, self._size, self._counts = pools, config.block_size, config.num_blocks
        self._jobs.clear()
        self._done.clear()
        self.closed = False
        for (group, place), (_, data) in self.stored.items():
            self._of(group, self._counts[group] + place)[:] = data

    def _of(self, group: int, block: int) -> NDArray[np.int64]:
        return self._pools[group][block * self._size : (block + 1) * self._size]

    def names(self, group: int) -> Mapping[int, bytes]:
        return {self._counts[group] + place: name for (of, place), (name, _) in self.stored.items() if of == group}

    def copy(self, group: int, block: int, stored_block: int) -> None:
        self.num_copies += 1

        def run() -> Done:
            self.stored.pop((group, stored_block - self._counts[group]), None)
            if self.fails:
                return Done((group, stored_block), "no space left")
            self._of(group, stored_block)[:] = self._of(group, block)
            self._copied[group, stored_block] = self._of(group, block).tolist()
            return Done((group, stored_block))

        self._ask(run)

    def commit(self, group: int, stored_block: int, name: bytes) -> None:
        self.stored[group, stored_block - self._counts[group]] = name, self._copied.pop((group, stored_block))

    def check(self, group: int, stored_block: int) -> None:
        self.num_checks += 1
        place = group, stored_block - self._counts[group]
        self._ask(lambda: Done((group, stored_block), "it is damaged" if place in self.damaged else None))

    def forget(self, group: int, stored_block: int) -> None:
        self.stored.pop((group, stored_block - self._counts[group]), None)

    def _ask(self, job: Callable[[], Done | None]) -> None:
        self._jobs.append(job)
        if self.rng.random() < 0.3:  # the thread is quick
            self._run()

    def _run(self) -> None:
        if (done := self._jobs.popleft()()) is not None:
            self._done.append(done)

    def take_done(self) -> list[Done]:
        while self._jobs and self.rng.random() < 0.6:
            self._run()
        count = self.rng.randint(0, len(self._done))
        done, self._done = self._done[:count], self._done[count:]
        return done

    def read_ahead(self, tables: Sequence[I32]) -> None:
        self.num_read_ahead += any((table >= low).any() for table, low in zip(tables, self._counts, strict=True))

    def close(self) -> None:
        self.closed = True
