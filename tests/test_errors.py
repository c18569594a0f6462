"""Tests of how a message shows what was found."""

from typing import Any

import pytest

from inferc.errors import shown


@pytest.mark.parametrize(
    "value",
    [None, True, 5, -1.5, "a'b", b"x", [1, "a", None], (1,), (1, 2), {"a": [1], 5: {}}, [], {}, "\ud800", 10**39],
)
def test_small_values_are_shown_as_python_writes_them(value: Any) -> None:
    assert shown(value) == repr(value)


def test_large_values_are_shown_by_their_beginning_alone() -> None:
    assert shown("a" * 10**6) == "'" + "a" * 79
    assert shown([[1] * 10**6] * 10**6, 10) == "[[1, 1, 1,"
    assert shown({str(number): number for number in range(10**5)}, 20) == "{'0': 0, '1': 1, '2'"


def test_what_has_no_repr_is_shown() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "[" * 80
    assert shown(10**5000) == "an integer of about 5001 digits"
    assert shown(-(10**399)) == "a negative integer of about 400 digits"
    while deep:  # freed one by one: the interpreter's own way is as deep
        deep = deep[0]
