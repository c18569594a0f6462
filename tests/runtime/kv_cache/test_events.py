"""Tests that events tell exactly what the prefix cache holds: by the pure core, in a thread, and from a process."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import count

import numpy as np
import pytest
from fake_mover import FakeMover
from fake_runner import FULL, make_engine
from hypothesis import given
from hypothesis import strategies as st

from inferc.kv_groups import CacheGroup, ChunkCacheGroup, WindowCacheGroup
from inferc.runtime.engine.engine import Engine
from inferc.runtime.engine.loop import EngineClient, EngineThread, Event
from inferc.runtime.engine.messages import EventReader, EventWriter
from inferc.runtime.engine.process import EngineProcess
from inferc.runtime.kv_cache.block_pool import BlockPool
from inferc.runtime.kv_cache.events import ARENA, CacheEvent, CacheEvents, Cleared, KvBatch, Removed, Stored
from inferc.runtime.kv_cache.hashing import block_hash, root_hash
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.sequence import Output

WINDOW, CHUNK, LATENT = WindowCacheGroup(8, window=6), ChunkCacheGroup(8, window=8), CacheGroup(8)
NAMES = count()


@dataclass
class Router:
    """A reader outside of the engine, which knows the cache from events alone."""

    held: dict[str, set[bytes]] = field(default_factory=dict)  # by medium
    tokens: dict[bytes, list[int]] = field(default_factory=dict)  # of each block, also of those that are gone

    def take(self, events: list[CacheEvent]) -> None:
        for event in events:
            if isinstance(event, Cleared):
                self.held.clear()
            elif isinstance(event, Removed):
                assert self.held[event.medium].issuperset(event.names), "removed, and was never stored"
                self.held[event.medium].difference_update(event.names)
            else:
                self._store(event)

    def _store(self, event: Stored) -> None:
        ids = np.frombuffer(event.token_ids, "<i4").tolist()
        assert len(ids) == len(event.names) * event.block_size and event.names
        name = event.parent or root_hash("", "", salt=event.salt)
        for index, found in enumerate(event.names):
            block = ids[index * event.block_size : (index + 1) * event.block_size]
            name = block_hash(name, block)
            assert name == found, "the tokens are not those of the hash"
            assert found not in self.held.setdefault(event.medium, set()), "stored twice"
            self.held[event.medium].add(found)
            self.tokens[found] = block


def in_cache(engine: Engine) -> set[bytes]:
    """Return the blocks that a router may count on: those held by every group that keeps its blocks, in any tier."""
    cache = engine.scheduler.cache
    lower = [store.pool for store in cache.stores] or [BlockPool(0, 0)] * len(cache.groups)
    tiers = list(zip(cache.groups, cache.pools, lower, strict=True))
    keeping = [each for each in tiers if not each[0].spec.frees_blocks] or tiers
    return set.intersection(*({*pool.block_of, *below.block_of} for _, pool, below in keeping))


def generate(engine: Engine, prompt: list[int], max_tokens: int = 1, **params: object) -> list[CacheEvent]:
    """Run one sequence, and return the events of the cache."""
    values = {"temperature": 0.0, "max_tokens": max_tokens, "ignore_eos": True, **params}
    engine.add_request(f"r{next(NAMES)}", prompt, SamplingParams(**values))  # type: ignore[arg-type]
    events: list[CacheEvent] = []
    while engine.has_work:
        engine.step()
        batch = engine.take_kv_events()
        events += batch.events if batch is not None else []
    return events


def ids(*tokens: int) -> bytes:
    return np.array(tokens, "<i4").tobytes()


def test_a_prompt_is_told_once_and_then_what_is_new() -> None:
    engine = make_engine(prefix_cache=True, kv_events=True)
    cleared, stored = generate(engine, list(range(10)))
    root = root_hash("", "")
    first = block_hash(root, range(4))
    second = block_hash(first, range(4, 8))
    assert cleared == Cleared() and stored == Stored([first, second], None, ids(*range(8)), 4, "", ARENA)
    assert generate(engine, list(range(10))) == []
    third = block_hash(second, [30, 31, 32, 33])
    assert generate(engine, [*range(8), 30, 31, 32, 33, 34]) == [Stored([third], second, ids(30, 31, 32, 33), 4)]
    (salted,) = generate(engine, list(range(5)), cache_salt="mine")
    assert salted == Stored([block_hash(root_hash("", "", salt="mine"), range(4))], None, ids(*range(4)), 4, "mine")


def test_what_decoding_fills_is_told_as_its_block_ends() -> None:
    engine = make_engine(prefix_cache=True, kv_events=True, pipeline=False)
    engine.add_request("r", [1, 2, 3], SamplingParams(temperature=0.0, max_tokens=7))
    told = []
    while engine.has_work:
        engine.step()
        batch = engine.take_kv_events()
        told.append([len(event.names) for event in batch.events if isinstance(event, Stored)] if batch else [])
    # 3 tokens, then one a step; the block's last token is computed, or scheduled to be, as the next one is.
    assert sum(map(sum, told)) == 2 and told[0] == []


def test_what_makes_room_is_told_before_what_takes_it() -> None:
    engine = make_engine(prefix_cache=True, kv_events=True, num_blocks=4)
    router = Router()
    router.take(generate(engine, [1] * 9))
    events = generate(engine, [2] * 9)
    assert [type(event) for event in events] == [Removed, Stored]
    assert isinstance(events[0], Removed) and len(events[0].names) == 2, "evictions in a row are one event"
    router.take(events)
    assert router.held[ARENA] == in_cache(engine)


def test_of_several_groups_all_that_keep_must_have_a_block() -> None:
    engine = make_engine(prefix_cache=True, kv_events=True, groups=(FULL, WINDOW, LATENT), num_blocks=(40, 40, 5))
    router = Router()
    for first in range(4):
        router.take(generate(engine, [first] * 9))
    assert router.held[ARENA] == in_cache(engine) == set(engine.scheduler.cache.pools[2].block_of)
    assert len(engine.scheduler.cache.pools[0].block_of) == 8, "and one that has more does not count"


def test_where_all_groups_give_blocks_back_all_must_have_it() -> None:
    engine = make_engine(prefix_cache=True, kv_events=True, groups=(WINDOW, CHUNK), num_blocks=(6, 40))
    router = Router()
    for first in range(6):
        router.take(generate(engine, [first] * 20, 10))
    assert router.held[ARENA] == in_cache(engine) != set()


def test_other_media_are_told_beside_the_arena() -> None:
    events = CacheEvents(make_engine(prefix_cache=True).scheduler.cache)
    events.add(Removed([b"a"], "DISK"))
    events.add(Removed([b"b"], "DISK"))
    events.add(Removed([b"c"]))
    assert events.take() == [Cleared(), Removed([b"a", b"b"], "DISK"), Removed([b"c"])]
    assert events.take() == []


def test_nothing_is_collected_unless_asked_for() -> None:
    engine = make_engine(prefix_cache=True)
    assert not engine.collects_kv_events and generate(engine, [1] * 9) == [] and engine.take_kv_events() is None


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: list[int]
    params: SamplingParams
    abort_at: int


@st.composite
def arrivals(draw: st.DrawFn) -> Arrival:
    params = SamplingParams(
        n=draw(st.sampled_from([1, 1, 2])),
        temperature=0.0,
        max_tokens=draw(st.integers(1, 12)),
        cache_salt=draw(st.sampled_from(["", "", "x"])),
        cache_priority=draw(st.sampled_from([0, 0, 2])),
        priority=draw(st.integers(0, 2)),
    )
    prompt = draw(st.lists(st.sampled_from([3, 3, 3, 4]), min_size=1, max_size=20))
    step = draw(st.integers(0, 20))
    return Arrival(step, prompt, params, step + draw(st.sampled_from([3, 100])))


GROUPS = st.sampled_from([(FULL,), (FULL, WINDOW), (LATENT, FULL), (WINDOW,), (CHUNK, WINDOW), (CHUNK, FULL, LATENT)])


@pytest.mark.slow
@given(GROUPS, st.data(), st.lists(arrivals(), min_size=1, max_size=8))
def test_whatever_runs_a_router_knows_what_the_cache_holds(
    groups: tuple[CacheGroup, ...], data: st.DataObject, requests: list[Arrival]
) -> None:
    engine = make_engine(
        prefix_cache=True,
        kv_events=True,
        groups=groups,
        max_model_len=40,
        num_blocks=[data.draw(st.integers(11, 30)) for _ in groups],
        pipeline=data.draw(st.booleans()),
        overcommit=data.draw(st.booleans()),
        policy=data.draw(st.sampled_from(["fcfs", "lpm", "priority"])),
        num_offloaded=data.draw(st.sampled_from([0, 12, 40])),
        offload_in_place=data.draw(st.booleans()),
        partial_blocks=data.draw(st.booleans()),
    )
    router, step = Router(), 0
    while engine.has_work or step <= 20:
        for index, request in enumerate(requests):
            if request.step == step:
                engine.add_request(str(index), request.prompt, request.params)
            if request.abort_at == step:
                engine.abort(str(index))
        if engine.has_work:
            engine.step()
        batch = engine.take_kv_events()
        router.take(batch.events if batch is not None else [])
        assert router.held.get(ARENA, set()) == in_cache(engine)
        step += 1
    engine.scheduler.check_integrity()


# ----------------------------------------------------------------------------------- out of a thread, a process


def test_batches_survive_the_pipe() -> None:
    events: list[CacheEvent] = [
        Cleared(),
        Stored([bytes([n]) * 32 for n in range(3)], None, ids(*range(12)), 4, "sält"),
        Stored([b"c" * 32], b"p" * 32, b"", 4, medium="DISK"),
        Removed([b"x" * 32, b"y" * 32], "DISK"),
    ]
    batch = KvBatch(12.25, events)
    assert [EventReader().decode(message) for message in EventWriter().encode(batch)] == [batch]
    assert batch.num_bytes == 6 * 32 + 48


@pytest.fixture(params=["thread", "process"])
def make_client(request: pytest.FixtureRequest) -> Iterator[Callable[..., EngineClient]]:
    made: list[EngineClient] = []

    def make(on_kv_events: Callable[[KvBatch], None], **options: object) -> EngineClient:
        if request.param == "thread":
            made.append(EngineThread(lambda: make_engine(**options), on_kv_events=on_kv_events))  # type: ignore[arg-type]
        else:
            process = EngineProcess(options, "fake_runner:make_engine", on_kv_events=on_kv_events)
            made.append(process.wait_until_ready())
        return made[-1]

    yield make
    for client in made:
        client.close()


def test_an_engine_behind_a_client_tells_each_step(make_client: Callable[..., EngineClient]) -> None:
    batches: queue.SimpleQueue[KvBatch] = queue.SimpleQueue()
    client = make_client(batches.put, prefix_cache=True, kv_events=True, num_blocks=12)
    outputs: queue.SimpleQueue[Event] = queue.SimpleQueue()
    for first in range(6):
        client.add([first] * 9, SamplingParams(temperature=0.0, max_tokens=8), outputs.put)
    ends = 0
    while ends < 6:
        event = outputs.get(timeout=20)
        assert isinstance(event, Output)
        ends += event.finish_reason is not None
    steps = client.stats().num_steps
    client.close()
    alone, told = make_engine(prefix_cache=True, kv_events=True, num_blocks=12), 0
    router, times = Router(), []
    while not batches.empty():
        batch = batches.get()
        router.take(batch.events)
        times.append(batch.time)
        told += 1
    assert 0 < told <= steps + 1 and times == sorted(times)
    assert len(router.held[ARENA]) <= alone.scheduler.cache.pools[0].size
    assert all([first] * 4 in router.tokens.values() for first in range(6))


def test_what_an_earlier_run_left_is_told_once_a_request_has_found_it() -> None:
    mover = FakeMover()
    first = make_engine(prefix_cache=True, num_offloaded=30, mover=mover)
    generate(first, list(range(13)))
    first.close()
    engine = make_engine(prefix_cache=True, num_offloaded=30, mover=mover, kv_events=True)
    router = Router()
    router.take(generate(engine, [9, 9, 9]))
    assert not router.held.get(ARENA)
    router.take(generate(engine, list(range(13))))
    assert len(router.held[ARENA]) == 3 and router.held[ARENA] == in_cache(engine)
