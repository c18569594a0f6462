"""The meaning of each keyword of JSON Schema: what must hold where the schema does, and where it does not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from inferc.runtime.grammar.schema.cases import Atom, Case, Chain, Layer
from inferc.runtime.grammar.schema.documents import step
from inferc.runtime.grammar.schema.formats import FORMATS
from inferc.runtime.grammar.schema.reader import (
    NUMBERS,
    Action,
    Keywords,
    Parts,
    Reader,
    Step,
    layer_of,
    types_but,
)
from inferc.runtime.grammar.schema.regex import Term, negation
from inferc.runtime.grammar.schema.values import TYPES

LEAVE_OUT = "is not built; leave it out, or name what is allowed with enum"


def parts_of(reader: Reader, atom: Atom) -> Parts:
    """Return what a schema, or its negation, says."""
    schema = reader.document.schemas[atom.schema]
    if (numbers := reader.document.alternatives.get(atom.schema)) is not None:
        atoms = [Atom(number, atom.holds) for number in numbers]
        return Parts(choices=[(schema.place, [[each] for each in atoms])]) if atom.holds else Parts([*atoms])
    if isinstance(schema.raw, bool):
        words = f"{schema.place} is false" if atom.holds else f"not {schema.place}, which is true"
        return Parts() if schema.raw == atom.holds else Parts([_nothing(words)])
    words_ = Keywords(schema.raw, schema.place)
    return _Holds(reader, atom, words_).parts if atom.holds else _negated(reader, atom, words_)


def _nothing(reason: str) -> Action:
    def act(case: Case, chain: Chain) -> None:
        case.reason = case.reason or reason
        case.types = set()

    return act


def _do(act: Callable[[Case], Any]) -> Action:
    return lambda case, chain: act(case) and None


def _only(*types: str) -> Action:
    return lambda case, chain: case.only(types)


def _forbid(name: str) -> Action:
    return lambda case, chain: case.forbidden.add(name)


def _require(*names: str) -> Action:
    return lambda case, chain: case.required.update(dict.fromkeys(names))


def _unbuilt(place: str, words: str, *types: str) -> Action:
    def act(case: Case, chain: Chain) -> None:
        case.unbuilt.update(dict.fromkeys(types, (place, words)))

    return act


def _leave_out(place: str, words: str) -> Action:
    return _do(lambda case: setattr(case, "left_out", (place, words)))


def _bound(place: str, number: float, is_low: bool, is_outside: bool) -> Action:
    def act(case: Case, chain: Chain) -> None:
        (case.over if is_low else case.under)((number, is_outside, place))

    return act


def _between(place: str, what: str, least: int = 0, most: int | None = None) -> Action:
    def act(case: Case, chain: Chain) -> None:
        case.between(what, least, most)
        if least:
            case.places.setdefault(f"{what} {least}", place)

    return act


def _placed(name: str, place: str) -> Action:
    return _do(lambda case: case.places.setdefault(name, place))


def _term(term: Term, place: str) -> Action:
    return lambda case, chain: case.terms.append((term, place))


BOUNDS = {
    "minimum": (True, False),
    "exclusiveMinimum": (True, True),
    "maximum": (False, False),
    "exclusiveMaximum": (False, True),
}
COUNTS = {
    "minLength": ("string", "lengths", True),
    "maxLength": ("string", "lengths", False),
    "minItems": ("array", "items", True),
    "maxItems": ("array", "items", False),
    "minProperties": ("object", "properties", True),
    "maxProperties": ("object", "properties", False),
}


class _Holds:
    """Reads a schema that holds."""

    def __init__(self, reader: Reader, atom: Atom, words: Keywords) -> None:
        self.reader, self.words, self.atom = reader, words, atom
        self.raw, self.place = words.raw, words.place
        self.parts = Parts()
        self.typed()
        self.parts.steps.append(self.layer)
        self.lists()
        self.objects()
        self.combined()

    def inner(self, *names: str | int) -> Atom:
        return Atom(self.reader.document.number(step(self.place, *names)))

    def typed(self) -> None:
        words, steps = self.words, self.parts.steps
        if "type" in self.raw:
            steps.append(_only(*words.types()))
            if "fraction" in words.types():
                steps.append(_placed("number", step(self.place, "type")))
        for values in words.values():
            steps.append(_choose(values))
        for name, (is_low, is_outside) in BOUNDS.items():
            if name in self.raw:
                steps.append(_bound(step(self.place, name), words.number(name), is_low, is_outside))
        if "multipleOf" in self.raw:
            unit = (words.unit(), step(self.place, "multipleOf"))
            steps.append(_do(lambda case: case.multiples.append(unit)))
        for name, (_, what, is_least) in COUNTS.items():
            if name in self.raw:
                count = words.count(name)
                ends = (count, None) if is_least else (0, count)
                steps.append(_between(step(self.place, name), what, *ends))
        if "pattern" in self.raw:
            steps.append(_term(words.pattern(), step(self.place, "pattern")))
        if "format" in self.raw and (term := words.format()) is not None:
            steps.append(_term(term, step(self.place, "format")))

    def layer(self, case: Case, chain: Chain) -> None:
        if (layer := layer_of(self.words, self.reader.document, chain)) is not None:
            case.layers.append(layer)

    def lists(self) -> None:
        if self.raw.get("uniqueItems") is True:
            unique = step(self.place, "uniqueItems")
            self.parts.steps.append(_do(lambda case: setattr(case, "unique", unique)))
        if "contains" in self.raw:
            least = self.words.count("minContains") if "minContains" in self.raw else 1
            atom = self.inner("contains")
            needed = (atom, least, step(self.place, "contains"))
            if least:
                self.parts.steps.append(_do(lambda case: case.contains.append(needed)))
            if self.reader.document.evaluates_contained:
                self.parts.steps.append(lambda case, chain: case.contained.append((chain, atom)))
            if "maxContains" in self.raw:
                place = step(self.place, "maxContains")
                self.parts.steps.append(_unbuilt(place, f'"maxContains" {LEAVE_OUT}', "array"))
        if "unevaluatedItems" in self.raw:
            self.parts.late.append(self.unevaluated_items)

    def objects(self) -> None:
        if "required" in self.raw:
            self.parts.steps.append(_require(*self.words.names("required")))
        if "propertyNames" in self.raw:
            atom = self.inner("propertyNames")
            self.parts.steps.append(_do(lambda case: case.names.append(atom)))
        for keyword in ("dependentRequired", "dependentSchemas", "dependencies"):
            if not isinstance(held := self.raw.get(keyword, {}), dict):
                self.words.fault(keyword, "an object")
            for name, needed in held.items():
                place = step(self.place, keyword, name)
                then: list[Step] = [_only("object"), _require(name)]
                if keyword == "dependentSchemas" or not isinstance(needed, list):
                    then.append(Atom(self.reader.document.number(place)))
                else:
                    then.append(_require(*self.words.names(keyword, needed)))
                self.parts.choices.append((place, [[_forbid(name)], then]))
        if "unevaluatedProperties" in self.raw:
            self.parts.late.append(self.unevaluated_properties)

    def combined(self) -> None:
        steps, choices, place = self.parts.steps, self.parts.choices, self.place
        for keyword in ("$ref", "$dynamicRef"):
            if keyword in self.raw:
                steps.append(Atom(self.reader.document.target(self.atom.schema, keyword)))
        steps += [self.inner("allOf", index) for index in range(len(self.raw.get("allOf", ())))]
        if "not" in self.raw:
            steps.append(Atom(self.inner("not").schema, False))
        if "anyOf" in self.raw:
            options = [[self.inner("anyOf", index)] for index in range(len(self.raw["anyOf"]))]
            choices.append((step(place, "anyOf"), [list[Step](option) for option in options]))
        if "oneOf" in self.raw:
            choices.append((step(place, "oneOf"), self.one_of()))
        if "if" in self.raw and ("then" in self.raw or "else" in self.raw):
            holds, fails = self.inner("if"), Atom(self.inner("if").schema, False)
            then: list[Step] = [holds, self.inner("then")] if "then" in self.raw else [holds]
            other: list[Step] = [fails, self.inner("else")] if "else" in self.raw else [fails]
            choices.append((step(place, "if"), [then, other]))

    def one_of(self) -> list[list[Step]]:
        """Return a branch at a time, with the negation of those that it is not plainly apart from."""
        branches = [self.inner("oneOf", index) for index in range(len(self.raw["oneOf"]))]
        options: list[list[Step]] = [[each] for each in branches]
        if self.reader.is_lenient:
            return options
        for index, each in enumerate(branches):
            for other in range(index):
                if not self.reader.are_apart(branches[other], each):
                    options[index].append(Atom(branches[other].schema, False))
                    options[other].append(Atom(each.schema, False))
        return options

    def evaluated(self, case: Case) -> list[Layer]:
        """Return the layers of what stands in this schema's place, without those within a negation."""
        return [layer for layer in case.layers if self.is_in_place(layer.chain)]

    def is_in_place(self, chain: Chain) -> bool:
        """Return whether what a chain leads to stands in this schema's place, and not within a negation."""
        return self.atom in chain and all(atom.holds for atom in chain[chain.index(self.atom) :])

    def unevaluated_items(self, case: Case, chain: Chain) -> None:
        layers = self.evaluated(case)
        if not any(layer.rest for layer in layers):
            known = max((len(layer.prefix) for layer in layers), default=0)
            prefix = [Atom(self.reader.document.true)] * known
            numbers = [self.inner("unevaluatedItems").schema]
            numbers += [atom.schema for inner, atom in case.contained if self.is_in_place(inner)]
            number = numbers[0] if len(numbers) == 1 else self.reader.document.any_of(numbers)
            case.layers.append(Layer(chain, prefix=prefix, rest=Atom(number)))

    def unevaluated_properties(self, case: Case, chain: Chain) -> None:
        layers = self.evaluated(case)
        if not any(layer.extra for layer in layers):
            names: dict[str, list[Atom]] = {name: [] for layer in layers for name in layer.names}
            true = Atom(self.reader.document.true)
            patterns = [(term, true) for layer in layers for term, _ in layer.patterns]
            extra = self.inner("unevaluatedProperties")
            case.layers.append(Layer(chain, names, patterns, extra, says_extra=True))


def _choose(values: list[Any]) -> Action:
    return lambda case, chain: case.choose(values)


# --------------------------------------------------------------------------------------------------- negations


def _negated(reader: Reader, atom: Atom, words: Keywords) -> Parts:
    """Return the ways in which a schema does not hold: each is one keyword that does not."""
    options = list(_ways(reader, words, atom))
    if not options:
        return Parts([_nothing(f"not {words.place}, which admits everything")])
    return Parts(choices=[(words.place, options)])


def _ways(reader: Reader, words: Keywords, atom: Atom) -> list[list[Step]]:
    raw, place, number = words.raw, words.place, reader.document.number

    def other(*names: str | int, holds: bool = False) -> Atom:
        return Atom(number(step(place, *names)), holds)

    ways: list[list[Step]] = []
    if "type" in raw:
        ways.append([_only(*types_but(words.types())), _placed("integer", step(place, "type"))])
    for values in words.values():
        ways.append([_do(lambda case, values=values: case.excluded.extend(values))])  # type: ignore[misc]
    for name, (is_low, is_outside) in BOUNDS.items():
        if name in raw:
            ways.append([_only(*NUMBERS), _bound(step(place, name), words.number(name), not is_low, not is_outside)])
    for name, (kind, what, is_least) in COUNTS.items():
        if name in raw and (count := words.count(name)) >= is_least:
            ends = (0, count - 1) if is_least else (count + 1, None)
            ways.append([_only(kind), _between(step(place, name), what, *ends)])
    if "pattern" in raw:
        ways.append([_only("string"), _term(negation(words.pattern(is_widest=True)), step(place, "pattern"))])
    for name in raw.get("properties", ()):
        names = {name: [other("properties", name)]}
        ways.append([_only("object"), _require(name), _layer(names=names)])
    for name in words.names("required") if "required" in raw else ():
        ways.append([_only("object"), _forbid(name)])
    for index in range(len(raw.get("prefixItems", ()))):
        prefix = [*[Atom(reader.document.true)] * index, other("prefixItems", index)]
        ways.append([_only("array"), _between(step(place, "prefixItems"), "items", index + 1), _layer(prefix=prefix)])
    if "contains" in raw and "minContains" not in raw and "maxContains" not in raw:
        ways.append([_only("array"), _layer(rest=other("contains"))])
    for keyword in ("$ref", "$dynamicRef"):
        if keyword in raw:
            ways.append([Atom(reader.document.target(atom.schema, keyword), False)])
    ways += [[other("allOf", index)] for index in range(len(raw.get("allOf", ())))]
    if "anyOf" in raw:
        ways.append([other("anyOf", index) for index in range(len(raw["anyOf"]))])
    if "not" in raw:
        ways.append([other("not", holds=True)])
    return ways + _unbuilt_ways(words, bool(ways))


def _layer(**held: Any) -> Action:
    return lambda case, chain: case.layers.append(Layer(chain, **held))


def _unbuilt_ways(words: Keywords, are_others: bool) -> list[list[Step]]:
    """Return the ways that are refused when they are needed.

    What else an object could have that is closed is left out instead, if anything else is left.
    """
    raw, found = words.raw, []
    kinds: dict[str, tuple[str, ...]] = {
        "multipleOf": NUMBERS,
        "items": ("array",),
        "uniqueItems": ("array",) if raw.get("uniqueItems") is True else (),
        "unevaluatedItems": ("array",),
        "patternProperties": ("object",),
        "propertyNames": ("object",),
        "additionalProperties": ("object",),
        "unevaluatedProperties": ("object",),
        "dependentRequired": ("object",),
        "dependentSchemas": ("object",),
        "dependencies": ("object",),
        "oneOf": TYPES,
        "if": TYPES if "then" in raw or "else" in raw else (),
        "format": ("string",) if raw.get("format") in FORMATS else (),
    }
    if "minContains" in raw or "maxContains" in raw:
        kinds["contains"] = ("array",)
    for keyword, types in kinds.items():
        place, text = step(words.place, keyword), f'the negation of "{keyword}" (by not, oneOf or if) {LEAVE_OUT}'
        if keyword in raw and types:
            is_closed = are_others and raw[keyword] is False
            refusal = _leave_out(place, text) if is_closed else _unbuilt(place, text, *types)
            found.append([_only(*types), refusal])
    return [list[Step](each) for each in found]
