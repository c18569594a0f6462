"""The blocks of one KV group with full attention: which block holds which tokens of which sequence.

Groups of other kinds override what differs. Each group has a pool of blocks of its own in the arena, in which steps
write. What the arena has no room for may lie in an offload tier (block_store.py), whose block ids follow the arena's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from inferc.kv_groups import NEVER, CacheGroup, CacheLimits
from inferc.runtime.kv_cache.block_pool import MOVING, BlockPool
from inferc.runtime.kv_cache.block_store import BlockStore, OffloadedBlocks
from inferc.runtime.step.plan import I32, I64

Finder = Callable[[int], int]
"""A function that returns how many of a sequence's first blocks a group has, given the number that is asked about.

With that many a sequence can start: the group has all that the query behind them sees.
"""


@dataclass(frozen=True)
class SlotArrays:
    """The per-slot numbers of one group: rows of the arrays over all groups, [num_slots] i64."""

    begins: I64
    ends: I64
    num_offloaded: I64


class FullGroup:
    """A KV group whose sequences keep all their blocks while they run.

    A slot holds the blocks [begin, end) of its sequence.
    table [num_slots, max_blocks] i32: block ids, 0 outside of [begin, end).
    num_offloaded: how many blocks of a slot are in the offload tier.
    """

    def __init__(
        self, spec: CacheGroup, pool: BlockPool, store: BlockStore, limits: CacheLimits, slots: SlotArrays
    ) -> None:
        self.spec, self.pool, self.store = spec, pool, store
        self.begins, self.ends, self.num_offloaded = slots.begins, slots.ends, slots.num_offloaded
        self.block_size, self._blocks_for = limits.block_size, limits.blocks_for
        self.table: I32 = np.zeros((limits.max_num_seqs, limits.blocks_for(limits.max_model_len)), np.int32)
        self.lent: list[int] = []  # blocks that belong to no sequence, see KVCacheManager.lend
        # A step computes only what there is room for, so a sequence never holds more of the arena than there is.
        self.most = min(spec.most_blocks(limits), pool.size)
        chunk = limits.blocks_for(limits.max_num_batched_tokens) + 1
        self.keep = max(1, min(pool.size * 3 // 4, pool.size - 2 * chunk))
        """The arena blocks that a sequence keeps; more are offloaded while it runs, so that others find room."""

    @property
    def first_counted(self) -> int:
        """The first token whose attention is counted, and which is therefore computed even if it is cached."""
        return NEVER

    # ------------------------------------------------------------------------------------------ how much

    def longest(self, limits: CacheLimits, least: int, *, offloads: bool) -> int:
        """Return the length of the longest sequence, in tokens, that has room when it has the pools to itself.

        least: tokens that a step must be able to compute.
        offloads: whether the offload tier takes what does not fit into the arena.
        """
        spare = max(0, self.store.size - MOVING) if offloads else 0
        return (self.pool.size + spare) * self.block_size

    def wanted_blocks(self, num_tokens: int, whole: int) -> int:
        """Return how many blocks a sequence takes that needs `num_tokens` now, and `whole` in total if that is more."""
        return self._blocks_for(max(num_tokens, whole))

    def offloads(self, num_blocks: int) -> bool:
        """Return whether a sequence of `num_blocks` blocks has some in the offload tier while it runs."""
        return self.store.size > 0 and self.store.in_place and num_blocks > self.pool.size

    def fits(self, num_blocks: int, found: Sequence[bytes], beside: I64) -> bool:
        """Return whether a sequence has room during its whole prefill, apart from the blocks that are offloaded.

        found: the blocks that it would attach first.
        beside: slots for which one more block each is reserved, if they may still come to hold more.
        """
        spare = np.count_nonzero(self.ends[beside] - self.begins[beside] < self.most)
        own = self._attached(found)
        if not self.store.in_place:  # the offloaded ones of them are copied to the arena
            own = [name for name in own if name in self.pool.block_of]
        kept = sum(self.pool.block_of[name] in self.pool.kept for name in own if name in self.pool.block_of)
        missing = min(num_blocks, self.most) - len(own)
        if self.offloads(num_blocks):
            missing = min(num_blocks - len(own), self.keep)
        return max(1, missing) + int(spare) + kept <= self.pool.num_free

    def fits_later(self, length: int, totals: I64, beside: I64, found: I64, error: float) -> bool:
        """Return whether all sequences have room until each ends; the new one is the last of `totals` and `found`.

        See `KVCacheManager.fits_later`.
        """
        own, goals = self._blocks_for(length), -(-totals // self.block_size)
        held = self.ends[beside]
        if self.store.size:  # blocks that are offloaded while they run need no room in the arena
            held = held - self.num_offloaded[beside]
            goals = np.where(goals > self.pool.size, self.keep, goals)
            own = min(own, int(goals[-1]))
        held = np.append(held, own)
        left = np.maximum(goals - held, 0)
        freed = held - found // self.block_size + left
        order = np.argsort(left, kind="stable")
        left, freed = left[order], freed[order]
        before = np.cumsum(freed) - freed
        grown = np.cumsum(left) - left  # growth of the sequences that ended before, which `before` includes
        still = np.arange(len(left), 0, -1)
        reserve = error * float(np.sqrt(np.square(left).sum()))
        available = self.pool.num_free - (own - int(found[-1]) // self.block_size)
        return bool((still * left + grown - before).max() + reserve <= available)

    def num_in_arena(self, found: Sequence[bytes]) -> int:
        """Return how many of some blocks that were found need no new room in the arena."""
        if self.store.in_place:
            return len(found)
        return sum(name in self.pool.block_of for name in found)

    # -------------------------------------------------------------------------------------- what is found

    def finder(self, hashes: Sequence[bytes]) -> Finder:
        """Return a function that counts how many of a sequence's first blocks this group has."""

        found: int | None = None  # the number of blocks, once it was counted

        def find(count: int) -> int:
            nonlocal found
            if found is None or count < found:
                found = next((at for at in range(count) if not self.has(hashes[at])), count) if found is None else count
            return found

        return find

    def has(self, name: bytes) -> bool:
        """Return whether a block of this hash can be found, in either tier."""
        return name in self.pool.block_of or self.store.has(name)

    def attach_cached(self, slot: int, hashes: Sequence[bytes], priority: int) -> None:
        """Give an empty slot the blocks of these hashes, which its next query sees."""
        self._attach(slot, 0, self._hold(hashes, priority), len(hashes))

    def _attached(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Return those of a sequence's first blocks that `attach_cached` takes."""
        return list(hashes)

    def _attach(self, slot: int, begin: int, blocks: Sequence[int], end: int) -> None:
        self.table[slot, begin:end] = blocks
        self.num_offloaded[slot] = sum(block >= self.pool.num_blocks for block in blocks)
        self.begins[slot], self.ends[slot] = begin, end

    def _hold(self, names: Sequence[bytes], priority: int) -> list[int]:
        """Return the blocks of some hashes, from whichever tier has them, with one more reference to each."""
        blocks = [self.pool.block_of.get(name, 0) for name in names]
        self.pool.hold([block for block in blocks if block], priority)
        missing = [name for name, block in zip(names, blocks, strict=True) if not block]
        found = iter(self.store.hold(missing, priority))
        return [block or next(found) for block in blocks]

    def cache_full_blocks(self, slot: int, first: int, hashes: Sequence[bytes], priority: int) -> None:
        """Cache the blocks of `slot` from `first` on under `hashes`, as far as there are hashes."""
        for block in range(max(first, int(self.begins[slot])), len(hashes)):
            self.pool.cache_block(int(self.table[slot, block]), hashes[block], priority)

    # -------------------------------------------------------------------------------- as sequences run

    def grow(self, slot: int, count: int) -> None:
        """Give a slot `count` more blocks, which are free."""
        end = int(self.ends[slot])
        self.table[slot, end : end + count] = self.pool.take(count)
        self.ends[slot] = end + count

    def free_outside_window(self, slot: int, position: int) -> int:
        """Free the blocks that no query of `slot` from `position` on sees, and return how many."""
        return 0

    def unseen_from(self, begin: int) -> int:
        """Return the first position whose query sees nothing of a slot's first block, which is its block `begin`."""
        return self.spec.unseen_from((begin + 1) * self.block_size - 1)

    def release(self, slot: int) -> None:
        """Free all blocks of `slot`."""
        self._drop(slot, int(self.begins[slot]), int(self.ends[slot]))
        self.begins[slot] = self.ends[slot] = 0

    def offload(self, block: int, stored: int, slots: I64) -> list[int]:
        """Replace a block of the arena by its offloaded copy, for those of `slots` that have it; return these slots."""
        assert isinstance(self.store, OffloadedBlocks)
        rows, columns = np.nonzero(self.table[slots] == block)
        moved: list[int] = slots[rows].tolist()
        for slot in moved:
            self.store.pool.hold([stored])
            self.pool.drop([block])
            self.num_offloaded[slot] += 1
        self.table[slots[rows], columns] = stored
        return moved

    def _drop(self, slot: int, begin: int, end: int) -> None:
        """Give up the blocks [begin, end) of a slot and set their entries to 0."""
        blocks: list[int] = self.table[slot, begin:end].tolist()
        if self.num_offloaded[slot]:
            self.num_offloaded[slot] -= sum(block >= self.pool.num_blocks for block in blocks)
        self._give_up(blocks)
        self.table[slot, begin:end] = 0

    def _give_up(self, blocks: Sequence[int]) -> None:
        """Give up one reference to each of some blocks, of either tier."""
        count = self.pool.num_blocks
        offloaded = [block for block in blocks if block >= count]
        if offloaded:
            self.store.drop(offloaded)
            blocks = [block for block in blocks if block < count]
        self.pool.drop(blocks)

    # ------------------------------------------------------------------------------------------- checks

    def check_integrity(self) -> None:
        """Assert that every block but 0 is either free, once, or referenced by as many tables as its ref_count says."""
        blocks = np.arange(self.table.shape[1])
        held = (blocks >= self.begins[:, None]) & (blocks < self.ends[:, None])
        assert not self.table[~held].any(), "a table holds blocks beyond its count"
        is_offloaded = self.table >= self.pool.num_blocks
        assert (is_offloaded.sum(1) == self.num_offloaded).all(), "blocks of the offload tier are miscounted"
        assert (held & ~is_offloaded).sum(1).max() <= self.most, "a slot holds more than it can ever need"
        others = self._held_besides()
        apart = others >= self.pool.num_blocks
        self.pool.check_integrity(
            np.concatenate((self.table[held & ~is_offloaded], others[~apart], self.lent)).astype(int)
        )
        if isinstance(self.store, OffloadedBlocks):
            self.store.pool.check_integrity(np.append(self.table[held & is_offloaded], others[apart]))

    def _held_besides(self) -> I32:
        """Return the blocks that slots hold outside of the table."""
        return np.zeros(0, np.int32)
