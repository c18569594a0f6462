"""The blocks of one KV group in one tier: which are free, who refers to them, and what can be found in them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from inferc.runtime.step.plan import I32

MOVING = 8  # blocks that are on their way to the lower tier at once, beside those that are waited for


class Kept:
    """Blocks that nobody has and that can be found, in the order in which they go: by priority, then by last use."""

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[int, None]] = {0: OrderedDict()}
        self.priority_of: dict[int, int] = {}  # of blocks that can be found, also of those in use; 0 where absent

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
        """The first to go; it has no priority any more."""
        level = next(level for _, level in sorted(self._levels.items()) if level)
        block, _ = level.popitem(last=False)
        self.priority_of.pop(block, None)
        return block

    def raise_to(self, block: int, priority: int) -> None:
        """A block that is in use is now also one of this priority."""
        if priority > self.priority_of.get(block, 0):
            self.priority_of[block] = priority
            self._levels.setdefault(priority, OrderedDict())


class BlockPool:
    """The blocks of one KV group in one tier, from `first` on. Block 0 is reserved: padding is written there.

    A block whose ref_count is 0 can be taken. It is in `free` if nobody can find it: what was freed last is taken first,
    so that blocks which were never needed never become resident memory. Else it is in `kept`, and taken when no other
    is left.
    """

    def __init__(self, num_blocks: int, first: int = 1) -> None:
        self.num_blocks = num_blocks  # ids end here
        self.size = num_blocks - first  # that can be given out
        self.free = list(range(num_blocks - 1, first - 1, -1))  # taken from the end
        self.kept = Kept()
        self.ref_count = np.zeros(num_blocks, np.int32)
        self.block_of: dict[bytes, int] = {}  # by the hash that it was published under
        self.hash_of: dict[int, bytes] = {}
        self.partial: set[int] = set()  # of those with a hash: not full
        self.moving: set[int] = set()  # held by the tiers while they are copied
        self.unchecked: set[int] = set()  # can be found once their bytes are known to be whole
        self.generation = np.zeros(num_blocks, np.int64)  # how often each was taken
        self.idle: dict[int, None] | None = (
            None  # where there is a lower tier: blocks that came to be `kept`, in their order
        )
        self.num_evicted = 0
        self.num_gains = 0  # how often there came to be more free blocks, or more to find
        self.on_evict: Callable[[bytes], None] | None = None  # hears of what can not be found any more

    @property
    def num_free(self) -> int:
        """Blocks that can be taken."""
        return len(self.free) + len(self.kept)

    def take(self, count: int) -> list[int]:
        """Of at most `num_free` blocks."""
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
        """The block with this hash, if its bytes can be used."""
        block = self.block_of.get(name)
        return None if block in self.unchecked else block

    def forget(self, block: int) -> None:
        """Let a block not be found any more."""
        del self.block_of[self.hash_of[block]]
        if block in self.kept:
            self.kept.remove(block)
            self.free.append(block)
        self.kept.priority_of.pop(block, None)
        del self.hash_of[block]
        self.unchecked.discard(block)

    def restore(self, names: Mapping[int, bytes]) -> None:
        """Blocks of an empty pool that hold something from an earlier run, the one used longest ago first; not checked."""
        self.free = [block for block in self.free if block not in names]
        for block, name in names.items():
            self.block_of[name], self.hash_of[block] = block, name
            self.kept.add(block)
        self.unchecked.update(names)

    def hold(self, blocks: Sequence[int], priority: int = 0) -> None:
        """One more reference to each of some blocks that were found, by who gives them a priority."""
        for block in blocks:
            if self.ref_count[block] == 0:
                self.kept.remove(block)
            self.ref_count[block] += 1
            if priority:
                self.kept.raise_to(block, priority)

    def drop(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each block. Of those without any left the first of a sequence are taken last: what
        comes later is of no use without them."""
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

    def publish(self, block: int, name: bytes, priority: int = 0) -> None:
        """Let a block that is in use be found by the hash `name`, unless another one is."""
        if name not in self.block_of and block not in self.hash_of:
            self.block_of[name], self.hash_of[block] = block, name
            self.num_gains += 1
            if priority:
                self.kept.raise_to(block, priority)

    def check_integrity(self, held: I32) -> None:
        """held: the blocks that tables refer to, as often as they do; `moving` ones are referred to once more."""
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
