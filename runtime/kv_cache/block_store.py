"""The offload tier of one KV group: blocks with ids behind the arena's, for what the arena has no room for.

If steps can read its blocks directly (`in_place`), a block that is found there is used from there. Otherwise the step
that is scheduled next begins by copying the block to a new block of the arena.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from inferc.runtime.kv_cache.block_pool import BlockPool
from inferc.runtime.step.plan import Copies


class BlockStore(Protocol):
    """The interface through which a group looks for blocks that its arena does not have."""

    in_place: bool

    @property
    def size(self) -> int:
        """The number of blocks that the store has room for."""

    def has(self, name: bytes) -> bool:
        """Return whether a block of this hash is there whose bytes can be used."""

    def hold(self, names: Sequence[bytes], priority: int) -> list[int]:
        """Return the blocks of these hashes, which must be there, with one more reference to each."""

    def drop(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each of some blocks of the store."""

    def take_loads(self) -> Copies:
        """Return the copies, from blocks to blocks, that the next step makes before it begins."""


NO_LOADS = Copies(np.zeros(0, np.int64), np.zeros(0, np.int64))


class NoStore:
    """The store of a group without an offload tier, in which nothing is found."""

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

    num_found: the number of blocks that sequences found there since the start.
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
        # Dropping marks the blocks as used now; nothing overwrites them before the step that copies them has landed.
        self.pool.drop(blocks)
        return self._load(names, blocks, priority)

    def _load(self, names: Sequence[bytes], sources: Sequence[int], priority: int) -> list[int]:
        """Return new arena blocks that the next step fills by copying before it begins; they can be found at once."""
        blocks = self._arena.take(len(names))
        for name, block in zip(names, blocks, strict=True):
            self._arena.cache_block(block, name, priority)
        self._loads += zip(sources, blocks, strict=True)
        return blocks

    def drop(self, blocks: Sequence[int]) -> None:
        self.pool.drop(blocks)

    def take_loads(self) -> Copies:
        loads, self._loads = self._loads, []
        rows = np.array(loads, np.int64).reshape(-1, 2)
        return Copies(np.ascontiguousarray(rows[:, 0]), np.ascontiguousarray(rows[:, 1]))
