"""The masks of steps: which tokens of a sequence they follow, and what happens to one that cannot be made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from inferc.runtime.grammar import masks as masks_module
from inferc.runtime.grammar.masks import ALL, Constraint, MaskMaker
from inferc.runtime.step.plan import I32, U32, SampleRows, StepPlan

VOCAB, SLOTS = 40, 4
END = 39


@dataclass
class Counting:
    """A grammar of the numbers 0, 1, 2, … in order, or the end: its mask is the next number's bit and the end's."""

    length: int = 0
    is_ended: bool = False
    rollbacks: list[int] = field(default_factory=list)
    fails: bool = False
    seconds: float = 0.0  # that a token takes
    fill_seconds: float = 0.0  # that a mask takes
    clock: list[float] = field(default_factory=lambda: [0.0])

    def accept(self, token_id: int) -> bool:
        self.clock[0] += self.seconds
        if self.is_ended or token_id not in (self.length, END):
            return False
        self.is_ended = token_id == END
        self.length += 1
        return True

    def fill(self, bits: U32, row: int) -> None:
        if self.fails:
            raise RuntimeError("a fault of the library")
        self.clock[0] += self.fill_seconds
        bits[row] = 0
        bits[row, self.length // 32] |= np.uint32(1 << self.length % 32)
        bits[row, END // 32] |= np.uint32(1 << END % 32)

    @staticmethod
    def fill_rows(matchers: Sequence[Counting], bits: U32, rows: Sequence[int]) -> None:
        for matcher, row in zip(matchers, rows, strict=True):
            matcher.fill(bits, row)

    def forced_text(self) -> str:
        return ""

    def rollback(self, count: int) -> None:
        self.rollbacks.append(count)
        self.length -= count
        self.is_ended = False


class Steps:
    """Plans of steps that sample one token of each slot, whose prompts are of three tokens."""

    def __init__(self, *matchers: Counting | None) -> None:
        self.maker = MaskMaker(SLOTS, VOCAB)
        self.tokens = np.zeros((SLOTS, 64), np.int32)
        self.prompt_len, self.num_known = np.full(SLOTS, 3, np.int64), np.full(SLOTS, 3, np.int64)
        for slot, matcher in enumerate(matchers):
            self.maker.assign(slot, None if matcher is None else Constraint(matcher))

    def known(self, slot: int, *token_ids: int) -> None:
        end = int(self.num_known[slot]) + len(token_ids)
        self.tokens[slot, self.num_known[slot] : end] = token_ids
        self.num_known[slot] = end

    def plan(self, *counters: int) -> StepPlan:
        """Return a plan that samples the output's token at these places, for slots 0, 1, …"""
        slots = np.arange(len(counters), dtype=np.int32)
        none: I32 = np.zeros(0, np.int32)
        sample = SampleRows.greedy(slots).with_counters(np.array(counters, np.uint64))
        plan = StepPlan(none, none.astype(np.int64), none, none, slots, slots, (), (), sample)
        self.maker.mask(plan, self.tokens, self.prompt_len, self.num_known)
        return plan

    def drafting(self, *rows: tuple[int, list[int]]) -> StepPlan:
        """Return a plan that samples, for slots 0, 1, …, the output's token at a place and one behind each draft."""
        slots = np.repeat(np.arange(len(rows)), [1 + len(drafted) for _, drafted in rows]).astype(np.int32)
        counters = [count + place for count, drafted in rows for place in range(len(drafted) + 1)]
        token_ids = np.array([token for _, drafted in rows for token in (0, *drafted)], np.int32)
        places, none = np.arange(len(slots), dtype=np.int32), np.zeros(0, np.int32)
        sample = SampleRows.greedy(slots).with_counters(np.array(counters, np.uint64))
        num_drafted = np.array([len(drafted) for _, drafted in rows], np.int32)
        plan = StepPlan(
            token_ids, places.astype(np.int64), none, none, slots, places, (), (), sample, num_drafted=num_drafted
        )
        self.maker.mask(plan, self.tokens, self.prompt_len, self.num_known)
        return plan

    def fit(self, slot: int, *drafted: int) -> int:
        """Return how many drafted tokens a slot's grammar has behind what is known."""
        place = self.maker.at(slot, self.tokens[slot], int(self.prompt_len[slot]), int(self.num_known[slot]))
        return len(drafted) if place is None else place.count_fitting(drafted)

    def masks(self, plan: StepPlan, *last_ids: int) -> list[list[int]]:
        """Return the tokens that each slot's row may choose; last_ids: what the step before sampled, by slot."""
        assert plan.masks is not None
        plan.masks.begin(np.array([*last_ids, *[0] * (SLOTS - len(last_ids))], np.int32))
        plan.masks.wait()
        bits = np.unpackbits(plan.masks.bits.view(np.uint8), axis=1, bitorder="little")[:, :VOCAB]
        return [np.flatnonzero(bits[row]).tolist() if row >= 0 else [] for row in plan.masks.mask_rows.tolist()]


def test_masks_follow_tokens_that_are_still_being_sampled() -> None:
    steps = Steps(Counting(), None)
    assert steps.masks(steps.plan(0, 0)) == [[0, END], []]
    second = steps.plan(1, 1)  # planned before the first step's ids are known
    assert steps.masks(second, 0, 17) == [[1, END], []]
    third = steps.plan(2, 2)
    steps.known(0, 0)
    assert steps.masks(third, 1, 17) == [[2, END], []]


def test_masks_follow_tokens_that_are_known() -> None:
    steps = Steps(Counting())
    steps.masks(steps.plan(0))
    steps.known(0, 0)
    assert steps.masks(steps.plan(1), 33) == [[1, END]], "the last id is not looked at"


def test_a_plan_without_constraints_has_no_masks() -> None:
    steps = Steps(None, Counting())
    assert steps.plan(0).masks is None
    assert steps.plan(0, 0).masks is not None
    steps.maker.assign(1, None)
    assert steps.plan(0, 0).masks is None


def test_a_sequence_that_begins_again_goes_on_where_it_is() -> None:
    matcher = Counting()
    steps = Steps(matcher)
    constraint = steps.maker._at[0]
    steps.masks(steps.plan(0))
    steps.masks(steps.plan(1), 0)
    steps.masks(steps.plan(2), 1)  # and then it is preempted, before the id 1 has counted
    steps.known(0, 0)
    steps.maker.assign(0, constraint)
    assert steps.masks(steps.plan(1)) == [[1, END]] and matcher.rollbacks == [1]
    steps.maker.assign(0, constraint)
    steps.known(0, 1, 2)
    assert steps.masks(steps.plan(3)) == [[3, END]] and matcher.rollbacks == [1]


def test_after_the_end_anything_goes() -> None:
    """The end is sampled before the host sees it: the step behind has a row for the sequence, which does not count."""
    steps = Steps(Counting())
    steps.masks(steps.plan(0))
    assert steps.masks(steps.plan(1), END) == [list(range(VOCAB))]
    assert (steps.maker.bits[0] == ALL).all()


@pytest.mark.parametrize("what", ["a token", "the library"])
def test_what_fails_fails_alone(what: str, caplog: pytest.LogCaptureFixture) -> None:
    steps = Steps(Counting(fails=what == "the library"), Counting())
    if what == "a token":
        steps.masks(steps.plan(0, 0))
        assert steps.masks(steps.plan(1, 1), 7, 0) == [[], [1, END]]
        assert "slot 0: the grammar does not have the tokens that its own masks allowed" in caplog.text
    else:
        assert steps.masks(steps.plan(0, 0)) == [[], [0, END]]
        assert "slot 0: its mask cannot be made" in caplog.text
    steps.maker.close()


def test_a_form_that_takes_too_long_fails_alone(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow, quick = Counting(seconds=0.6), Counting(seconds=0.4)
    quick.clock = slow.clock
    monkeypatch.setattr(masks_module, "thread_time", lambda: slow.clock[0])
    steps = Steps(slow, quick)
    assert steps.masks(steps.plan(0, 0)) == [[0, END], [0, END]]
    assert steps.masks(steps.plan(1, 1), 0, 0) == [[], [1, END]]
    assert "slot 0: its form takes more than 0.5 s a step" in caplog.text and "slot 1" not in caplog.text
    steps.maker.close()


def test_masks_that_take_too_long_fail_alone(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    slow, quick = Counting(fill_seconds=0.6), Counting(fill_seconds=0.4)
    quick.clock = slow.clock
    monkeypatch.setattr(masks_module, "thread_time", lambda: slow.clock[0])
    steps = Steps(slow, quick)
    assert steps.masks(steps.plan(0, 0)) == [[0, END], [0, END]], "whose masks took long is not known yet"
    assert steps.masks(steps.plan(1, 1), 0, 0) == [[], [1, END]]
    assert "slot 0: its form takes more than 0.5 s a step" in caplog.text and "slot 1" not in caplog.text
    steps.maker.close()


def test_drafted_tokens_have_a_time_each(monkeypatch: pytest.MonkeyPatch) -> None:
    matcher = Counting(seconds=0.1, fill_seconds=0.1)
    monkeypatch.setattr(masks_module, "thread_time", lambda: matcher.clock[0])
    steps = Steps(matcher)
    masks = steps.masks(steps.drafting((0, [0, 1, 2, 3])))
    assert masks == [[place, END] for place in range(5)]
    slow = Counting(fill_seconds=0.6)
    monkeypatch.setattr(masks_module, "thread_time", lambda: slow.clock[0])
    steps.maker.close()
    steps = Steps(slow)
    assert steps.masks(steps.drafting((0, [0, 1]))) == [[], [], []]
    steps.maker.close()


def test_ranks_share_masks() -> None:
    steps = Steps(Counting())
    plan = steps.plan(0)
    assert steps.masks(plan) == steps.masks(plan) == [[0, END]]


def test_each_drafted_token_has_a_mask_behind_it() -> None:
    steps = Steps(Counting(), None, Counting())
    steps.masks(steps.plan(0, 0, 0))
    steps.known(0, 0)
    steps.known(2, 0)
    plan = steps.drafting((1, [1, 2]), (1, [8]), (1, []))
    assert steps.masks(plan) == [[1, END], [2, END], [3, END], [], [], [1, END]]
    steps.known(0, 1, 5)  # the second draft was not chosen
    steps.known(2, 1)
    assert plan.masks is not None
    again = steps.drafting((3, []), (2, []), (2, [2, END]))
    assert steps.masks(again) == [[], [], [2, END], [3, END], list(range(VOCAB))], "5 is not what its mask allowed"


def test_drafts_that_were_not_chosen_are_taken_back() -> None:
    matcher = Counting()
    steps = Steps(matcher)
    steps.masks(steps.plan(0))
    steps.known(0, 0)
    assert steps.masks(steps.drafting((1, [1, 2, 3]))) == [[1, END], [2, END], [3, END], [4, END]]
    steps.known(0, 1)
    assert steps.masks(steps.plan(2)) == [[2, END]] and matcher.rollbacks == [2]


def test_only_drafts_that_the_grammar_has_fit() -> None:
    matcher = Counting()
    steps = Steps(matcher, None)
    assert steps.fit(1, 9, 9, 9) == 3
    assert steps.fit(0, 0, 1, 2) == 3 and steps.fit(0, 0, 7, 2) == 1 and steps.fit(0, 5) == 0
    assert steps.masks(steps.plan(0, 0)) == [[0, END], []], "what was tried is taken back"
    steps.known(0, 0, 1)
    assert steps.fit(0, 2, END, 3) == 2
