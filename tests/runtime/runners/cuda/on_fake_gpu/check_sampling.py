"""Sampling as the runner launches it: the reference's choices from the same logits, and its log-probabilities."""

from collections.abc import Iterator

import numpy as np
import pytest
from fake_gpu import Pair, opened, sampled
from lowered import make_plan

from inferc.arena import mask_words
from inferc.runtime.step.plan import I32, StepPlan, TokenLists

PROMPT = [5, 7, 11, 13]


@pytest.fixture(scope="module")
def llama() -> Iterator[Pair]:
    with opened("llama") as made:
        yield made


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
    decode(llama, 3, temperature=1.1, seeds=8, typical_p=[0.6, 1.0], xtc_probability=[0.0, 1.0], xtc_threshold=0.001)


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
class Masks:
    """Masks of some slots' rows, whose three tokens follow from the last one if that is still being sampled."""

    def __init__(self, slots: list[int], masked: list[int], vocab: int, is_pending: bool = False) -> None:
        self._is_pending, self._masked, self._vocab = is_pending, masked, vocab
        self.mask_rows = np.array([slot if slot in masked else -1 for slot in slots], np.int32)
        self.bits = np.zeros((4, mask_words(vocab)), np.uint32)
        self.is_made = False

    def begin(self, last_ids: I32) -> None:
        for slot in self._masked:
            last = int(last_ids[slot]) if self._is_pending else 0
            for token in (np.arange(3) * 29 + last * 7 + slot) % self._vocab:
                self.bits[slot, token // 32] |= np.uint32(1 << int(token) % 32)

    def wait(self) -> None:
        self.is_made = True


def test_masks_follow_the_ids_of_the_step_before(llama: Pair) -> None:
    """A step is given before those are there: it computes meanwhile, and is sampled once they are."""
    vocab = llama.artifact.vocab_size

    def steps(greedy: bool) -> list[StepPlan]:
        plans = [make_plan([(0, PROMPT, 0), (1, PROMPT[:2], 0), (2, PROMPT[1:], 0)])]
        for step in range(3):
            plan = make_plan([(slot, [0], length + step) for slot, length in enumerate((4, 2, 3))])
            plan.pending_rows = plan.pending_slots = np.arange(3, dtype=np.int32)
            plans.append(plan)
        for count, plan in enumerate(plans):
            sampled(plan, counters=count, temperature=0.0 if greedy else 1.3, seeds=[3, 4, 5], num_logprobs=[0, 2, 0])
            plan.masks = Masks([0, 1, 2], [[2], [0, 2], [], [1]][count], vocab, is_pending=count > 0)
        plans[2].masks = None
        return plans

    for greedy in (True, False):
        ours, theirs = steps(greedy), steps(greedy)
        expected = [llama.expected(plan) for plan in theirs]
        llama.runner.submit(ours[0])
        found = []
        for plan in ours[1:]:
            llama.runner.submit(plan)
            found.append(llama.runner.wait())
        found.append(llama.runner.wait())
        assert [each.token_ids.tolist() for each in found] == [each.token_ids.tolist() for each in expected]
        for mine, other in zip(found, expected, strict=True):
            assert mine.logprobs and other.logprobs and mine.logprobs[1] and other.logprobs[1]
            assert mine.logprobs[1].logprob == pytest.approx(other.logprobs[1].logprob, abs=2e-5)


def test_a_mask_of_nothing_fails_its_row_alone(llama: Pair) -> None:
    plan = make_plan([(0, PROMPT, 0), (1, PROMPT[:2], 0)])
    plan.masks = Masks([0, 1], [1], llama.artifact.vocab_size)
    plan.masks.begin = lambda last_ids: None  # type: ignore[method-assign]
    found, expected = llama.run(plan), llama.expected(make_plan([(0, PROMPT, 0), (1, PROMPT[:2], 0)]))
    assert found.failed is not None and found.failed.tolist() == [False, True]
    assert found.token_ids[0] == expected.token_ids[0]


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
