"""The store of a head's rows on a GPU: whose each row is, and when it is free again."""

import numpy as np
import pytest
from lowered import make_plan

from inferc.runtime.runners.cuda.head_rows import NOT_KEPT, DeviceRows, RowKeeper, RowStore


def taken(store: RowStore, count: int, is_own: bool = False) -> DeviceRows:
    found = store.take(count, is_own)
    assert found is not None
    return found


def test_a_row_is_free_when_nobody_has_it_any_more() -> None:
    store = RowStore(0, 6, 3)
    rows = taken(store, 4)
    part, chosen = rows[1:3], rows[[3, 3]]
    del rows
    assert store.num_free == (3, 3) and len(part) == 2 and len(chosen) == 2
    joined = part.joined([chosen[:1]])
    del part, chosen
    assert store.num_free == (3, 3) and len(joined) == 3
    others = taken(store, 3)
    assert not set(others.numbers.tolist()) & set(joined.numbers.tolist())
    del joined
    assert store.num_free == (3, 3)
    copy = others.copy()
    del others
    assert store.num_free == (3, 3) and len(copy) == 3
    del copy
    assert store.num_free == (6, 3)


def test_the_heads_own_rows_have_numbers_below_zero() -> None:
    store = RowStore(0, 2, 3)
    own, given = taken(store, 3, is_own=True), taken(store, 2)
    assert sorted(own.numbers.tolist()) == [-3, -2, -1] and sorted(given.numbers.tolist()) == [0, 1]
    assert store.take(1, True) is None and store.take(1, False) is None
    both = given.joined([own])
    del own, given
    assert store.num_free == (0, 0)
    del both
    assert store.num_free == (2, 3)


@pytest.mark.parametrize("is_own", [False, True])
def test_a_step_is_told_where_to_keep_its_rows(is_own: bool) -> None:
    """The model those of tokens, the head those behind which it samples, and each only what its plan asks for."""
    store = RowStore(0, 8, 8)
    keeper = RowKeeper(store, is_own, {}, {})
    plan = make_plan([(0, [5, 6, 7], 0), (1, [8, 9], 0)])
    inputs, kept = keeper.numbers(plan, None)
    assert kept is None and set(inputs["kept_numbers"].tolist()) == {NOT_KEPT}
    plan.tapped_rows = np.array([2, 4] if is_own else [0, 1, 2, 4])
    read = taken(store, 3).joined([taken(store, 2, is_own=True)])
    inputs, kept = keeper.numbers(plan, read)
    assert kept is not None and inputs["row_numbers"].tolist() == read.numbers.tolist()
    places = (-1 - kept.numbers if is_own else kept.numbers).tolist()
    assert inputs["kept_numbers"].tolist() == (places if is_own else [*places[:3], NOT_KEPT, places[3]])
    assert not set(kept.numbers.tolist()) & set(read.numbers.tolist())


def test_a_step_that_finds_no_free_rows_keeps_none() -> None:
    store = RowStore(0, 3, 1)
    rows = taken(store, 1)
    plan = make_plan([(0, [5, 6, 7], 0)])
    plan.tapped_rows = np.arange(3)
    inputs, kept = RowKeeper(store, False, {}, {}).numbers(plan, None)
    assert kept is None and inputs["kept_numbers"].tolist() == [NOT_KEPT] * 3 and len(rows) == 1
