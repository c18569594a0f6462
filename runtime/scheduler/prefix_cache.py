"""The prefix cache of the scheduler: finds the cached first blocks of a sequence, and caches blocks for later ones.

If two sequences diverge within a block, the tokens of it that they share are copied to a block of the later sequence
(copy on write, done at once, because the sequence goes on to write there). The last, incomplete block that a sequence
leaves behind is kept for that as well.

A block can be found as soon as a step that fills it is scheduled: steps run one after the other, and in a step each
layer stores the K and V of all its tokens before any is read.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from inferc.runtime.kv_cache.events import CacheEvents
from inferc.runtime.kv_cache.hashing import extend_hashes, hash_block
from inferc.runtime.kv_cache.manager import KVCacheManager
from inferc.runtime.kv_cache.partial_index import LEAST, PartialIndex
from inferc.runtime.scheduler.batch import Batch
from inferc.runtime.scheduler.config import SchedulerConfig
from inferc.runtime.step.plan import I32, I64, Copies
from inferc.runtime.step.sequence import Sequence

SUBMITTED = 0  # the step number of blocks that are computed before any step still to be scheduled


class Hashed(Protocol):
    """A token sequence with the hashes of its full blocks; `root` is the hash before the first block.

    It is a sequence of the batch, or a text that is scored.
    """

    root: bytes
    hashes: list[bytes]


class PrefixCache:
    """The blocks of a batch's sequences by the hashes of their tokens; it finds and caches nothing if it is off."""

    def __init__(
        self, cache: KVCacheManager, batch: Batch, config: SchedulerConfig, events: CacheEvents | None
    ) -> None:
        self.cache, self.batch, self.is_on, self.events = cache, batch, config.prefix_cache, events
        self.step = 1  # the step that is being scheduled, or will be next
        # Blocks that are loaded from the offload tier first may overwrite a block from which tokens are to be copied.
        copies_parts = config.partial_blocks and (config.offload_in_place or not config.num_offloaded)
        self._partial = PartialIndex() if config.prefix_cache and copies_parts else None
        self._copies: list[tuple[list[int], list[int], int]] = []  # (source blocks, target blocks, number of tokens)
        self._places: I64 = np.arange(cache.block_size)

    def find(self, seq: Sequence) -> list[bytes]:
        """Return the hashes of a sequence's cached first blocks, leaving at least one token to compute."""
        if not self.is_on:
            return []
        if not seq.hashes:
            seq.hashes += seq.prompt_hashes
        extend_hashes(seq.hashes, seq.root, seq.token_ids, self.cache.block_size)
        if not seq.prompt_hashes and seq.params.n > 1:
            seq.prompt_hashes += seq.hashes[: seq.prompt_len // self.cache.block_size]
        return seq.hashes[: self.cache.find(seq.hashes[: self.most_found(seq)])]

    def find_text(self, text: Hashed, token_ids: list[int]) -> list[bytes]:
        """Return the hashes of the cached first blocks of a text that is no sequence of the batch.

        token_ids: those of its first tokens that may be found. Nothing is found where blocks may lie in the offload
        tier: only the scheduled steps load from there.
        """
        if not self.is_on or self.cache.stores:
            return []
        extend_hashes(text.hashes, text.root, token_ids, self.cache.block_size)
        return text.hashes[: self.cache.find(text.hashes[: self.cache.max_cached_blocks])]

    def find_partial(self, seq: Sequence, num_blocks: int) -> tuple[list[int], int] | None:
        """Return the block of each group that begins with the tokens behind a sequence's first blocks, or None.

        The second result is how many of these tokens the blocks hold.
        """
        if self._partial is None or seq.params.tap or num_blocks >= self.cache.max_cached_blocks:
            return None
        size, parent = self.cache.block_size, seq.hashes[num_blocks - 1] if num_blocks else seq.root
        ids = np.array(
            seq.token_ids[num_blocks * size : min(num_blocks * size + size, len(seq.token_ids) - 1)], np.int32
        )
        found = self._partial.find(parent, ids, self.step, self._is_there)
        if found is None:
            return None
        blocks = self.cache.blocks_of(found[0])
        assert blocks is not None, "it is there"
        return blocks, found[1]

    def copy(self, source: list[int], slot: int, block: int, count: int) -> None:
        """Copy the first tokens of another block to a slot's block, in each group, before the step begins."""
        target = [int(table[slot, block]) for table in self.cache.tables]
        if source != target:
            self._copies.append((source, target, count))

    def take_copies(self) -> tuple[Copies, ...]:
        """Return the copies that the scheduled step makes first, for each group."""
        copies, self._copies = self._copies, []
        size, groups = self.cache.block_size, []
        for index in range(len(self.cache.groups) if copies else 0):
            places = [
                (np.arange(count, dtype=np.int64) + source[index] * size, np.arange(count) + target[index] * size)
                for source, target, count in copies
            ]
            groups.append(Copies(*(np.concatenate(side).astype(np.int64) for side in zip(*places, strict=True))))
        return tuple(groups)

    def _is_there(self, name: bytes) -> bool:
        return self.cache.blocks_of(name) is not None

    def most_found(self, seq: Sequence) -> int:
        """Return the most blocks of a sequence that can be found; 0 if taps must see all tokens computed."""
        return (
            0
            if seq.params.tap
            else min((len(seq.token_ids) - 1) // self.cache.block_size, self.cache.max_cached_blocks)
        )

    def cache_full_blocks(self, slot: int, num_tokens: int, step: int | None = None) -> None:
        """Cache the full blocks among a slot's first tokens, which are known.

        step: the step that computes them; the one being scheduled if not given.
        """
        first = int(self.cache.num_cached_blocks[slot])
        count = min(num_tokens // self.cache.block_size, self.cache.max_cached_blocks)
        if not self.is_on or count <= first:
            return
        seq = self.batch.seqs[slot]
        assert seq is not None
        self._cache(slot, seq, self.batch.tokens[slot, :num_tokens], seq.params.cache_priority, step)
        self.tell(seq, first, count)

    def cache_text(self, slot: int, text: Hashed, token_ids: I32, salt: str, adapter: str) -> None:
        """Cache the full blocks of the first tokens of a text that is no sequence of the batch; all are computed."""
        first, size = int(self.cache.num_cached_blocks[slot]), self.cache.block_size
        count = min(len(token_ids) // size, self.cache.max_cached_blocks)
        if not self.is_on or count <= first:
            return
        self._cache(slot, text, token_ids, 0, SUBMITTED)
        if self.events is not None:
            ids = token_ids[first * size : count * size].tobytes()
            self.events.publish(text.hashes, first, ids, salt, adapter)

    def _cache(self, slot: int, text: Hashed, token_ids: I32, priority: int, step: int | None) -> None:
        first, size = int(self.cache.num_cached_blocks[slot]), self.cache.block_size
        count = min(len(token_ids) // size, self.cache.max_cached_blocks)
        extend_hashes(text.hashes, text.root, token_ids, size)
        self.cache.cache_full_blocks(slot, text.hashes[:count], priority)
        for block in range(first, count) if self._partial is not None else ():
            self._list(text, block, token_ids[block * size :][:size], self.step if step is None else step)

    def tell(self, seq: Sequence, first: int, end: int) -> None:
        """Report to the event log that blocks of a running sequence can be found."""
        if self.events is None:
            return
        ids = self.batch.tokens[seq.slot, first * self.cache.block_size : end * self.cache.block_size]
        self.events.publish(seq.hashes, first, ids.tobytes(), seq.params.cache_salt, seq.params.adapter)

    def _list(self, text: Hashed, block: int, token_ids: I32, step: int) -> None:
        """List a full block in the index of first tokens."""
        if self._partial is not None:
            parent = text.hashes[block - 1] if block else text.root
            self._partial.add(parent, token_ids, text.hashes[block], step, self._is_there)

    def cache_known(self, slot: int) -> None:
        """Cache all that a slot has computed, including its last, incomplete block."""
        count = int(min(self.batch.num_computed[slot], self.batch.num_known[slot]))
        self.cache_full_blocks(slot, count, SUBMITTED)
        block, size, seq = count // self.cache.block_size, self.cache.block_size, self.batch.seqs[slot]
        if self._partial is None or count % size < LEAST or seq is None or block >= self.cache.max_cached_blocks:
            return
        parent = seq.hashes[block - 1] if block else seq.root
        ids = self.batch.tokens[slot, block * size : count]
        name = hash_block(parent, ids.astype("<u4").tobytes())
        if self.cache.cache_partial_block(slot, block, name, seq.params.cache_priority):
            self._partial.add(parent, ids, name, SUBMITTED, self._is_there)

    def cache_last(self, slots: I64) -> None:
        """Cache the last block of each of some slots, which decoding has filled."""
        cache, seqs, size = self.cache, self.batch.seqs, self.cache.block_size
        # A slot that found no next block asks again, and its last block may be in the offload tier by now.
        slots = slots[cache.num_cached_blocks[slots] < cache.num_grown[slots]]
        slots = slots[cache.num_grown[slots] <= cache.max_cached_blocks]
        # Blocks that were taken for drafted tokens may have been filled one after the other.
        is_behind = cache.num_cached_blocks[slots] < cache.num_grown[slots] - 1
        for slot in slots[is_behind].tolist():
            self.cache_full_blocks(slot, int(cache.num_grown[slot]) * size, SUBMITTED)
        slots = slots[~is_behind]
        last = cache.num_grown[slots] - 1
        # All tokens of the block are known: only the one behind it may be in flight.
        ids = self.batch.tokens[slots[:, None], (last * size)[:, None] + self._places].tobytes()
        names, priorities, count = [], [], 4 * size
        for row, (slot, block) in enumerate(zip(slots.tolist(), last.tolist(), strict=True)):
            seq = seqs[slot]
            assert seq is not None
            hashes = seq.hashes
            if len(hashes) == block:
                name = hashes[-1] if hashes else seq.root
                hashes.append(hash_block(name, ids[row * count : row * count + count]))
            if self._partial is not None:
                self._list(seq, block, self.batch.tokens[slot, block * size :][:size], SUBMITTED)
            names.append(hashes[block])
            priorities.append(seq.params.cache_priority)
        cache.cache_last_blocks(slots, last, names, priorities)
        if self.events is not None:
            for row, (slot, block) in enumerate(zip(slots.tolist(), last.tolist(), strict=True)):
                seq = seqs[slot]
                assert seq is not None
                row_ids = ids[row * count : row * count + count]
                self.events.publish(seq.hashes, block, row_ids, seq.params.cache_salt, seq.params.adapter)
