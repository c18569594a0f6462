"""The sharing of the KV memory between groups, by hand and as properties."""

from __future__ import annotations

import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inferc.errors import ConfigError
from inferc.kv_groups import (
    KINDS,
    CacheGroup,
    CacheLimits,
    ChunkCacheGroup,
    WindowCacheGroup,
    pools_bytes,
    pools_for_all,
    share_out,
    shared_part,
)

LIMITS = CacheLimits(block_size=16, max_model_len=1000, max_num_seqs=2, max_num_batched_tokens=32)
FULL, WINDOW, CHUNK = CacheGroup(10), WindowCacheGroup(30, window=100), ChunkCacheGroup(30, window=100)


def test_a_window_needs_few_blocks_however_long_the_sequence() -> None:
    assert FULL.most_blocks(LIMITS) == 63
    # 99 keys before the first of 32 new tokens: 131 tokens that begin anywhere in a block of 16.
    assert WINDOW.most_blocks(LIMITS) == CHUNK.most_blocks(LIMITS) == 10
    assert WINDOW.held_blocks(LIMITS, 1000, 1) == 8
    assert WINDOW.held_blocks(LIMITS, 40, 32) == 3, "a short sequence never fills its window"


@given(st.integers(1, 40), st.integers(1, 9), st.integers(1, 20), st.sampled_from(["window", "chunk"]))
def test_held_blocks_are_enough_for_every_step(window: int, block_size: int, num_new: int, kind: str) -> None:
    group, limits = KINDS[kind](8, window), CacheLimits(block_size, 200, 1, 20)
    for start in range(200 - num_new):
        first = group.first_key(start) // block_size
        assert limits.blocks_for(start + num_new) - first <= group.held_blocks(limits, 200, num_new)


def test_windows_leave_their_memory_to_the_others() -> None:
    groups = (FULL, WINDOW)
    assert pools_for_all(groups, LIMITS) == (127, 21)
    assert pools_bytes(groups, LIMITS, (127, 21)) == 16 * (127 * 10 + 21 * 30)
    assert share_out(groups, LIMITS, 16 * (127 * 10 + 21 * 30)) == (127, 21)
    assert share_out(groups, LIMITS, 16 * (127 * 10 + 21 * 30) - 1) == (126, 21)
    assert share_out(groups, LIMITS, 16 * 20 * 40) == (20, 20), "with little memory all have the same"
    assert share_out(groups, LIMITS, 10**6) == (6187, 21)
    assert share_out((WINDOW,), LIMITS, 10**6) == (21,), "more than all sequences need buys nothing"


def test_groups_of_another_model_have_as_many_blocks_of_the_same_memory() -> None:
    both = 16 * (90 * (10 + 5) + 21 * 30)
    part = shared_part((FULL, WINDOW), (CacheGroup(5),), LIMITS, both)
    assert share_out((FULL, WINDOW), LIMITS, part) == (90, 21)
    assert part + 16 * 90 * 5 == both


def test_two_blocks_are_the_least() -> None:
    assert share_out((FULL, WINDOW), LIMITS, 2 * 16 * 40) == (2, 2)
    message = (
        "1279 holds less than two blocks of 640 bytes; give at least 1280, or 20320 for one sequence of full length"
    )
    with pytest.raises(ConfigError, match=message):
        share_out((FULL, WINDOW), LIMITS, 2 * 16 * 40 - 1)
    assert share_out((FULL, WINDOW), LIMITS, 20320)[0] == 64


groups_strategy = st.lists(
    st.sampled_from(["full", "window", "chunk"]).flatmap(
        lambda kind: st.builds(KINDS[kind], st.integers(1, 300), st.integers(1, 500))
    ),
    min_size=1,
    max_size=4,
)


@given(groups_strategy, st.integers(0, 10**7))
def test_the_pools_fit_and_nothing_larger_does(groups: list[CacheGroup], spare: int) -> None:
    memory = pools_bytes(groups, LIMITS, [2] * len(groups)) + spare
    counts = share_out(groups, LIMITS, memory)
    assert pools_bytes(groups, LIMITS, counts) <= memory
    caps = [most if group.frees_blocks else 10**9 for group, most in zip(groups, pools_for_all(groups, LIMITS))]
    assert counts == tuple(min(max(counts), cap) for cap in caps)
    larger = [min(max(counts) + 1, cap) for cap in caps]
    assert pools_bytes(groups, LIMITS, larger) > memory or tuple(larger) == counts


def test_the_runtime_can_import_it() -> None:
    code = "import sys, inferc.kv_groups; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
