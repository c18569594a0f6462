"""The manager of the offload tier of the KV cache: which blocks move between it and the arena, and when.

Steps read a block of the offload tier directly, or the step that needs it first copies it to the arena
(`KVCacheManager`). Only copies of full blocks are offloaded: blocks that no sequence has and that can be found
(write-behind), blocks of a preempted sequence if copying is cheaper than computing them again (swap), and, if steps can
read the tier directly, the oldest blocks of a running sequence that is longer than the arena (spill). A mover makes the
copies beside the steps. A copy is valid if its block was not given to another sequence meanwhile: full blocks do not
change.

Blocks that an earlier run left are verified before they can be found. A sequence that could use them waits for that,
unless computing them again is expected to take less time.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from inferc.runtime.kv_cache.block_pool import MOVING
from inferc.runtime.kv_cache.manager import KVCacheManager
from inferc.runtime.step.forecast import Forecast
from inferc.runtime.step.plan import I32, I64
from inferc.runtime.step.sequence import Sequence as Seq

log = logging.getLogger(__name__)

PAUSE = 60.0  # seconds without copies after one that failed
Place = tuple[int, int]  # (KV group, block of its offload tier)


@dataclass(frozen=True)
class Done:
    """A copy or a check that the mover has finished.

    failure: why it failed, or None; the failure of a check is about the bytes.
    """

    place: Place
    failure: str | None = None


class BlockMover(Protocol):
    """The interface to copy and verify bytes beside the steps, in the order of the calls."""

    @property
    def seconds_per_byte(self) -> float:
        """The time that copies and checks took so far, per byte."""

    def names(self, group: int) -> Mapping[int, bytes]:
        """Return the hashes of the blocks that an earlier run left, by block, the earliest stored first."""

    def copy(self, group: int, block: int, stored_block: int) -> None:
        """Copy a block of the arena, which may change meanwhile, to the offload tier."""

    def commit(self, group: int, stored_block: int, name: bytes) -> None:
        """Record that the last copy to this place is the block with this hash, also for later runs."""

    def check(self, group: int, stored_block: int) -> None:
        """Read and verify a block of an earlier run."""

    def forget(self, group: int, stored_block: int) -> None:
        """Record that the block at this place is of no use to later runs."""

    def take_done(self) -> list[Done]:
        """Return what has finished since the last call."""

    def read_ahead(self, tables: Sequence[I32]) -> None:
        """Announce that a step will read the blocks of these block tables, one table per group, layer by layer."""

    def close(self) -> None:
        """Finish the queued work."""


@dataclass
class _Copy:
    index: int  # the KV group
    block: int
    name: bytes
    generation: int
    # The step that must have landed before: until then the block may not have been computed.
    step: int
    is_spilled: bool = False  # running sequences use the copy instead
    is_held: bool = False  # the block is not given out before it is copied
    stored_block: int = 0


class OffloadManager:
    """The manager of a cache with an offload tier; it is called between steps, and `look` once before each."""

    def __init__(
        self,
        cache: KVCacheManager,
        mover: BlockMover,
        forecast: Forecast,
        clock: Callable[[], float],
    ) -> None:
        self.cache = cache
        self.forecast = forecast
        self.num_stored = self.num_spilled = self.num_swapped = self.num_damaged = 0  # numbers of blocks
        self._mover = mover
        self._block_bytes = [cache.block_size * group.spec.bytes_per_token for group in cache.groups]
        self._clock = clock
        self._wanted: deque[_Copy] = deque()  # copies that wait for a step to land
        self._moving: dict[Place, _Copy] = {}
        self._spilling: set[tuple[int, int]] = set()  # (group, block of the arena)
        self._num_held = 0
        self._keep = np.array([group.keep for group in cache.groups])[:, None]
        self._checking: dict[Place, int] = {}  # the generation of each block that is being verified
        self._fetching: dict[Seq, set[Place]] = {}  # what is still to be verified for each sequence
        self._paused_until = 0.0
        self._stored = [store.pool for store in cache.stores]
        for index, pool in enumerate(self._stored):
            pool.restore(mover.names(index))

    @property
    def is_paused(self) -> bool:
        """True if nothing can be stored for a while, because a copy failed."""
        return self._clock() < self._paused_until

    @property
    def is_busy(self) -> bool:
        """True if any block moves between tiers, or is about to."""
        idle = any(pool.idle for pool in self.cache.pools) and not self.is_paused
        return bool(self._wanted or self._moving or self._checking or idle)

    @property
    def are_blocks_coming(self) -> bool:
        """True if blocks of the arena will be free once they are copied."""
        return bool(self._num_held or self._spilling)

    @property
    def num_fetching(self) -> int:
        """The number of sequences that wait for a check."""
        return len(self._fetching)

    @property
    def fetching_ids(self) -> list[str]:
        """The requests of the sequences that wait for a check."""
        return [seq.request_id for seq in self._fetching]

    @property
    def usage(self) -> float:
        """The share of the fullest group's offload tier that holds blocks."""
        return max(1.0 - len(pool.free) / max(1, pool.size) for pool in self._stored)

    # ---------------------------------------------------------------------------------------------- down

    def look(self, order: I64, num_tokens: I64, seqs: Sequence[Seq | None], scheduled: int, landed: int) -> list[Seq]:
        """Take the copies that are done, start new ones, and return the sequences whose check is over.

        order, num_tokens, seqs: those of the batch.
        scheduled, landed: the numbers of the last steps that were scheduled and that landed.
        """
        ready: list[Seq] = []
        for done in self._mover.take_done():
            if done.place in self._checking:
                ready += self._checked(done)
            else:
                self._copied(done, order)
        self._spill_of_long(order, num_tokens, seqs, scheduled)
        if not self.is_paused:
            self._want_idle(scheduled)
        while self._wanted and self._wanted[0].step <= landed and len(self._moving) < MOVING:
            self._start(self._wanted.popleft())
        return ready

    def _want_idle(self, scheduled: int) -> None:
        """Request copies of blocks that no sequence has, before their place is reused."""
        for index, pool in enumerate(self.cache.pools):
            assert pool.idle is not None
            while pool.idle and len(self._moving) + len(self._wanted) < MOVING:
                block = next(iter(pool.idle))
                del pool.idle[block]
                if (name := pool.hash_of.get(block)) is not None and block not in pool.partial:
                    self._want(_Copy(index, block, name, int(pool.generation[block]), scheduled))

    def _want(self, copy: _Copy) -> None:
        """Give a copy its place now; it is made when the steps that may still read what was there have landed."""
        stored = self._stored[copy.index]
        if copy.name in stored.block_of or not stored.num_free:
            self._end(copy)
            return
        copy.stored_block = stored.take(1)[0]
        stored.moving.add(copy.stored_block)
        self._wanted.append(copy)

    def _start(self, copy: _Copy) -> None:
        if self.cache.pools[copy.index].generation[copy.block] != copy.generation or self.is_paused:
            self._release(copy)
            self._end(copy)
            return
        self._moving[copy.index, copy.stored_block] = copy
        self._mover.copy(copy.index, copy.block, copy.stored_block)

    def _release(self, copy: _Copy) -> None:
        stored = self._stored[copy.index]
        stored.moving.discard(copy.stored_block)
        stored.drop([copy.stored_block])

    def _copied(self, done: Done, order: I64) -> None:
        copy = self._moving.pop(done.place)
        pool, stored = self.cache.pools[copy.index], self._stored[copy.index]
        is_same = pool.generation[copy.block] == copy.generation
        if done.failure is not None:
            if not self.is_paused:
                log.warning("nothing is stored in the offload tier of the KV cache for a while: %s", done.failure)
            self._paused_until = self._clock() + PAUSE
        elif is_same and copy.name not in stored.block_of:
            stored.cache_block(copy.stored_block, copy.name, pool.kept.priority_of.get(copy.block, 0))
            self._mover.commit(copy.index, copy.stored_block, copy.name)
            self.num_stored += 1
        self._release(copy)
        if copy.is_spilled and is_same and (stored_block := stored.find(copy.name)) is not None:
            self.num_spilled += self.cache.offload(copy.index, copy.block, stored_block, order)
        self._end(copy)

    def _end(self, copy: _Copy) -> None:
        """Release what kept the block of a copy from being reused."""
        self._spilling.discard((copy.index, copy.block))
        if copy.is_held:
            pool = self.cache.pools[copy.index]
            pool.moving.discard(copy.block)
            pool.drop([copy.block])
            self._num_held -= 1

    # ------------------------------------------------------------------------------- of those that run

    def _spill_of_long(self, order: I64, num_tokens: I64, seqs: Sequence[Seq | None], scheduled: int) -> None:
        cache = self.cache
        held = cache.ends[:, order] - cache.begins[:, order] - cache.num_offloaded[:, order]
        if not np.count_nonzero(held > self._keep):
            return
        for index, group in enumerate(cache.groups):
            for row in np.flatnonzero(held[index] > group.keep).tolist():
                slot = int(order[row])
                if group.offloads(cache.blocks_for(int(num_tokens[slot]))):
                    self.spill(index, slot, seqs, int(held[index, row]) - group.keep, scheduled, order)

    def spill(self, index: int, slot: int, seqs: Sequence[Seq | None], count: int, scheduled: int, order: I64) -> bool:
        """Move the first `count` full arena blocks of a running sequence to the offload tier, as their copies are done.

        Returns whether any block will be free by that.
        """
        cache, seq = self.cache, seqs[slot]
        pool, stored, table = cache.pools[index], self._stored[index], cache.tables[index]
        begin, end = int(cache.begins[index, slot]), int(cache.num_cached_blocks[slot])
        columns = begin + np.flatnonzero(table[slot, begin:end] < pool.num_blocks)[:count]
        if self.is_paused or seq is None or cache.groups[index].spec.frees_blocks:
            return False
        num_spilled = self.num_spilled
        for column in columns.tolist():
            block, name = int(table[slot, column]), seq.hashes[column]
            if (index, block) in self._spilling:
                continue
            if (stored_block := stored.find(name)) is not None:
                self.num_spilled += cache.offload(index, block, stored_block, order)
            else:
                self._spilling.add((index, block))
                self._want(_Copy(index, block, name, int(pool.generation[block]), scheduled, is_spilled=True))
        return bool(self._spilling) or self.num_spilled > num_spilled

    def may_swap(self, num_tokens: int, num_blocks: Sequence[int]) -> bool:
        """Return whether copying these blocks and reading them again is expected to beat computing them again."""
        if self.is_paused or not self.forecast.cost.is_known:
            return False
        size = sum(count * of for count, of in zip(num_blocks, self._block_bytes, strict=True))
        return 2 * size * self._mover.seconds_per_byte < self.forecast.prompt_seconds(num_tokens)

    def save(self, slot: int, hashes: Sequence[bytes], scheduled: int) -> None:
        """Copy the blocks that only a sequence about to be preempted has, before they are reused, the last first."""
        cache = self.cache
        for index, (pool, stored, table) in enumerate(zip(cache.pools, self._stored, cache.tables, strict=True)):
            begin, end = int(cache.begins[index, slot]), int(cache.num_cached_blocks[slot])
            for column in range(end - 1, begin - 1, -1):
                block, name = int(table[slot, column]), hashes[column]
                is_alone = block < pool.num_blocks and pool.ref_count[block] == 1
                if is_alone and name not in stored.block_of and (index, block) not in self._spilling:
                    pool.hold([block])
                    pool.moving.add(block)
                    self._num_held += 1
                    self.num_swapped += 1
                    self._want(_Copy(index, block, name, int(pool.generation[block]), scheduled, is_held=True))

    # ------------------------------------------------------------------------------- of an earlier run

    def fetch(self, seq: Seq, num_found: int, num_blocks: int) -> bool:
        """Verify the blocks that an earlier run left for a sequence, and return whether it must wait for that.

        num_found: the number of blocks that can be found now.
        num_blocks: the most that can be found, whose hashes are known.
        """
        wanted = self._unchecked(seq.hashes[:num_blocks])
        if not wanted:
            return False
        size = self.cache.block_size
        seconds = sum(self._block_bytes[index] for index, _ in wanted) * self._mover.seconds_per_byte
        if self.forecast.cost.is_known:
            prompt, found = len(seq.token_ids), num_found * size
            saved = self.forecast.prompt_seconds(prompt, found) - self.forecast.prompt_seconds(
                prompt, found + len(wanted) // len(self.cache.groups) * size
            )
            if seconds > saved:
                return False
        for index, stored_block in wanted:
            if (index, stored_block) not in self._checking:
                self._checking[index, stored_block] = int(self._stored[index].generation[stored_block])
                self._mover.check(index, stored_block)
        self._fetching[seq] = set(wanted)
        return True

    def _unchecked(self, hashes: Sequence[bytes]) -> list[Place]:
        found: list[Place] = []
        for index, (group, pool, stored) in enumerate(
            zip(self.cache.groups, self.cache.pools, self._stored, strict=True)
        ):
            if not stored.unchecked:
                continue
            for name in hashes:
                stored_block = stored.block_of.get(name)
                if stored_block is not None and stored_block in stored.unchecked and name not in pool.block_of:
                    found.append((index, stored_block))
                elif stored_block is None and name not in pool.block_of and not group.spec.frees_blocks:
                    break
        return found

    def _checked(self, done: Done) -> list[Seq]:
        index, stored_block = done.place
        stored = self._stored[index]
        if stored.generation[stored_block] == self._checking.pop(done.place):
            if done.failure is None:
                stored.unchecked.discard(stored_block)
            else:
                log.warning("a block of the KV cache on disk is not used: %s", done.failure)
                self.num_damaged += 1
                stored.forget(stored_block)
                self._mover.forget(index, stored_block)
        ready = []
        for seq, wanted in list(self._fetching.items()):
            wanted.discard(done.place)
            if not wanted:
                del self._fetching[seq]
                ready.append(seq)
        return ready

    def is_fetching(self, seq: Seq) -> bool:
        return seq in self._fetching

    def abandon(self, seq: Seq) -> None:
        """Forget a sequence that has ended while it waited for a check."""
        del self._fetching[seq]
