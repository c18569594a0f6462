"""Conjunctions of schemas as cases: in each case all that must hold is a plain list of limits of each type.

A case is one way through the alternatives (anyOf, oneOf, if, what a negation leaves open). What it says of a type
matters only to values of that type.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from inferc.errors import shown
from inferc.runtime.grammar.schema.documents import refuse
from inferc.runtime.grammar.schema.regex import Term, matches
from inferc.runtime.grammar.schema.values import TYPES, among, is_multiple, same, type_of


@dataclass(frozen=True, order=True)
class Atom:
    """A schema by its number, that holds or that does not."""

    schema: int
    holds: bool = True


Key: TypeAlias = tuple[Atom, ...]  # schemas that hold together, sorted


def key_of(atoms: Iterable[Atom]) -> Key:
    return tuple(sorted(set(atoms)))


Bound: TypeAlias = tuple[float, bool, str]  # the number, whether itself is outside, the place of the keyword
Chain: TypeAlias = tuple[Atom, ...]


@dataclass
class Layer:
    """The keywords of one schema that give an object's or a list's parts their schemas.

    is_naming: whether it names properties, so that others than the named ones are left out unless a layer says more.
    chain: the schema itself and those in place of which it stands.
    """

    chain: Chain = ()
    names: dict[str, list[Atom]] = field(default_factory=dict)
    patterns: list[tuple[Term, Atom]] = field(default_factory=list)
    extra: Atom | None = None
    is_naming: bool = False
    says_extra: bool = False
    prefix: list[Atom] = field(default_factory=list)
    rest: Atom | None = None

    def of_name(self, name: str) -> list[Atom]:
        """Return the schemas of the property with this name."""
        found = [*self.names.get(name, ()), *(atom for term, atom in self.patterns if matches(term, name))]
        is_named = bool(found) or name in self.names
        return found if is_named or self.extra is None else [self.extra]

    def of_item(self, index: int) -> list[Atom]:
        """Return the schemas of the item at an index."""
        if index < len(self.prefix):
            return [self.prefix[index]]
        return [] if self.rest is None else [self.rest]


@dataclass
class Case:
    """The limits of one case.

    unbuilt: by type, the place and the words of what its values cannot be held to.
    left_out: of such a case that is left out if any other admits something.
    contained: the schemas that `contains` names, which rule nothing out: unevaluatedItems leaves out items that hold.
    places: of the keywords that refusals name: of "properties 3" (at least three), "integer" (a type that is ruled
    out), "number" (one that is asked for).
    """

    types: set[str] = field(default_factory=lambda: set(TYPES))
    values: list[Any] | None = None
    excluded: list[Any] = field(default_factory=list)
    low: Bound | None = None
    high: Bound | None = None
    multiples: list[tuple[float, str]] = field(default_factory=list)
    terms: list[tuple[Term, str]] = field(default_factory=list)
    lengths: tuple[int, int | None] = (0, None)
    items: tuple[int, int | None] = (0, None)
    properties: tuple[int, int | None] = (0, None)
    layers: list[Layer] = field(default_factory=list)
    contains: list[tuple[Atom, int, str]] = field(default_factory=list)
    contained: list[tuple[Chain, Atom]] = field(default_factory=list)
    unique: str = ""
    required: dict[str, None] = field(default_factory=dict)
    forbidden: set[str] = field(default_factory=set)
    names: list[Atom] = field(default_factory=list)
    unbuilt: dict[str, tuple[str, str]] = field(default_factory=dict)
    left_out: tuple[str, str] | None = None
    places: dict[str, str] = field(default_factory=dict)
    reason: str = ""

    def copy(self) -> Case:
        found = copy.copy(self)
        for name, held in vars(self).items():
            if isinstance(held, list | dict | set):
                setattr(found, name, copy.copy(held))
        return found

    def copy_without_excluded(self) -> Case:
        found = self.copy()
        found.excluded = []
        return found

    def only(self, types: Iterable[str]) -> None:
        left = self.types & set(types)
        if self.types and not left:
            found = ", ".join(sorted(self.types))
            self.reason = self.reason or f"{found} is not {' or '.join(sorted(types)) or 'anything'}"
        self.types = left

    def choose(self, values: list[Any]) -> None:
        before = self.values
        self.values = list(values) if before is None else [each for each in before if among(each, values)]

    def over(self, bound: Bound) -> None:
        """Hold numbers to a lower bound."""
        if self.low is None or bound[0] > self.low[0] or (bound[0] == self.low[0] and bound[1]):
            self.low = bound

    def under(self, bound: Bound) -> None:
        """Hold numbers to an upper bound."""
        if self.high is None or bound[0] < self.high[0] or (bound[0] == self.high[0] and bound[1]):
            self.high = bound

    def between(self, what: str, least: int = 0, most: int | None = None) -> None:
        """Hold `lengths`, `items` or `properties` to a range."""
        low, high = getattr(self, what)
        ends = [each for each in (high, most) if each is not None]
        setattr(self, what, (max(low, least), min(ends) if ends else None))

    def of_name(self, name: str) -> Key:
        return key_of(atom for layer in self.layers for atom in layer.of_name(name))

    def of_item(self, index: int) -> Key:
        return key_of(atom for layer in self.layers for atom in layer.of_item(index))

    def range_fault(self) -> str:
        """Return why no number is within the bounds, or nothing."""
        if self.low is None or self.high is None:
            return ""
        (low, is_over, lower), (high, is_under, upper) = self.low, self.high
        if low > high or (low == high and (is_over or is_under)):
            lower, upper = lower.rpartition("/")[2], upper.rpartition("/")[2]
            return f"{lower} {shown(low)} is {'more than' if low > high else 'no less than'} {upper} {shown(high)}"
        return ""


Judge: TypeAlias = Callable[[Key, Any], bool]


def admits(case: Case, value: Any, judge: Judge) -> bool:
    """Return whether a value holds to all limits of a case; `judge` says it of a value within."""
    kind = type_of(value)
    if kind not in case.types or case.left_out is not None or among(value, case.excluded):
        return False
    if case.values is not None and not among(value, case.values):
        return False
    if kind in case.unbuilt:
        refuse(*case.unbuilt[kind])
    if kind in ("integer", "fraction"):
        return _admits_number(case, value)
    if kind == "string":
        return _is_within(len(value), case.lengths) and all(matches(term, value) for term, _ in case.terms)
    if kind == "array":
        return _admits_list(case, value, judge)
    return kind != "object" or _admits_object(case, value, judge)


def _is_within(count: int, bounds: tuple[int, int | None]) -> bool:
    return bounds[0] <= count and (bounds[1] is None or count <= bounds[1])


def _admits_number(case: Case, value: float) -> bool:
    if case.low is not None and (value < case.low[0] or (value == case.low[0] and case.low[1])):
        return False
    if case.high is not None and (value > case.high[0] or (value == case.high[0] and case.high[1])):
        return False
    return all(is_multiple(value, unit) for unit, _ in case.multiples)


def _admits_list(case: Case, value: list[Any], judge: Judge) -> bool:
    if not _is_within(len(value), case.items):
        return False
    if case.unique and any(same(each, other) for index, each in enumerate(value) for other in value[:index]):
        return False
    if not all(judge(case.of_item(index), each) for index, each in enumerate(value)):
        return False
    return all(sum(judge((atom,), each) for each in value) >= least for atom, least, _ in case.contains)


def _admits_object(case: Case, value: dict[str, Any], judge: Judge) -> bool:
    if not _is_within(len(value), case.properties) or case.forbidden & value.keys():
        return False
    if any(name not in value for name in case.required):
        return False
    names = key_of(case.names)
    return all((not names or judge(names, name)) and judge(case.of_name(name), each) for name, each in value.items())
