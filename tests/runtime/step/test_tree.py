"""Trees of drafted tokens: what is cut off, and in which lines they are computed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from inferc.runtime.step.tree import Tree


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    tree = Tree()
    for _ in range(draw(st.integers(0, 9))):
        parent, token = draw(st.integers(-1, len(tree) - 1)), draw(st.integers(0, 3))
        if tree.child(parent, token) is None:
            tree.parents.append(parent)
            tree.token_ids.append(token)
    return tree


def ways(tree: Tree) -> set[tuple[int, ...]]:
    return {tuple(tree.path(node)) for node in range(len(tree))}


@given(trees(), st.integers(0, 3), st.integers(0, 3))
def test_what_is_behind_a_token_that_does_not_fit_is_cut_off_with_it(tree: Tree, bad: int, longest: int) -> None:
    def num_fitting(ids: list[int]) -> int:
        return next((at for at, token in enumerate(ids) if token == bad or at >= longest), len(ids))

    found = tree.cut(num_fitting)
    assert ways(found) == {way for way in ways(tree) if bad not in way and len(way) <= longest}
    assert len(ways(found)) == len(found)


@given(trees())
def test_lines_have_every_token_once_and_the_first_follows_first_children(tree: Tree) -> None:
    found, lines = tree.in_lines()
    assert ways(found) == ways(tree) and len(found) == len(tree)
    assert [node for line in lines for node in line.nodes] == list(range(len(tree)))
    for line in lines:
        assert [found.parents[node] for node in line.nodes] == [line.parent, *line.nodes[:-1]]
        assert line.parent < line.nodes[0]
    first, node = list[int](), -1
    while (children := [each for each, parent in enumerate(tree.parents) if parent == node]) != []:
        node = children[0]
        first.append(tree.token_ids[node])
    assert [found.token_ids[node] for line in lines[:1] for node in line.nodes] == first
    again, same = found.in_lines()
    assert (again, same) == (found, lines)


def test_a_chain_is_one_line() -> None:
    tree = Tree.chain([5, 6, 5])
    assert tree.is_chain and tree.in_lines()[0] == tree and len(tree.in_lines()[1]) == 1
    assert not Tree([5, 6, 7], [-1, -1, 0]).is_chain
    assert [tree.child(-1, 5), tree.child(0, 6), tree.child(0, 5)] == [0, 1, None]
