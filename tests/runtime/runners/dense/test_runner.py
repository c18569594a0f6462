"""Steps as calls over a dense cache: which rows, what lies in them, and how long they are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from fake_runner import FULL, VOCAB_SIZE, next_id, oracle
from hypothesis import given, settings
from hypothesis import strategies as st
from lowered import make_plan
from numpy.typing import NDArray

from inferc.config import ResolvedEngineConfig
from inferc.errors import RequestError
from inferc.runtime.engine.engine import Engine, ModelLimits
from inferc.runtime.runners.dense.caches import CacheInput, HostCaches
from inferc.runtime.runners.dense.runner import MIN_CAPACITY, DenseRunner, calls_of
from inferc.runtime.scheduler.config import SchedulerConfig
from inferc.runtime.step.sampling_params import SamplingParams

Array = NDArray[Any]


class FakeModel:
    """Keeps its ids in two caches of different shapes, and makes the next one of all it finds there."""

    name = "fake"

    def __init__(self) -> None:
        self.calls: list[tuple[int, int, int]] = []  # rows, new tokens, capacity
        self.closed = False
        self.fails = False

    def __call__(self, inputs: Mapping[str, Array], caches: Mapping[str, Array]) -> tuple[Array, NDArray[np.float32]]:
        if self.fails:
            raise ValueError("the fake model broke")
        starts, ids = inputs["starts"], inputs["token_ids"]
        num_new = len(ids) // len(starts)
        self.calls.append((len(starts), num_new, caches["k"].shape[2]))
        assert (inputs["seq_lens"] == starts + num_new).all() and len(ids) == num_new * len(starts)
        assert (inputs["positions"] == (starts[:, None] + np.arange(num_new)).ravel()).all()
        for row, start in enumerate(starts.tolist()):
            for name, heads in (("k", 1), ("v", 2)):
                cache = caches[name]
                assert cache.shape[:2] == (len(starts), heads) and start + num_new <= cache.shape[2]
                cache[row, :, start : start + num_new, 0] = ids[row * num_new : (row + 1) * num_new]
        logits = np.zeros((len(inputs["logits_rows"]), VOCAB_SIZE), np.float32)
        for out, at in enumerate(inputs["logits_rows"].tolist()):
            row, length = at // num_new, int(starts[at // num_new]) + at % num_new + 1
            (k,), (v, w) = caches["k"][row, :, :length, 0].astype(int), caches["v"][row, :, :length, 0].astype(int)
            assert (k == v).all() and (k == w).all()
            logits[out, next_id(k.tolist())] = 1.0
        return logits[:, :3], logits

    def close(self) -> None:
        self.closed = True


CACHES = (CacheInput("k", 1, 2, "float32"), CacheInput("v", 2, 1, "float64"))


def make_runner(max_num_seqs: int = 4, max_model_len: int = 200) -> tuple[DenseRunner, FakeModel]:
    model = FakeModel()
    config = ResolvedEngineConfig(1, "auto", max_num_seqs, 64, 0, (9,), False, False, False)
    return DenseRunner(model, HostCaches(CACHES), config, max_model_len, VOCAB_SIZE), model


def make_engine(
    max_num_seqs: int = 4, max_model_len: int = 200, num_blocks: int = 9, budget: int = 32, pipeline: bool = True
) -> tuple[Engine, FakeModel]:
    runner, model = make_runner(max_num_seqs, max_model_len)
    config = SchedulerConfig(max_num_seqs, budget, max_model_len, (num_blocks,), max_model_len, (FULL,))
    engine = Engine(runner, ModelLimits(VOCAB_SIZE, max_model_len), config, pipeline)
    runner.share_free_slots(engine.scheduler.batch.free_slots)
    return engine, model


GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


@st.composite
def scenes(draw: st.DrawFn) -> tuple[dict[str, Any], list[tuple[int, list[int], int, int | None]]]:
    max_num_seqs, max_model_len = draw(st.integers(1, 5)), draw(st.sampled_from([12, 70, 200]))
    options = {
        "max_num_seqs": max_num_seqs,
        "max_model_len": max_model_len,
        "num_blocks": draw(st.integers(2, 7)),
        "budget": draw(st.integers(max_num_seqs, 40)),
        "pipeline": draw(st.booleans()),
    }
    requests = []
    for _ in range(draw(st.integers(1, 7))):
        length = draw(st.integers(1, max_model_len - 1))
        prompt = draw(st.lists(st.integers(0, VOCAB_SIZE - 1), min_size=length, max_size=length))
        requests.append(
            (draw(st.integers(0, 12)), prompt, draw(st.integers(1, 20)), draw(st.none() | st.integers(0, 9)))
        )
    return options, requests


@settings(max_examples=60, deadline=None)
@given(scenes())
def test_each_sequence_gets_what_it_would_alone(scene: tuple[dict[str, Any], list[Any]]) -> None:
    """Whoever joins, leaves, is aborted or waits beside it."""
    options, requests = scene
    engine, _ = make_engine(**options)
    found: dict[str, list[int]] = {str(index): [] for index in range(len(requests))}
    aborted: set[str] = set()
    step = 0
    while step <= 12 or engine.has_work:
        for index, (arrival, prompt, max_tokens, abort_after) in enumerate(requests):
            if arrival == step:
                engine.add_request(str(index), prompt, replace(GREEDY, max_tokens=max_tokens))
            if abort_after is not None and arrival + abort_after == step:
                engine.abort(str(index))
                aborted.add(str(index))
        for output in engine.step():
            found[output.request_id] += output.token_ids
        step += 1
        assert step < 5000
    for index, (_, prompt, max_tokens, _) in enumerate(requests):
        want, _ = oracle(prompt, replace(GREEDY, max_tokens=max_tokens), (), options["max_model_len"])
        got = found[str(index)]
        assert got == (want[: len(got)] if str(index) in aborted else want)
    engine.close()


def run(engine: Engine, *prompts: list[int], max_tokens: int = 4) -> list[list[int]]:
    found: dict[str, list[int]] = {str(index): [] for index in range(len(prompts))}
    for index, prompt in enumerate(prompts):
        engine.add_request(str(index), prompt, replace(GREEDY, max_tokens=max_tokens))
    while engine.has_work:
        for output in engine.step():
            found[output.request_id] += output.token_ids
    return list(found.values())


def test_rows_are_as_long_as_they_need_to_be() -> None:
    engine, model = make_engine()
    run(engine, [1] * 10)
    assert {capacity for _, _, capacity in model.calls} == {MIN_CAPACITY}
    run(engine, [1] * 100)
    assert model.calls[-1][2] == 128
    run(engine, [1] * 190, [2] * 3)
    assert model.calls[-1][2] == 200, "and no longer than a sequence may be"
    run(engine, [1] * 10)
    assert model.calls[-1][2] == MIN_CAPACITY
    engine.close()
    assert model.closed


def test_those_that_bring_one_token_are_one_call() -> None:
    plan = make_plan([(2, [5], 3), (1, [5, 6, 7, 8, 9], 0), (0, [5], 7), (9, [5], 2)])
    lengths = np.zeros(12, np.int64)
    lengths[plan.seq_slots] = plan.seq_lens
    calls = calls_of(plan, lengths, 200)
    assert [(call.first, call.count, call.starts.tolist(), call.tokens.tolist()) for call in calls] == [
        (1, 1, [0], [1, 2, 3, 4, 5]),
        (0, 3, [7, 5, 3], [6, -1, 0]),  # slot 1 lies between: its token goes behind what it has by then
        (9, 1, [2], [7]),  # too far away
    ]


def test_what_is_wrong_is_said() -> None:
    runner, model = make_runner()
    with pytest.raises(RequestError, match="score: 2 target ids for 1 rows"):
        runner.score(make_plan([(0, [5], 0)]), np.zeros(2, np.int32))
    model.fails = True
    runner.submit(make_plan([(0, [5], 0)]))
    assert runner.wait().error == "the fake model broke"
    with pytest.raises(ValueError, match="broke"):
        runner.rows_of(make_plan([(0, [5], 0)]))
    runner.close()
