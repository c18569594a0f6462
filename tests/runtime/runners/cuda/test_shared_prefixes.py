"""Tests of which sequences of a step have a prefix read once for several of them."""

from __future__ import annotations

import pytest
from lowered import make_plan

from inferc.runtime.runners.cuda import shared_prefixes as module
from inferc.runtime.runners.cuda.shared_prefixes import SharedPrefixes, shared_prefixes
from inferc.runtime.step.plan import StepPlan

BLOCK = 32
LAYER_BYTES = 1024


@pytest.fixture(autouse=True)
def all_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LEAST_SAVED_BYTES", 1)


def decoding(lengths: list[int], prefixes: dict[int, tuple[int, int]]) -> StepPlan:
    """Sequences of these lengths; prefixes: of some of them, whose first blocks they begin with, and how many."""
    plan = make_plan([(slot, [1], length - 1) for slot, length in enumerate(lengths)], block_size=BLOCK, max_blocks=16)
    table = plan.block_tables[0]
    for slot, (owner, blocks) in prefixes.items():
        table[slot, :blocks] = table[owner, :blocks]
    return plan


def found(plan: StepPlan, most_members: int = 8) -> SharedPrefixes:
    made = shared_prefixes(plan, 0, BLOCK, most_members, 64, LAYER_BYTES)
    assert made is not None
    return made


def groups(made: SharedPrefixes) -> list[tuple[list[int], int]]:
    return [
        (made.members[first:last].tolist(), keys)
        for first, last, keys in zip(made.starts[:-1], made.starts[1:], made.keys, strict=True)
    ]


def test_those_that_begin_with_the_same_blocks() -> None:
    made = found(decoding([200, 300, 201, 310, 90], {2: (0, 6), 3: (1, 8)}))
    assert groups(made) == [([0, 2], 192), ([1, 3], 256)]
    assert made.shared.tolist() == [192, 256, 192, 256, 0]


def test_a_prefix_is_what_all_share_in_whole_tiles() -> None:
    """Two blocks of 32 are a tile; the third block is not half of one."""
    made = found(decoding([200, 200, 200], {1: (0, 5), 2: (0, 3)}))
    assert groups(made) == [([0, 1, 2], 64)]


def test_the_new_token_is_its_own() -> None:
    """The last of 128 keys is the new token's: it is in a block that no other sequence may write."""
    made = found(decoding([128, 300], {1: (0, 4)}))
    assert groups(made) == [([0, 1], 64)]


def test_many_members_are_several_groups() -> None:
    made = found(decoding([100] * 6, dict.fromkeys(range(1, 6), (0, 2))), most_members=4)
    assert groups(made) == [([0, 1, 2, 3], 64), ([4, 5], 64)]
    one_left = found(decoding([100] * 5, dict.fromkeys(range(1, 5), (0, 2))), most_members=4)
    assert groups(one_left) == [([0, 1, 2, 3], 64)] and one_left.shared[4] == 0


def test_only_of_sequences_with_one_new_token() -> None:
    plan = make_plan([(0, [1], 99), (1, [1, 2], 98), (2, [1], 99)], block_size=BLOCK, max_blocks=16)
    plan.block_tables[0][:, :3] = 7
    assert groups(found(plan)) == [([0, 2], 64)]


@pytest.mark.parametrize(
    "plan",
    [
        decoding([100, 200, 300], {}),
        decoding([100], {}),
        decoding([60, 61], {1: (0, 1)}),
        make_plan([(0, [1, 2], 0)]),
    ],
    ids=["none alike", "one sequence", "less than a tile", "no decode"],
)
def test_no_prefix(plan: StepPlan) -> None:
    assert shared_prefixes(plan, 0, BLOCK, 8, 64, LAYER_BYTES) is None


def test_not_where_little_is_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two of three sequences with 64 keys in common do not read them."""
    plan = decoding([100] * 3, {1: (0, 2), 2: (0, 2)})
    monkeypatch.setattr(module, "LEAST_SAVED_BYTES", 2 * 64 * LAYER_BYTES)
    assert found(plan).keys == [64]
    monkeypatch.setattr(module, "LEAST_SAVED_BYTES", 2 * 64 * LAYER_BYTES + 1)
    assert shared_prefixes(plan, 0, BLOCK, 8, 64, LAYER_BYTES) is None
