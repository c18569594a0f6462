"""The tokens that a drafter holds possible for each place, and the tree that is made of them.

A drafter goes on with one token at each place: these are the chain. What else it holds possible at a place may be tried
in the same step, as a branch of one token. Of all of these a tree takes as many as the step is to compute, those that
are the likeliest to be reached and chosen: the probabilities on the way to each are multiplied, as in Li et al. 2024
(EAGLE-2, arXiv:2406.16858), section 4. How far a drafter's probabilities hold is learned by rank: of its first choices
and of its second ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from inferc.runtime.speculation.drafter import Guesses
from inferc.runtime.speculation.lengths import FORGETTING, MOST_KINDS, MOST_RANKS
from inferc.runtime.step.plan import F64
from inferc.runtime.step.tree import Tree

STRENGTH = 1.0  # the chosen tokens for which a drafter's own probabilities count


@dataclass(frozen=True)
class RankedTree:
    """A tree with the rank of each node at its place (0: of the chain), and the drafter's probability of its token."""

    tree: Tree = field(default_factory=Tree)
    ranks: list[int] = field(default_factory=list)
    probabilities: list[float] = field(default_factory=list)

    @staticmethod
    def chain(token_ids: Sequence[int]) -> RankedTree:
        """Return a chain of whose tokens no probability is known."""
        return RankedTree(Tree.chain(token_ids), [0] * len(token_ids), [])

    def within(self, tree: Tree) -> RankedTree:
        """Return what is left if only the ways of another tree are kept."""
        if len(tree) == len(self.tree):
            return self
        places: dict[int, int | None] = {-1: -1}
        for node, (parent, token) in enumerate(zip(self.tree.parents, self.tree.token_ids, strict=True)):
            behind = places[parent]
            places[node] = None if behind is None else tree.child(behind, token)
        keeps = [places[node] is not None for node in range(len(self.tree))]
        probabilities = [each for each, is_kept in zip(self.probabilities, keeps, strict=False) if is_kept]
        return RankedTree(
            self.tree.kept(keeps),
            [rank for rank, is_kept in zip(self.ranks, keeps, strict=True) if is_kept],
            probabilities,
        )


class Trust:
    """The trust in drafters' probabilities: by kind and rank, how many tokens were chosen and how many expected."""

    def __init__(self) -> None:
        self._expected: F64 = np.zeros((MOST_KINDS, MOST_RANKS))
        self._chosen: F64 = np.zeros((MOST_KINDS, MOST_RANKS))

    def of(self, kind: int, rank: int, probability: float) -> float:
        """Return how probable it is that a token is chosen which the drafter gives this probability."""
        factor = (STRENGTH + self._chosen[kind, rank]) / (STRENGTH + self._expected[kind, rank])
        return min(1.0, probability * float(factor))

    def learn(self, kind: int, ranked: RankedTree, reached: Sequence[int]) -> None:
        """Note which tokens were chosen; reached: the nodes that were, from -1 on, in their order."""
        if not ranked.probabilities:
            return
        found = set(reached)
        for node, parent in enumerate(ranked.tree.parents):
            if parent not in found:
                continue
            rank = ranked.ranks[node]
            self._expected[kind, rank] = self._expected[kind, rank] * FORGETTING + ranked.probabilities[node]
            self._chosen[kind, rank] = self._chosen[kind, rank] * FORGETTING + (node in found)


def choose_tree(guesses: Guesses, count: int, kind: int, trust: Trust) -> RankedTree:
    """Return the tree of the `count` guesses that are the likeliest to be reached and chosen."""
    if not any(guesses.others):
        return RankedTree.chain(guesses.token_ids[:count])
    found: list[tuple[float, int, int, int, float]] = []  # worth, depth, rank, token, the drafter's probability
    reach = 1.0
    for depth, token in enumerate(guesses.token_ids):
        own = trust.of(kind, 0, guesses.probabilities[depth])
        found.append((reach * own, depth, 0, token, guesses.probabilities[depth]))
        for rank, (other, probability) in enumerate(guesses.others[depth][: MOST_RANKS - 1], start=1):
            found.append((reach * trust.of(kind, rank, probability), depth, rank, other, probability))
        reach *= own
    found.sort(key=lambda each: (-each[0], each[1], each[2]))
    # What is behind a token is worth no more than the token, and of equals the one before comes first.
    taken = sorted(found[:count], key=lambda each: each[1:3])
    made, last = RankedTree(), -1  # last: the chain's node of the depth before
    behind = last
    at = 0
    for _, depth, rank, token, probability in taken:
        if depth != at:
            at, last = depth, behind
        if rank == 0:
            behind = len(made.ranks)
        made.tree.token_ids.append(token)
        made.tree.parents.append(last)
        made.ranks.append(rank)
        made.probabilities.append(probability)
    return made
