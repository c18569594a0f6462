"""The tree that is made of what a drafter holds possible: the likeliest guesses, and what is learned of them."""

from __future__ import annotations

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inferc.runtime.speculation.drafter import Guesses, Offer
from inferc.runtime.speculation.guesses import RankedTree, Trust, choose_tree
from inferc.runtime.speculation.lengths import Acceptance, choose_counts
from inferc.runtime.step.plan import F64
from inferc.runtime.step.tree import Tree

FLAT: F64 = np.ones(513)


def guesses_of(chain: list[float], others: list[list[float]]) -> Guesses:
    """Return guesses of these probabilities: token 10 * depth + rank at each place."""
    ids = [10 * depth for depth in range(len(chain))]
    beside = [[(10 * depth + 1 + at, each) for at, each in enumerate(row)] for depth, row in enumerate(others)]
    return Guesses(ids, chain, beside)


def worth(tree: Tree, guesses: Guesses) -> float:
    """Return how many of a tree's tokens are expected to be chosen."""
    chance = dict(zip(guesses.token_ids, guesses.probabilities, strict=True))
    chance |= {token: each for row in guesses.others for token, each in row}
    return sum(float(np.prod([chance[token] for token in tree.path(node)])) for node in range(len(tree)))


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.floats(0.05, 0.6), st.floats(0.01, 0.3), st.floats(0.01, 0.05)), min_size=1, max_size=3),
    st.integers(1, 5),
)
def test_no_tree_of_as_many_tokens_has_more_that_are_likely_chosen(
    places: list[tuple[float, float, float]], count: int
) -> None:
    guesses = guesses_of([place[0] for place in places], [sorted(place[1:], reverse=True) for place in places])
    found = choose_tree(guesses, count, 0, Trust())
    everything = [(depth, 10 * depth + rank) for depth, rank in product(range(len(places)), range(3))]
    best = 0.0
    for some in combinations(everything, min(count, len(everything))):
        tree = Tree()
        behind = {0: -1}
        for depth, token in some:
            if depth in behind:
                tree.token_ids.append(token)
                tree.parents.append(behind[depth])
                if token % 10 == 0:
                    behind[depth + 1] = len(tree) - 1
        best = max(best, worth(tree, guesses))
    assert worth(found.tree, guesses) == pytest.approx(best) and len(found.tree) == min(count, len(everything))
    assert [token % 10 for token in found.tree.token_ids] == found.ranks


def test_a_drafter_that_is_sure_gets_a_chain_and_one_that_is_not_a_tree() -> None:
    sure = choose_tree(guesses_of([0.9] * 4, [[0.05]] * 4), 4, 0, Trust())
    unsure = choose_tree(guesses_of([0.4] * 4, [[0.3]] * 4), 4, 0, Trust())
    assert sure.tree.is_chain and sure.ranks == [0] * 4
    assert unsure.tree.parents == [-1, -1, 0, 0] and unsure.ranks == [0, 1, 0, 1]
    assert choose_tree(Guesses([4, 5, 6]), 2, 0, Trust()).tree == Tree.chain([4, 5])


def test_second_choices_that_are_never_right_are_no_more_tried() -> None:
    trust, guesses = Trust(), guesses_of([0.4] * 3, [[0.3]] * 3)
    before = choose_tree(guesses, 3, 1, trust)
    assert 1 in before.ranks
    for _ in range(30):
        trust.learn(1, before, [-1, 0])
    assert choose_tree(guesses, 3, 1, trust).ranks == [0, 0, 0]
    assert choose_tree(guesses, 3, 2, trust).ranks == before.ranks, "of another kind nothing is known"


def test_what_was_not_reached_tells_nothing() -> None:
    one, other = Trust(), Trust()
    tree = choose_tree(guesses_of([0.5] * 2, [[0.2]] * 2), 4, 0, one)
    first = choose_tree(guesses_of([0.5], [[0.2]]), 2, 0, other)
    one.learn(0, tree, [-1])
    other.learn(0, first, [-1])
    assert all(one.of(0, rank, 0.5) == other.of(0, rank, 0.5) for rank in range(2))


def test_what_was_cut_off_is_not_among_what_was_tried() -> None:
    ranked = choose_tree(guesses_of([0.4] * 2, [[0.3]] * 2), 4, 0, Trust())
    left = ranked.within(ranked.tree.cut(lambda ids: ids.index(1) if 1 in ids else len(ids)))
    assert (left.tree.token_ids, left.ranks, len(left.probabilities)) == ([0, 10, 11], [0, 0, 1], 3)
    assert RankedTree.chain([1, 2, 3]).within(Tree.chain([1])).tree == Tree.chain([1])


def test_how_often_a_second_choice_is_right_is_learned() -> None:
    acceptance, offer = Acceptance(1), Offer(8, 3, 0.5, num_others=2)
    second, third = acceptance.beside(offer)
    assert 0 < third < second < 0.5 and acceptance.beside(Offer(8, 3)) == []
    for _ in range(40):
        acceptance.learn_beside(3, [1, 2], 2)
    second, third = acceptance.beside(offer)
    assert second < 0.1 and third > 0.9


def test_second_choices_are_tried_where_they_pay_more_than_a_longer_chain() -> None:
    times = FLAT + 0.05 * np.arange(513)
    (chain,) = choose_counts([15], [0.4], 1, times, 0.0, 0.0)
    (tree,) = choose_counts([15], [0.4], 1, times, 0.0, 0.0, [[0.6, 0.3]])
    (hopeless,) = choose_counts([15], [0.4], 1, times, 0.0, 0.0, [[0.0, 0.0]])
    assert chain.count == chain.depth and chain == hopeless
    assert tree.count > tree.depth > 0 and tree.count > chain.count
    assert choose_counts([15], [0.95], 1, FLAT, 0.0, 0.0, [[0.1]])[0].depth == 15


def test_a_tree_pays_where_a_chain_does_not() -> None:
    times = FLAT + 0.12 * np.arange(513)
    waiting = 0.4  # which is paid once, whatever the number of drafts
    assert choose_counts([15], [0.4], 1, times, waiting, 0.0)[0].count == 0
    assert choose_counts([15], [0.4], 1, times, waiting, 0.0, [[0.9]])[0].count >= 2
