"""What of a sequence is found in the cache of earlier ones, and what others will find of it.

A block can be found as soon as a step that fills it is scheduled: steps run one after the other, and in a step each layer
stores the K and V of all its tokens before any is read.
"""

from __future__ import annotations

import numpy as np

from inferc.runtime.batch import Batch
from inferc.runtime.kv_cache import KVCacheManager, extend_hashes, hash_block
from inferc.runtime.kv_events import CacheEvents
from inferc.runtime.sequence import Sequence
from inferc.runtime.step import I64


class PrefixCache:
    """Blocks of a batch's sequences by the hashes of their tokens; finds and publishes nothing if it is not on."""

    def __init__(self, cache: KVCacheManager, batch: Batch, is_on: bool, events: CacheEvents | None) -> None:
        self.cache, self.batch, self.is_on, self.events = cache, batch, is_on, events
        self._places: I64 = np.arange(cache.block_size)

    def find(self, seq: Sequence) -> list[bytes]:
        """The hashes of its first blocks that are in the cache; one token at least is left to compute."""
        if not self.is_on:
            return []
        extend_hashes(seq.hashes, seq.root, seq.token_ids, self.cache.block_size)
        return seq.hashes[: self.cache.find(seq.hashes[: self.most_found(seq)])]

    def most_found(self, seq: Sequence) -> int:
        """Blocks that can be found of a sequence at most."""
        return (len(seq.token_ids) - 1) // self.cache.block_size

    def publish(self, slot: int, num_tokens: int) -> None:
        """Let the full blocks of a slot's first tokens be found, which are known and computed, or are in this step."""
        count, first = num_tokens // self.cache.block_size, int(self.cache.num_published[slot])
        if not self.is_on or count <= first:
            return
        seq = self.batch.seqs[slot]
        assert seq is not None
        extend_hashes(seq.hashes, seq.root, self.batch.tokens[slot, :num_tokens], self.cache.block_size)
        self.cache.publish(slot, seq.hashes[:count], seq.params.cache_priority)
        if self.events is not None:
            self.tell(seq, first, count)

    def tell(self, seq: Sequence, first: int, end: int) -> None:
        """Those who want to know that some blocks of a running sequence can be found."""
        assert self.events is not None
        ids = self.batch.tokens[seq.slot, first * self.cache.block_size : end * self.cache.block_size]
        self.events.publish(seq.hashes, first, ids.tobytes(), seq.params.cache_salt)

    def publish_known(self, slot: int) -> None:
        self.publish(slot, int(min(self.batch.num_computed[slot], self.batch.num_known[slot])))

    def publish_last(self, slots: I64) -> None:
        """Let the last block of each of some slots be found, which decoding has filled."""
        cache, seqs, size = self.cache, self.batch.seqs, self.cache.block_size
        last = cache.num_grown[slots] - 1
        # All its tokens are known: only the one behind it may be on its way.
        ids = self.batch.tokens[slots[:, None], (last * size)[:, None] + self._places].tobytes()
        names, priorities, count = [], [], 4 * size
        for row, (slot, block) in enumerate(zip(slots.tolist(), last.tolist(), strict=True)):
            seq = seqs[slot]
            assert seq is not None
            hashes = seq.hashes
            if len(hashes) == block:
                name = hashes[-1] if hashes else seq.root
                hashes.append(hash_block(name, ids[row * count : row * count + count]))
            names.append(hashes[block])
            priorities.append(seq.params.cache_priority)
        cache.publish_last(slots, last, names, priorities)
        if self.events is not None:
            for row, (slot, block) in enumerate(zip(slots.tolist(), last.tolist(), strict=True)):
                seq = seqs[slot]
                assert seq is not None
                row_ids = ids[row * count : row * count + count]
                self.events.publish(seq.hashes, block, row_ids, seq.params.cache_salt)
