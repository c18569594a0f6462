"""When an engine waits for tokens in order to draft, and what it drafts: forced tokens first."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from inferc.runtime.kv_cache.manager import KVCacheManager
from inferc.runtime.scheduler.batch import Batch
from inferc.runtime.speculation.drafter import NOTHING, Drafter, Offer
from inferc.runtime.speculation.forced import KIND, ForcedDrafter
from inferc.runtime.speculation.lengths import choose_counts
from inferc.runtime.speculation.speculation import GOOD, LEAST_REST, MOST_REST, PATIENCE, Speculation
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.sequence import Sequence as Seq


@dataclass
class Fixed(Drafter):
    """A drafter of fixed tokens, by slot."""

    drafts: dict[int, list[int]] = field(default_factory=dict)
    promising: bool = False
    closed: bool = False

    def attach(self, cache: KVCacheManager) -> None:
        raise AssertionError("there is no cache")

    def offers(self, batch: Batch, slots: Sequence[int]) -> list[Offer]:
        return [Offer(len(self.drafts[slot]), 1, 0.9) if self.drafts.get(slot) else NOTHING for slot in slots]

    def draft(self, batch: Batch, slots: Sequence[int], counts: Sequence[int]) -> list[list[int]]:
        return [self.drafts[slot][:count] for slot, count in zip(slots, counts, strict=True)]

    def is_promising(self, batch: Batch, slots: Sequence[int]) -> bool:
        return self.promising

    def close(self) -> None:
        self.closed = True


def batch_of(count: int) -> Batch:
    batch = Batch(8, 100)
    for number in range(count):
        join(batch, number)
    return batch


def join(batch: Batch, arrival: int, stops: tuple[int, ...] = ()) -> int:
    seq = Seq(str(arrival), 0, arrival, 2, [1, 2], SamplingParams(), 0, 100, frozenset(stops))
    slot = batch.join(seq)
    batch.num_known[slot] = batch.num_tokens[slot] = 3
    return slot


def draft(speculation: Speculation, batch: Batch, room: int = 10) -> list[list[int]]:
    slots = batch.order.tolist()
    found = speculation.draft(batch, slots, [room] * len(slots), len(slots), lambda slot, count: count)
    return [tree.token_ids for tree in found]


def idle_steps(speculation: Speculation, batch: Batch) -> int:
    """Return after how many steps that do not wait one waits again."""
    count = 0
    while not speculation.wants_ids(batch):
        count += 1
    return count


def test_without_sequences_nothing_waits() -> None:
    assert not Speculation(Fixed(), 8).wants_ids(batch_of(0))
    assert Speculation(Fixed(), 8).wants_ids(batch_of(1))


def test_steps_stop_waiting_after_drafts_in_vain_for_longer_each_time() -> None:
    speculation, batch = Speculation(Fixed(), 8), batch_of(1)
    rests = []
    for _ in range(8):
        while speculation.wants_ids(batch):
            assert draft(speculation, batch) == [[]]
        rests.append(idle_steps(speculation, batch) + 1)
        if len(rests) == 1:
            assert rests[0] in (LEAST_REST - 1, LEAST_REST)
    assert rests == sorted(rests) and rests[-1] == MOST_REST - 1


def test_steps_wait_again_when_a_draft_is_promising_or_a_sequence_comes() -> None:
    drafter = Fixed()
    speculation, batch = Speculation(drafter, 8), batch_of(1)

    def rest() -> None:
        while speculation.wants_ids(batch):
            draft(speculation, batch)

    rest()
    drafter.promising = True
    assert speculation.wants_ids(batch)
    drafter.promising = False
    rest()
    assert not speculation.wants_ids(batch)
    join(batch, 7)
    assert speculation.wants_ids(batch), "nobody knows yet what it is like"
    rest()
    for seconds in (0.01, 0.02, 0.03, 0.04, 0.05, 0.06):  # by now a token more costs as much as one alone
        speculation.observe(round(seconds * 100), seconds)
    join(batch, 8)
    assert not speculation.wants_ids(batch), "however good its drafts, they would not pay"


def test_no_draft_is_looked_for_where_none_could_pay() -> None:
    batch = batch_of(2)
    drafter = Fixed({slot: [5, 6] for slot in batch.order.tolist()})
    speculation = Speculation(drafter, 8)
    assert draft(speculation, batch) == [[5, 6], [5, 6]]
    for count in (2, 3, 4):
        speculation.observe(count, 0.01 * count)
    drafter.drafts = {}  # a drafter that is asked would fail
    drafter.offers = None  # type: ignore[assignment, method-assign]
    assert draft(speculation, batch) == [[], []]


def test_a_draft_that_is_accepted_halves_the_rests() -> None:
    drafter = Fixed()
    speculation, batch = Speculation(drafter, 8), batch_of(1)
    for _ in range(3):
        while speculation.wants_ids(batch):
            draft(speculation, batch)
        idle_steps(speculation, batch)
    drafter.drafts = {int(batch.order[0]): [5, 6]}
    assert draft(speculation, batch) == [[5, 6]]
    speculation.landed(int(batch.order[0]), 2, [5, 6, 7], 2)
    drafter.drafts = {}
    for _ in range(PATIENCE):
        assert speculation.wants_ids(batch)
        draft(speculation, batch)
    assert idle_steps(speculation, batch) in (4 * LEAST_REST - 2, 4 * LEAST_REST - 1)
    stats = speculation.stats
    assert (stats.num_drafts, stats.num_drafted, stats.num_accepted) == (1, 2, 2)


def test_a_draft_ends_before_an_end_token_and_where_the_grammar_ends() -> None:
    batch = batch_of(0)
    slots = [join(batch, 0, stops=(9,)), join(batch, 1), join(batch, 2)]
    speculation = Speculation(Fixed({slots[0]: [5, 9, 6], slots[1]: [5, 6, 7], slots[2]: [9, 9]}), 8)
    speculation.fit = lambda slot, ids: 2 if slot == slots[1] else len(ids)
    assert draft(speculation, batch) == [[5], [5, 6], [9, 9]]


def test_no_more_is_drafted_than_there_is_room_for() -> None:
    batch = batch_of(2)
    first, second = batch.order.tolist()
    speculation = Speculation(Fixed({first: [5, 6, 7], second: [5, 6, 7]}), 8)
    assert draft(speculation, batch, room=2) == [[5, 6], [5, 6]]
    found = speculation.draft(batch, [first, second], [3, 3], 2, lambda slot, count: 1 if slot == first else 0)
    assert [tree.token_ids for tree in found] == [[5], []]


@pytest.mark.parametrize("has_other", [False, True])
def test_forced_tokens_come_before_those_of_another_drafter(has_other: bool) -> None:
    batch = batch_of(3)
    first, second, third = batch.order.tolist()
    other = Fixed({second: [8, 8], first: [8]}, promising=True)
    drafter = ForcedDrafter(2, other if has_other else None)
    drafter.forced = lambda slot: [5, 6, 7] if slot == first else []
    drafter.is_any_held = lambda: False
    assert drafter.may_draft(batch) == has_other and drafter.is_promising(batch, [first]) == has_other
    drafter.is_any_held = lambda: True
    assert drafter.may_draft(batch)
    offers = drafter.offers(batch, [first, second, third])
    assert [offer.most for offer in offers] == [2, 2 if has_other else 0, 0] and offers[0].kind == KIND
    expected = {first: [5], second: [8, 8]} if has_other else {first: [5]}
    assert drafter.draft(batch, list(expected), [1, 2][: len(expected)]) == list(expected.values())
    drafter.close()
    assert other.closed == has_other


@pytest.mark.parametrize("count", [46, 64])
def test_the_look_beforehand_does_not_refuse_drafts_that_pay(count: int) -> None:
    """Drafts for all sequences pay in any batch if steps take the same time whatever is in them."""
    speculation = Speculation(Fixed(), count)
    speculation.times._table = times = np.ones(513)
    wanted = choose_counts([7] * count, [GOOD] * count, count, times, 0.0, 0.0)
    assert sum(each.count for each in wanted) > count
    assert speculation._can_pay(count)


def test_ids_that_the_model_does_not_have_end_a_draft() -> None:
    batch = batch_of(1)
    speculation = Speculation(Fixed({int(batch.order[0]): [5, 49, 50, 6]}), 8, vocab_size=50)
    assert draft(speculation, batch) == [[5, 49]]


def test_a_drafter_that_fails_is_not_asked_again(caplog: pytest.LogCaptureFixture) -> None:
    batch, drafter = batch_of(1), Fixed()
    drafter.offers = None  # type: ignore[assignment, method-assign]
    speculation = Speculation(drafter, 8)
    assert draft(speculation, batch) == [[]] and "answers go on without" in caplog.text
    assert not speculation.wants_ids(batch) and draft(speculation, batch) == [[]]
    assert caplog.text.count("answers go on without") == 1
