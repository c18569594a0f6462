"""The choice of lengths against a search of all choices; what is learned of acceptance and of steps' times."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferc.runtime.speculation.drafter import Offer
from inferc.runtime.speculation.lengths import MARGIN, Acceptance, can_pay, choose_counts
from inferc.runtime.speculation.step_times import PER_TOKEN, StepTimes
from inferc.runtime.step.plan import F64

COUNTS: F64 = np.arange(65, dtype=np.float64)
FLAT: F64 = np.ones(65)  # a step takes as long whatever it computes


def counts_of(*args: Any) -> list[int]:
    """Return how many tokens each sequence gets if all drafts are chains."""
    found = choose_counts(*args)
    assert all(each.count == each.depth for each in found)
    return [each.count for each in found]


def speed(counts: list[int], rates: list[float], num_tokens: int, times: F64, waiting: float, depth: float) -> float:
    """Return the expected tokens of a step in its time."""
    gained = sum(rate**place for count, rate in zip(counts, rates, strict=True) for place in range(1, count + 1))
    cost = times[num_tokens + sum(counts)]
    return float((num_tokens + gained) / (cost + (waiting + depth * max(counts) if any(counts) else 0.0)))


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.sampled_from([0.1, 0.5, 0.7, 0.9])), min_size=1, max_size=3),
    st.lists(st.floats(0.0, 0.5), min_size=20, max_size=20),
    st.sampled_from([0.0, 0.1]),
    st.sampled_from([0.0, 0.05]),
)
def test_no_choice_gives_more_tokens_a_second(
    offered: list[tuple[int, float]], steps: list[float], waiting: float, depth: float
) -> None:
    most, rates = [count for count, _ in offered], [rate for _, rate in offered]
    times: F64 = 1.0 + np.concatenate(([0.0], np.cumsum(steps)))
    num_tokens = len(most)
    found = counts_of(most, rates, num_tokens, times, waiting, depth)
    assert all(0 <= count <= limit for count, limit in zip(found, most, strict=True))

    def of(counts: list[int]) -> float:
        return speed(counts, rates, num_tokens, times, waiting, depth)

    best = max(of(list(counts)) for counts in product(*(range(limit + 1) for limit in most)))
    none = of([0] * num_tokens)
    if any(found):
        assert of(found) >= MARGIN * none - 1e-9
        # With a cost of the longest draft, tokens in the order of their worth may miss the best choice by a little.
        assert of(found) == pytest.approx(best) if not depth else of(found) > 0.9 * best
    elif not depth:
        assert best < MARGIN * none + 1e-9


def test_a_step_that_costs_more_has_shorter_drafts() -> None:
    flat = counts_of([15], [0.8], 1, FLAT, 0.0, 0.0)
    steep = counts_of([15], [0.8], 1, 1.0 + 0.3 * COUNTS, 0.0, 0.0)
    steeper = counts_of([15], [0.8], 1, 1.0 + 10.0 * COUNTS, 0.0, 0.0)
    assert flat == [15] and 0 < steep[0] < 15 and steeper == [0]


def test_the_sequence_that_chooses_more_gets_more() -> None:
    low, high = counts_of([15, 15], [0.4, 0.9], 2, 1.0 + 0.05 * COUNTS, 0.0, 0.0)
    assert 0 <= low < high


def test_no_more_tokens_than_steps_whose_times_are_known() -> None:
    assert sum(counts_of([63] * 4, [0.99] * 4, 4, FLAT, 0.0, 0.0)) == len(FLAT) - 1 - 4


def test_acceptance_is_learned_by_kind_and_by_sequence() -> None:
    acceptance, offer = Acceptance(2), Offer(8, 1, 0.5)
    assert acceptance.rate(0, offer) == 0.5
    for _ in range(20):
        acceptance.learn(0, 1, 4, 4)
    assert acceptance.rate(0, offer) > 0.9
    assert 0.8 < acceptance.rate(1, offer) < acceptance.rate(0, offer), "the kind is good, the sequence is new"
    for _ in range(20):
        acceptance.learn(1, 1, 4, 0)
    assert acceptance.rate(1, offer) < 0.3 < acceptance.rate(0, offer)
    acceptance.begin(1)
    assert (
        acceptance.rate(1, offer) == pytest.approx(acceptance.rate(1, Offer(2, 1, 0.5)))
        and acceptance.rate(1, offer) > 0.2
    )


def test_what_is_behind_a_wrong_token_is_not_counted() -> None:
    one, many = Acceptance(1), Acceptance(1)
    one.learn(0, 0, 1, 0)
    many.learn(0, 0, 15, 0)
    assert one.rate(0, Offer(1)) == many.rate(0, Offer(1))


def test_a_sequence_that_was_in_vain_is_tried_again() -> None:
    acceptance, offer = Acceptance(1), Offer(8, 0, 0.7)
    for _ in range(30):
        acceptance.learn(0, 0, 8, 0)
    low = acceptance.rate(0, offer)
    for _ in range(200):
        acceptance.relent(0)
    assert acceptance.rate(0, offer) > low


def test_times_are_learned_relative_to_one_another() -> None:
    times = StepTimes()
    assert times.times[8] / times.times[1] == pytest.approx(1 + 8 * PER_TOKEN, rel=0.1)
    for _ in range(60):
        for count, seconds in ((1, 0.010), (8, 0.013), (16, 0.030)):
            times.observe(count, seconds)
    table = times.times
    assert table[8] / table[1] == pytest.approx(1.3, rel=0.05) and table[16] / table[1] == pytest.approx(3.0, rel=0.05)
    assert table[8] < table[12] < table[16] and times.seconds_per_unit * table[1] == pytest.approx(0.010, rel=0.05)
    for _ in range(30):  # the machine gets three times slower, and only small steps run
        times.observe(1, 0.030)
    table = times.times
    assert table[16] / table[1] == pytest.approx(3.0, rel=0.2), "all of them got slower alike"
    assert times.seconds_per_unit * table[1] == pytest.approx(0.030, rel=0.1)


@pytest.mark.parametrize(("count", "seconds"), [(0, 1.0), (1, 0.0), (10_000, 1.0)])
def test_steps_that_tell_nothing_are_left_out(count: int, seconds: float) -> None:
    times = StepTimes()
    times.observe(count, seconds)
    assert np.array_equal(times.times, StepTimes().times)


@pytest.mark.parametrize("num_tokens", [1, 3, 24, 64, 300])
@pytest.mark.parametrize("slope", [0.0, 0.05, 0.5, 1.0])
@pytest.mark.parametrize("costs", [(0.0, 0.0), (0.2, 0.1)])
def test_the_look_beforehand_is_what_would_be_chosen(num_tokens: int, slope: float, costs: tuple[float, float]) -> None:
    times: F64 = 1.0 + slope * np.arange(513, dtype=np.float64)
    chosen = counts_of([1] * num_tokens, [0.9] * num_tokens, num_tokens, times, *costs)
    assert can_pay(0.9, num_tokens, times, *costs) == any(chosen)
