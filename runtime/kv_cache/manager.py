"""Which block of the KV pool holds what: free blocks, block tables, reference counts, and what can be found again.

A full block is published under the hash of all tokens up to its end. When the last sequence that has it leaves, it stays
where it is, and whoever begins with the same tokens takes it as it lies, until its place is needed: then the one goes, of
the lowest priority, that was used the longest time ago. Knows block ids only; the bytes are the model runner's.

Below the arena, in which steps write, there may be a lower tier (runtime/offload): blocks with ids of their own behind the arena's.
Where steps can read them as they lie (`in_place`), what is found there is used from there; else it is copied to the arena first.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from inferc.kv_groups import CacheGroup, CacheLimits
from inferc.runtime.kv_cache.block_pool import MOVING, BlockPool
from inferc.runtime.kv_cache.heavy_hitters import BlockMasses, first_counted
from inferc.runtime.step.plan import I32, I64, Copies, Counted


class KVCacheManager:
    """Block tables of the running sequences, by slot, over one pool per KV group.

    In each group a slot holds blocks [begin, end) of its sequence: `end` rises as it grows, all groups alike but that
    those which give nothing back may get a prompt's blocks at once; `begin` rises as blocks leave the group's window.

    tables[g] [num_slots, max_blocks] i32, 0 outside of [begin, end); begins, ends [num_groups, num_slots] i64
    sinks[g] [num_slots, sink blocks] i32      of an evicted group: the blocks that a slot keeps of those before its `begin`
    masses[g]                     of an evicted group that chooses these: what attention gives to blocks
    num_below [num_groups, num_slots] i64 how many of a slot's blocks are of the lower tier
    num_grown [num_slots] i64     the least `end` of a slot: blocks it has got in every group
    num_published [num_slots] i64 blocks from the first on that were published, or found
    next_unseen [num_slots] i64   the first position whose query sees nothing of a block that the slot holds
    """

    def __init__(
        self,
        groups: Sequence[CacheGroup],
        num_blocks: Sequence[int],
        limits: CacheLimits,
        chunked_prefill: bool = True,
        num_lower: Sequence[int] = (),
        in_place: bool = True,
    ) -> None:
        """num_lower: blocks of each group's lower tier, if there is one; in_place: steps read them as they lie."""
        self.in_place = in_place
        self.block_size = limits.block_size
        self.groups = tuple(groups)
        self.pools = tuple(BlockPool(count) for count in num_blocks)
        self.lower = tuple(
            BlockPool(count + more, first=count)
            for count, more in (zip(num_blocks, num_lower, strict=True) if num_lower else ())
        )
        for pool in self.pools if self.lower else ():
            pool.idle = {}
        max_blocks = limits.blocks_for(limits.max_model_len)
        num_slots = limits.max_num_seqs
        self.tables: tuple[I32, ...] = tuple(np.zeros((num_slots, max_blocks), np.int32) for _ in self.groups)
        self.begins: I64 = np.zeros((len(self.groups), num_slots), np.int64)
        self.ends: I64 = np.zeros((len(self.groups), num_slots), np.int64)
        self.num_below: I64 = np.zeros((len(self.groups), num_slots), np.int64)
        self._num_sinks = max([group.sinks // self.block_size for group in self.groups])
        self.sinks: tuple[I32, ...] = tuple(
            np.zeros((num_slots, group.sinks // self.block_size), np.int32) for group in self.groups
        )
        self.masses = tuple(
            BlockMasses(group, num_slots, max_blocks, limits.block_size) if group.counted else None
            for group in self.groups
        )
        self._evicted = next((index for index, group in enumerate(self.groups) if group.kind == "evicted"), None)
        self.chooses = any(group.counted for group in self.groups)
        self.most_found = min(group.first_counted for group in self.groups) // self.block_size
        """The blocks of a sequence that may be found at most: behind them its own attention counts."""
        self.num_grown: I64 = np.zeros(num_slots, np.int64)
        self.num_published: I64 = np.zeros(num_slots, np.int64)
        self._first_unseen = self._unseen_from([0] * len(self.groups))
        self.next_unseen: I64 = np.full(num_slots, self._first_unseen, np.int64)
        self.gives_back = any(group.gives_back for group in self.groups)
        self.num_given_back = 0
        self.num_raised = 0  # blocks of the lower tier that sequences found
        self._raised: list[
            tuple[int, int, int]
        ] = []  # of a group, from the lower tier, to the arena, before the next step
        self._changed: list[int] = []
        sizes = list(zip(self.groups, self.pools, strict=True))
        # A step computes what there is room for, so a sequence never holds more of the arena than there is.
        self._most = [min(group.most_blocks(limits), pool.size) for group, pool in sizes]
        least = 1 if chunked_prefill else limits.max_model_len  # tokens that a step must be able to compute

        def longest(spare: Sequence[int]) -> int:
            return min(
                limits.max_model_len
                if group.gives_back and group.held_blocks(limits, limits.max_model_len, least) <= pool.size
                else (pool.size + (0 if group.gives_back else more)) * self.block_size
                for (group, pool), more in zip(sizes, spare, strict=True)
            )

        self.max_tokens_at_once = longest([0] * len(sizes))
        """The longest sequence that the arena holds when it has it to itself."""
        chunk = limits.blocks_for(limits.max_num_batched_tokens) + 1
        # What a sequence has of the arena beyond this goes to the lower tier while it runs: others find room beside it.
        self.keep = [max(1, min(pool.size * 3 // 4, pool.size - 2 * chunk)) for pool in self.pools]
        below = [max(0, pool.size - MOVING) for pool in self.lower] if chunked_prefill and in_place else []
        self.max_tokens = longest(below) if below else self.max_tokens_at_once
        """The longest sequence that can be computed when it has the pools to itself."""

    @property
    def num_free(self) -> tuple[int, ...]:
        """Blocks that each group can still give."""
        return tuple(pool.num_free for pool in self.pools)

    @property
    def usage(self) -> float:
        """Share of the fullest group's pool that sequences have, 0 to 1."""
        return max(1.0 - pool.num_free / pool.size for pool in self.pools)

    @property
    def num_gains(self) -> int:
        """Changes when a sequence that found no room may find some."""
        return sum(pool.num_gains for pool in (*self.pools, *self.lower))

    @property
    def num_evicted(self) -> int:
        """Blocks that could be found, and were taken for something else."""
        return sum(pool.num_evicted for pool in self.pools)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def fits(self, num_tokens: int, beside: I64, found: Sequence[bytes] = ()) -> bool:
        """Whether a sequence of `num_tokens` has room in every group, at all times of its prefill, but for what of it
        goes to the lower tier.

        beside: slots that shall find one more block each, if they may still come to hold more than they do.
        found: what it would `adopt` first.
        """
        blocks = self.blocks_for(num_tokens)
        for index, (group, pool, most) in enumerate(zip(self.groups, self.pools, self._most, strict=True)):
            spare = np.count_nonzero(self.ends[index, beside] - self.begins[index, beside] < most)
            first = self._first_block(group, len(found))
            own = [*found[: group.sinks // self.block_size if first else 0], *found[first:]]
            if not self.in_place:  # the rest of them comes to the arena
                own = [name for name in own if name in pool.block_of]
            kept = sum(pool.block_of[name] in pool.kept for name in own if name in pool.block_of)
            missing = min(blocks, most) - len(own)
            if self.spills(index, blocks):
                missing = min(blocks - len(own), self.keep[index])
            if max(1, missing) + spare + kept > pool.num_free:
                return False
        return True

    def spills(self, index: int, num_blocks: int) -> bool:
        """Whether a sequence of so many blocks has some of a group in the lower tier while it runs."""
        has_room = bool(self.lower) and self.in_place and not self.groups[index].gives_back
        return has_room and num_blocks > self.pools[index].size

    def spills_of(self, num_tokens: int) -> bool:
        """Whether a sequence of `num_tokens` has some in the lower tier, in any group."""
        return any(self.spills(index, self.blocks_for(num_tokens)) for index in range(len(self.groups)))

    def fits_later(
        self, length: int, total: int, num_found: int, beside: I64, totals: I64, found: I64, error: float = 0.0
    ) -> bool:
        """Whether a sequence of `length` can be let in so that all get the blocks that they are expected to need.

        The need is the greatest when one of them ends: those that are still there have grown by then, those that ended
        before gave back what they alone had. Source: Gong et al. 2025, "Past-Future Scheduler for LLM Serving".

        total, totals [B]: expected lengths at the end, of the sequence and of the slots `beside`; num_found, found [B]:
        their tokens that others may have as well. error: of what is still to come of each, as a share of it; errors of several
        even out, and what is left of them is kept in reserve.
        """
        size = self.block_size
        for index, (group, pool) in enumerate(zip(self.groups, self.pools, strict=True)):
            if group.gives_back:
                continue  # holds no more in the end than at first
            own, goals = self.blocks_for(length), -(-np.append(totals, total) // size)
            held = self.ends[index, beside]
            if self.lower:  # what goes there while they run is no need of the arena's
                held = held - self.num_below[index, beside]
                goals = np.where(goals > pool.size, self.keep[index], goals)
                own = min(own, int(goals[-1]))
            held = np.append(held, own)
            left = np.maximum(goals - held, 0)
            freed = held - np.append(found, num_found) // size + left
            order = np.argsort(left, kind="stable")
            left, freed = left[order], freed[order]
            before = np.cumsum(freed) - freed
            grown = np.cumsum(left) - left  # of those that ended before, which `before` gives back too
            still = np.arange(len(left), 0, -1)
            reserve = error * float(np.sqrt(np.square(left).sum()))
            if (still * left + grown - before).max() + reserve > pool.num_free - (own - num_found // size):
                return False
        return True

    def _first_block(self, group: CacheGroup, num_blocks: int) -> int:
        """The first block that the query behind `num_blocks` sees."""
        return group.first_key(num_blocks * self.block_size) // self.block_size

    def find(self, hashes: Sequence[bytes]) -> int:
        """How many of a sequence's first blocks can be found: in every group all that the query behind them sees."""
        count = len(hashes)
        for index, group in enumerate(self.groups):
            if not group.gives_back:
                found = range(count)
                count = next((at for at in found if not self._has(index, hashes[at])), count)
        windows = [(index, group) for index, group in enumerate(self.groups) if group.gives_back]
        there = [count] * len(windows)  # from here to `count` all can be found
        is_seen = False
        while count and not is_seen:
            is_seen = True
            for row, (index, group) in enumerate(windows):
                at = min(there[row], count)
                first = self._first_block(group, count)
                while at > first and self._has(index, hashes[at - 1]):
                    at -= 1
                there[row] = at
                sinks = group.sinks // self.block_size if first else 0
                if (
                    missing := next((block for block in range(sinks) if not self._has(index, hashes[block])), None)
                ) is not None:
                    count, is_seen = missing, False
                elif at > first:  # with more blocks than are before the missing one the query still sees that
                    count, is_seen = at - 1, False
        return count

    def _has(self, index: int, name: bytes) -> bool:
        if name in self.pools[index].block_of:
            return True
        return bool(self.lower) and self.lower[index].find(name) is not None

    def adopt(self, slot: int, hashes: Sequence[bytes], priority: int = 0) -> None:
        """Give an empty slot the blocks that `find` counted."""
        for index, (group, table) in enumerate(zip(self.groups, self.tables, strict=True)):
            begin = self._first_block(group, len(hashes))
            sinks = group.sinks // self.block_size if begin else 0
            held = self._hold(index, [*hashes[:sinks], *hashes[begin:]], priority)
            self.sinks[index][slot, :sinks], blocks = held[:sinks], held[sinks:]
            table[slot, begin : len(hashes)] = blocks
            self.num_below[index, slot] = sum(block >= self.pools[index].num_blocks for block in blocks)
            self.begins[index, slot], self.ends[index, slot] = begin, len(hashes)
        self.num_grown[slot] = self.num_published[slot] = len(hashes)
        self.next_unseen[slot] = self._unseen_from(self.begins[:, slot].tolist())

    def _hold(self, index: int, names: Sequence[bytes], priority: int) -> list[int]:
        """The blocks of some hashes, of whichever tier has them, with one more reference each."""
        pool = self.pools[index]
        blocks = [pool.block_of.get(name, 0) for name in names]
        pool.hold([block for block in blocks if block], priority)
        if 0 not in blocks:
            return blocks
        lower = self.lower[index]
        missing = [name for name, block in zip(names, blocks, strict=True) if not block]
        below = [lower.block_of[name] for name in missing]
        self.num_raised += len(below)
        if self.in_place:
            lower.hold(below, priority)
        else:
            below = self._raise(index, missing, below, priority)
        found = iter(below)
        return [block or next(found) for block in blocks]

    def _raise(self, index: int, names: Sequence[bytes], below: Sequence[int], priority: int) -> list[int]:
        """New blocks of the arena that the next step begins by copying from the lower tier, and that can be found at once.

        Nothing is stored in those of the lower tier before that step has landed (`Tiers`).
        """
        pool = self.pools[index]
        blocks = pool.take(len(names))
        for name, block in zip(names, blocks, strict=True):
            pool.publish(block, name, priority)
        self.lower[index].hold(below, priority)  # they were used now
        self.lower[index].drop(below)
        self._raised += [(index, source, block) for source, block in zip(below, blocks, strict=True)]
        return blocks

    def take_raised(self) -> tuple[Copies, ...]:
        """Blocks of each group that the step which is scheduled copies from the lower tier first; none at all: ()."""
        raised, self._raised = self._raised, []
        if not raised:
            return ()
        groups = []
        for index in range(len(self.groups)):
            rows = np.array([row[1:] for row in raised if row[0] == index], np.int64).reshape(-1, 2)
            groups.append(Copies(np.ascontiguousarray(rows[:, 0]), np.ascontiguousarray(rows[:, 1])))
        return tuple(groups)

    def num_there(self, found: Sequence[bytes]) -> int:
        """How many of the blocks that `find` counted need no room in the arena, where a group gives nothing back."""
        if self.in_place or not self.lower:
            return len(found)
        pools = [pool for group, pool in zip(self.groups, self.pools, strict=True) if not group.gives_back]
        return min((sum(name in pool.block_of for name in found) for pool in pools), default=len(found))

    def publish(self, slot: int, hashes: Sequence[bytes], priority: int = 0) -> None:
        """Let the first blocks of `slot`, which are or will be computed before any later step, be found by these hashes."""
        for index, (pool, table) in enumerate(zip(self.pools, self.tables, strict=True)):
            for block in range(max(int(self.num_published[slot]), int(self.begins[index, slot])), len(hashes)):
                pool.publish(int(table[slot, block]), hashes[block], priority)
        self.num_published[slot] = len(hashes)

    def publish_last(self, slots: I64, blocks: I64, hashes: Sequence[bytes], priorities: Sequence[int]) -> None:
        """Let one block of each of some slots be found, all before it being published."""
        for pool, table in zip(self.pools, self.tables, strict=True):
            for block, name, priority in zip(table[slots, blocks].tolist(), hashes, priorities, strict=True):
                if block:  # not given back
                    pool.publish(block, name, priority)
        self.num_published[slots] = blocks + 1

    def publish_partial(self, slot: int, block: int, name: bytes, priority: int) -> bool:
        """Let a block that is not full be found by its first tokens' hash; False if a group has given it back."""
        blocks = [int(table[slot, block]) for table in self.tables]
        if 0 in blocks:
            return False
        for pool, each in zip(self.pools, blocks, strict=True):
            pool.publish(each, name, priority)
            if pool.hash_of.get(each) == name:
                pool.partial.add(each)
        return True

    def blocks_of(self, name: bytes) -> list[int] | None:
        """The block of a hash in each group's arena, if all have it."""
        blocks = [pool.block_of.get(name, 0) for pool in self.pools]
        return None if 0 in blocks else blocks

    def grow(self, slot: int, num_tokens: int, whole: int = 0) -> bool:
        """Give `slot` blocks up to `num_tokens`, in every group; False, and nothing changed, if too few are free.

        whole: as many tokens, if these are more, in the groups that give nothing back.
        """
        wanted = [self.blocks_for(num_tokens if group.gives_back else max(num_tokens, whole)) for group in self.groups]
        missing = [max(0, blocks - int(end)) for blocks, end in zip(wanted, self.ends[:, slot], strict=True)]
        if any(count > pool.num_free for count, pool in zip(missing, self.pools, strict=True)):
            return False
        for index, count in enumerate(missing):
            if count:
                end = int(self.ends[index, slot])
                self.tables[index][slot, end : end + count] = self.pools[index].take(count)
                self.ends[index, slot] = end + count
        self.num_grown[slot] = self.ends[:, slot].min()
        self._changed.append(slot)
        return True

    def grow_all(self, slots: I64) -> bool:
        """One more block for each of some slots, in every group; False, and nothing changed, if too few are free.

        Also False if a slot has more in one group than in another: `grow` then says what each lacks.
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
        """Slots whose block tables have changed since the last call."""
        changed, self._changed = self._changed, []
        return changed

    def extend(self, slot: int, start: int, count: int, whole: int = 0) -> int:
        """Make room for the tokens [start, start + count), or as many of them as blocks are free for; returns how many.

        Blocks that no query from `start` on sees are given back first. `whole` as in `grow`. Of a cache that evicts no more
        than see the same.
        """
        self.give_back(slot, start)
        if self._evicted is not None:
            count = min(count, self.groups[self._evicted].most_new(start))
        ends = zip(self.ends[:, slot].tolist(), self.pools, strict=True)
        room = min(end + pool.num_free for end, pool in ends) * self.block_size
        count = max(0, min(count, room - start))
        grown = not count or self.grow(slot, start + count, whole)
        assert grown, "counted above"
        return count

    def give_back(self, slot: int, position: int) -> None:
        """Free the blocks of which no query of `slot` from `position` on sees a token; their entries become 0.

        `position` is the first that the next step will compute. That step's block table has no such block any more.
        The step in flight may still read them, from its own copy of the table; yet another sequence can have them at
        once: it writes into them in the next step at the earliest, and a step begins when the one before it is done
        (`Runner`). No query ever comes back to an earlier position: a sequence that has to begins again from nothing.
        """
        for index, group in enumerate(self.groups):
            begin, end = int(self.begins[index, slot]), group.first_key(position) // self.block_size
            if end > begin:
                assert end <= self.ends[index, slot], "blocks are given back before they were held"
                if group.counted:
                    self._choose(index, slot, position, begin, end)
                    begin = begin or len(self.sinks[index][slot])
                else:
                    if not begin and group.sinks:
                        begin = self._keep_sinks(index, slot)
                    self._drop(index, slot, begin, end)
                self.begins[index, slot] = end
                self.num_given_back += end - begin
                self._changed.append(slot)
        self.next_unseen[slot] = self._unseen_from(self.begins[:, slot].tolist())

    def _keep_sinks(self, index: int, slot: int) -> int:
        """Let a slot's first blocks, all of which it has, outlive what lies behind them; how many."""
        table, sinks = self.tables[index][slot], self.sinks[index][slot]
        count = len(sinks)
        sinks[:] = table[:count]
        table[:count] = 0
        self.num_below[index, slot] -= np.count_nonzero(sinks >= self.pools[index].num_blocks)
        return count

    def _choose(self, index: int, slot: int, position: int, begin: int, end: int) -> None:
        """Keep the best of the blocks that a slot has kept and of [begin, end), and give up the others."""
        masses, table, sinks = self.masses[index], self.tables[index][slot], self.sinks[index][slot]
        assert masses is not None
        own = slice(0, len(sinks) if begin else 0)
        candidates = np.concatenate((masses.kept[slot, own], np.arange(begin, end)))
        blocks = np.concatenate((sinks[own], table[begin:end]))
        is_kept = masses.choose(slot, position, candidates)
        self.num_below[index, slot] -= np.count_nonzero(table[begin:end] >= self.pools[index].num_blocks)
        sinks[:] = blocks[is_kept]
        table[begin:end] = 0
        self._give_up(index, blocks[~is_kept].tolist())

    def count(self, slots: I64, start: I64, end: I64, query_start_loc: I32, max_blocks: int) -> Counted | None:
        """Which queries of a step of some slots are counted, by whose attention blocks are kept later; None: none at all."""
        if not self.chooses or self._evicted is None:
            return None
        group = self.groups[self._evicted]
        wanted = first_counted(group, start)
        first = np.clip(wanted, start, end)
        seqs = np.flatnonzero(first < end)
        if not len(seqs):
            return None
        of = slots[seqs]
        forgotten = self.num_forgotten(of) // self.block_size
        return Counted(
            (query_start_loc[:-1] + (first - start)).astype(np.int32),
            tuple(None if each is None else np.zeros((len(slots), max_blocks), np.int64) for each in self.masses),
            seqs,
            of,
            wanted[seqs] // group.stride % 2,
            tuple(None if each is None else each.columns(of, forgotten, max_blocks) for each in self.masses),
        )

    def add_masses(self, counted: Counted) -> None:
        """What a step has counted. Every step that counted for a sequence has landed when its next stride but one begins."""
        for masses, found, columns in zip(self.masses, counted.masses, counted.columns, strict=True):
            if masses is not None and found is not None and columns is not None:
                masses.add(counted.slots, counted.turns, columns, found[counted.seqs])

    @property
    def evicts(self) -> bool:
        """Whether sequences forget tokens while they run."""
        return self._evicted is not None

    def forgets(self, positions: I64) -> NDArray[np.bool_]:
        """Whether the queries at some positions see less than those before them may have seen."""
        assert self._evicted is not None
        do: NDArray[np.bool_] = positions % self.groups[self._evicted].stride == 0
        return do

    def num_forgotten_at(self, position: int) -> int:
        """Tokens that the query at a position does not see, between the sinks and what it sees."""
        if self._evicted is None:
            return 0
        group = self.groups[self._evicted]
        return max(0, group.first_key(position) - group.sinks)

    def num_forgotten(self, slots: I64) -> I64:
        """The same of the next queries of some slots."""
        assert self._evicted is not None
        begins = self.begins[self._evicted, slots]
        return np.where(begins > 0, (begins - self._num_sinks) * self.block_size, 0)

    def tables_without(self, slots: I64, forgotten: I64, max_blocks: int) -> tuple[I32, ...]:
        """Block tables of some slots without what they have forgotten: sinks, then what they see. A layer with a window sees
        none of its keys moved: what has moved lies out of it."""
        columns = np.arange(max_blocks)
        is_sink = (columns < self._num_sinks) & (forgotten > 0)[:, None]
        moved = np.minimum(columns + forgotten[:, None] // self.block_size, self.tables[0].shape[1] - 1)
        tables = []
        for group, table, sinks in zip(self.groups, self.tables, self.sinks, strict=True):
            rows = np.where(is_sink, 0, table[slots[:, None], moved]).astype(np.int32)
            if group.sinks:
                count = min(max_blocks, self._num_sinks)
                rows[:, :count] = np.where(is_sink[:, :count], sinks[slots, :count], rows[:, :count])
            tables.append(rows)
        return tuple(tables)

    def _drop(self, index: int, slot: int, begin: int, end: int) -> None:
        """Give up the blocks [begin, end) of a slot; their entries become 0."""
        pool, table = self.pools[index], self.tables[index]
        blocks: list[int] = table[slot, begin:end].tolist()
        if self.num_below[index, slot]:
            below = [block for block in blocks if block >= pool.num_blocks]
            self.lower[index].drop(below)
            self.num_below[index, slot] -= len(below)
            blocks = [block for block in blocks if block < pool.num_blocks]
        pool.drop(blocks)
        table[slot, begin:end] = 0

    def _give_up(self, index: int, blocks: Sequence[int]) -> None:
        """One reference less to some blocks, of either tier."""
        count = self.pools[index].num_blocks
        self.pools[index].drop([block for block in blocks if block < count])
        if self.lower:
            self.lower[index].drop([block for block in blocks if block >= count])

    def spill(self, index: int, block: int, below: int, slots: I64) -> int:
        """Let those of some slots that have a block of the arena have its copy in the lower tier instead; how many did."""
        table = self.tables[index]
        rows, columns = np.nonzero(table[slots] == block)
        for slot in slots[rows].tolist():
            self.lower[index].hold([below])
            self.pools[index].drop([block])
            self.num_below[index, slot] += 1
            self._changed.append(slot)
        table[slots[rows], columns] = below
        return len(rows)

    def _unseen_from(self, begins: Sequence[int]) -> int:
        """The first position whose query sees nothing of one of these blocks, one a group."""
        size = self.block_size
        return min(group.unseen_from((begin + 1) * size - 1) for group, begin in zip(self.groups, begins, strict=True))

    def release(self, slot: int) -> None:
        """Free all blocks of `slot`."""
        for index in range(len(self.groups)):
            self._drop(index, slot, int(self.begins[index, slot]), int(self.ends[index, slot]))
            if (sinks := self.sinks[index][slot]).any():
                self._give_up(index, sinks.tolist())
                sinks[:] = 0
            if (masses := self.masses[index]) is not None:
                masses.reset(slot)
        self.begins[:, slot] = self.ends[:, slot] = self.num_grown[slot] = self.num_published[slot] = 0
        self.next_unseen[slot] = self._first_unseen

    def check_integrity(self) -> None:
        """Every block but 0 can either be taken, once, or is referred to by as many tables as its ref_count says.

        What can be found is found by one hash, and is in no list of free ones.
        """
        assert (self.num_grown == self.ends.min(0)).all(), "num_grown is not the least of a slot's ends"
        assert (self.begins <= self.ends).all(), "a slot gave back more than it had"
        for index, table in enumerate(self.tables):
            blocks = np.arange(table.shape[1])
            held = (blocks >= self.begins[index, :, None]) & (blocks < self.ends[index, :, None])
            assert not table[~held].any(), "a table holds blocks beyond its count"
            is_below = table >= self.pools[index].num_blocks
            assert (is_below.sum(1) == self.num_below[index]).all(), "blocks of the lower tier are miscounted"
            assert (held & ~is_below).sum(1).max() <= self._most[index], "a slot holds more than it can ever need"
            sinks = self.sinks[index][self.sinks[index] > 0]
            below = sinks >= self.pools[index].num_blocks
            self.pools[index].check_integrity(np.append(table[held & ~is_below], sinks[~below]))
            if self.lower:
                self.lower[index].check_integrity(np.append(table[held & is_below], sinks[below]))


def root_hash(model_hash: str, kv_dtype: str, adapter: str = "", salt: str = "") -> bytes:
    """The hash before a sequence's first block: what must be equal for two sequences to share K and V at all.

    SHA-256 over length-prefixed fields, so that other processes and machines compute the same.
    """
    digest = hashlib.sha256()
    for part in (model_hash, kv_dtype, adapter, salt):
        data = part.encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def block_hash(previous: bytes, token_ids: Sequence[int]) -> bytes:
    """The hash of a full block: of all tokens up to its end, through `previous`. Ids enter as little-endian u32."""
    return hash_block(previous, np.asarray(token_ids, "<u4").tobytes())


def hash_block(previous: bytes, ids: bytes) -> bytes:
    """`block_hash` of ids that are bytes already."""
    return hashlib.sha256(previous + ids).digest()


def extend_hashes(hashes: list[bytes], root: bytes, token_ids: Sequence[int] | I32, block_size: int) -> None:
    """Append the hashes of the full blocks of `token_ids` that `hashes` lacks. root: `root_hash` of the sequence."""
    first = len(hashes)
    ids = np.asarray(token_ids[first * block_size : len(token_ids) // block_size * block_size], "<u4").tobytes()
    name = hashes[-1] if hashes else root
    for begin in range(0, len(ids), 4 * block_size):
        name = hash_block(name, ids[begin : begin + 4 * block_size])
        hashes.append(name)
