"""Drafted tokens in a schedule: they take from nobody, are charged, and come only where no step is in flight."""

from __future__ import annotations

import random

import numpy as np
import pytest
from fake_runner import make_engine

from inferc.runtime.step.cost import WORK
from inferc.runtime.step.plan import StepPlan
from inferc.runtime.step.sampling_params import SamplingParams


@pytest.mark.parametrize("seed", [8, 46, 49, 52, 66])
def test_a_step_with_drafts_is_never_submitted_beside_another(seed: int) -> None:
    """A sequence that found no block for a step is known to its end while the others' step runs."""
    rng = random.Random(seed)
    engine = make_engine(
        drafts=seed,
        num_blocks=random.Random(seed).choice([14, 18, 24]),
        overcommit=True,
        prefix_cache=bool(seed % 2),
    )
    submit = engine._submit

    def checked(plan: StepPlan) -> None:
        assert not plan.num_drafted.any() or not engine._in_flight
        submit(plan)

    engine._submit = checked  # type: ignore[method-assign]
    for number in range(25):
        prompt = [rng.randrange(50) for _ in range(rng.randint(1, 20))]
        params = SamplingParams(max_tokens=rng.randint(1, 30), ignore_eos=True, temperature=0)
        engine.add_request(str(number), prompt, params)
    while engine.has_work:
        engine.step()
        if rng.random() < 0.05 and engine.request_ids:
            engine.abort(rng.choice(engine.request_ids))


def test_clients_are_charged_for_drafted_tokens_that_count() -> None:
    served = []
    for drafts in (None, 1):
        engine = make_engine(drafts=drafts)
        for client in "ab":
            engine.add_request(client, [5, 6, 7], SamplingParams(max_tokens=40, ignore_eos=True, client=client, seed=1))
        last = np.zeros(2)
        while engine.has_work:
            last = engine.scheduler.waiting.served[:2].copy()
            engine.step()
        served.append(last.tolist())
    assert served[1] == pytest.approx(served[0], abs=20)


def test_drafts_leave_every_running_sequence_a_block() -> None:
    engine, rng = make_engine(drafts=13, num_blocks=26, max_num_batched_tokens=64, pipeline=False), random.Random(13)
    engine.speculation._scripted.right = 0.0  # type: ignore[union-attr]
    drafts, cache = engine.scheduler.drafts, engine.scheduler.cache
    room = drafts._room  # type: ignore[attr-defined]

    def checked(slot: int, count: int) -> int:
        before, found = min(cache.num_free), int(room(slot, count))
        assert min(cache.num_free) == before or min(cache.num_free) >= len(engine.scheduler.batch.order)
        return found

    drafts._room = checked  # type: ignore[attr-defined]
    for number in range(4):
        prompt = [rng.randrange(50) for _ in range(rng.randint(1, 9))]
        params = SamplingParams(max_tokens=rng.randint(20, 30), ignore_eos=True, temperature=0)
        engine.add_request(str(number), prompt, params)
    while engine.has_work:
        engine.step()
    assert engine.stats().num_drafted > 0


@pytest.mark.parametrize("tbt_ms", [6.0, 10.0, None])
def test_steps_with_drafts_are_no_longer_than_tokens_may_take(tbt_ms: float | None) -> None:
    engine, rng = make_engine(drafts=4, tbt_ms=tbt_ms, max_num_batched_tokens=40, num_blocks=200), random.Random(4)
    engine.scheduler.forecast.cost.set_prices(dict(zip(WORK, (0.0, 1e-3, 0.0, 0.0, 0.0), strict=True)))
    submit, longest = engine._submit, [0]

    def checked(plan: StepPlan) -> None:
        if plan.num_drafted.any() and plan.num_tokens == len(plan.logits_rows):  # no prompt is in it
            longest[0] = max(longest[0], plan.num_tokens)
        submit(plan)

    engine._submit = checked  # type: ignore[method-assign]
    for number in range(4):
        prompt = [rng.randrange(50) for _ in range(5)]
        engine.add_request(str(number), prompt, SamplingParams(max_tokens=40, ignore_eos=True, temperature=0))
    while engine.has_work:
        engine.step()
    assert longest[0] > (10 if tbt_ms is None else 4) and (tbt_ms is None or longest[0] <= tbt_ms)
