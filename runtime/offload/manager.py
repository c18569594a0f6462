"""What moves between the arena and the lower tier of the KV cache, and when.

A block of the lower tier is read by steps as it lies, or copied by the step that needs it first (`KVCacheManager`). What goes
down is always a copy of a full block: of one that nobody has and that can be found (write-behind), of a preempted sequence
if that is cheaper than to compute it again (swap), or, where steps read there, of the oldest blocks of a running sequence
that is longer than the arena (spill). Copies are made beside the steps, by a mover. A copy counts if its block was not
given to somebody else meanwhile: full blocks do not change.

What an earlier run left is checked before it can be found; a sequence that could use it waits for that, unless computing it
again is expected to take less time.
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

PAUSE = 60.0  # seconds without a copy after one that failed
Place = tuple[int, int]  # a KV group and a block of its lower tier


@dataclass(frozen=True)
class Done:
    """A copy or a check that the mover has ended. `failure` says why it did not do; a check's is of the bytes."""

    place: Place
    failure: str | None = None


class BlockMover(Protocol):
    """Copies and checks bytes beside the steps, in the order in which it is asked to."""

    @property
    def seconds_per_byte(self) -> float:
        """Of copies and checks so far."""

    def names(self, group: int) -> Mapping[int, bytes]:
        """What an earlier run left, by block: the one that was stored first first."""

    def copy(self, group: int, block: int, below: int) -> None:
        """Copy a block of the arena, which may change meanwhile, to the lower tier."""

    def commit(self, group: int, below: int, name: bytes) -> None:
        """What was copied last to this place is this, also for later runs."""

    def check(self, group: int, below: int) -> None:
        """Read a block of an earlier run."""

    def forget(self, group: int, below: int) -> None:
        """What lies here is of no use to later runs."""

    def take_done(self) -> list[Done]:
        """What has ended since the last call."""

    def read_ahead(self, tables: Sequence[I32]) -> None:
        """A step will read these block tables' blocks, one table a group, layer by layer."""

    def close(self) -> None:
        """End what was asked for."""


@dataclass
class _Copy:
    index: int  # of its KV group
    block: int
    name: bytes
    generation: int
    step: int  # that must have landed: until then what it reads may not have been computed
    is_spilled: bool = False  # sequences that run use the copy instead
    is_held: bool = False  # nobody gets the block before it is copied
    below: int = 0


class OffloadManager:
    """Decides for a cache with a lower tier. Called between steps; `look` once before each."""

    def __init__(
        self,
        cache: KVCacheManager,
        mover: BlockMover,
        forecast: Forecast,
        clock: Callable[[], float],
    ) -> None:
        self.cache = cache
        self.forecast = forecast
        self.num_stored = self.num_spilled = self.num_swapped = self.num_damaged = 0  # blocks
        self._mover = mover
        self._block_bytes = [cache.block_size * group.spec.bytes_per_token for group in cache.groups]
        self._clock = clock
        self._wanted: deque[_Copy] = deque()  # by somebody who waits for it
        self._moving: dict[Place, _Copy] = {}
        self._spilling: set[tuple[int, int]] = set()  # groups and blocks of the arena
        self._num_held = 0
        self._keep = np.array([group.keep for group in cache.groups])[:, None]
        self._checking: dict[Place, int] = {}  # and the generation of what is checked
        self._fetching: dict[Seq, set[Place]] = {}  # what is still to be checked for each
        self._paused_until = 0.0
        self._stored = [store.pool for store in cache.stores]
        for index, pool in enumerate(self._stored):
            pool.restore(mover.names(index))

    @property
    def is_paused(self) -> bool:
        """After a copy that failed: nothing can be stored for a while."""
        return self._clock() < self._paused_until

    @property
    def is_busy(self) -> bool:
        """Whether anything moves, or is about to."""
        idle = any(pool.idle for pool in self.cache.pools) and not self.is_paused
        return bool(self._wanted or self._moving or self._checking or idle)

    @property
    def are_blocks_coming(self) -> bool:
        """Whether blocks of the arena will be free once they are copied."""
        return bool(self._num_held or self._spilling)

    @property
    def num_fetching(self) -> int:
        """Sequences that wait for a check."""
        return len(self._fetching)

    @property
    def usage(self) -> float:
        """Share of the fullest group's lower tier that holds something."""
        return max(1.0 - len(pool.free) / max(1, pool.size) for pool in self._stored)

    # ---------------------------------------------------------------------------------------------- down

    def look(self, order: I64, num_tokens: I64, seqs: Sequence[Seq | None], scheduled: int, landed: int) -> list[Seq]:
        """Take what has moved, start what shall move. Returns sequences whose check is over.

        order, num_tokens, seqs: of the batch; scheduled, landed: numbers of the last steps of which this is so.
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
        """Copy what nobody has, before somebody gets its place."""
        for index, pool in enumerate(self.cache.pools):
            assert pool.idle is not None
            while pool.idle and len(self._moving) + len(self._wanted) < MOVING:
                block = next(iter(pool.idle))
                del pool.idle[block]
                if (name := pool.hash_of.get(block)) is not None and block not in pool.partial:
                    self._want(_Copy(index, block, name, int(pool.generation[block]), scheduled))

    def _want(self, copy: _Copy) -> None:
        """Give a copy its place now: when the steps have landed that may still read what was there, it is made."""
        stored = self._stored[copy.index]
        if copy.name in stored.block_of or not stored.num_free:
            self._end(copy)
            return
        copy.below = stored.take(1)[0]
        stored.moving.add(copy.below)
        self._wanted.append(copy)

    def _start(self, copy: _Copy) -> None:
        if self.cache.pools[copy.index].generation[copy.block] != copy.generation or self.is_paused:
            self._release(copy)
            self._end(copy)
            return
        self._moving[copy.index, copy.below] = copy
        self._mover.copy(copy.index, copy.block, copy.below)

    def _release(self, copy: _Copy) -> None:
        stored = self._stored[copy.index]
        stored.moving.discard(copy.below)
        stored.drop([copy.below])

    def _copied(self, done: Done, order: I64) -> None:
        copy = self._moving.pop(done.place)
        pool, stored = self.cache.pools[copy.index], self._stored[copy.index]
        is_same = pool.generation[copy.block] == copy.generation
        if done.failure is not None:
            if not self.is_paused:
                log.warning("nothing is stored in the lower tier of the KV cache for a while: %s", done.failure)
            self._paused_until = self._clock() + PAUSE
        elif is_same and copy.name not in stored.block_of:
            stored.publish(copy.below, copy.name, pool.kept.priority_of.get(copy.block, 0))
            self._mover.commit(copy.index, copy.below, copy.name)
            self.num_stored += 1
        self._release(copy)
        if copy.is_spilled and is_same and (below := stored.find(copy.name)) is not None:
            self.num_spilled += self.cache.offload(copy.index, copy.block, below, order)
        self._end(copy)

    def _end(self, copy: _Copy) -> None:
        """Nothing keeps the block any more."""
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
        """Let a running sequence have its first `count` full blocks of the arena in the lower tier instead, in time.

        Returns whether any will be free by that.
        """
        cache, seq = self.cache, seqs[slot]
        pool, stored, table = cache.pools[index], self._stored[index], cache.tables[index]
        begin, end = int(cache.begins[index, slot]), int(cache.num_cached_blocks[slot])
        columns = begin + np.flatnonzero(table[slot, begin:end] < pool.num_blocks)[:count]
        if self.is_paused or seq is None or cache.groups[index].spec.gives_back:
            return False
        num_spilled = self.num_spilled
        for column in columns.tolist():
            block, name = int(table[slot, column]), seq.hashes[column]
            if (index, block) in self._spilling:
                continue
            if (below := stored.find(name)) is not None:
                self.num_spilled += cache.offload(index, block, below, order)
            else:
                self._spilling.add((index, block))
                self._want(_Copy(index, block, name, int(pool.generation[block]), scheduled, is_spilled=True))
        return bool(self._spilling) or self.num_spilled > num_spilled

    def may_swap(self, num_tokens: int, num_blocks: Sequence[int]) -> bool:
        """Whether to copy so much and read it again is expected to take less time than to compute it again."""
        if self.is_paused or not self.forecast.cost.is_known:
            return False
        size = sum(count * of for count, of in zip(num_blocks, self._block_bytes, strict=True))
        return 2 * size * self._mover.seconds_per_byte < self.forecast.prompt_seconds(num_tokens)

    def save(self, slot: int, hashes: Sequence[bytes], scheduled: int) -> None:
        """Copy what only a sequence has that is about to be preempted, before anybody gets it; the last blocks first."""
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
        """Have what an earlier run left of a sequence's first blocks checked; whether it is to wait for that.

        num_found: blocks that can be found now; num_blocks: at most, of which the hashes are known.
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
        for index, below in wanted:
            if (index, below) not in self._checking:
                self._checking[index, below] = int(self._stored[index].generation[below])
                self._mover.check(index, below)
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
                below = stored.block_of.get(name)
                if below is not None and below in stored.unchecked and name not in pool.block_of:
                    found.append((index, below))
                elif below is None and name not in pool.block_of and not group.spec.gives_back:
                    break
        return found

    def _checked(self, done: Done) -> list[Seq]:
        index, below = done.place
        stored = self._stored[index]
        if stored.generation[below] == self._checking.pop(done.place):
            if done.failure is None:
                stored.unchecked.discard(below)
            else:
                log.warning("a block of the KV cache on disk is not used: %s", done.failure)
                self.num_damaged += 1
                stored.forget(below)
                self._mover.forget(index, below)
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
        """A sequence that waits for a check has ended."""
        del self._fetching[seq]
