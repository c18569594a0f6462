"""The pool of blocks of one KV group in one tier: which are free, who refers to them, and which can be found."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from inferc.runtime.step.plan import I32

MOVING = 8  # the most blocks that are copied to the offload tier at once, beside those that are waited for


class Kept:
    """An eviction queue of the unreferenced blocks that can still be found, by priority and then by last use."""

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[int, None]] = {0: OrderedDict()}
        # Priorities of the blocks that can be found, also of those in use; a block that is absent has priority 0.
        self.priority_of: dict[int, int] = {}

    def __contains__(self, block: int) -> bool:
        return block in self._levels[self.priority_of.get(block, 0)]

    def __len__(self) -> int:
        return sum(map(len, self._levels.values()))

    def __iter__(self) -> Iterator[int]:
        return (block for _, level in sorted(self._levels.items()) for block in level)

    def add(self, block: int) -> None:
        self._levels[self.priority_of.get(block, 0)][block] = None

    def remove(self, block: int) -> None:
        del self._levels[self.priority_of.get(block, 0)][block]

    def pop(self) -> int:
        """Remove and return the block that is evicted first, and forget its priority."""
        level = next(level for _, level in sorted(self._levels.items()) if level)
        block, _ = level.popitem(last=False)
        self.priority_of.pop(block, None)
        return block

    def raise_to(self, block: int, priority: int) -> None:
        """Raise the priority of a block that is in use to `priority`, if it is lower."""
        if priority > self.priority_of.get(block, 0):
            self.priority_of[block] = priority
            self._levels.setdefault(priority, OrderedDict())


class BlockPool:
    """The blocks of one KV group in one tier, with ids from `first` on; block 0 is reserved, padding is written there.

    A block whose ref_count is 0 can be taken. A block that cannot be found is in `free`: the block freed last is taken
    first, so that blocks which were never needed never become resident memory. A block that can be found is in `kept`,
    and is taken only if no free one is left.
    """

    def __init__(self, num_blocks: int, first: int = 1) -> None:
        self.num_blocks = num_blocks  # one more than the highest block id
        self.size = num_blocks - first  # the number of blocks that can be given out
        self.free = list(range(num_blocks - 1, first - 1, -1))  # blocks are taken from the end
        self.kept = Kept()
        self.ref_count = np.zeros(num_blocks, np.int32)
        self.block_of: dict[bytes, int] = {}  # by the hash under which a block was cached
        self.hash_of: dict[int, bytes] = {}
        self.partial: set[int] = set()  # blocks with a hash that are not full
        self.moving: set[int] = set()  # blocks that the tiers hold while they are copied
        self.unchecked: set[int] = set()  # blocks that cannot be found before their bytes are verified
        self.generation = np.zeros(num_blocks, np.int64)  # how often each block was taken
        # If there is an offload tier: blocks that were added to `kept`, in that order.
        self.idle: dict[int, None] | None = None
        self.num_evicted = 0
        self.num_gains = 0  # how often blocks became free or findable
        self.on_evict: Callable[[bytes], None] | None = None  # called with the hash of each evicted block

    @property
    def num_free(self) -> int:
        """The number of blocks that can be taken."""
        return len(self.free) + len(self.kept)

    def take(self, count: int) -> list[int]:
        """Take `count` blocks, at most `num_free`, and evict kept ones if too few are free."""
        for _ in range(count - len(self.free)):
            block = self.kept.pop()
            name = self.hash_of.pop(block)
            del self.block_of[name]
            self.unchecked.discard(block)
            self.partial.discard(block)
            self.free.append(block)
            self.num_evicted += 1
            if self.on_evict is not None:
                self.on_evict(name)
        first = len(self.free) - count
        blocks = self.free[: first - 1 if first else None : -1]
        del self.free[first:]
        self.ref_count[blocks] = 1
        self.generation[blocks] += 1
        return blocks

    def find(self, name: bytes) -> int | None:
        """Return the block with this hash if its bytes can be used, or None."""
        block = self.block_of.get(name)
        return None if block in self.unchecked else block

    def forget(self, block: int) -> None:
        """Remove a block from the index of cached blocks, so that no sequence finds it any more."""
        del self.block_of[self.hash_of[block]]
        if block in self.kept:
            self.kept.remove(block)
            self.free.append(block)
        self.kept.priority_of.pop(block, None)
        del self.hash_of[block]
        self.unchecked.discard(block)

    def restore(self, names: Mapping[int, bytes]) -> None:
        """Fill an empty pool with the blocks that an earlier run left, least recently used first.

        Their bytes are not verified yet.
        """
        self.free = [block for block in self.free if block not in names]
        for block, name in names.items():
            self.block_of[name], self.hash_of[block] = block, name
            self.kept.add(block)
        self.unchecked.update(names)

    def hold(self, blocks: Sequence[int], priority: int = 0) -> None:
        """Add one reference to each of some blocks that were found, and raise their priority if one is given."""
        for block in blocks:
            if self.ref_count[block] == 0:
                self.kept.remove(block)
            self.ref_count[block] += 1
            if priority:
                self.kept.raise_to(block, priority)

    def drop(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block.

        Among the blocks that lose their last reference, the first blocks of a sequence are evicted last, because later
        blocks are useless without them.
        """
        for block in reversed(blocks):
            self.ref_count[block] -= 1
            if self.ref_count[block]:
                continue
            self.num_gains += 1
            if block in self.hash_of:
                self.kept.add(block)
                if self.idle is not None:
                    self.idle[block] = None
            else:
                self.free.append(block)

    def cache_block(self, block: int, name: bytes, priority: int = 0) -> None:
        """Cache a block that is in use under the hash `name`, unless another block has it."""
        if name not in self.block_of and block not in self.hash_of:
            self.block_of[name], self.hash_of[block] = block, name
            self.num_gains += 1
            if priority:
                self.kept.raise_to(block, priority)

    def check_integrity(self, held: I32) -> None:
        """Assert the invariants of the pool.

        held: the blocks that block tables refer to, once per reference; a block in `moving` has one more reference.
        """
        references = np.bincount([*held.tolist(), *self.moving], minlength=self.num_blocks)
        assert references[0] == 0, "block 0 is reserved and in a table"
        assert (references == self.ref_count).all(), "ref counts do not add up"
        assert len(set(self.free)) == len(self.free), "a block is free twice"
        used = int((self.ref_count > 0).sum())
        assert used + self.num_free == self.size, f"{used} used and {self.num_free} free of {self.size}"
        assert not self.ref_count[[*self.free, *self.kept]].any(), "a free block is referred to"
        assert self.hash_of == {block: name for name, block in self.block_of.items()}, "hashes are not one to one"
        assert 0 not in self.hash_of, "block 0 can be found"
        assert all(block < self.num_blocks for block in self.hash_of), "a block of the other tier can be found"
        assert self.kept.priority_of.keys() <= self.hash_of.keys(), "what cannot be found has a priority"
        assert set(self.kept) <= self.hash_of.keys() and not self.hash_of.keys() & set(self.free)
        assert self.partial <= self.hash_of.keys(), "what cannot be found is partial"
        assert self.unchecked <= self.hash_of.keys(), "what cannot be found is to be checked"
