"""Numbers, texts and single values of one case as schemas that a library converts exactly."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any, TypeAlias

from inferc.errors import shown
from inferc.runtime.grammar.schema.automata import TooLargeError, of_length
from inferc.runtime.grammar.schema.cases import Bound, Case
from inferc.runtime.grammar.schema.documents import MOST_VALUES, refuse
from inferc.runtime.grammar.schema.ecma import core
from inferc.runtime.grammar.schema.regex import ALL, ANY, NEVER, Term, conj, literal, negation, repeat
from inferc.runtime.grammar.schema.values import exact, type_of

Form: TypeAlias = dict[str, Any]  # a schema that xgrammar converts exactly
MARK = "!"  # xgrammar takes objects for the same that differ in a property named `title`; with a mark each it does not
LARGEST = 2**63 - 2
LARGEST_UNIT = 1_024
DECIMALS = 10**6  # of a unit: the numbers between bounds that xgrammar writes


class UnspelledError(Exception):
    """Limits of a text that are too intricate together; the text names them."""


def text_term(case: Case, is_core: bool = False) -> Term:
    """Return the term of a case's texts. Raises UnspelledError.

    is_core: whether patterns without anchors are to be the whole text, where that leaves any.
    """
    parts = [core(term) if is_core else term for term, _ in case.terms]
    parts += [negation(literal(each)) for each in case.excluded if isinstance(each, str)]
    (least, most), whole = case.lengths, conj(parts)
    if most is not None and least > most:
        return NEVER
    try:
        found = repeat(ANY, least, most) if whole == ALL else of_length(whole, least, most)
        return text_term(case) if is_core and found == NEVER else found
    except TooLargeError:
        if is_core:
            return text_term(case)
        places = [place.rpartition("/")[2] for _, place in case.terms]
        lengths = [name for name, is_said in (("minLength", least), ("maxLength", most is not None)) if is_said]
        raise UnspelledError(f"{', '.join([*places, *lengths])} are too intricate together") from None


def text_form(case: Case, place: str, spell: Callable[[Term], str]) -> tuple[Form, Term] | None:
    """Return the schema of a case's texts, and their term, or None if there are none."""
    try:
        if (term := text_term(case, is_core=True)) == NEVER:
            least, most = case.lengths
            no_length = most is not None and least > most
            case.reason = (
                f"minLength {least} is more than maxLength {most}" if no_length else "no text holds to all of it"
            )
            return None
        return ({"type": "string"} if term == ALL else {"type": "string", "pattern": spell(term)}), term
    except UnspelledError as error:
        where, words = case.terms[0][1] if case.terms else place, str(error)
    except TooLargeError:
        where, words = case.terms[0][1] if case.terms else place, "the pattern is too long written out"
    refuse(where, f"{words}; make it simpler, or leave part of it out")


# ---------------------------------------------------------------------------------------------------- numbers


def number_forms(case: Case, place: str) -> list[Form]:
    """Return the schemas of a case's numbers; none if there are none."""
    if fault := case.range_fault():
        case.reason = fault
        return []
    unit, is_integer = _unit(case, place)
    if is_integer:
        return _integers(case, unit, place)
    skipped = sorted(each for each in case.excluded if type_of(each) in ("integer", "fraction"))
    forms: list[Form] = []
    low = case.low
    for each in skipped:
        if not _is_outside(each, low, case.high):
            forms += _between(low, (each, True, "not"), place)
            low = (each, True, "not")
    return forms + _between(low, case.high, place)


def _unit(case: Case, place: str) -> tuple[int, bool]:
    """Return what the numbers are multiples of, and whether they are integers."""
    is_integer = "fraction" not in case.types
    if "integer" not in case.types:
        refuse(case.places.get("integer", place), "numbers that are no integers cannot be told apart; allow number")
    found = 1
    for unit, where in case.multiples:
        parts = exact(unit)
        if not is_integer and parts.denominator > 1:
            refuse(where, f"multiples of {shown(unit)} are not built; use an integer of smaller units, or leave it out")
        if parts.denominator & (parts.denominator - 1):
            refuse(where, f"multiples of {shown(unit)} depend on rounding; use a whole number")
        found = math.lcm(found, parts.numerator)
    return found, is_integer or bool(case.multiples)


def _is_outside(number: float, low: Bound | None, high: Bound | None) -> bool:
    return (low is not None and (number < low[0] or (number == low[0] and low[1]))) or (
        high is not None and (number > high[0] or (number == high[0] and high[1]))
    )


def _integers(case: Case, unit: int, place: str) -> list[Form]:
    low = None if case.low is None else math.floor(case.low[0]) + 1 if case.low[1] else math.ceil(case.low[0])
    high = None if case.high is None else math.ceil(case.high[0]) - 1 if case.high[1] else math.floor(case.high[0])
    if (low is not None and low > LARGEST) or (high is not None and high < -LARGEST):
        bound = case.low if low is not None and low > LARGEST else case.high
        refuse(_place(bound, place), "integers beyond 64 bits are not built; use a smaller bound")
    if low is not None and high is not None and low > high:
        case.reason = f"no integer is from {shown(case.low and case.low[0])} to {shown(case.high and case.high[0])}"
        return []
    low, high = None if low is None else max(low, -LARGEST), None if high is None else min(high, LARGEST)
    skipped = sorted({int(each) for each in case.excluded if type_of(each) == "integer"})
    if unit > 1:
        return _multiples(case, unit, low, high, skipped)
    forms: list[Form] = []
    for each in skipped:
        if (low is None or each >= low) and (high is None or each <= high):
            forms += _integers_between(low, each - 1)
            low = each + 1
    return forms + _integers_between(low, high)


def _integers_between(low: int | None, high: int | None) -> list[Form]:
    if low is not None and high is not None and low > high:
        return []
    ends = {name: end for name, end in (("minimum", low), ("maximum", high)) if end is not None}
    return [{"type": "integer", **ends}]


def _multiples(case: Case, unit: int, low: int | None, high: int | None, skipped: list[int]) -> list[Form]:
    place = case.multiples[0][1]
    if low is None and high is None and not skipped:
        if unit > LARGEST_UNIT:
            refuse(place, f"found {unit}, expected at most {LARGEST_UNIT} for integers without bounds; give bounds")
        return [{"type": "integer", "multipleOf": unit}]
    if low is None or high is None:
        refuse(place, '"multipleOf" with one bound is not built; give minimum and maximum, or neither')
    first, last = -(-low // unit), high // unit
    if last - first >= MOST_VALUES:
        refuse(place, f"more than {MOST_VALUES} multiples between minimum and maximum; bring them nearer")
    found = [unit * each for each in range(first, last + 1) if unit * each not in skipped]
    if not found:
        case.reason = f"no multiple of {unit} is from {low} to {high}"
    return [{"enum": found}] if found else []


def _between(low: Bound | None, high: Bound | None, place: str) -> list[Form]:
    """Return the schema of the numbers between two bounds, which are written with up to six decimals."""
    if low is None and high is None:
        return [{"type": "number"}]
    if low is not None and high is not None:
        if low[0] == high[0]:
            return [] if low[1] or high[1] else [number_form(low[0], place)]
        first, last = exact(low[0]) * DECIMALS, exact(high[0]) * DECIMALS
        from_, to = (
            math.floor(first) + 1 if low[1] else math.ceil(first),
            math.ceil(last) - 1 if high[1] else math.floor(last),
        )
        if from_ > to:
            refuse(
                _place(high, place), f"no number of six decimals is between {low[0]} and {high[0]}; use a wider range"
            )
    form: Form = {"type": "number"}
    if low is not None:
        form["exclusiveMinimum" if low[1] else "minimum"] = _floating(low[0], math.inf)
    if high is not None:
        form["exclusiveMaximum" if high[1] else "maximum"] = _floating(high[0], -math.inf)
    for bound in (low, high):
        if bound is not None and abs(bound[0]) > 1e15:
            refuse(
                _place(bound, place), "bounds of numbers beyond 1e15 are not built; use integers, or a smaller bound"
            )
    return [form]


def _place(bound: Bound | None, place: str) -> str:
    """Return the place of a bound, or this one for a bound that is a value left out."""
    return bound[2] if bound is not None and bound[2] != "not" else place


def _floating(number: float, inwards: float) -> float:
    """Return a number as a float, if it is none the next one inwards."""
    if isinstance(number, float) or abs(number) <= 2**53:
        return number
    try:
        found = float(number)
    except OverflowError:
        return math.copysign(math.inf, number)
    return found if (found >= number if inwards > 0 else found <= number) else math.nextafter(found, inwards)


# ----------------------------------------------------------------------------------------------------- values


def number_form(number: float, place: str) -> Form:
    """Return the schema of one number."""
    if number == int(number) if abs(number) < 2**63 else isinstance(number, int):
        if abs(number) > LARGEST:
            refuse(place, f"{shown(number)} is beyond 64 bits; use a smaller number, or a text")
        return {"enum": [int(number)]}
    if abs(number) < 10**9 and (exact(number) * DECIMALS).denominator == 1:
        return {"type": "number", "minimum": number, "maximum": number}
    return {"enum": [number]}


def value_forms(values: list[Any], place: str) -> list[Form]:
    """Return the schemas of single values: plain ones together, numbers with decimals and compound ones apart."""
    plain: list[Any] = []
    forms: list[Form] = []
    for value in values:
        form = value_form(value, place)
        if form.keys() == {"enum"}:
            plain += form["enum"]
        else:
            forms.append(form)
    return [{"enum": plain}, *forms] if plain else forms


def value_form(value: Any, place: str) -> Form:
    """Return the schema of one value; within lists and objects any whitespace may stand, as elsewhere."""
    if isinstance(value, list):
        items = [value_form(each, place) for each in value]
        prefix = {"prefixItems": items, "minItems": len(items)} if items else {}
        return {"type": "array", **prefix, "items": False}
    if isinstance(value, dict):
        return {
            MARK: json.dumps(value),
            "type": "object",
            "properties": {name: value_form(each, place) for name, each in value.items()},
            "required": list(value),
            "additionalProperties": False,
        }
    if isinstance(value, int | float) and not isinstance(value, bool):
        return number_form(value, place)
    return {"enum": [value]}
