"""The n-gram drafter's matches, the longest of the last tokens, against a search through all places."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from inferc.runtime.scheduler.batch import Batch
from inferc.runtime.speculation import ngram, pair_index
from inferc.runtime.speculation.ngram import NgramDrafter
from inferc.runtime.speculation.pair_index import LONGEST, MOST_PLACES, PairIndex
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.step.sequence import Sequence


def agreeing(ids: list[int], place: int) -> int:
    """Return how many tokens up to `place` are the last ones of all, at most LONGEST."""
    count = 0
    while count < min(LONGEST, place + 1) and ids[place - count] == ids[len(ids) - 1 - count]:
        count += 1
    return count


def longest(ids: list[int]) -> tuple[int, int]:
    """Return the latest of the longest matches, of two tokens at least, among the latest MOST_PLACES places."""

    def name(place: int) -> int:
        return pair_index._hash(ids[place - 1], ids[place], 32 - pair_index.FIRST_BITS)

    chain = [place for place in range(len(ids) - 2, 0, -1) if name(place) == name(len(ids) - 1)][:MOST_PLACES]
    places = [place for place in chain if ids[place - 1 : place + 1] == ids[-2:]]
    found = max(places, key=lambda place: (agreeing(ids, place), place), default=-1)
    return (found, agreeing(ids, found)) if places else (-1, 0)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=80), st.lists(st.integers(1, 20), max_size=10))
def test_the_longest_match_is_found(ids: list[int], pieces: list[int]) -> None:
    tokens, index = np.array(ids, np.int32), PairIndex()
    for count in pieces:  # in whatever pieces it was indexed
        index.extend(tokens, min(len(ids), index.num_tokens + count))
    index.extend(tokens, len(ids))
    assert index.num_tokens == len(ids)
    assert index.longest_match(tokens, len(ids)) == longest(ids)


def batch_of(*texts: list[int]) -> Batch:
    batch = Batch(len(texts), 10_000)
    for number, ids in enumerate(texts):
        params = SamplingParams(max_tokens=100)
        batch.join(Sequence(str(number), 0, number, len(ids), list(ids), params, 0, 10_000, frozenset()))
    return batch


def drafts_of(batch: Batch, drafter: NgramDrafter, count: int) -> list[list[int]]:
    slots = batch.order.tolist()
    offers = drafter.offers(batch, slots)
    having = [slot for slot, offer in zip(slots, offers, strict=True) if offer.most]
    found = dict(zip(having, drafter.draft(batch, having, [count] * len(having)), strict=True))
    return [found.get(slot, []) for slot in slots]


def test_what_followed_is_drafted_and_goes_round_where_the_sequence_ends() -> None:
    batch = batch_of([1, 2, 3, 4, 5, 9, 1, 2, 3], [7, 8, 7, 8], [1, 2, 3], [5])
    drafts = drafts_of(batch, NgramDrafter(4, 8), 5)
    assert drafts == [[4, 5, 9, 1, 2], [7, 8, 7, 8, 7], [], []]


def test_longer_matches_are_of_a_higher_kind() -> None:
    def kind(ids: list[int]) -> tuple[int, float]:
        (offer,) = NgramDrafter(1, 8).offers(batch_of(ids), [0])
        return offer.kind, offer.expected

    kinds = [kind([*range(length), 99, *range(length)]) for length in (2, 3, 5, 9)]
    assert kinds == [(index, share) for index, (_, share) in enumerate(ngram.KINDS)]


def test_a_slot_that_another_sequence_gets_is_indexed_anew() -> None:
    batch, drafter = batch_of([1, 2, 3, 1, 2]), NgramDrafter(1, 8)
    assert drafts_of(batch, drafter, 1) == [[3]]
    batch.leave(0)
    batch.free(0)
    batch.join(Sequence("b", 0, 0, 5, [4, 5, 6, 4, 5], SamplingParams(), 0, 100, frozenset()))
    assert drafts_of(batch, drafter, 1) == [[6]]


def test_a_long_prompt_is_indexed_in_pieces() -> None:
    ids = [*range(ngram.INDEXED_AT_ONCE), 0, 1]
    batch, drafter = batch_of(ids), NgramDrafter(1, 8)
    assert drafts_of(batch, drafter, 2) == [[]]
    assert drafts_of(batch, drafter, 2) == [[2, 3]]


def test_only_a_long_match_is_worth_waiting_for() -> None:
    short, long = [1, 2, 3, 9, 2, 3], [*range(6), 99, *range(6)]
    assert not NgramDrafter(1, 8).is_promising(batch_of(short), [0])
    assert NgramDrafter(2, 8).is_promising(batch_of(short, long), [0, 1])
