"""The blocks of one KV group: which block holds what of which sequence. Full attention; other kinds override what they do otherwise.

In the arena, in which steps write, each group has a pool of blocks of its own; what the arena has no room for may lie in an
offload tier (block_store.py), whose blocks have ids behind the arena's.
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
"""Of a sequence's first blocks, as many as are asked about: the largest number that a group has for whoever goes on behind them."""


@dataclass(frozen=True)
class SlotArrays:
    """What is kept of each slot in one group: rows of the arrays over all groups, [num_slots] i64."""

    begins: I64
    ends: I64
    num_offloaded: I64


class FullGroup:
    """A KV group whose sequences keep all blocks that they have.

    A slot holds blocks [begin, end) of its sequence. table [num_slots, max_blocks] i32, 0 outside of these. num_offloaded: how
    many of a slot's blocks are of the offload tier.
    """

    def __init__(
        self, spec: CacheGroup, pool: BlockPool, store: BlockStore, limits: CacheLimits, slots: SlotArrays
    ) -> None:
        self.spec, self.pool, self.store = spec, pool, store
        self.begins, self.ends, self.num_offloaded = slots.begins, slots.ends, slots.num_offloaded
        self.block_size = limits.block_size
        self.table: I32 = np.zeros((limits.max_num_seqs, limits.blocks_for(limits.max_model_len)), np.int32)
        # A step computes what there is room for, so a sequence never holds more of the arena than there is.
        self.most = min(spec.most_blocks(limits), pool.size)
        chunk = limits.blocks_for(limits.max_num_batched_tokens) + 1
        self.keep = max(1, min(pool.size * 3 // 4, pool.size - 2 * chunk))
        """What a sequence has of the arena beyond this goes to the offload tier while it runs: others find room beside it."""

    @property
    def first_counted(self) -> int:
        """The first token that is needed whatever the cache holds of its sequence, as its attention counts."""
        return NEVER

    # ------------------------------------------------------------------------------------------ how much

    def longest(self, limits: CacheLimits, least: int, *, offloads: bool) -> int:
        """The longest sequence, in tokens, that has room when it has the pools to itself.

        least: tokens that a step must be able to compute; offloads: whether the offload tier takes what the arena does not.
        """
        spare = max(0, self.store.size - MOVING) if offloads else 0
        return (self.pool.size + spare) * self.block_size

    def wanted_blocks(self, num_tokens: int, whole: int) -> int:
        """How many blocks of a sequence are taken that needs `num_tokens` now, and `whole` in all if that is more."""
        return self._blocks_for(max(num_tokens, whole))

    def offloads(self, num_blocks: int) -> bool:
        """Whether a sequence of so many blocks has some in the offload tier while it runs."""
        return self.store.size > 0 and self.store.in_place and num_blocks > self.pool.size

    def fits(self, num_blocks: int, found: Sequence[bytes], beside: I64) -> bool:
        """Whether a sequence has room at all times of its prefill, but for what of it is offloaded.

        beside: slots that shall find one more block each, if they may still come to hold more; found: what it would attach first.
        """
        spare = np.count_nonzero(self.ends[beside] - self.begins[beside] < self.most)
        own = self._attached(found)
        if not self.store.in_place:  # the rest of them comes to the arena
            own = [name for name in own if name in self.pool.block_of]
        kept = sum(self.pool.block_of[name] in self.pool.kept for name in own if name in self.pool.block_of)
        missing = min(num_blocks, self.most) - len(own)
        if self.offloads(num_blocks):
            missing = min(num_blocks - len(own), self.keep)
        return max(1, missing) + int(spare) + kept <= self.pool.num_free

    def fits_later(self, length: int, totals: I64, beside: I64, found: I64, error: float) -> bool:
        """Whether there is room for a sequence, which is the last of `totals` and `found`, when all are as long as they get.

        See `KVCacheManager.fits_later`.
        """
        own, goals = self._blocks_for(length), -(-totals // self.block_size)
        held = self.ends[beside]
        if self.store.size:  # what is offloaded while they run is no need of the arena's
            held = held - self.num_offloaded[beside]
            goals = np.where(goals > self.pool.size, self.keep, goals)
            own = min(own, int(goals[-1]))
        held = np.append(held, own)
        left = np.maximum(goals - held, 0)
        freed = held - found // self.block_size + left
        order = np.argsort(left, kind="stable")
        left, freed = left[order], freed[order]
        before = np.cumsum(freed) - freed
        grown = np.cumsum(left) - left  # of those that ended before, which `before` gives back too
        still = np.arange(len(left), 0, -1)
        reserve = error * float(np.sqrt(np.square(left).sum()))
        available = self.pool.num_free - (own - int(found[-1]) // self.block_size)
        return bool((still * left + grown - before).max() + reserve <= available)

    def num_in_arena(self, found: Sequence[bytes]) -> int:
        """How many of some blocks that were found need no room in the arena."""
        if self.store.in_place:
            return len(found)
        return sum(name in self.pool.block_of for name in found)

    # -------------------------------------------------------------------------------------- what is found

    def finder(self, hashes: Sequence[bytes]) -> Finder:
        """What this group has of a sequence's first blocks."""

        found: int | None = None  # so many, which was counted once

        def find(count: int) -> int:
            nonlocal found
            if found is None or count < found:
                found = next((at for at in range(count) if not self.has(hashes[at])), count) if found is None else count
            return found

        return find

    def has(self, name: bytes) -> bool:
        """Whether a block of this hash can be found, in either tier."""
        return name in self.pool.block_of or self.store.has(name)

    def attach_cached(self, slot: int, hashes: Sequence[bytes], priority: int) -> None:
        """Give an empty slot the blocks of these hashes, all of which its next query finds."""
        self._attach(slot, 0, self._hold(hashes, priority), len(hashes))

    def _attached(self, hashes: Sequence[bytes]) -> list[bytes]:
        """Of the first blocks of a sequence those that `attach_cached` takes."""
        return list(hashes)

    def _attach(self, slot: int, begin: int, blocks: Sequence[int], end: int) -> None:
        self.table[slot, begin:end] = blocks
        self.num_offloaded[slot] = sum(block >= self.pool.num_blocks for block in blocks)
        self.begins[slot], self.ends[slot] = begin, end

    def _hold(self, names: Sequence[bytes], priority: int) -> list[int]:
        """The blocks of some hashes, of whichever tier has them, with one more reference each."""
        blocks = [self.pool.block_of.get(name, 0) for name in names]
        self.pool.hold([block for block in blocks if block], priority)
        missing = [name for name, block in zip(names, blocks, strict=True) if not block]
        found = iter(self.store.hold(missing, priority))
        return [block or next(found) for block in blocks]

    def cache_full_blocks(self, slot: int, first: int, hashes: Sequence[bytes], priority: int) -> None:
        """Let the blocks of `slot` from `first` on, as far as there are hashes, be found by these."""
        for block in range(max(first, int(self.begins[slot])), len(hashes)):
            self.pool.publish(int(self.table[slot, block]), hashes[block], priority)

    # -------------------------------------------------------------------------------- as sequences run

    def grow(self, slot: int, count: int) -> None:
        """Give a slot `count` more blocks, which are free."""
        end = int(self.ends[slot])
        self.table[slot, end : end + count] = self.pool.take(count)
        self.ends[slot] = end + count

    def free_outside_window(self, slot: int, position: int) -> int:
        """Free the blocks of which no query of `slot` from `position` on sees a token; returns how many."""
        return 0

    def unseen_from(self, begin: int) -> int:
        """The first position whose query sees nothing of a slot's first block, which is its block `begin`."""
        return self.spec.unseen_from((begin + 1) * self.block_size - 1)

    def release(self, slot: int) -> None:
        """Free all blocks of `slot`."""
        self._drop(slot, int(self.begins[slot]), int(self.ends[slot]))
        self.begins[slot] = self.ends[slot] = 0

    def offload(self, block: int, stored: int, slots: I64) -> list[int]:
        """Let those of some slots that have a block of the arena have its copy in the offload tier instead; which did."""
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
        """Give up the blocks [begin, end) of a slot; their entries become 0."""
        blocks: list[int] = self.table[slot, begin:end].tolist()
        if self.num_offloaded[slot]:
            self.num_offloaded[slot] -= sum(block >= self.pool.num_blocks for block in blocks)
        self._give_up(blocks)
        self.table[slot, begin:end] = 0

    def _give_up(self, blocks: Sequence[int]) -> None:
        """One reference less to some blocks, of either tier."""
        count = self.pool.num_blocks
        offloaded = [block for block in blocks if block >= count]
        if offloaded:
            self.store.drop(offloaded)
            blocks = [block for block in blocks if block < count]
        self.pool.drop(blocks)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    # ------------------------------------------------------------------------------------------- checks

    def check_integrity(self) -> None:
        """Every block but 0 can either be taken, once, or is referred to by as many tables as its ref_count says."""
        blocks = np.arange(self.table.shape[1])
        held = (blocks >= self.begins[:, None]) & (blocks < self.ends[:, None])
        assert not self.table[~held].any(), "a table holds blocks beyond its count"
        is_offloaded = self.table >= self.pool.num_blocks
        assert (is_offloaded.sum(1) == self.num_offloaded).all(), "blocks of the offload tier are miscounted"
        assert (held & ~is_offloaded).sum(1).max() <= self.most, "a slot holds more than it can ever need"
        others = self._held_besides()
        apart = others >= self.pool.num_blocks
        self.pool.check_integrity(np.append(self.table[held & ~is_offloaded], others[~apart]))
        if isinstance(self.store, OffloadedBlocks):
            self.store.pool.check_integrity(np.append(self.table[held & is_offloaded], others[apart]))

    def _held_besides(self) -> I32:
        """Blocks that slots hold outside of the table."""
        return np.zeros(0, np.int32)
