"""The block allocator alone, and the block hashes that other processes must compute the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferc.runtime.kv_cache import KVCacheManager, block_hash, root_hash


def test_blocks_are_taken_as_a_sequence_grows_and_come_back() -> None:
    cache = KVCacheManager(num_blocks=6, block_size=4, num_slots=2, max_model_len=16, num_groups=2)
    assert cache.max_tokens == 20
    assert cache.grow(0, 5)
    assert [table[0].tolist() for table in cache.tables] == [[1, 2, 0, 0]] * 2
    assert cache.grow(0, 8)
    assert cache.num_held.tolist() == [2, 0]
    assert cache.grow(1, 12)
    assert not cache.grow(0, 9), "no block is left"
    assert cache.num_held.tolist() == [2, 3]
    assert cache.usage == 1.0
    cache.check_integrity()
    cache.release(0)
    assert cache.num_free == 2
    assert cache.grow(1, 16)
    assert cache.tables[0][1].tolist() == [3, 4, 5, 2], "what was freed first is overwritten first, tails before heads"
    cache.check_integrity()


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 20)), max_size=60))
def test_no_sequence_of_calls_breaks_the_accounts(calls: list[tuple[int, int]]) -> None:
    cache = KVCacheManager(num_blocks=12, block_size=2, num_slots=4, max_model_len=20)
    for slot, num_tokens in calls:
        before = cache.num_free
        if num_tokens == 0:
            cache.release(slot)
        elif not cache.grow(slot, num_tokens):
            assert cache.num_free == before
        cache.check_integrity()
    for slot in range(4):
        cache.release(slot)
    assert cache.num_free == 11


def test_integrity_notices_what_does_not_add_up() -> None:
    cache = KVCacheManager(num_blocks=6, block_size=4, num_slots=2, max_model_len=16)
    cache.grow(0, 8)
    cache.tables[0][1, 0] = 1
    with pytest.raises(AssertionError, match="beyond its count"):
        cache.check_integrity()
    cache.num_held[1] = 1
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
