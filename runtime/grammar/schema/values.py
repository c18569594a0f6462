"""JSON values: when two are the same, their types, and multiples among them."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from typing import Any

TYPES = ("null", "boolean", "integer", "fraction", "string", "array", "object")
OF_KEYWORD = {"number": ("integer", "fraction"), **{name: (name,) for name in TYPES if name != "fraction"}}


def type_of(value: Any) -> str:
    """Return the type of a value; "fraction" is a number that is no integer, and 1.0 is an integer."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else "boolean"
    if isinstance(value, int | float):
        return "integer" if isinstance(value, int) or value.is_integer() else "fraction"
    return "string" if isinstance(value, str) else "array" if isinstance(value, list) else "object"


def same(value: Any, other: Any) -> bool:
    """Return whether two values are the same as JSON: 1 is 1.0, and True is no 1."""
    if type_of(value) != type_of(other):
        return False
    if isinstance(value, list):
        return len(value) == len(other) and all(map(same, value, other))
    if isinstance(value, dict):
        return value.keys() == other.keys() and all(same(each, other[name]) for name, each in value.items())
    return bool(value == other)


def among(value: Any, others: Iterable[Any]) -> bool:
    return any(same(value, other) for other in others)


def distinct(values: Iterable[Any]) -> list[Any]:
    """Return the values without those that are the same as one before."""
    found: list[Any] = []
    seen: set[tuple[str, Any]] = set()
    for value in values:
        if isinstance(value, list | dict):
            if among(value, (each for each in found if isinstance(each, list | dict))):
                continue
        elif (key := (type_of(value), value)) in seen:
            continue
        else:
            seen.add(key)
        found.append(value)
    return found


def exact(number: float) -> Fraction:
    """Return the number that a JSON text of it writes: a tenth for 0.1."""
    return Fraction(str(number))


def is_multiple(value: float, unit: float) -> bool:
    """Return whether a number is a multiple, both as written and as readers compute it in floating point."""
    try:
        quotient = value / unit
    except OverflowError:
        return False
    return exact(value) % exact(unit) == 0 and quotient == int(quotient)
