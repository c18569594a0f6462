"""The manager of the KV cache over all KV groups: block tables, and the blocks that can be found by hash.

A full block is cached under the hash of all tokens up to its end. When the last sequence that has it leaves, the
block stays, and a sequence that begins with the same tokens takes it as it is, until its place is needed: then the
block of the lowest priority is evicted that was used the longest time ago. The manager knows block ids only; the bytes
belong to the runner.

Where a kind of group differs from full attention, the difference is in a module of its own (window.py, evicted.py); the
manager treats all groups alike.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from inferc.kv_groups import CacheGroup, CacheLimits
from inferc.runtime.kv_cache.block_pool import BlockPool
from inferc.runtime.kv_cache.block_store import BlockStore, NoStore, OffloadedBlocks
from inferc.runtime.kv_cache.forgetting import forgetting_of
from inferc.runtime.kv_cache.group import FullGroup, SlotArrays
from inferc.runtime.step.plan import I32, I64, Copies


class KVCacheManager:
    """The block tables of the running sequences, by slot, over one pool per KV group.

    In each group a slot holds blocks [begin, end) of its sequence. `end` rises as the sequence grows, equally in all
    groups, except that groups which give nothing back may get a prompt's blocks at once. `begin` rises as blocks leave
    the group's window.

      tables[g]          [num_slots, max_blocks] i32  block ids of group g, 0 outside of [begin, end)
      begins, ends       [num_groups, num_slots] i64
      num_offloaded      [num_groups, num_slots] i64  number of a slot's blocks that are in the offload tier
      num_grown          [num_slots] i64  the least `end` of a slot: blocks that it has in every group
      num_cached_blocks  [num_slots] i64  number of first blocks that can be found, cached by the slot or found by it
      next_unseen        [num_slots] i64  the first position whose query sees nothing of a block that the slot holds
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: Sequence[int],
        limits: CacheLimits,
        chunked_prefill: bool = True,
        num_offloaded: Sequence[int] = (),
        in_place: bool = True,
    ) -> None:
        """Create empty pools and tables.

        num_offloaded: the number of blocks of each group's offload tier; empty if there is none.
        in_place: whether steps read blocks of the offload tier directly.
        """
        self.block_size, self.blocks_for = limits.block_size, limits.blocks_for
        num_slots = limits.max_num_seqs
        self.begins: I64 = np.zeros((len(groups), num_slots), np.int64)
        self.ends: I64 = np.zeros((len(groups), num_slots), np.int64)
        self.num_offloaded: I64 = np.zeros((len(groups), num_slots), np.int64)
        self.num_grown: I64 = np.zeros(num_slots, np.int64)
        self.num_cached_blocks: I64 = np.zeros(num_slots, np.int64)
        made: list[FullGroup] = []
        for index, (spec, count) in enumerate(zip(groups, num_blocks, strict=True)):
            pool = BlockPool(count)
            store: BlockStore = NoStore()
            if num_offloaded:
                store = OffloadedBlocks(pool, num_offloaded[index], in_place=in_place)
            slots = SlotArrays(self.begins[index], self.ends[index], self.num_offloaded[index])
            made.append(spec.find_blocks()(spec, pool, store, limits, slots))
        self.groups: tuple[FullGroup, ...] = tuple(made)
        self.tables: tuple[I32, ...] = tuple(group.table for group in made)
        self.pools = tuple(group.pool for group in made)
        self.stores = tuple(group.store for group in made if isinstance(group.store, OffloadedBlocks))
        self.forgetting = forgetting_of(made)
        self.max_cached_blocks = min(group.first_counted for group in made) // self.block_size
        """The most blocks of a sequence that may be found: behind them the attention of its own queries is counted."""
        self._first_unseen = self._unseen_from([0] * len(made))
        self.next_unseen: I64 = np.full(num_slots, self._first_unseen, np.int64)
        self.frees_blocks = any(spec.frees_blocks for spec in groups)
        self.num_freed_outside_window = 0
        self._changed: list[int] = []
        least = 1 if chunked_prefill else limits.max_model_len  # tokens that a step must be able to compute
        self.max_tokens_at_once = min(group.longest(limits, least, offloads=False) for group in made)
        """The length of the longest sequence that the arena holds when the sequence is alone."""
        offloads = chunked_prefill and in_place
        self.max_tokens = min(group.longest(limits, least, offloads=offloads) for group in made)
        """The length of the longest sequence that can be computed when it is alone in all pools."""

    @property
    def num_free(self) -> tuple[int, ...]:
        """The number of blocks that each group can still give out."""
        return tuple(pool.num_free for pool in self.pools)

    @property
    def usage(self) -> float:
        """The share of the fullest group's pool that sequences hold, 0 to 1."""
        return max(1.0 - pool.num_free / pool.size for pool in self.pools)

    @property
    def num_gains(self) -> int:
        """The number of changes after which a sequence that found no room may find some."""
        return sum(pool.num_gains for pool in (*self.pools, *(store.pool for store in self.stores)))

    @property
    def num_evicted(self) -> int:
        """The number of cached blocks that were evicted to make room."""
        return sum(pool.num_evicted for pool in self.pools)

    @property
    def num_loaded(self) -> int:
        """The number of blocks of the offload tier that sequences found."""
        return sum(store.num_found for store in self.stores)

    # --------------------------------------------------------------------------------------------- room

    def fits(self, num_tokens: int, beside: I64, found: Sequence[bytes] = ()) -> bool:
        """Return whether a sequence of `num_tokens` has room in every group during its whole prefill.

        Offloaded blocks are not counted.
        beside: slots for which one more block each is reserved, if they may still come to hold more than they do.
        found: the blocks that it would attach first (`attach_cached`).
        """
        blocks = self.blocks_for(num_tokens)
        return all(group.fits(blocks, found, beside) for group in self.groups)

    def fits_later(
        self, length: int, total: int, num_found: int, beside: I64, totals: I64, found: I64, error: float = 0.0
    ) -> bool:
        """Return whether all sequences get the blocks that they are expected to need if one of `length` is admitted.

        The need is greatest when a sequence ends: the remaining ones have grown by then, and those that ended before
        have given back the blocks that only they had. Source: Gong et al. 2025, "Past-Future Scheduler for LLM
        Serving".

        total, totals [B]: expected lengths at the end, of the sequence and of the slots `beside`.
        num_found, found [B]: how many of their tokens others may have as well.
        error: the relative error of the number of tokens that each is still to get. Errors of several sequences even
        out, and the remaining error is kept in reserve.
        """
        goals, shared = np.append(totals, total), np.append(found, num_found)
        return all(group.fits_later(length, goals, beside, shared, error) for group in self.groups)

    def offloads(self, num_tokens: int) -> bool:
        """Return whether a sequence of `num_tokens` has blocks in the offload tier while it runs, in any group."""
        blocks = self.blocks_for(num_tokens)
        return any(group.offloads(blocks) for group in self.groups)

    def num_in_arena(self, found: Sequence[bytes]) -> int:
        """Return how many of the blocks that `find` counted need no new room in the arena.

        Only groups that give nothing back are considered.
        """
        return min(group.num_in_arena(found) for group in self.groups)

    # ------------------------------------------------------------------------------------ what is cached

    def find(self, hashes: Sequence[bytes]) -> int:
        """Return how many of a sequence's first blocks can be found.

        For that many, every group has all blocks that the query behind them sees.
        """
        count, finders = len(hashes), [group.finder(hashes) for group in self.groups]
        agreed = 0  # the number of consecutive groups that have `count` blocks
        while agreed < len(finders):
            for find in finders:
                before, count = count, find(count)
                agreed = agreed + 1 if count == before else 1
                if agreed >= len(finders):
                    break
        return count

    def attach_cached(self, slot: int, hashes: Sequence[bytes], priority: int = 0) -> None:
        """Give an empty slot the blocks that `find` counted."""
        for group in self.groups:
            group.attach_cached(slot, hashes, priority)
        self.num_grown[slot] = self.num_cached_blocks[slot] = len(hashes)
        self.next_unseen[slot] = self._unseen_from(self.begins[:, slot].tolist())

    def take_loads(self) -> tuple[Copies, ...]:
        """Return the copies from the offload tier that the scheduled step makes first, by group; () if none."""
        loads = tuple(group.store.take_loads() for group in self.groups) if self.stores else ()
        return loads if any(len(each.source) for each in loads) else ()

    def cache_full_blocks(self, slot: int, hashes: Sequence[bytes], priority: int = 0) -> None:
        """Cache the first blocks of `slot` under these hashes; they are or will be computed before any later step."""
        first = int(self.num_cached_blocks[slot])
        for group in self.groups:
            group.cache_full_blocks(slot, first, hashes, priority)
        self.num_cached_blocks[slot] = len(hashes)

    def cache_last_blocks(self, slots: I64, blocks: I64, hashes: Sequence[bytes], priorities: Sequence[int]) -> None:
        """Cache one block of each of some slots whose blocks before it are all cached."""
        for pool, table in zip(self.pools, self.tables, strict=True):
            for block, name, priority in zip(table[slots, blocks].tolist(), hashes, priorities, strict=True):
                if block:  # the block was not given back
                    pool.cache_block(block, name, priority)
        self.num_cached_blocks[slots] = blocks + 1

    def cache_partial_block(self, slot: int, block: int, name: bytes, priority: int) -> bool:
        """Cache a block that is not full under its tokens' hash; return False if a group has given the block back."""
        blocks = [int(table[slot, block]) for table in self.tables]
        if 0 in blocks:
            return False
        for pool, each in zip(self.pools, blocks, strict=True):
            pool.cache_block(each, name, priority)
            if pool.hash_of.get(each) == name:
                pool.partial.add(each)
        return True

    def blocks_of(self, name: bytes) -> list[int] | None:
        """Return the block with this hash in each group's arena, or None if not all groups have it."""
        blocks = [pool.block_of.get(name, 0) for pool in self.pools]
        return None if 0 in blocks else blocks

    # ----------------------------------------------------------------------------------- as sequences run

    def grow(self, slot: int, num_tokens: int, whole: int = 0) -> bool:
        """Give `slot` blocks up to `num_tokens` in every group; return False, and change nothing, if too few are free.

        whole: the number of tokens, if it is larger, for the groups that give nothing back.
        """
        missing = [group.wanted_blocks(num_tokens, whole) - int(group.ends[slot]) for group in self.groups]
        if any(count > pool.num_free for count, pool in zip(missing, self.pools, strict=True)):
            return False
        for group, count in zip(self.groups, missing, strict=True):
            if count > 0:
                group.grow(slot, count)
        self.num_grown[slot] = self.ends[:, slot].min()
        self._changed.append(slot)
        return True

    def grow_all(self, slots: I64) -> bool:
        """Give each of some slots one more block in every group; return False, and change nothing, if too few are free.

        It also returns False if a slot has more blocks in one group than in another: `grow` then finds what each lacks.
        """
        count, ends, least = len(slots), self.ends[:, slots], self.num_grown[slots]
        if any(pool.num_free < count for pool in self.pools) or np.count_nonzero(ends != least):
            return False
        for pool, table in zip(self.pools, self.tables, strict=True):
            table[slots, least] = pool.take(count)
        least += 1
        self.ends[:, slots] = self.num_grown[slots] = least
        self._changed += slots.tolist()
        return True

    def take_changed(self) -> list[int]:
        """Return the slots whose block tables have changed since the last call."""
        changed, self._changed = self._changed, []
        return changed

    def extend(self, slot: int, start: int, count: int, whole: int = 0) -> int:
        """Make room for the tokens [start, start + count), or for as many as blocks are free for, and return how many.

        Blocks that no query from `start` on sees are freed first. `whole` is as in `grow`. If sequences forget, `count`
        is limited to tokens that see the same earlier keys.
        """
        self.free_outside_window(slot, start)
        count = min(count, self.forgetting.most_new(start))
        ends = zip(self.ends[:, slot].tolist(), self.pools, strict=True)
        room = min(end + pool.num_free for end, pool in ends) * self.block_size
        count = max(0, min(count, room - start))
        grown = not count or self.grow(slot, start + count, whole)
        assert grown, "counted above"
        return count

    def free_outside_window(self, slot: int, position: int) -> None:
        """Free the blocks that no query of `slot` from `position` on sees, and set their entries to 0.

        `position` is the first that the next step will compute, and the block table of that step has no freed block.
        The step in flight may still read freed blocks, through its own copy of the table. Another sequence can
        nevertheless get them at once: it writes into them in the next step at the earliest, and a step begins when the
        one before it is done (`Runner`). No query ever comes back to an earlier position, because a preempted sequence
        begins again from nothing.
        """
        for group in self.groups:
            if count := group.free_outside_window(slot, position):
                self.num_freed_outside_window += count
                self._changed.append(slot)
        self.next_unseen[slot] = self._unseen_from(self.begins[:, slot].tolist())

    def lend(self, count: int) -> list[list[int]]:
        """Take `count` free blocks of every group that belong to no sequence, until they are taken back."""
        blocks = [pool.take(count) for pool in self.pools]
        for group, own in zip(self.groups, blocks, strict=True):
            group.lent += own
        return blocks

    def take_back(self, blocks: Sequence[Sequence[int]]) -> None:
        """Free blocks that were lent, of every group."""
        for group, own in zip(self.groups, blocks, strict=True):
            group.lent = [block for block in group.lent if block not in own]
            group.pool.drop(own)

    def offload(self, index: int, block: int, stored: int, slots: I64) -> int:
        """Replace a block of the arena by its offloaded copy, for those of `slots` that have it; return how many."""
        moved = self.groups[index].offload(block, stored, slots)
        self._changed += moved
        return len(moved)

    def release(self, slot: int) -> None:
        """Free all blocks of `slot`."""
        for group in self.groups:
            group.release(slot)
        self.num_grown[slot] = self.num_cached_blocks[slot] = 0
        self.next_unseen[slot] = self._first_unseen

    def _unseen_from(self, begins: Sequence[int]) -> int:
        """Return the first position whose query sees nothing of one of these blocks, which are one per group."""
        return min(group.unseen_from(begin) for group, begin in zip(self.groups, begins, strict=True))

    def check_integrity(self) -> None:
        """Assert the invariants of the groups, and that the counts per slot are right."""
        assert (self.num_grown == self.ends.min(0)).all(), "num_grown is not the least of a slot's ends"
        assert (self.begins <= self.ends).all(), "a slot gave back more than it had"
        for group in self.groups:
            group.check_integrity()
