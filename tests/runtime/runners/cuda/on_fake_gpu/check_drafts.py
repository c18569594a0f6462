"""Steps with drafted tokens: each row has the bits of a step of its own, and its slot goes on from what counts."""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
from fake_gpu import OTHER, Pair, opened, sampled
from lowered import make_plan

from inferc.arena import mask_words
from inferc.runtime.step.plan import I32, StepPlan, StepResult

PROMPTS = {0: OTHER[:5], 3: [7, 8, 9, 7, 8], 1: [30, 2]}
PARAMS: dict[int, dict[str, Any]] = {
    0: {"repetition_penalty": 1.7, "frequency_penalty": 0.6, "num_logprobs": 2},
    3: {"temperature": 1.4, "seeds": 11, "top_k": 30, "presence_penalty": 1.5, "num_logprobs": 1},
    1: {"num_logprobs": 1},
}
MASKED = (0, 3)  # slots
TURNS = 4
Submit = Callable[[StepPlan], StepResult]


@pytest.fixture(scope="module")
def llama() -> Iterator[Pair]:
    with opened("llama", deterministic=True) as made:
        yield made


class Masks:
    """Masks of half of the tokens, which follow from a row's slot and from how many tokens were chosen before."""

    def __init__(self, slots: list[int], counters: list[int], vocab: int) -> None:
        is_masked = np.isin(slots, MASKED)
        self.mask_rows = np.where(is_masked, np.arange(len(slots))[::-1], -1).astype(np.int32)
        self.bits = np.zeros((len(slots), mask_words(vocab)), np.uint32)
        for row, slot, counter in zip(self.mask_rows.tolist(), slots, counters, strict=True):
            random = np.random.default_rng((slot, counter))
            if row >= 0:
                self.bits[row] = random.integers(0, 1 << 32, mask_words(vocab), np.uint32)

    def begin(self, last_ids: I32) -> None:
        pass

    def wait(self) -> None:
        pass


def step(chunks: dict[int, list[int]], turn: int, vocab: int, num_rows: dict[int, int] | None = None) -> StepPlan:
    """Return a step over new tokens of slots, whose outputs had `turn` tokens before.

    num_rows: of each slot, how many of the last tokens are followed by a row; one of each if there are no drafts.
    """
    cached = {slot: len(PROMPTS[slot]) + turn - 1 if turn else 0 for slot in chunks}
    plan = make_plan([(slot, ids, cached[slot]) for slot, ids in chunks.items()], all_rows=num_rows is not None)
    slots = plan.sample.seq_slots.tolist()
    counters = [turn + slots[:row].count(slot) for row, slot in enumerate(slots)]
    fields = {name for slot in chunks for name in PARAMS[slot]}
    neutral = {"repetition_penalty": 1.0}
    changes = {name: [PARAMS[slot].get(name, neutral.get(name, 0)) for slot in slots] for name in fields}
    sampled(plan, counters=counters, **changes)
    plan.masks = Masks(slots, counters, vocab)
    if num_rows is not None:
        plan.num_drafted = np.array([num_rows[slot] - 1 for slot in chunks], np.int32)
    return plan


def begin(pair: Pair, *, oracle: bool = False) -> None:
    for slot, prompt in PROMPTS.items():
        ids = None if slot == 1 else np.array(prompt, np.int32)
        (pair.oracle if oracle else pair.runner).reset_slot(slot, ids)


def one_by_one(run: Submit, turns: int, vocab: int) -> list[dict[int, tuple[int, Any]]]:
    """Return what each step chooses for each slot, and its log probabilities."""
    found: list[dict[int, tuple[int, Any]]] = []
    for turn in range(turns):
        chunks = {slot: [found[-1][slot][0]] for slot in PROMPTS} if turn else PROMPTS
        found.append(dict(zip(PROMPTS, rows_of(run(step(chunks, turn, vocab))), strict=True)))
    return found


def num_kept(pair: Pair) -> int:
    """Return how often what chose rows behind drafts was kept."""
    return sum(count for name, count in pair.fake.launched.items() if name.startswith("keep_chosen"))


def rows_of(result: StepResult) -> list[tuple[int, Any]]:
    return list(zip(result.token_ids.tolist(), result.logprobs or [], strict=True))


@pytest.mark.parametrize(
    "right", [{0: 3, 3: 0, 1: 2}, pytest.param({0: 1, 3: 3, 1: 0}, marks=pytest.mark.slow)], ids=str
)
def test_rows_behind_drafts_have_the_bits_of_single_steps(llama: Pair, right: dict[int, int]) -> None:
    """Whatever is behind a wrong draft, the next step goes on from the last row that counts, and counts no other."""
    vocab = llama.runner.vocab_size
    before = num_kept(llama)
    begin(llama)
    alone = one_by_one(llama.run, TURNS + 2, vocab)
    assert num_kept(llama) == before, "steps without drafts launch nothing for them"
    begin(llama)
    llama.run(step(PROMPTS, 0, vocab))
    chunks = {}
    for slot, count in right.items():
        ids = [alone[turn][slot][0] for turn in range(TURNS)]
        chunks[slot] = [id if place <= count else (id + 1) % vocab for place, id in enumerate(ids)]
    found = rows_of(llama.run(step(chunks, 1, vocab, dict.fromkeys(chunks, TURNS))))
    for order, (slot, count) in enumerate(right.items()):
        rows = found[TURNS * order : TURNS * order + count + 1]
        assert rows == [alone[turn][slot] for turn in range(1, count + 2)]
    # The ids that count are on the device, too.
    for order, (slot, count) in enumerate(right.items()):
        last = step({slot: [0]}, count + 2, vocab)
        last.pending_rows, last.pending_slots = np.zeros(1, np.int32), np.array([slot], np.int32)
        assert rows_of(llama.run(last)) == [alone[count + 2][slot]], order
    assert num_kept(llama) == before + 1


@pytest.mark.slow
def test_a_chunk_of_rows_may_end_within_a_slot(llama: Pair) -> None:
    """More rows, and more masks, than there is memory for at a time."""
    vocab, count = llama.runner.vocab_size, 30
    begin(llama, oracle=True)
    alone = one_by_one(llama.expected, count + 2, vocab)
    for oracle in (False, True):
        begin(llama, oracle=oracle)
    chunks = {slot: [alone[turn][slot][0] for turn in range(count)] for slot in PROMPTS}
    chunks[3][-2] = (chunks[3][-2] + 1) % vocab
    plans = [step(PROMPTS, 0, vocab), step(chunks, 1, vocab, dict.fromkeys(chunks, count))]
    assert len(plans[1].logits_rows) > llama.runner._inputs.layout(llama.runner._most).sample_rows
    for slot in chunks:
        turn = count - 1 if slot == 3 else count + 1
        plans.append(step({slot: [0]}, turn, vocab))
        plans[-1].pending_rows, plans[-1].pending_slots = np.zeros(1, np.int32), np.array([slot], np.int32)
    for plan in plans:
        assert llama.run(plan).token_ids.tolist() == llama.expected(plan).token_ids.tolist()


def test_a_row_that_fails_ends_what_counts(llama: Pair) -> None:
    vocab = llama.runner.vocab_size
    for oracle in (False, True):
        begin(llama, oracle=oracle)
    plan = step(PROMPTS, 0, vocab)
    first = llama.run(plan).token_ids.tolist()
    llama.expected(plan)
    chunks = {slot: [id, 5, 6] for slot, id in zip(PROMPTS, first, strict=True)}
    plan = step(chunks, 1, vocab, dict.fromkeys(chunks, 3))
    assert isinstance(plan.masks, Masks)
    plan.masks.bits[plan.masks.mask_rows[0]] = 0
    found, expected = llama.run(plan), llama.expected(plan)
    assert found.failed is not None and expected.failed is not None
    assert found.failed.tolist() == expected.failed.tolist() == [True] + [False] * 8
    after = step({0: [0]}, 2, vocab)
    after.pending_rows = after.pending_slots = np.zeros(1, np.int32)
    assert llama.run(after).token_ids.tolist() == llama.expected(after).token_ids.tolist()
