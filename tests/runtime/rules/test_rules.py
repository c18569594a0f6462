"""The rules of sampling against the plainest form of each, and against transformers' logits processors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rules_by_hand import banned_behind, penalties_behind
from transformers.generation.logits_process import NoBadWordsLogitsProcessor, NoRepeatNGramLogitsProcessor

from inferc.runtime.rules.repeats import places_behind
from inferc.runtime.rules.rules import Rules
from inferc.runtime.step.plan import F32, TokenLists
from inferc.runtime.step.sampling_params import SamplingParams

VOCAB_SIZE = 12
few = st.integers(0, 3)  # so that much repeats
texts = st.lists(few, max_size=40)
words = st.lists(st.lists(few, min_size=1, max_size=5).map(tuple), max_size=6).map(tuple)


def banned(ids: list[int], params: SamplingParams) -> set[int]:
    """Return what is banned behind these ids, by the rules and whatever is before them."""
    rules = Rules.of(params)
    found = set() if rules is None else set(rules.banned(np.array(ids, np.int32)).tolist())
    return found | set(params.never_chosen)


@settings(max_examples=500, deadline=None)
@given(texts, words, st.integers(0, 6))
def test_rules_ban_what_they_say(ids: list[int], bad: tuple[tuple[int, ...], ...], size: int) -> None:
    params = SamplingParams(bad_words_ids=bad, no_repeat_ngram_size=size)
    assert banned(ids, params) == banned_behind(ids, params)


@settings(max_examples=300, deadline=None)
@given(texts.filter(bool), words.filter(bool))
def test_bad_words_are_those_of_transformers(ids: list[int], bad: tuple[tuple[int, ...], ...]) -> None:
    """But for a word that with its last token would be the whole text, which transformers lets pass."""
    found = banned(ids, SamplingParams(bad_words_ids=bad))
    shorter = [list(word) for word in bad if len(word) <= len(ids)]
    scores = torch.zeros(1, VOCAB_SIZE)
    if shorter:
        scores = NoBadWordsLogitsProcessor(shorter)(torch.tensor([ids]), scores)
    whole = {word[-1] for word in bad if len(word) == len(ids) + 1 and list(word[:-1]) == ids}
    assert found == set(torch.isinf(scores[0]).nonzero().flatten().tolist()) | whole


@settings(max_examples=300, deadline=None)
@given(texts.filter(bool), st.integers(1, 6))
def test_repeated_ngrams_are_those_of_transformers(ids: list[int], size: int) -> None:
    scores = NoRepeatNGramLogitsProcessor(size)(torch.tensor([ids]), torch.zeros(1, VOCAB_SIZE))
    wanted = set(torch.isinf(scores[0]).nonzero().flatten().tolist())
    assert banned(ids, SamplingParams(no_repeat_ngram_size=size)) == wanted


@settings(max_examples=500, deadline=None)
@given(
    st.lists(few, max_size=90),
    st.sampled_from([0.5, 0.8, 3.0]),
    st.sampled_from([1.0, 1.75, 100.0]),
    st.integers(0, 6),
    st.sampled_from([-1, -1, 0, 1, 20, 1000]),
    st.frozensets(st.integers(0, 4), max_size=2),
)
def test_dry_takes_what_its_definition_says(
    ids: list[int], multiplier: float, base: float, allowed: int, last_n: int, breakers: frozenset[int]
) -> None:
    params = SamplingParams(
        dry_multiplier=multiplier,
        dry_base=base,
        dry_allowed_length=allowed,
        dry_penalty_last_n=last_n,
        dry_breaker_ids=tuple(breakers),
    )
    assert params.has_rules == (last_n != 0)
    found = Rules(params).penalties(np.array(ids, np.int32))
    wanted = penalties_behind(ids, params)
    assert found.token_ids.tolist() == sorted(wanted)
    values = [min(1e30, wanted[token]) for token in sorted(wanted)]
    assert found.values.dtype == np.float32 and -found.values == pytest.approx(values, rel=1e-5)


def test_a_repetition_of_more_than_fifty_tokens_costs_as_one_of_fifty() -> None:
    params = SamplingParams(dry_multiplier=1, dry_base=2, dry_allowed_length=2)
    for count in (40, 50, 51, 300):
        ids = np.arange(count + 1, dtype=np.int32)
        found = Rules(params).penalties(np.concatenate([ids, ids[:count]]))
        assert (found.token_ids.tolist(), -found.values[0]) == ([count], 2.0 ** (min(count, 50) - 2))


def test_penalties_are_added_to_biases_of_the_same_token() -> None:
    def floats(*values: float) -> F32:
        return np.array(values, np.float32)

    lists = TokenLists.of([np.array([7, 2], np.int32), np.zeros(0, np.int32)], [floats(1, 2), floats()])
    added = {0: (np.array([2, 9], np.int32), floats(-3, -4)), 1: (np.array([5], np.int32), floats(-1))}
    found = lists.with_added(2, added)
    assert found.starts.tolist() == [0, 3, 4] and found.token_ids.tolist() == [2, 7, 9, 5]
    assert found.values.tolist() == [-1.0, 1.0, -4.0, -1.0] and found.values.dtype == np.float32
    assert lists.with_added(2, {}) is lists


def test_long_texts_of_one_token_and_of_many() -> None:
    """Nearly all places match in the one, and nearly none in the other."""
    same, other = np.zeros(30_000, np.int32), np.arange(30_000, dtype=np.int32)
    assert len(places_behind(same, 3)) == 29_997 and not len(places_behind(other, 3))
    rules = Rules(SamplingParams(no_repeat_ngram_size=4))
    assert rules.banned(same).tolist() == [0] and not len(rules.banned(other))
    again = np.concatenate([other, other[5:8]])
    assert rules.banned(again).tolist() == [8]


def test_requests_without_rules_have_none() -> None:
    assert Rules.of(SamplingParams(bad_words_ids=((5,), (6,)), banned_token_ids=(7,))) is None
    assert SamplingParams(bad_words_ids=((5,), (6, 7)), banned_token_ids=(8,)).never_chosen == (8, 5)


@pytest.mark.parametrize("own", [[[1, 2], [], [3]], [[], [], []]])
def test_lists_get_more_ids_in_some_rows(own: list[list[int]]) -> None:
    lists = TokenLists.of([np.array(row, np.int32) for row in own])
    more = {0: np.array([9], np.int32), 2: np.array([], np.int32)}
    found = lists.with_more(3, more)
    assert found.starts.tolist() == [0, *np.cumsum([len(own[0]) + 1, len(own[1]), len(own[2])]).tolist()]
    assert found.token_ids.tolist() == [*own[0], 9, *own[1], *own[2]] and found.token_ids.dtype == np.int32
    assert lists.with_more(3, {1: np.array([], np.int32)}) is lists
