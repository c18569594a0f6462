"""Tests of which blocks of earlier sequences are found, by whom, and what makes room for what."""

from collections.abc import Iterator
from itertools import count
from typing import Any

import numpy as np
import pytest
from fake_runner import FULL, FakeRunner, make_engine
from hypothesis import given
from hypothesis import strategies as st

from inferc.errors import RequestError
from inferc.kv_groups import CacheGroup, CacheLimits, ChunkCacheGroup, WindowCacheGroup
from inferc.runtime.engine.engine import Engine
from inferc.runtime.engine.scoring import Score
from inferc.runtime.kv_cache import hashing
from inferc.runtime.kv_cache.block_pool import BlockPool
from inferc.runtime.kv_cache.events import Stored
from inferc.runtime.kv_cache.hashing import block_hash, extend_hashes, root_hash
from inferc.runtime.kv_cache.manager import KVCacheManager
from inferc.runtime.step.plan import I32, StepPlan
from inferc.runtime.step.sampling_params import SamplingParams

WINDOW, CHUNK = WindowCacheGroup(8, window=6), ChunkCacheGroup(8, window=8)
TURN = list(range(18))


@pytest.fixture
def engine() -> Iterator[Engine]:
    made = make_engine(prefix_cache=True)
    yield made
    made.scheduler.check_integrity()
    assert made.scheduler.cache.usage == 0.0


NAMES = count()


def generate(engine: Engine, prompt: list[int], max_tokens: int = 3, **params: object) -> list[int]:
    """The ids of one sequence, while nobody else runs."""
    values = {"temperature": 0.0, "max_tokens": max_tokens, **params}
    engine.add_request(f"r{next(NAMES)}", prompt, SamplingParams(**values))  # type: ignore[arg-type]
    ids = []
    while engine.has_work:
        ids += [token for output in engine.step() for token in output.token_ids]
        engine.scheduler.check_integrity()
    return ids


def cached(engine: Engine) -> int:
    """Tokens found since this was asked last."""
    before: int = getattr(engine, "seen", 0)
    engine.seen = engine.stats().cached_tokens  # type: ignore[attr-defined]
    return engine.seen - before  # type: ignore[attr-defined, no-any-return]


def test_a_prompt_begins_behind_the_full_blocks_that_are_found(engine: Engine) -> None:
    assert generate(engine, TURN) == generate(engine, TURN)
    assert cached(engine) == 16
    generate(engine, [*TURN[:13], 49, 49, 49])
    assert cached(engine) == 12
    generate(engine, [49, *TURN])
    assert cached(engine) == 0
    generate(engine, TURN[:16])
    assert cached(engine) == 12, "of a prompt one token at least is computed, for its logits"
    assert engine.stats().admitted_tokens == 18 + 18 + 16 + 19 + 16


def test_what_was_answered_is_found_by_the_next_turn(engine: Engine) -> None:
    answer = generate(engine, TURN, 12)
    generate(engine, [*TURN, *answer, 1, 2, 3])
    assert cached(engine) == 28, "the last token of 30 was sampled and never computed"


def test_sequences_of_a_request_share_its_prompt_in_their_first_step() -> None:
    engine = make_engine(prefix_cache=True, max_num_batched_tokens=32)
    engine.add_request("n", TURN, SamplingParams(n=3, temperature=0.0, max_tokens=2))
    engine.step()
    assert engine.stats().scheduled_tokens == 18 + 2 + 2
    while engine.has_work:
        engine.step()


def test_a_prompt_is_hashed_once_for_all_its_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[bytes] = []
    plain = hashing.hash_block

    def hash_block(previous: bytes, ids: bytes) -> bytes:
        hashed.append(ids)
        return plain(previous, ids)

    monkeypatch.setattr(hashing, "hash_block", hash_block)
    engine = make_engine(prefix_cache=True, max_num_batched_tokens=32)
    engine.add_request("n", TURN, SamplingParams(n=3, temperature=0.0, max_tokens=1))
    while engine.has_work:
        engine.step()
    assert len(hashed) == len(TURN) // 4
    assert generate(engine, TURN, 1) and cached(engine) == 16 + 16 + 16, "those of the second and third, and again"


def test_only_requests_of_one_salt_share(engine: Engine) -> None:
    generate(engine, TURN, cache_salt="a")
    generate(engine, TURN)
    assert cached(engine) == 0
    generate(engine, TURN, cache_salt="a")
    assert cached(engine) == 16
    with pytest.raises(RequestError, match="cache_salt: expected a string of at most 256 characters"):
        SamplingParams(cache_salt="x" * 257)


def score(engine: Engine, text: list[int], **options: Any) -> Score:
    """Score one text while nothing else runs."""
    assert isinstance(engine.runner, FakeRunner)
    engine.runner.scored_text = text
    engine.score(f"s{next(NAMES)}", text, **options)
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()
    ((_, found),) = engine.take_scores()
    return found


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (WINDOW,), (FULL, CHUNK)], ids=str)
def test_what_was_scored_is_found(groups: tuple[CacheGroup, ...]) -> None:
    """All but its last token, which is not computed, in steps of 16; and it says the same whatever is there already."""
    text = [number % 50 for number in range(41)]
    fresh = generate(make_engine(groups=groups), text)
    engine = make_engine(groups=groups, prefix_cache=True)
    found = score(engine, text)
    assert generate(engine, text) == fresh and cached(engine) == 40
    scheduled = engine.stats().scheduled_tokens
    assert score(engine, text) == found == score(make_engine(groups=groups), text)
    assert engine.stats().scheduled_tokens == scheduled, "a score takes no step of the schedule"
    assert engine.scheduler.cache.usage == 0.0


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW), (WINDOW,), (FULL, CHUNK)], ids=str)
def test_what_is_before_scored_tokens_is_computed_once(
    groups: tuple[CacheGroup, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In blocks of 4: of 30 tokens and 4 continuations, the later ones compute what is behind the first 28."""
    engine, text, counts = make_engine(groups=groups, prefix_cache=True), [number % 50 for number in range(30)], []
    compute = engine.runner.score

    def counted(plan: StepPlan, targets: I32) -> Any:
        counts.append(len(plan.token_ids))
        return compute(plan, targets)

    monkeypatch.setattr(engine.runner, "score", counted)
    whole = score(engine, [*text, 1, 2])
    assert sum(counts) == 31
    counts.clear()
    for last in (1, 2, 3, 4):
        found = score(engine, [*text, last, 2], first=30)
        if last == 1:
            assert found.logprobs == whole.logprobs[29:]
    assert counts == [3, 3, 3, 3]
    counts.clear()
    score(engine, [*text, 1, 2], first=30, cache_salt="other")
    assert sum(counts) == 31


def test_what_was_scored_is_found_by_those_of_its_salt(engine: Engine) -> None:
    score(engine, TURN, cache_salt="a")
    generate(engine, TURN)
    assert cached(engine) == 0
    generate(engine, [*TURN[:16], 3], cache_salt="a")
    assert cached(engine) == 16


def test_a_score_without_the_cache_leaves_nothing() -> None:
    engine = make_engine()
    score(engine, TURN)
    generate(engine, TURN)
    assert cached(engine) == 0 and not engine.scheduler.cache.pools[0].block_of


def test_who_listens_hears_of_what_was_scored() -> None:
    engine = make_engine(prefix_cache=True, kv_events=True)
    score(engine, TURN, cache_salt="a")
    batch = engine.take_kv_events()
    assert batch is not None
    stored = [event for event in batch.events if isinstance(event, Stored)]
    assert [(len(event.names), event.salt) for event in stored] == [(4, "a")]
    assert np.frombuffer(stored[0].token_ids, np.int32).tolist() == TURN[:16]
    generate(engine, TURN, 1, cache_salt="a")
    again = engine.take_kv_events()
    assert again is None or not any(isinstance(event, Stored) for event in again.events), "it was told"


def test_what_was_used_longest_ago_makes_room_and_the_end_of_it_first() -> None:
    engine = make_engine(prefix_cache=True, num_blocks=11)
    first, second = TURN[:12], [*range(20, 32)]
    for prompt in (first, second, first):
        generate(engine, prompt, 1)
    cached(engine)
    assert (len(engine.scheduler.cache.pools[0].free), engine.stats().num_evicted) == (4, 0)
    generate(engine, [*range(30, 50)], 1)  # of 5 blocks
    assert engine.stats().num_evicted == 1
    generate(engine, second, 1)
    assert cached(engine) == 8, "its last block made room"
    generate(engine, first, 1)
    assert cached(engine) == 8
    engine.scheduler.check_integrity()


def test_a_preempted_sequence_goes_on_behind_what_is_still_there() -> None:
    engine = make_engine(prefix_cache=True, num_blocks=9, max_num_seqs=2, overcommit=True)
    alone = [generate(make_engine(num_blocks=20), prompt, 12) for prompt in (TURN[:8], TURN[8:16])]
    for name, prompt in (("0", TURN[:8]), ("1", TURN[8:16])):
        engine.add_request(name, prompt, SamplingParams(temperature=0.0, max_tokens=12))
    found: dict[str, list[int]] = {"0": [], "1": []}
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids
        engine.scheduler.check_integrity()
    assert list(found.values()) == alone
    stats = engine.stats()
    assert stats.num_preemptions == 1 and stats.cached_tokens == 0
    computed_again = stats.scheduled_tokens - 2 * (8 + 11)
    assert 0 < computed_again < 16


def test_a_block_that_is_filled_as_it_leaves_sight_is_not_found() -> None:
    engine = make_engine(prefix_cache=True, groups=(CHUNK,))
    assert CHUNK.window % 4 == 0, "a chunk of queries ends with a block"
    engine.add_request("0", TURN[:3], SamplingParams(temperature=0.0, max_tokens=30, ignore_eos=True))
    while engine.has_work:
        engine.step()
        engine.scheduler.check_integrity()


@pytest.mark.parametrize("groups", [(FULL, WINDOW), (WINDOW,), (CHUNK, FULL), (WINDOW, CHUNK)])
def test_windows_need_only_what_the_next_query_sees(groups: tuple[CacheGroup, ...]) -> None:
    engine = make_engine(prefix_cache=True, groups=groups, num_blocks=40)
    expected = generate(make_engine(groups=groups), TURN, 3)
    assert generate(engine, TURN, 3) == generate(engine, TURN, 3) == expected
    assert cached(engine) == 16
    held = engine.scheduler.cache.pools[[group.frees_blocks for group in groups].index(True)]
    gone = [name for name in held.block_of if held.block_of[name] in list(held.kept)[:1]]
    held.kept.remove(block := held.block_of.pop(gone[0]))
    del held.hash_of[block]
    held.free.append(block)
    assert generate(engine, TURN, 3) == expected


def test_what_has_a_priority_goes_last_and_in_order() -> None:
    engine = make_engine(prefix_cache=True, num_blocks=13)  # 12 blocks of 4
    kept, other = [1] * 9, [2] * 9

    def found(prompt: list[int], priority: int = 0) -> int:
        engine.add_request("r", prompt, SamplingParams(temperature=0.0, max_tokens=1, cache_priority=priority))
        before = engine.stats().cached_tokens
        while engine.has_work:
            engine.step()
            engine.scheduler.check_integrity()
        return engine.stats().cached_tokens - before

    found(kept, 3)
    found(other)
    for i in range(10, 40):  # many that nobody asks for again
        found([i] * 20)
    assert (found(kept), found(other)) == (8, 0)
    for i in range(10, 40):  # finding it with a lower priority took it none
        found([i] * 20)
    assert found(kept) == 8
    found(other, 5)
    for i in range(10, 40):
        found([i] * 20, 4)  # these push out what has less
    assert (found(kept), found(other)) == (0, 8)
    assert found(list(range(40)), 0) == 0 and engine.scheduler.cache.num_evicted > 100, "and running sequences get all"


def test_without_it_nothing_is_kept() -> None:
    engine = make_engine(prefix_cache=False)
    for _ in range(2):
        generate(engine, TURN)
    assert cached(engine) == 0
    assert not engine.scheduler.cache.pools[0].block_of


def test_blocks_that_nobody_finds_are_taken_first() -> None:
    pool = BlockPool(6)
    blocks = pool.take(5)
    pool.cache_block(blocks[0], b"0")
    pool.cache_block(blocks[1], b"1")
    pool.cache_block(blocks[2], b"1")
    pool.drop(blocks)
    assert pool.block_of == {b"0": blocks[0], b"1": blocks[1]}, "of two with the same content one is found"
    assert list(pool.kept) == [blocks[1], blocks[0]]
    assert set(pool.take(3)) == set(blocks[2:])
    pool.hold([blocks[1]])
    assert pool.take(1) == [blocks[0]] and pool.num_free == 0 and pool.num_evicted == 1


def test_hashes_are_those_of_the_blocks() -> None:
    root = root_hash("m", "bfloat16")
    hashes: list[bytes] = []
    extend_hashes(hashes, root, TURN[:5], 4)
    extend_hashes(hashes, root, TURN[:15], 4)
    first = block_hash(root, TURN[:4])
    assert hashes == [first, block_hash(first, TURN[4:8]), block_hash(block_hash(first, TURN[4:8]), TURN[8:12])]


@given(
    st.lists(st.sampled_from([FULL, WINDOW, CHUNK, WindowCacheGroup(8, window=1)]), min_size=1, max_size=3),
    st.lists(st.lists(st.booleans(), min_size=9, max_size=9), min_size=3, max_size=3),
)
def test_as_much_is_found_as_every_group_has(groups: list[CacheGroup], there: list[list[bool]]) -> None:
    limits = CacheLimits(4, 48, 1, 8)
    cache = KVCacheManager(groups, [13] * len(groups), limits)
    names = [bytes([index]) for index in range(9)]
    for pool, kept in zip(cache.pools, there, strict=False):
        blocks = pool.take(9)
        for block, name, is_kept in zip(blocks, names, kept, strict=True):
            if is_kept:
                pool.cache_block(block, name)
        pool.drop(blocks)

    def all_there(num_blocks: int) -> bool:
        for group, kept in zip(groups, there, strict=False):
            seen = np.arange(group.first_key(4 * num_blocks) // 4, num_blocks)
            if not all(kept[block] for block in seen):
                return False
        return True

    assert cache.find(names) == max(num_blocks for num_blocks in range(10) if all_there(num_blocks))
    found = names[: cache.find(names)]
    assert cache.fits(4 * len(found) + 1, np.zeros(0, np.int64), found)
    cache.attach_cached(0, found)
    assert cache.extend(0, 4 * len(found), 1, whole=4 * len(found) + 1) == 1
    cache.check_integrity()
    cache.release(0)
    cache.check_integrity()
