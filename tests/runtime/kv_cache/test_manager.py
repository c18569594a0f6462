"""The block allocator alone, and the block hashes that other processes must compute the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from inferc.ir.ops import visible
from inferc.kv_groups import NEVER, CacheGroup, CacheLimits, ChunkCacheGroup, WindowCacheGroup
from inferc.runtime.kv_cache.hashing import block_hash, root_hash
from inferc.runtime.kv_cache.manager import KVCacheManager

FULL, WINDOW, CHUNK = CacheGroup(8), WindowCacheGroup(8, window=6), ChunkCacheGroup(8, window=6)


def make_cache(
    num_blocks: int, block_size: int, num_slots: int, max_model_len: int, groups: tuple[CacheGroup, ...] = (FULL,)
) -> KVCacheManager:
    limits = CacheLimits(block_size, max_model_len, num_slots, max_num_batched_tokens=8)
    return KVCacheManager(groups, (num_blocks,) * len(groups), limits)


def test_sequences_after_one_another_use_the_same_blocks() -> None:
    """Memory that one of them made resident is enough for the next."""
    cache = make_cache(num_blocks=20, block_size=4, num_slots=2, max_model_len=32)
    for _ in range(5):
        assert cache.grow(0, 12)
        assert cache.tables[0][0].tolist()[:3] == [1, 2, 3]
        cache.release(0)


def test_blocks_are_taken_as_a_sequence_grows_and_come_back() -> None:
    cache = make_cache(num_blocks=6, block_size=4, num_slots=2, max_model_len=16, groups=(FULL, FULL))
    assert cache.max_tokens == 20
    assert cache.grow(0, 5)
    assert [table[0].tolist() for table in cache.tables] == [[1, 2, 0, 0]] * 2
    assert cache.grow(0, 8)
    assert cache.num_grown.tolist() == [2, 0]
    assert cache.grow(1, 12)
    assert not cache.grow(0, 9), "no block is left"
    assert cache.num_grown.tolist() == [2, 3]
    assert cache.usage == 1.0
    cache.check_integrity()
    cache.release(0)
    assert cache.num_free == (2, 2)
    assert cache.grow(1, 16)
    assert cache.tables[0][1].tolist() == [3, 4, 5, 1], "what was freed last is taken first"
    cache.check_integrity()


@pytest.mark.parametrize(
    ("group", "given_back"),
    # Blocks of 4: the query at 9 is the first whose window of 6 (4 to 9) leaves block 0 out;
    # a chunk of 6 ends at 5, 11, …
    [(FULL, {}), (WINDOW, {9: [0], 13: [1], 17: [2]}), (CHUNK, {6: [0], 12: [1, 2], 18: [3]})],
    ids=["full", "window", "chunk"],
)
def test_a_block_is_given_back_when_no_later_query_sees_it(group: CacheGroup, given_back: dict[int, list[int]]) -> None:
    cache = make_cache(num_blocks=8, block_size=4, num_slots=1, max_model_len=20, groups=(group,))
    gone: set[int] = set()
    for position in range(20):
        is_due = position >= cache.next_unseen[0]
        assert is_due == (position in given_back)
        cache.free_outside_window(0, position)
        gone |= set(given_back.get(position, ()))
        assert cache.grow(0, position + 1)
        assert [block in gone for block in range(cache.num_grown[0])] == (cache.tables[0][0] == 0)[
            : position // 4 + 1
        ].tolist()
        cache.check_integrity()
    assert cache.num_freed_outside_window == len(gone)
    cache.release(0)
    assert cache.num_free == (7,)
    assert cache.next_unseen[0] == min(given_back, default=NEVER), "the slot begins anew"


def test_what_a_query_sees_is_what_the_mask_says() -> None:
    positions = torch.arange(60)
    for group, mask in ((FULL, "causal"), (WINDOW, "sliding"), (CHUNK, "chunked")):
        seen = visible(positions, positions, mask, 6)
        for position in range(40):
            assert seen[position].nonzero()[:, 0].tolist() == list(range(group.first_key(position), position + 1))
            later = seen[position:, position].logical_not().nonzero()[:, 0].tolist()
            assert group.unseen_from(position) == (position + later[0] if later else NEVER)


def test_a_prompt_takes_blocks_at_once_only_where_they_stay() -> None:
    cache = make_cache(num_blocks=6, block_size=4, num_slots=2, max_model_len=20, groups=(FULL, WINDOW))
    assert cache.extend(0, 0, 8, whole=18) == 8
    assert [table[0].tolist() for table in cache.tables] == [[1, 2, 3, 4, 5], [1, 2, 0, 0, 0]]
    assert cache.num_grown.tolist() == [2, 0]
    assert (cache.usage, cache.num_free) == (1.0, (0, 3))
    assert cache.grow(1, 0) and not cache.grow(1, 1), "one group has none"
    assert cache.extend(0, 8, 8) == 8
    assert cache.tables[1][0].tolist() == [1, 2, 3, 4, 0], "3 to 7 are still seen from 8 on"
    assert cache.extend(0, 16, 2) == 2
    assert cache.tables[1][0].tolist() == [0, 0, 3, 4, 1]
    cache.check_integrity()
    cache.release(0)
    assert cache.num_free == (5, 5)


def test_a_step_is_as_long_as_there_is_room() -> None:
    cache = make_cache(num_blocks=4, block_size=4, num_slots=2, max_model_len=40, groups=(WINDOW,))
    assert cache.grow(1, 4)
    assert cache.extend(0, 0, 12) == 8
    assert cache.extend(0, 8, 4) == 0, "3 is still seen from 8 on"
    cache.release(1)
    assert cache.extend(0, 8, 12) == 4
    assert cache.extend(0, 12, 12) == 4, "block 0 came back"
    cache.check_integrity()


def test_room_is_left_for_those_who_still_grow() -> None:
    one = np.zeros(1, np.int64)
    for group, is_full_grown in ((WINDOW, True), (FULL, False)):
        cache = make_cache(num_blocks=6, block_size=4, num_slots=2, max_model_len=20, groups=(group,))
        assert cache.grow(0, 4)
        assert [cache.fits(tokens, beside=one) for tokens in (12, 13)] == [True, False]
        assert cache.fits(16, beside=one[:0])
        # A window of 6 before 8 new tokens touches 4 blocks at most: one who has them takes no more.
        assert cache.grow(0, 16)
        assert cache.fits(4, beside=one) == is_full_grown


def test_longest_sequence_of_each_kind_of_pool() -> None:
    def longest(num_blocks: int, group: CacheGroup, chunked: bool = True) -> int:
        limits = CacheLimits(4, 100, 2, 100)
        return KVCacheManager((group,), (num_blocks,), limits, chunked).max_tokens

    assert [longest(count, FULL) for count in (2, 5, 30)] == [4, 16, 116]
    # Six keys touch at most three blocks of 4: with these, blocks come back as fast as they are needed.
    assert [longest(count, WINDOW) for count in (2, 3, 4)] == [4, 8, 100]
    assert [longest(count, WINDOW, chunked=False) for count in (4, 25, 26)] == [12, 96, 100], "a prompt is one step"


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), max_size=60), st.booleans())
def test_no_sequence_of_calls_breaks_the_accounts(calls: list[tuple[int, int]], in_windows: bool) -> None:
    cache = make_cache(
        12, block_size=2, num_slots=4, max_model_len=20, groups=(FULL, WINDOW, CHUNK)[: 1 + 2 * in_windows]
    )
    computed = [0] * 4
    for slot, num_tokens in calls:
        before = cache.num_free
        if num_tokens == 0:
            cache.release(slot)
            computed[slot] = 0
        elif num_tokens > computed[slot]:
            cache.free_outside_window(slot, computed[slot])
            before = cache.num_free
            new = min(num_tokens, computed[slot] + 8)
            if cache.grow(slot, new):
                computed[slot] = new
            else:
                assert cache.num_free == before
        cache.check_integrity()
    for slot in range(4):
        cache.release(slot)
    assert set(cache.num_free) == {11}


def test_integrity_notices_what_does_not_add_up() -> None:
    cache = make_cache(num_blocks=6, block_size=4, num_slots=2, max_model_len=16)
    cache.grow(0, 8)
    cache.tables[0][1, 0] = 1
    with pytest.raises(AssertionError, match="beyond its count"):
        cache.check_integrity()
    cache.ends[0, 1] = 1
    with pytest.raises(AssertionError, match="num_grown is not"):
        cache.check_integrity()
    cache.num_grown[1] = 1
    with pytest.raises(AssertionError, match="ref counts do not add up"):
        cache.check_integrity()


def test_block_hashes_are_chained_and_the_same_everywhere() -> None:
    root = root_hash("model", "bfloat16")
    assert root.hex() == "d207c4c4f9c638591812a6134c6c8d4a93242ce0ce0af08e475954079f46cd68"
    first = block_hash(root, [1, 2, 3, 4])
    assert first.hex() == "16b08426bb020623ada9af0546c3a5adb3433f9be311b31bb959aca6248c048d"
    assert block_hash(first, [5]) != block_hash(root, [5])
    others = [
        root_hash("model", "int8"),
        root_hash("model", "bfloat16", "lora"),
        root_hash("model", "bfloat16", salt="t"),
    ]
    assert len({root, *others, root_hash("modelbfloat16", "")}) == 5
