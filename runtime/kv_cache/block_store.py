"""The offload tier of one KV group: blocks with ids of their own behind the arena's, which hold what the arena has no room for.

Where steps can read them as they lie (`in_place`), what is found there is used from there; else the step that is scheduled next
begins by copying it to new blocks of the arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from inferc.runtime.kv_cache.block_pool import BlockPool
from inferc.runtime.step.plan import Copies


class BlockStore(Protocol):
    """Where a group looks for blocks that its arena does not have."""

    in_place: bool

    @property
    def size(self) -> int:
        """Blocks that it has room for."""

    def has(self, name: bytes) -> bool:
        """Whether a block of this hash is there, whose bytes can be used."""

    def hold(self, names: Sequence[bytes], priority: int) -> list[int]:
        """Blocks of the hashes, which are there, with one more reference each."""

    def drop(self, blocks: Sequence[int]) -> None:
        """One reference less to blocks of its own."""

    def take_loads(self) -> Copies:
        """From which blocks to which the next step copies before it begins."""


NO_LOADS = Copies(np.zeros(0, np.int64), np.zeros(0, np.int64))


class NoStore:
    """No offload tier: nothing is found."""

    in_place = True
    size = 0

    def has(self, name: bytes) -> bool:
        return False

    def hold(self, names: Sequence[bytes], priority: int) -> list[int]:
        assert not names, "nothing is found here"
        return []

    def drop(self, blocks: Sequence[int]) -> None:
        assert not blocks, "no block is of this tier"

    def take_loads(self) -> Copies:
        return NO_LOADS


class OffloadedBlocks:
    """An offload tier beside the arena's pool of a group.

    num_found: blocks that sequences found there, since the start.
    """

    def __init__(self, arena: BlockPool, size: int, *, in_place: bool) -> None:
        self.in_place = in_place
        self.pool = BlockPool(arena.num_blocks + size, first=arena.num_blocks)
        self.num_found = 0
        self._arena = arena
        self._loads: list[tuple[int, int]] = []
        arena.idle = {}

    @property
    def size(self) -> int:
        return self.pool.size

    def has(self, name: bytes) -> bool:
        return self.pool.find(name) is not None

    def hold(self, names: Sequence[bytes], priority: int) -> list[int]:
        if not names:
            return []
        blocks = [self.pool.block_of[name] for name in names]
        self.num_found += len(blocks)
        self.pool.hold(blocks, priority)
        if self.in_place:
            return blocks
        self.pool.drop(
            blocks
        )  # they were used now, and nothing is stored in them before the step that copies has landed
        return self._load(names, blocks, priority)

    def _load(self, names: Sequence[bytes], sources: Sequence[int], priority: int) -> list[int]:
        """New blocks of the arena that the next step begins by copying to, and that can be found at once."""
        blocks = self._arena.take(len(names))
        for name, block in zip(names, blocks, strict=True):
            self._arena.publish(block, name, priority)
        self._loads += zip(sources, blocks, strict=True)
        return blocks

    def drop(self, blocks: Sequence[int]) -> None:
        self.pool.drop(blocks)

    def take_loads(self) -> Copies:
        loads, self._loads = self._loads, []
        rows = np.array(loads, np.int64).reshape(-1, 2)
        return Copies(np.ascontiguousarray(rows[:, 0]), np.ascontiguousarray(rows[:, 1]))
