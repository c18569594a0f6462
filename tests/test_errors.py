"""Tests of how a message shows what was found."""

import json
from typing import Any

import pytest

from inferc.errors import shown


@pytest.mark.parametrize(
    "value",
    [None, True, 5, -1.5, 'a"b', "ä", [1, "a", None], {"a": [1], "5": {}}, [], {}, 10**39],
)
def test_small_values_are_shown_as_json(value: Any) -> None:
    assert shown(value) == json.dumps(value, ensure_ascii=value != "ä")


def test_what_json_does_not_have_is_shown() -> None:
    assert shown((1, b"x", {5: float("nan")})) == "[1, b'x', {5: nan}]"
    assert shown("\ud800\u202e") == '"\\ud800\\u202e"'


def test_large_values_are_shown_by_their_beginning_alone() -> None:
    assert shown("a" * 10**6) == '"' + "a" * 78 + "…"
    assert shown([[1] * 10**6] * 10**6, 10) == "[[1, 1, 1…"
    assert shown({str(number): number for number in range(10**5)}, 20) == '{"0": 0, "1": 1, "2…'
    assert shown("a" * 78) == '"' + "a" * 78 + '"' and shown("a" * 79)[-1] == "…"


def test_what_has_no_repr_is_shown() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert shown(deep) == "[" * 79 + "…"
    assert shown(10**5000) == "an integer of about 5001 digits"
    assert shown(-(10**399)) == "a negative integer of about 400 digits"
    while deep:  # freed one by one: the interpreter's own way is as deep
        deep = deep[0]
