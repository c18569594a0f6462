"""Tests of which cases of a test with many parameters `make test` runs."""

from itertools import combinations, product

import pytest
from pairwise import choose


@pytest.mark.parametrize("sizes", [(2, 2), (5, 2, 3), (2, 2, 2, 2), (7, 1, 4)])
def test_every_pair_is_in_a_case(sizes: tuple[int, ...]) -> None:
    names = "abcd"[: len(sizes)]
    cases = [dict(zip(names, each, strict=True)) for each in product(*map(range, sizes))]
    chosen = [cases[index] for index in choose(cases)]
    for (first, a), (second, b) in combinations(zip(names, sizes, strict=True), 2):
        assert {(case[first], case[second]) for case in chosen} == set(product(range(a), range(b)))
    assert len(chosen) <= 2 * max(a * b for a, b in combinations(sizes, 2))


def test_names_of_one_parametrize_are_one_parameter() -> None:
    cases = [{"x": i, "y": f"of {i}", "dtype": j, "isa": k} for i in range(3) for j in range(2) for k in range(2)]
    assert len(choose(cases)) == 6


def test_cases_that_were_left_out_are_not_asked_for() -> None:
    cases = [{"a": i, "b": j, "c": k} for i in range(3) for j in range(3) for k in range(3) if i + j + k != 2]
    pairs = {(n, case[n], m, case[m]) for case in cases for n, m in combinations("abc", 2)}
    chosen = [cases[index] for index in choose(cases)]
    assert {(n, case[n], m, case[m]) for case in chosen for n, m in combinations("abc", 2)} == pairs


def test_all_cases_of_one_parameter_are_chosen() -> None:
    assert choose([{"case": name, "expected": name.upper()} for name in "abc"]) == [0, 1, 2]
