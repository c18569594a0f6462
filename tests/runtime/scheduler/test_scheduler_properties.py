"""Random arrivals, aborts, preemptions, KV groups and settings: the output is that of each sequence run alone."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pytest
from fake_mover import FakeMover
from fake_runner import FULL, VOCAB_SIZE, make_engine, next_id, oracle
from hypothesis import given, settings
from hypothesis import strategies as st

from inferc.errors import ObjectiveError, RequestError
from inferc.kv_groups import ChunkCacheGroup, WindowCacheGroup
from inferc.runtime.engine.engine import Engine
from inferc.runtime.scheduler.policies import NAMES
from inferc.runtime.step.cost import WORK
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.sequence import sequence_seed

pytestmark = pytest.mark.long

EOS = (7, 11)


@dataclass(frozen=True)
class Arrival:
    step: int
    prompt: list[int]
    params: SamplingParams
    abort_after: int | None  # steps


class Clock:
    """Moves on by as much each time a step begins."""

    def __init__(self, seconds: float) -> None:
        self.now, self.seconds = 0.0, seconds

    def __call__(self) -> float:
        return self.now


@dataclass(frozen=True)
class Scene:
    options: dict[str, Any]  # of the engine; what fails is told by its repr
    engine: Engine = dataclasses.field(repr=False)
    requests: list[Arrival]
    clock: Clock
    texts: list[tuple[int, list[int]]]  # to score, with the step at which each arrives


@st.composite
def arrivals(draw: st.DrawFn, max_prompt_len: int) -> Arrival:
    params = SamplingParams(
        n=draw(st.sampled_from([1, 1, 1, 2])),
        temperature=draw(st.sampled_from([0.0, 1.0])),
        seed=draw(st.integers(0, 2**64 - 1)),
        max_tokens=draw(st.one_of(st.none(), st.integers(3, 20))),
        min_tokens=draw(st.integers(0, 3)),
        ignore_eos=draw(st.booleans()),
        stop_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=6))),
        banned_token_ids=tuple(draw(st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=3))),
        bad_words_ids=tuple(
            draw(st.lists(st.lists(st.sampled_from([3, 4, 5]), min_size=1, max_size=3).map(tuple), max_size=3))
        ),
        no_repeat_ngram_size=draw(st.sampled_from([0, 0, 0, 1, 2, 3])),
        dry_multiplier=draw(st.sampled_from([0.0, 0.0, 4.0])),
        dry_allowed_length=draw(st.integers(1, 3)),
        dry_penalty_last_n=draw(st.sampled_from([-1, -1, 0, 1, 9])),
        dry_sequence_breakers=(),
        dry_breaker_ids=(4, 20),
        presence_penalty=draw(st.sampled_from([0.0, 0.5])),
        logprobs=draw(st.sampled_from([None, 0, 2])),
        priority=draw(st.integers(-1, 2)),
        client=draw(st.sampled_from(["", "", "a", "b"])),
        ttft_ms=draw(st.sampled_from([None, 20.0, 500.0])),
        tbt_ms=draw(st.sampled_from([None, None, 15.0])),
    )
    # Of few ids, so that prompts begin alike.
    ids = draw(st.sampled_from([st.integers(0, VOCAB_SIZE - 1), st.just(3), st.sampled_from([3, 3, 3, 4])]))
    prompt = draw(st.lists(ids, min_size=1, max_size=max_prompt_len))
    abort_after = draw(st.one_of(st.none(), st.none(), st.integers(0, 12)))
    return Arrival(draw(st.integers(0, 15)), prompt, params, abort_after)


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    block_size = draw(st.sampled_from([1, 2, 4]))
    max_model_len = draw(st.sampled_from([12, 24, 40]))
    max_num_seqs = draw(st.integers(1, 5))
    chunked = draw(st.booleans())
    full_length = -(-max_model_len // block_size)
    # From less than one sequence of full length, which forces preemption and early ends, to room for all; where blocks
    # are given back, from the smallest pool there can be.
    windows = st.one_of(
        st.builds(WindowCacheGroup, st.just(8), window=st.integers(1, 14)),
        st.builds(ChunkCacheGroup, st.just(8), window=st.integers(1, 14)),
    )
    groups = draw(st.lists(st.one_of(st.just(FULL), windows), min_size=1, max_size=3))
    num_blocks = []
    for group in groups:
        low, high = max(1, full_length - 2), full_length * 4
        if isinstance(group, WindowCacheGroup):
            low, high = 1, draw(st.sampled_from([group.window // block_size + 3, high]))
        num_blocks.append(1 + draw(st.one_of(st.just(low), st.integers(low, high))))
    clock = Clock(draw(st.sampled_from([0.01, 1.0, 20.0])))
    prefix_cache = draw(st.booleans())
    num_offloaded = draw(st.sampled_from([0, 10, 30])) if prefix_cache else 0
    mover = FakeMover(draw(st.integers(0, 100)), rate=draw(st.sampled_from([1e-12, 1e-3]))) if num_offloaded else None
    options: dict[str, Any] = {
        "policy": draw(st.sampled_from(["fcfs", *(name.replace("N", "50") for name in NAMES)])),
        "tbt_ms": draw(st.sampled_from([None, 15.0])),
        "clock": clock,
        "max_num_seqs": max_num_seqs,
        "max_num_batched_tokens": draw(st.integers(max_num_seqs, 12))
        if chunked
        else max_model_len + draw(st.integers(0, 8)),
        "max_model_len": max_model_len,
        "num_blocks": num_blocks,
        "block_size": block_size,
        "groups": groups,
        "chunked_prefill": chunked,
        "eos": EOS,
        "pipeline": draw(st.booleans()),
        "prefix_cache": prefix_cache,
        "partial_blocks": draw(st.booleans()),
        "num_offloaded": num_offloaded,
        "offload_in_place": draw(st.booleans()),
        "mover": mover,
        "overcommit": draw(st.booleans()),
        "drafts": draw(st.one_of(st.none(), st.integers(0, 2**16))),
        "branching": draw(st.sampled_from([0.0, 0.3, 0.6])),
    }
    engine = make_engine(**options)
    if draw(st.booleans()):
        engine.scheduler.forecast.cost.set_prices(dict(zip(WORK, (0.01, 1e-4, 1e-4, 1e-6, 1e-6), strict=True)))
    cache = engine.scheduler.cache
    longest = min(max_model_len - 1, cache.max_tokens)
    requests = draw(st.lists(arrivals(longest), min_size=1, max_size=7))
    if draw(st.booleans()):
        engine.runner.broken_prompt = requests[0].prompt  # type: ignore[attr-defined]
    texts: list[tuple[int, list[int]]] = []
    longest = min(longest, cache.max_tokens_at_once)
    if longest > 1:
        text = st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=2, max_size=longest)
        texts = draw(st.lists(st.tuples(st.integers(0, 15), text), max_size=2))
    return Scene(options, engine, requests, clock, texts)


def longest_of(engine: Engine) -> int:
    """Tokens of the longest sequence that runs; the last one's K and V are not stored."""
    return min(engine.model.max_model_len, engine.scheduler.cache.max_tokens + 1)


def does_not_fit(engine: Engine, arrival: Arrival) -> bool:
    """Return whether a request asks for more than the cache holds; what the model's length cuts is no such case."""
    if arrival.params.max_tokens is None:
        return False
    return min(len(arrival.prompt) + arrival.params.max_tokens, engine.model.max_model_len) > longest_of(engine)


def run(scene: Scene) -> tuple[dict[tuple[str, int], list[int]], dict[tuple[str, int], str], set[str]]:
    """Drive the engine until all is done; the ids and finish reason of each sequence, and who was refused."""
    engine, requests = scene.engine, scene.requests
    scored = 0
    ids: dict[tuple[str, int], list[int]] = defaultdict(list)
    reasons: dict[tuple[str, int], str] = {}
    aborted: set[str] = set()
    refused: set[str] = set()
    work = sum(arrival.params.n * engine.model.max_model_len for arrival in requests) + sum(
        len(text) for _, text in scene.texts
    )
    last_arrival = max([arrival.step for arrival in requests] + [step for step, _ in scene.texts])
    slower = 20 if engine.scheduler.offload.manager else 1  # for steps in which all wait for what moves
    for step in range(last_arrival + 20 + 4 * work * slower):  # a sequence that starves never ends
        for i, (arrival_step, text) in enumerate(scene.texts):
            if arrival_step == step:
                engine.score(f"text {i}", text, num_top=i % 3)
        for i, arrival in enumerate(requests):
            if arrival.step == step and does_not_fit(engine, arrival):
                with pytest.raises(RequestError, match="do not fit the whole KV cache"):
                    engine.add_request(str(i), arrival.prompt, arrival.params)
            elif arrival.step == step:
                try:
                    engine.add_request(str(i), arrival.prompt, arrival.params)
                except ObjectiveError:
                    refused.add(str(i))
            if arrival.abort_after is not None and arrival.step + arrival.abort_after == step:
                engine.abort(str(i))
                aborted.add(str(i))
        scene.clock.now += scene.clock.seconds
        outputs = engine.step()
        refused |= {name for name, _ in engine.take_refused()}
        for output in outputs:
            key = (output.request_id, output.index)
            assert output.request_id not in aborted | refused, "an output after the abort"
            assert key not in reasons, "an output after the end"
            if output.finish_reason == "error":
                assert not output.token_ids and output.logprobs is None
            else:
                assert len(output.token_ids) == 1 or (scene.options["drafts"] is not None and output.token_ids)
                wanted = requests[int(output.request_id)].params.logprobs
                assert (output.logprobs is not None) == (wanted is not None)
                assert all(len(entry.top) == wanted for entry in output.logprobs or ())
                assert wanted is None or [entry.token_id for entry in output.logprobs or ()] == output.token_ids
            ids[key] += output.token_ids
            if output.finish_reason is not None:
                reasons[key] = output.finish_reason
        for name, score in engine.take_scores():
            _, text = scene.texts[int(name.split()[1])]
            assert score.argmax == [next_id(text[:end]) for end in range(1, len(text))]
            scored += 1
        engine.scheduler.check_integrity()
        if step > last_arrival and not engine.has_work:
            assert scored == len(scene.texts)
            return ids, reasons, refused
    raise AssertionError("a sequence starves")


def check(scene: Scene) -> None:
    engine, requests = scene.engine, scene.requests
    ids, reasons, refused = run(scene)
    assert not refused or engine.scheduler.policy.refuses
    broken = engine.runner.broken_prompt  # type: ignore[attr-defined]
    for i, arrival in enumerate(requests):
        if does_not_fit(engine, arrival) or str(i) in refused:
            assert (str(i), 0) not in ids
            continue
        for index in range(arrival.params.n):
            seed = sequence_seed(arrival.params.seed or 0, index)
            params = dataclasses.replace(arrival.params, n=1)
            want, reason = oracle(arrival.prompt, params, EOS, longest_of(engine), seed, broken)
            got = ids[str(i), index]
            if (str(i), index) in reasons:
                assert (got, reasons[str(i), index]) == (want, reason)
            else:
                assert arrival.abort_after is not None, "neither ended nor aborted"
                assert got == want[: len(got)]
    cache = engine.scheduler.cache
    assert all(pool.num_free == pool.size for pool in (*cache.pools, *(store.pool for store in cache.stores))), (
        "blocks leak"
    )
    assert len(engine.scheduler.batch.free_slots) == engine.scheduler.config.max_num_seqs, "slots leak"


@settings(max_examples=60, deadline=None)
@given(scenes())
def test_every_schedule_gives_the_text_of_each_sequence_alone(scene: Scene) -> None:
    check(scene)


@pytest.mark.slow
@pytest.mark.timeout(3000)
@settings(max_examples=5000, deadline=None, derandomize=False)
@given(scenes())
def test_so_does_every_schedule_that_was_never_tried_before(scene: Scene) -> None:
    check(scene)
