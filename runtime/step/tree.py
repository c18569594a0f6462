"""The tokens that were drafted of one sequence: a chain, or a tree with several guesses for one place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise


@dataclass(frozen=True)
class Line:
    """A run of drafted tokens, each behind the one before it.

    parent: the node that the first is behind, -1 for the last known token. nodes: in their tree, which go up by one.
    """

    parent: int
    nodes: range


@dataclass(frozen=True)
class Tree:
    """Drafted tokens, each behind the last known token of its sequence or behind another drafted one.

    token_ids: by node, in an order in which what a token is behind comes before it. parents: by node, the node that it
    is behind, -1 for the last known token; of one parent's tokens no two are equal, and the likeliest comes first.
    """

    token_ids: list[int] = field(default_factory=list)
    parents: list[int] = field(default_factory=list)

    @staticmethod
    def chain(token_ids: Sequence[int]) -> Tree:
        """Return the tree in which each token is behind the one before it."""
        return Tree(list(token_ids), list(range(-1, len(token_ids) - 1)))

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def is_chain(self) -> bool:
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    def path(self, node: int) -> list[int]:
        """Return the tokens on the way to a node, its own last; none for -1."""
        found: list[int] = []
        while node >= 0:
            found.append(self.token_ids[node])
            node = self.parents[node]
        return found[::-1]

    def child(self, node: int, token: int) -> int | None:
        """Return the node of a token behind a node (-1: the last known token), or None."""
        for each, (parent, own) in enumerate(zip(self.parents, self.token_ids, strict=True)):
            if parent == node and own == token:
                return each
        return None

    def kept(self, keeps: Sequence[bool]) -> Tree:
        """Return the tree of the nodes that are kept and behind which none is left out."""
        places: dict[int, int] = {-1: -1}
        for node, (parent, is_kept) in enumerate(zip(self.parents, keeps, strict=True)):
            if is_kept and parent in places:
                places[node] = len(places) - 1
        nodes = [node for node in places if node >= 0]
        return Tree([self.token_ids[node] for node in nodes], [places[self.parents[node]] for node in nodes])

    def cut(self, num_fitting: Callable[[list[int]], int]) -> Tree:
        """Return the tree of the nodes whose way fits; num_fitting: of the tokens on a way, how many fit."""
        if self.is_chain:  # asked about once
            count = num_fitting(self.token_ids) if self.token_ids else 0
            return Tree.chain(self.token_ids[:count])
        has_children = set(self.parents)
        fits = [False] * len(self)
        for leaf in (node for node in range(len(self)) if node not in has_children):
            way, node = [], leaf
            while node >= 0:
                way.append(node)
                node = self.parents[node]
            way.reverse()
            for each in way[: num_fitting([self.token_ids[each] for each in way])]:
                fits[each] = True
        return self.kept(fits)

    def in_lines(self) -> tuple[Tree, list[Line]]:
        """Return the tree with its nodes in the order of its lines, and these.

        The first line goes from the last known token on with the first child of each node; another one begins at each
        other child.
        """
        children: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            children.setdefault(parent, []).append(node)
        order: list[int] = []
        starts = [(-1, each) for each in children.get(-1, [])]
        bounds, parents = [0], []
        while starts:
            parent, node = starts.pop(0)
            parents.append(parent)
            while True:
                order.append(node)
                behind = children.get(node, [])
                starts += [(node, each) for each in behind[1:]]
                if not behind:
                    break
                node = behind[0]
            bounds.append(len(order))
        places = {node: place for place, node in enumerate(order)} | {-1: -1}
        tree = Tree([self.token_ids[node] for node in order], [places[self.parents[node]] for node in order])
        lines = [Line(places[parent], range(*each)) for parent, each in zip(parents, pairwise(bounds), strict=True)]
        return tree, lines
