"""Sequences that part within a block: what they share of it is found, copied, and computed by one of them alone."""

import random

import numpy as np
import pytest
from fake_runner import FULL, make_engine, oracle
from hypothesis import given
from hypothesis import strategies as st

from inferc.kv_groups import CacheGroup, WindowCacheGroup
from inferc.runtime.engine.engine import Engine
from inferc.runtime.kv_cache.partial_index import LEAST, PartialIndex
from inferc.runtime.step.plan import I32
from inferc.runtime.step.sampling_params import SamplingParams

WINDOW = WindowCacheGroup(8, window=12)
PROMPT = list(range(20, 47))


def ids(*tokens: int) -> I32:
    return np.array(tokens, np.int32)


def generate(engine: Engine, prompt: list[int], max_tokens: int = 5, name: str = "r", **params: object) -> list[int]:
    values = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **params}
    engine.add_request(name, prompt, SamplingParams(**values))  # type: ignore[arg-type]
    found = []
    while engine.has_work:
        found += [token for output in engine.step() for token in output.token_ids]
        engine.scheduler.check_integrity()
    return found


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=8), max_size=12), st.lists(st.integers(0, 2), max_size=9)
)
def test_the_neighbour_that_is_found_shares_the_most(blocks: list[list[int]], wanted: list[int]) -> None:
    index, there, late = PartialIndex(), set(), set()
    for number, block in enumerate(blocks):
        name = bytes([number])
        index.add(b"", ids(*block), name, step=number % 3, is_there=lambda _: True)
        there |= {name} if number % 4 else set()
        late |= {name} if number % 3 == 2 else set()

    def shared(block: list[int]) -> int:
        return next(
            (i for i, (a, b) in enumerate(zip(block, wanted, strict=False)) if a != b), min(len(block), len(wanted))
        )

    usable = [(shared(block), bytes([n])) for n, block in enumerate(blocks) if bytes([n]) in there - late]
    most = max((count for count, _ in usable), default=0)
    for _ in range(2):  # what is gone was forgotten
        found = index.find(b"", ids(*wanted), 2, there.__contains__)
        assert (found is None) == (most < LEAST)
        assert found is None or (found[1] == most and (most, found[0]) in usable)
    assert index.find(b"other", ids(*wanted), 2, there.__contains__) is None


def test_what_is_gone_is_forgotten_before_the_index_grows_over_it() -> None:
    index = PartialIndex()
    for number in range(10_000):
        name = number.to_bytes(4, "little")
        index.add(b"", ids(number), name, 0, lambda name: int.from_bytes(name, "little") > 9_990)
    assert len(index) < 2000


@pytest.mark.parametrize("groups", [(FULL,), (FULL, WINDOW)])
def test_what_two_prompts_share_of_a_block_is_copied(groups: tuple[CacheGroup, ...]) -> None:
    engine = make_engine(prefix_cache=True, partial_blocks=True, block_size=8, groups=groups)
    params = SamplingParams(temperature=0.0, max_tokens=5, ignore_eos=True)
    for prompt, cached in (
        (PROMPT, 0),
        ([*PROMPT[:21], 1, 2, 3], 21),
        ([*PROMPT[:3], 9, 9], 0),
        ([*PROMPT[:6], 9, 9], 6),
    ):
        before = engine.stats().cached_tokens
        assert generate(engine, prompt) == oracle(prompt, params, (), 64)[0]
        assert engine.stats().cached_tokens - before == cached
    assert engine.runner.num_copied == len(groups) * (5 + 6)  # type: ignore[attr-defined]


def test_the_next_turn_goes_on_within_the_block_that_the_answer_ended_in() -> None:
    engine = make_engine(prefix_cache=True, partial_blocks=True, block_size=8)
    answer = generate(engine, PROMPT, 4)
    generate(engine, [*PROMPT, *answer, 1, 2])
    assert engine.stats().cached_tokens == 30, "but the last token, which was sampled and never computed"


def test_a_block_is_copied_once_the_step_that_fills_it_is_under_way() -> None:
    engine = make_engine(prefix_cache=True, partial_blocks=True, block_size=8, max_num_batched_tokens=64)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, n=3)
    engine.add_request("three", PROMPT, params)
    engine.step()
    assert engine.runner.num_copied == 0 and engine.stats().scheduled_tokens == 27 + 3 + 3  # type: ignore[attr-defined]
    engine.add_request("later", [*PROMPT[:22], 3], params)
    while engine.has_work:
        engine.step()
    assert engine.runner.num_copied == 3 * 6  # type: ignore[attr-defined]


def test_salts_do_not_share_parts_of_blocks() -> None:
    engine = make_engine(prefix_cache=True, partial_blocks=True, block_size=8)
    generate(engine, PROMPT, cache_salt="a")
    generate(engine, [*PROMPT[:21], 1], cache_salt="b")
    assert engine.stats().cached_tokens == 0


@pytest.mark.parametrize("seed", range(20))
def test_every_schedule_gives_the_text_of_each_sequence_alone(seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(
        prefix_cache=True,
        partial_blocks=True,
        block_size=8,
        num_blocks=rng.randint(9, 30),
        max_num_seqs=rng.randint(1, 4),
        max_num_batched_tokens=rng.randint(4, 40),
        groups=rng.choice([(FULL,), (FULL, WINDOW)]),
        overcommit=True,
    )
    common = [rng.randrange(50) for _ in range(40)]
    requests: dict[str, tuple[list[int], SamplingParams]] = {}
    found: dict[str, list[int]] = {}
    for number in range(25):
        prompt = [*common[: rng.randint(1, 40)], *(rng.randrange(3) for _ in range(rng.randint(0, 5)))]
        requests[str(number)] = prompt, SamplingParams(temperature=0.0, max_tokens=rng.randint(1, 12), ignore_eos=True)
    waiting = list(requests)
    while waiting or engine.has_work:
        if waiting and rng.random() < 0.4:
            name = waiting.pop()
            engine.add_request(name, *requests[name])
        for output in engine.step():
            found.setdefault(output.request_id, []).extend(output.token_ids)
        engine.scheduler.check_integrity()
    for name, (prompt, params) in requests.items():
        assert found[name] == oracle(prompt, params, (), 64)[0]
    assert engine.runner.num_copied > 0  # type: ignore[attr-defined]
