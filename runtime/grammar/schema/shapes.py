"""The shapes of a case: finished schemas of plain values, and lists and objects whose parts are named by their keys."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import combinations, permutations, product
from math import perm
from typing import Any, TypeAlias

from inferc.errors import shown
from inferc.runtime.grammar.schema.automata import TooLargeError, is_never, plain
from inferc.runtime.grammar.schema.cases import Atom, Case, Key, key_of
from inferc.runtime.grammar.schema.documents import refuse
from inferc.runtime.grammar.schema.reader import MOST_CASES, NUMBERS, Reader
from inferc.runtime.grammar.schema.regex import ALL, NEVER, Term, alt, conj, literal, matches, negation
from inferc.runtime.grammar.schema.scalars import Form, UnspelledError, number_forms, text_form, text_term, value_forms
from inferc.runtime.grammar.schema.values import TYPES, distinct

MOST_PATTERNS = 4
MOST_PLACES = 8  # at the begin of a list, for each of which `contains` makes a case
MOST_LISTS = 400
MOST_EXCLUDED = 2_000  # characters of the names that others must differ from


@dataclass
class Leaf:
    """A finished schema. term: that of its texts, if it is of texts alone that are not listed."""

    form: Form
    term: Term | None = None


@dataclass
class ListShape:
    """A list: the items at its begin, and those after, if there may be any."""

    prefix: list[Key]
    rest: Key | None
    least: int
    most: int | None


@dataclass
class ObjectShape:
    """An object. others: the properties beside the named ones, by the term of their names."""

    names: dict[str, Key]
    required: set[str]
    others: list[tuple[Term, Key]]
    least: int
    most: int | None
    place: str
    least_place: str


Shape: TypeAlias = Leaf | ListShape | ObjectShape


@dataclass
class Node:
    """All shapes of a key; `reason` says why one of no shapes admits nothing."""

    place: str
    shapes: list[Shape] = field(default_factory=list)
    reason: str = ""


def node_of(reader: Reader, key: Key, spell: Callable[[Term], str]) -> Node:
    """Return the shapes of the values that hold to all schemas of a key; spell: writes a pattern for the library."""
    place = next((reader.document.schemas[atom.schema].place for atom in key), "#")
    node = Node(place)
    cases = reader.cases(key)
    if any(map(is_free, cases)):
        return Node(place, [Leaf({})])
    for case in cases:
        if case.left_out is None or not case.types:
            node.shapes += _Shaper(reader, case, place, spell).shapes()
            node.reason = node.reason or case.reason
    if not node.shapes:
        for case in cases:
            if case.left_out is not None and case.types:
                refuse(*case.left_out)
    return node


def is_free(case: Case) -> bool:
    """Return whether a case admits every value."""
    return case == Case(reason=case.reason, places=case.places, contained=case.contained)


class _Shaper:
    def __init__(self, reader: Reader, case: Case, place: str, spell: Callable[[Term], str]) -> None:
        self.reader, self.case, self.place, self.spell = reader, case, place, spell

    def shapes(self) -> list[Shape]:
        case = self.case
        if case.values is not None:
            others = case.copy()
            others.values = None  # each is one of them, which would be looked for among all
            found = [value for value in case.values if self.reader.admits_case(others, value)]
            if not found:
                words = (
                    f"none of {len(case.values)} values holds"
                    if len(case.values) != 1
                    else "its one value does not hold"
                )
                case.reason = case.reason or (f"{words} to the rest" if case.values else "no value of enum is left")
            return [Leaf(form) for form in value_forms(found, self.place)]
        shapes: list[Shape] = []
        for kind in TYPES:
            if kind in case.types and kind in case.unbuilt:
                refuse(*case.unbuilt[kind])
        for kind in ("null", "boolean"):
            values = [each for each in ((None,) if kind == "null" else (True, False)) if kind in case.types]
            values = [each for each in values if not any(each is other for other in case.excluded)]
            shapes += [Leaf(form) for form in value_forms(values, self.place)]
        are_left_out = "integer" not in case.types and "number" not in case.places
        if case.types & set(NUMBERS) and not are_left_out:
            shapes += [Leaf(form) for form in number_forms(case, self.place)]
        if "string" in case.types and (texts := text_form(case, self.place, self.spell)) is not None:
            shapes.append(Leaf(*texts))
        for kind in ("array", "object"):
            if kind in case.types:
                self.check_excluded(list if kind == "array" else dict)
                shapes += self.lists() if kind == "array" else self.objects()
        if not shapes and are_left_out and "fraction" in case.types:
            shapes += [Leaf(form) for form in number_forms(case, self.place)]
        return shapes

    def check_excluded(self, kind: type) -> None:
        for each in self.case.excluded:
            if isinstance(each, kind) and self.reader.admits_case(self.case.copy_without_excluded(), each):
                words = "lists" if kind is list else "objects"
                refuse(self.place, f"{words} other than {shown(each)} are not built; name what is allowed with enum")

    # ------------------------------------------------------------------------------------------------- lists

    def lists(self) -> list[Shape]:
        case = self.case
        least, most = case.items
        size = max((len(layer.prefix) for layer in case.layers), default=0)
        prefix = [case.of_item(index) for index in range(size)]
        rest = case.of_item(size)
        if case.unique and (most is None or most > 1):
            return self.different(prefix, rest)
        ways: list[tuple[list[Key], int]] = [(prefix, least)]
        for atom, count, place in case.contains:
            ways = [way for begin, low in ways for way in self.containing(begin, rest, low, atom, count, place)]
            if len(ways) > MOST_CASES:
                hint = f"set maxItems below {MOST_PLACES}"
                refuse(place, f"more than {MOST_CASES} ways in which lists contain what they must; {hint}")
        if most is not None and least > most:
            case.reason = f"minItems {least} is more than maxItems {most}"
        return [ListShape(begin, rest, low, most) for begin, low in ways if most is None or low <= most]

    def different(self, prefix: list[Key], rest: Key) -> list[Shape]:
        """Return all lists of items that differ, if there are few, one by one."""
        case = self.case
        least, most = case.items
        values: list[Any] = []
        for inner in self.reader.cases(rest) if rest and not prefix else [Case()]:
            if inner.values is None:
                refuse(case.unique, "found true, which is built for few values; name them with enum, or leave it out")
            values += [value for value in inner.values if self.reader.admits_case(inner, value)]
        values = distinct(values)
        sizes = range(least, min(len(values), len(values) if most is None else most) + 1)
        if sum(perm(len(values), size) for size in sizes) > MOST_LISTS:
            refuse(
                case.unique, f"found true, with more than {MOST_LISTS} lists that differ; use fewer values, or maxItems"
            )
        lists = [list(each) for size in sizes for each in permutations(values, size)]
        if not lists:
            case.reason = f"minItems {least} is more than there are values, {len(values)}"
        return [
            Leaf(form)
            for form in value_forms([each for each in lists if self.reader.admits_case(case, each)], self.place)
        ]

    def containing(
        self, prefix: list[Key], rest: Key, least: int, atom: Atom, count: int, place: str
    ) -> list[tuple[list[Key], int]]:
        """Return the lists that contain so many items: those of such items alone, or a case for each first place."""
        most = self.case.items[1]
        if self.reader.is_false(atom):
            self.case.reason = f"{place} is false"
            return []
        if most is not None and count > most:
            self.case.reason = f"minContains {count} is more than maxItems {most}"
            return []
        if count <= sum(atom in key for key in prefix[:least]):
            return [(prefix, least)]
        is_any = any(map(is_free, self.reader.cases((atom,))))
        if is_any or (atom in rest and all(atom in key for key in prefix)):
            return [(prefix, max(least, count))]
        if count > MOST_PLACES:
            refuse(place, f"minContains {count} is more than {MOST_PLACES}, among whose places they are looked for")
        ways = []
        for places in combinations(range(MOST_PLACES if most is None else min(most, MOST_PLACES)), count):
            size = places[-1] + 1
            begin = [prefix[each] if each < len(prefix) else rest for each in range(max(size, len(prefix)))]
            for index in places:
                begin[index] = key_of((*begin[index], atom))
            ways.append((begin, max(least, size)))
        return ways

    # ----------------------------------------------------------------------------------------------- objects

    def objects(self) -> list[Shape]:
        case = self.case
        least, most = case.properties
        is_open = any(layer.says_extra for layer in case.layers) or not any(layer.is_naming for layer in case.layers)
        listed, term = self.names()
        named = dict.fromkeys([name for layer in case.layers for name in layer.names] + list(case.required))
        if listed is not None:
            # A finite list of names: each becomes a property of its own, if others than the named ones may be.
            is_named = (
                name for name in listed if is_open or any(matches(t, name) for x in case.layers for t, _ in x.patterns)
            )
            named.update(dict.fromkeys(is_named))
        names: dict[str, Key] = {}
        for name in named:
            if name not in case.forbidden and (name in listed if listed is not None else matches(term, name)):
                names[name] = case.of_name(name)
            elif name in case.required:
                case.reason = f"{shown(name)} is required, and no name that is allowed"
                return []
        others = [] if listed is not None else self.others(term, {*named, *case.forbidden}, is_open)
        if most is not None and max(least, len(case.required)) > most:
            is_least = least >= len(case.required)
            found = (
                f"minProperties {least}" if is_least else f"the number of required properties, {len(case.required)},"
            )
            case.reason = f"{found} is more than maxProperties {most}"
            return []
        return [
            ObjectShape(
                names,
                set(case.required),
                others,
                least,
                most,
                self.place,
                case.places.get(f"properties {least}", self.place),
            )
        ]

    def names(self) -> tuple[list[str] | None, Term]:
        """Return the names that properties may have: a list, or a term."""
        key = key_of(self.case.names)
        cases = self.reader.cases(key) if key else []
        if not key:
            return None, ALL
        cases = [case for case in cases if "string" in case.types]
        if all(case.values is not None for case in cases):
            values = [each for case in cases for each in case.values or () if isinstance(each, str)]
            return [each for each in dict.fromkeys(values) if self.reader.admits(key, each)], NEVER
        place = self.reader.document.schemas[key[0].schema].place
        terms = []
        for case in cases:
            if "string" in case.unbuilt:
                refuse(*case.unbuilt["string"])
            try:
                if case.values is not None:
                    terms += [literal(each) for each in case.values if self.reader.admits(key, each)]
                else:
                    terms.append(text_term(case))
            except UnspelledError as error:
                refuse(place, f"{error}; make it simpler")
        return None, alt(terms)

    def others(self, allowed: Term, named: set[str], is_open: bool) -> list[tuple[Term, Key]]:
        """Return the properties beside the named ones: for each set of patterns, the names that match just those."""
        case = self.case
        terms = list(dict.fromkeys(term for layer in case.layers for term, _ in layer.patterns))
        if len(terms) > MOST_PATTERNS:
            refuse(self.place, f"more than {MOST_PATTERNS} patternProperties hold together; use fewer")
        found: list[tuple[Term, Key]] = []
        for chosen in product((True, False), repeat=len(terms)):
            inside = {term for term, is_in in zip(terms, chosen, strict=True) if is_in}
            if not inside and not is_open:
                continue
            key = key_of(atom for layer in case.layers for atom in self.beside(layer.patterns, layer.extra, inside))
            if any(self.reader.is_false(atom) for atom in key):
                continue
            outside = [term for term in terms if term not in inside]
            if (term := self.region([*inside, allowed], outside, named)) != NEVER:
                found.append((term, key))
        return found

    def beside(self, patterns: list[tuple[Term, Atom]], extra: Atom | None, inside: set[Term]) -> list[Atom]:
        atoms = [atom for term, atom in patterns if term in inside]
        return atoms if atoms or extra is None else [extra]

    def region(self, inside: list[Term], outside: list[Term], named: set[str]) -> Term:
        """Return the names that match all of some terms, none of others, and are not named."""
        try:
            found = plain(conj(inside))
            apart = [term for term in outside if not is_never(conj((found, term)))]
            found = plain(conj((found, *map(negation, apart)))) if apart else found
            same = sorted(name for name in named if matches(found, name))
            if not same:
                return found
            if sum(map(len, same)) > MOST_EXCLUDED:
                raise TooLargeError
            if found == ALL:
                return but(same)
            return plain(conj((found, negation(alt(map(literal, same))))))
        except TooLargeError:
            hint = "make the patterns simpler, or set additionalProperties to false"
            refuse(self.place, f"the names of other properties cannot be told from those named and matched; {hint}")


def but(names: list[str]) -> Term:
    """Return the term of all texts but some: after each begin that they share, what is none of them."""
    from inferc.runtime.grammar.schema.regex import ANY, EMPTY, chars, repeat, seq, without

    def after(index: int, rest: list[str]) -> Term:
        by_char: dict[str, list[str]] = {}
        for name in rest:
            if len(name) > index:
                by_char.setdefault(name[index], []).append(name)
        used = tuple((ord(char), ord(char)) for char in by_char)
        ways = [seq((chars(without(ANY.ranges, used)), repeat(ANY, 0, None)))]
        ways += [seq((literal(char), after(index + 1, held))) for char, held in by_char.items()]
        return alt(ways if any(len(name) == index for name in rest) else [EMPTY, *ways])

    if max(map(len, names)) > 64:
        raise TooLargeError
    return after(0, names)
