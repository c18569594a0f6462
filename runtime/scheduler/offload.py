"""The scheduler's interface to the offload tier: `NoOffload` if there is none, `Offload` over a manager."""

from __future__ import annotations

import numpy as np

from inferc.runtime.kv_cache.manager import KVCacheManager
from inferc.runtime.offload.manager import BlockMover, OffloadManager
from inferc.runtime.scheduler.batch import Batch
from inferc.runtime.scheduler.config import SchedulerConfig
from inferc.runtime.scheduler.prefix_cache import PrefixCache
from inferc.runtime.step.plan import StepPlan
from inferc.runtime.step.sequence import Sequence


class NoOffload:
    """The offload tier of a cache without one: nothing is stored, nothing is found, and no sequence waits."""

    manager: OffloadManager | None = None
    outlives_engine = False
    """True if what is stored is there for the next run."""

    @property
    def is_busy(self) -> bool:
        """True if blocks are being copied between tiers, or are about to be."""
        return False

    @property
    def num_waiting(self) -> int:
        """The number of sequences that wait for blocks that an earlier run left."""
        return 0

    @property
    def are_blocks_coming(self) -> bool:
        """True if blocks of the arena will become free when their copies are done."""
        return False

    def keeps_waiting(self, seq: Sequence) -> bool:
        """Return whether a new sequence must wait until the blocks that an earlier run left of it are verified.

        `look` returns it then.
        """
        return False

    def look(self, scheduled: int, landed: int) -> list[Sequence]:
        """Advance the copies between tiers, and return the sequences that need not wait any more.

        scheduled, landed: the numbers of the last step that was scheduled and of the last that landed.
        """
        return []

    def admitted(self, seq: Sequence, num_found: int) -> None:
        """Note that a sequence was admitted with `num_found` blocks from the cache."""

    def before_preemption(self, slot: int, scheduled: int) -> None:
        """Save the blocks of a sequence that is about to lose them."""

    def makes_room(self, slot: int, scheduled: int) -> bool:
        """Return whether offloading more of a sequence that is alone and finds no block will give it one."""
        return False

    def must_end(self, num_tokens: int) -> bool:
        """Return whether a sequence of this length cannot go on.

        It cannot if it is longer than the arena and nothing can be stored now.
        """
        return False

    def abandon(self, seq: Sequence) -> bool:
        """End the waiting of a sequence, and return whether it was waiting here."""
        return False

    def read_ahead(self, plan: StepPlan) -> None:
        """Begin to read the offloaded blocks that a step is about to read."""

    def close(self) -> None:
        """Stop all copies; nothing is stored or loaded any more."""


class Offload(NoOffload):
    """An offload tier that stores and loads blocks as its manager decides."""

    outlives_engine = True

    def __init__(
        self,
        manager: OffloadManager,
        mover: BlockMover,
        cache: KVCacheManager,
        batch: Batch,
        prefixes: PrefixCache,
        config: SchedulerConfig,
    ) -> None:
        self.manager: OffloadManager = manager
        self._mover = mover
        self._cache, self._batch, self._prefixes = cache, batch, prefixes
        self._in_place, self._tokens = config.offload_in_place, config.max_num_batched_tokens

    @property
    def is_busy(self) -> bool:
        return self.manager.is_busy

    @property
    def num_waiting(self) -> int:
        return self.manager.num_fetching

    @property
    def are_blocks_coming(self) -> bool:
        return self.manager.are_blocks_coming

    def keeps_waiting(self, seq: Sequence) -> bool:
        return self.manager.fetch(seq, len(self._prefixes.find(seq)), self._prefixes.most_found(seq))

    def look(self, scheduled: int, landed: int) -> list[Sequence]:
        batch = self._batch
        return self.manager.look(batch.order, batch.num_tokens, batch.seqs, scheduled, landed)

    def admitted(self, seq: Sequence, num_found: int) -> None:
        self._prefixes.tell(seq, 0, num_found)  # an earlier run may have left the blocks, which no event reported

    def before_preemption(self, slot: int, scheduled: int) -> None:
        self._prefixes.cache_known(slot)
        seq, cache = self._batch.seqs[slot], self._cache
        assert seq is not None
        held = cache.ends[:, slot] - cache.begins[:, slot]
        if self.manager.may_swap(int(self._batch.num_computed[slot]), held.tolist()):
            self.manager.save(slot, seq.hashes, scheduled)

    def makes_room(self, slot: int, scheduled: int) -> bool:
        if not self._in_place or len(self._batch.order) > 1:
            return False
        batch, wanted = self._batch, self._cache.blocks_for(self._tokens)
        groups = range(len(self._cache.groups))
        found = [self.manager.spill(index, slot, batch.seqs, wanted, scheduled, batch.order) for index in groups]
        return any(found)

    def must_end(self, num_tokens: int) -> bool:
        return self.manager.is_paused and self._cache.offloads(num_tokens)

    def abandon(self, seq: Sequence) -> bool:
        if not self.manager.is_fetching(seq):
            return False
        self.manager.abandon(seq)
        return True

    def read_ahead(self, plan: StepPlan) -> None:
        if np.count_nonzero(self._cache.num_offloaded):
            self._mover.read_ahead(plan.block_tables)

    def close(self) -> None:
        self._mover.close()
