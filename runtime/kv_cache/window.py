"""The blocks of a KV group with windows or chunks, which are freed as soon as no later query sees them."""

from __future__ import annotations

from collections.abc import Sequence

from inferc.kv_groups import CacheLimits
from inferc.runtime.kv_cache.group import Finder, FullGroup
from inferc.runtime.step.plan import I64


class WindowGroup(FullGroup):
    """A KV group whose sequences hold only the blocks that their next query sees, and those being computed."""

    def longest(self, limits: CacheLimits, least: int, *, offloads: bool) -> int:
        if self.spec.held_blocks(limits, limits.max_model_len, least) <= self.pool.size:
            return limits.max_model_len
        return self.pool.size * self.block_size

    def wanted_blocks(self, num_tokens: int, whole: int) -> int:
        return self._blocks_for(num_tokens)

    def offloads(self, num_blocks: int) -> bool:
        return False

    def fits_later(self, length: int, totals: I64, beside: I64, found: I64, error: float) -> bool:
        return True  # a sequence never holds more later than at first

    def num_in_arena(self, found: Sequence[bytes]) -> int:
        return len(found)

    def first_block(self, num_blocks: int) -> int:
        """Return the first block that the query behind `num_blocks` blocks sees."""
        return self.spec.first_key(num_blocks * self.block_size) // self.block_size

    def finder(self, hashes: Sequence[bytes]) -> Finder:
        # All blocks from this one to the last that was asked about can be found.
        there = len(hashes)

        def find(count: int) -> int:
            nonlocal there
            while count:
                there = min(there, count)
                first = self.first_block(count)
                while there > first and self.has(hashes[there - 1]):
                    there -= 1
                if (missing := self._missing_sink(hashes, first)) is not None:
                    count = missing
                elif there > first:
                    # Block `there - 1` is missing; with more blocks than those before it, the query would see it.
                    count = there - 1
                else:
                    break
            return count

        return find

    def _missing_sink(self, hashes: Sequence[bytes], first: int) -> int | None:
        """Return the first block that is seen besides the window and cannot be found, or None."""
        return None

    def attach_cached(self, slot: int, hashes: Sequence[bytes], priority: int) -> None:
        begin = self.first_block(len(hashes))
        self._attach(slot, begin, self._hold(hashes[begin:], priority), len(hashes))

    def _attached(self, hashes: Sequence[bytes]) -> list[bytes]:
        return list(hashes[self.first_block(len(hashes)) :])

    def free_outside_window(self, slot: int, position: int) -> int:
        begin, end = int(self.begins[slot]), self.spec.first_key(position) // self.block_size
        if end <= begin:
            return 0
        assert end <= self.ends[slot], "blocks are given back before they were held"
        count = self._free(slot, position, begin, end)
        self.begins[slot] = end
        return count

    def _free(self, slot: int, position: int, begin: int, end: int) -> int:
        """Free the blocks [begin, end) of a slot, none of which the query at `position` sees, and return how many."""
        self._drop(slot, begin, end)
        return end - begin
