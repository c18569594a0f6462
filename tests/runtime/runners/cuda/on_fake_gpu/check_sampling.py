"""Sampling as the runner launches it: the reference's choices from the same logits, and its log-probabilities."""

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from fake_gpu import Pair, opened
from lowered import make_plan

from inferc.runtime.step.plan import SampleRows, StepPlan, TokenLists

PROMPT = [5, 7, 11, 13]


@pytest.fixture(scope="module")
def llama() -> Iterator[Pair]:
    with opened("llama") as made:
        yield made


def sampled(plan: StepPlan, **changes: object) -> StepPlan:
    rows = len(plan.logits_rows)
    arrays = {
        name: value if isinstance(value, TokenLists) else np.broadcast_to(np.asarray(value), (rows,)).copy()
        for name, value in changes.items()
    }
    greedy = SampleRows.greedy(plan.seq_slots)
    fields = {
        name: value if isinstance(value, TokenLists) else value.astype(getattr(greedy, name).dtype)
        for name, value in arrays.items()
    }
    plan.sample = replace(greedy, **fields)  # type: ignore[arg-type]
    return plan


def decode(llama: Pair, steps: int, **changes: object) -> None:
    """Several steps of two sequences, each on the ids that the one before found; both runners find the same."""
    for slot in (0, 1):
        for runner in (llama.runner, llama.oracle):
            runner.reset_slot(slot, np.array(PROMPT, np.int32), np.zeros(0, np.int32))
    plan = sampled(make_plan([(0, PROMPT, 0), (1, PROMPT[:2], 0)]), counters=0, **changes)
    for step in range(steps):
        found, expected = llama.run(plan), llama.expected(plan)
        assert found.token_ids.tolist() == expected.token_ids.tolist(), step
        a, b = found.token_ids.tolist()
        plan = make_plan([(0, [a], 4 + step), (1, [b], 2 + step)])
        plan = sampled(plan, counters=step + 1, **changes)


@pytest.mark.slow
def test_a_draw(llama: Pair) -> None:
    decode(llama, 4, temperature=0.9, seeds=[3, 2**63 + 5])


def test_filters(llama: Pair) -> None:
    decode(llama, 3, temperature=1.1, seeds=7, top_k=[5, 0], top_p=[1.0, 0.7], min_p=[0.05, 0.0])


def test_penalties_count_what_was_sampled(llama: Pair) -> None:
    decode(llama, 5, repetition_penalty=[1.5, 1.0], presence_penalty=[0.0, 2.0], frequency_penalty=[0.0, 3.0])


@pytest.mark.slow
def test_lists(llama: Pair) -> None:
    def ids(*each: int) -> np.ndarray:
        return np.array(each, np.int32)

    decode(
        llama,
        2,
        logit_bias=TokenLists.of([ids(9, 30), ids()], [np.array([5.0, -3.0], np.float32), np.zeros(0, np.float32)]),
        allowed=TokenLists.of([ids(), ids(4, 8, 15, 16, 23, 42)]),
        banned=TokenLists.of([ids(1, 2, 3), ids(8)]),
    )


@pytest.mark.slow
def test_many_sequences_with_penalties_start_at_once(llama: Pair) -> None:
    """More than there is pinned memory for their counts, while a step is under way."""
    prompts = [[5 + slot, 7, 5 + slot, 9 + slot] for slot in range(4)]
    first = make_plan([(slot, prompt, 0) for slot, prompt in enumerate(prompts)])
    expected = [llama.expected(first).token_ids.tolist()]
    llama.runner.submit(first)
    for turn in range(2):
        for slot, prompt in enumerate(prompts):
            ids = np.array(prompt if turn else prompt[:1], np.int32)
            for runner in (llama.runner, llama.oracle):
                runner.reset_slot(slot, ids, ids[2:])
    plan = sampled(
        make_plan([(slot, [7], 4) for slot in range(4)]), counters=1, repetition_penalty=3.0, frequency_penalty=2.0
    )
    llama.runner.submit(plan)
    expected.append(llama.expected(plan).token_ids.tolist())
    assert [llama.runner.wait().token_ids.tolist() for _ in range(2)] == expected
    llama.runner.reset_slot(0, None)


def test_lists_of_steps_that_are_under_way_at_once(llama: Pair) -> None:
    """Each longer than the one before, up to more than there was memory for at first."""
    plans = []
    for count in (2, 100, 20000):
        allowed = np.resize(np.arange(count % 97, count % 97 + 40, dtype=np.int32), count)
        bias = TokenLists.of([allowed[:30]], [np.linspace(4, 8, len(allowed[:30]), dtype=np.float32)])
        plans.append(sampled(make_plan([(0, PROMPT, 0)]), logit_bias=bias, allowed=TokenLists.of([allowed])))
    for plan in plans[:2]:
        llama.runner.submit(plan)
    found = [llama.runner.wait()]
    llama.runner.submit(plans[2])
    found += [llama.runner.wait(), llama.runner.wait()]
    assert [each.token_ids.tolist() for each in found] == [llama.expected(plan).token_ids.tolist() for plan in plans]


def test_log_probabilities(llama: Pair) -> None:
    plan = sampled(make_plan([(0, PROMPT, 0), (1, PROMPT[:3], 0)]), num_logprobs=[3, 0])
    found, expected = llama.run(plan).logprobs, llama.expected(plan).logprobs
    assert found is not None and expected is not None and found[1] is None
    assert found[0] is not None and expected[0] is not None
    assert found[0].rank == expected[0].rank and found[0].token_id == expected[0].token_id
    assert [token for token, _ in found[0].top] == [token for token, _ in expected[0].top]
    for (_, a), (_, b) in zip(found[0].top, expected[0].top, strict=True):
        assert a == pytest.approx(b, rel=1e-4)


def test_a_row_without_a_finite_logit_fails_alone(llama: Pair) -> None:
    everything = np.arange(llama.runner.vocab_size, dtype=np.int32)
    nothing = np.zeros(0, np.int32)
    plan = sampled(make_plan([(0, PROMPT, 0), (1, PROMPT, 0)]), banned=TokenLists.of([everything, nothing]))
    result = llama.run(plan)
    assert result.failed is not None and result.failed.tolist() == [True, False]
    assert result.token_ids[1] == llama.expected(make_plan([(1, PROMPT, 0)])).token_ids[0]
