"""Tests of what is learned about lengths and steps."""

import math

import numpy as np
import pytest

from inferc.runtime.step.cost import MIN_STEPS, PRIOR, WORK, StepCost, StepWork
from inferc.runtime.step.forecast import (
    LEAST_CAUTION,
    MIN_LENGTHS,
    MOST_CAUTION,
    UNKNOWN_LENGTH,
    Caution,
    Forecast,
    LengthPredictor,
)
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.sequence import Sequence

PRICES = (4e-3, 2e-5, 1e-4, 3e-8, 5e-9)


def answered(prompt: list[int], length: int, max_tokens: int = 1000, **params: object) -> Sequence:
    ids = [*prompt, *([1] * length)]
    return Sequence(
        "",
        0,
        0,
        len(prompt),
        ids,
        SamplingParams(max_tokens=max_tokens, **params),  # type: ignore[arg-type]
        0,
        len(prompt) + max_tokens,
        frozenset({0}),
    )


def some_work(rng: np.random.Generator, count: int) -> list[StepWork]:
    """Decodes of 1 to 64 sequences, every other with a chunk of a prompt."""
    found = []
    for i in range(count):
        lens = rng.integers(10, 2000, rng.integers(1, 64))
        new = np.ones_like(lens)
        if i % 2:
            new[0] = rng.integers(1, min(lens[0], 512) + 1)
        found.append(StepWork.of(lens, new))
    return found


# -------------------------------------------------------------------------------------------------------- steps


def test_work_of_a_step_is_what_is_in_it() -> None:
    work = StepWork.of(np.array([10, 8, 100]), np.array([1, 8, 40]))
    assert work == StepWork(tokens=49, sequences=3, keys=118, pairs=8 * 4 + 40 * 80)


def test_prices_are_found_again_from_noisy_steps() -> None:
    rng = np.random.default_rng(0)
    cost = StepCost()
    assert not cost.is_known and cost.prices.tolist() == list(PRIOR)
    for work in some_work(rng, 400):
        cost.observe(work, float(np.array(PRICES) @ work.row) * rng.normal(1.0, 0.05))
    assert cost.is_known and 0.02 < cost.error < 0.08
    for work in some_work(rng, 50):
        assert cost.seconds(work) == pytest.approx(float(np.array(PRICES) @ work.row), rel=0.05)


def test_predictions_sum_up_to_the_times_of_a_noisy_machine() -> None:
    rng = np.random.default_rng(4)
    cost = StepCost()
    works = some_work(rng, 4000)
    times = [float(np.array(PRICES) @ work.row) * rng.lognormal(-0.08, 0.4) for work in works]
    for work, seconds in zip(works, times, strict=True):
        cost.observe(work, seconds)
    assert sum(map(cost.seconds, works)) == pytest.approx(sum(times), rel=0.03)
    cost.observe(works[0], 1000.0)  # as of a machine that was suspended
    assert sum(map(cost.seconds, works)) == pytest.approx(sum(times), rel=0.04)


def test_no_price_is_below_zero() -> None:
    rng = np.random.default_rng(1)
    cost = StepCost()
    for _ in range(2 * MIN_STEPS):  # all of one kind: what part is whose can not be told
        cost.observe(StepWork(8, 8, 800), float(rng.normal(0.01, 0.001)))
    assert cost.prices.min() >= 0 and cost.seconds(StepWork(8, 8, 800)) == pytest.approx(0.01, rel=0.05)
    for i in range(300):  # the more tokens, the faster
        cost.observe(StepWork(1 + i % 7, 1, 10), 0.02 - 0.002 * (i % 7))
    assert cost.prices.min() >= 0


def test_what_changed_is_learned_again() -> None:
    rng = np.random.default_rng(2)
    cost = StepCost()
    for factor, count in ((1.0, 500), (3.0, 4000)):
        for work in some_work(rng, count):
            cost.observe(work, factor * float(np.array(PRICES) @ work.row))
    work = StepWork(64, 64, 64000)
    assert cost.seconds(work) == pytest.approx(3 * float(np.array(PRICES) @ work.row), rel=0.1)


@pytest.mark.parametrize("pair_price", [0.0, 1e-6])
@pytest.mark.parametrize("start", [0, 1000])
def test_most_tokens_fill_the_time_and_one_more_does_not_fit(pair_price: float, start: int) -> None:
    cost = StepCost()
    cost.set_prices(dict(zip(WORK, (4e-3, 2e-4, 1e-4, 3e-8, pair_price), strict=True)))
    decodes = np.full(8, 100)

    def seconds(tokens: int) -> float:
        lens, new = np.append(decodes, start + tokens), np.append(np.ones(8, np.int64), tokens)
        return cost.seconds(StepWork.of(lens, new))

    most = cost.most_tokens(StepWork.of(decodes, np.ones(8, np.int64)), 0.05, start)
    assert 1 < most < 300
    assert seconds(most) <= 0.05 < seconds(most + 2)
    assert cost.most_tokens(StepWork.of(decodes, np.ones(8, np.int64)), 0.005, start) == 0


# ------------------------------------------------------------------------------------------------------ lengths


def test_lengths_follow_what_kinds_of_prompts_were_answered_with() -> None:
    rng = np.random.default_rng(3)
    predictor = LengthPredictor()
    lengths = {5: 400, 6: 20, 7: 90}
    for _ in range(400):
        kind = int(rng.choice(list(lengths)))
        prompt = [kind] * 4 + rng.integers(10, 1000, 30).tolist()
        predictor.learn(answered(prompt, int(lengths[kind] * math.exp(rng.normal(0, 0.2)))))
    assert predictor.error < 0.3 and predictor.error_of_mean > 0.8
    for kind, length in lengths.items():
        prompt = [kind] * 4 + rng.integers(10, 1000, 30).tolist()
        assert math.exp(predictor.predict(answered(prompt, 0))) == pytest.approx(length, rel=0.5)


def test_where_there_is_nothing_to_learn_from_it_is_hardly_worse_than_the_mean() -> None:
    rng = np.random.default_rng(4)
    predictor = LengthPredictor()
    for _ in range(600):
        prompt = rng.integers(0, 1000, 30).tolist()
        predictor.learn(answered(prompt, int(math.exp(rng.normal(4, 1))) + 1))
    assert predictor.error < 1.15 * predictor.error_of_mean


def test_it_does_not_run_away_over_thousands_of_answers_to_one_prompt() -> None:
    predictor = LengthPredictor()
    for i in range(5000):
        predictor.learn(answered([3, 4, 5], 50 + i % 2))
    for kind in (6, 7):
        assert 10 < math.exp(predictor.predict(answered([kind] * 20, 0))) < 250


def test_totals_are_within_the_limits_and_grow_with_who_outlives_them() -> None:
    forecast = Forecast(chunk=512)
    assert forecast.total_tokens(answered([1] * 10, 0)) == 10 + UNKNOWN_LENGTH
    assert forecast.total_tokens(answered([1] * 10, 0, max_tokens=7)) == 17
    exact = answered([1] * 10, 0, max_tokens=900, ignore_eos=True)
    exact.stop_ids = frozenset()
    assert forecast.total_tokens(exact) == 910
    for _ in range(2 * MIN_LENGTHS):
        forecast.lengths.learn(answered([1] * 10, 40))
    assert forecast.total_tokens(answered([1] * 10, 0)) == pytest.approx(50, abs=3)
    assert forecast.total_tokens(answered([1] * 10, 100)) == 10 + 200


# ------------------------------------------------------------------------------------------------------ seconds


def test_a_prompt_takes_the_sum_of_its_chunks() -> None:
    forecast = Forecast(chunk=100)
    forecast.cost.set_prices(dict(zip(WORK, PRICES, strict=True)))
    chunks = [StepWork.of(np.array([end]), np.array([100])) for end in (200, 300, 400)]
    together = sum(forecast.cost.seconds(chunk) for chunk in chunks)
    assert forecast.prompt_seconds(400, 100) == pytest.approx(together, rel=0.01)
    beside = StepWork(8, 8, 800)
    chunks = [StepWork.of(np.array([end]), np.array([92])) for end in (192, 284, 376)]  # what decodes leave of a step
    together = sum(forecast.cost.seconds(chunk) + forecast.cost.seconds(beside) - PRICES[0] for chunk in chunks)
    assert forecast.prompt_seconds(376, 100, beside) == pytest.approx(together, rel=0.01)


def test_service_is_prefill_and_decode() -> None:
    forecast = Forecast(chunk=512)
    forecast.cost.set_prices(dict(zip(WORK, PRICES, strict=True)))
    seq = answered([1] * 10, 0, max_tokens=101, ignore_eos=True)
    seq.stop_ids = frozenset()
    decodes = sum(forecast.cost.seconds(StepWork(1, 1, length)) for length in range(11, 111))
    wanted = forecast.prompt_seconds(10) + decodes
    assert forecast.service_seconds(seq) == pytest.approx(wanted, rel=0.01)


def test_caution_settles_where_few_are_preempted() -> None:
    caution, preempted = Caution(), 0
    for i in range(20_000):
        caution.after_admission()
        if i % 200 == 0 and caution.value < 3.0:  # one in 200 would be preempted, if it were not for caution
            caution.after_preemption()
            preempted += 1
        assert LEAST_CAUTION <= caution.value <= MOST_CAUTION
    assert preempted / 20_000 < 0.01
    for _ in range(100):
        caution.after_preemption()
    assert caution.value == MOST_CAUTION
    for _ in range(5_000):
        caution.after_admission()
    assert caution.value == LEAST_CAUTION


def test_of_the_time_between_tokens_a_share_is_kept_for_prompts() -> None:
    forecast = Forecast(512)
    forecast.cost.set_prices(dict(zip(WORK, (10e-3, 1e-3, 0.0, 0.0, 0.0), strict=True)))
    fourteen = StepWork(14, 14, 0)
    assert forecast.has_time(fourteen, 1, 0.025) and not forecast.has_time(StepWork(15, 15, 0), 1, 0.025)
    assert forecast.has_time(StepWork(15, 15, 0), 1, 0.01), "nor has one alone: fewer would not help"
    for _ in range(200):  # by turns decodes, and half of the step a prompt's
        forecast.observe(StepWork(10, 10, 0), 0.020)
        forecast.observe(StepWork(29, 10, 0), 0.040)
    assert forecast.prompt_share == pytest.approx(1 / 3, abs=0.02)
    assert forecast.has_time(StepWork(5, 5, 0), 1, 0.025) and not forecast.has_time(StepWork(7, 7, 0), 1, 0.025)


def test_the_time_for_a_prompt_is_that_of_the_chunks_it_can_have() -> None:
    forecast = Forecast(512)
    forecast.cost.set_prices(dict(zip(WORK, (10e-3, 1e-3, 0.0, 0.0, 0.0), strict=True)))
    beside = StepWork(10, 10, 0)
    assert forecast.prompt_seconds(200, 0, beside) == pytest.approx(0.220)
    assert forecast.prompt_seconds(200, 0, beside, 0.040) == pytest.approx(0.2 + 10 * 0.020), "10 chunks of 20"
    assert forecast.prompt_seconds(200, 0, beside, 0.015) == pytest.approx(0.2 + 13 * 0.020), "of 16 at least"
