"""The cases of schemas that hold together, read keyword by keyword."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from inferc.errors import RequestError, shown
from inferc.runtime.grammar.schema.automata import TooLargeError, is_never
from inferc.runtime.grammar.schema.cases import Atom, Case, Chain, Key, Layer, admits, key_of
from inferc.runtime.grammar.schema.documents import Document, refuse, step
from inferc.runtime.grammar.schema.ecma import PatternError, pattern_term
from inferc.runtime.grammar.schema.formats import FORMATS, format_term
from inferc.runtime.grammar.schema.regex import Term, conj
from inferc.runtime.grammar.schema.values import OF_KEYWORD, TYPES, distinct

MOST_CASES = 256
MOST_COUNT = 4_096
APART_DEPTH = 3
NUMBERS = ("integer", "fraction")

Action: TypeAlias = Callable[[Case, Chain], None]
Step: TypeAlias = Atom | Action


@dataclass
class Parts:
    """The meaning of one schema: what holds at once, what is chosen from, and what is known after all else."""

    steps: list[Step] = field(default_factory=list)
    choices: list[tuple[str, list[list[Step]]]] = field(default_factory=list)
    late: list[Action] = field(default_factory=list)


@dataclass
class _Way:
    case: Case
    pending: list[tuple[Step, Chain]]
    choices: list[tuple[str, list[list[Step]], Chain]]
    late: list[tuple[Action, Chain]]
    seen: set[Atom]


class Reader:
    """Reads a document's schemas as cases. A lenient one may admit more: it refuses nothing for how it is combined."""

    def __init__(self, document: Document, read: Callable[[Reader, Atom], Parts], is_lenient: bool = False) -> None:
        self.document, self.is_lenient = document, is_lenient
        self._read = read
        self._parts: dict[Atom, Parts] = {}
        self._cases: dict[Key, list[Case]] = {}
        self._lenient = self if is_lenient else Reader(document, read, True)
        self._apart: dict[tuple[Key, int], bool] = {}

    def cases(self, key: Key) -> list[Case]:
        """Return the cases in which all schemas of a key hold; those that admit nothing for their types included."""
        if key not in self._cases:
            self._cases[key] = self._expand(key)
        return self._cases[key]

    def admits(self, key: Key, value: Any) -> bool:
        """Return whether a value holds to all schemas of a key."""
        return any(admits(case, value, self.admits) for case in self.cases(key))

    def admits_case(self, case: Case, value: Any) -> bool:
        """Return whether a value holds to all limits of a case."""
        return admits(case, value, self.admits)

    def is_false(self, atom: Atom) -> bool:
        """Return whether an atom is the schema false itself."""
        return self.document.schemas[atom.schema].raw is (not atom.holds)

    def are_apart(self, left: Atom, right: Atom) -> bool:
        """Return whether it is plain that no value holds to both schemas."""
        return self._lenient.is_plainly_empty(key_of((left, right)), APART_DEPTH)

    def parts(self, atom: Atom) -> Parts:
        if atom not in self._parts:
            self._parts[atom] = self._read(self, atom)
        return self._parts[atom]

    def _expand(self, key: Key) -> list[Case]:
        done: list[Case] = []
        todo = [_Way(Case(), [(atom, ()) for atom in reversed(key)], [], [], set())]
        forks = 0
        while todo:
            way = todo.pop()
            self._follow(way)
            if not way.choices or not way.case.types:
                for action, chain in reversed(way.late):
                    action(way.case, chain)
                _settle(way.case)
                done.append(way.case)
                continue
            place, options, chain = way.choices[0]
            forks += len(options)
            if forks > MOST_CASES:
                if self.is_lenient:
                    return [Case()]
                refuse(place, f"the alternatives here multiply to more than {MOST_CASES}; state them in one place")
            for option in reversed(options):
                pending = [(each, chain) for each in reversed(option)]
                todo.append(_Way(way.case.copy(), pending, way.choices[1:], [*way.late], set(way.seen)))
            if not options:
                done.append(Case(types=set(), reason="none of no alternatives holds"))
        return done

    def _follow(self, way: _Way) -> None:
        """Take all steps of a way up to its next choice."""
        while way.pending:
            each, chain = way.pending.pop()
            if not isinstance(each, Atom):
                each(way.case, chain)
                continue
            if each in chain:
                refuse(self.document.schemas[each.schema].place, "refers to itself without end; put a property between")
            if each in way.seen:
                continue
            way.seen.add(each)
            chain = (*chain, each)
            parts = self.parts(each)
            way.pending += [(inner, chain) for inner in reversed(parts.steps)]
            way.choices += [(place, options, chain) for place, options in parts.choices]
            way.late += [(action, chain) for action in parts.late]
        _settle(way.case)

    def is_plainly_empty(self, key: Key, depth: int) -> bool:
        """Return whether no value holds to a key, looking only so many levels down; False if that is not plain."""
        if depth == 0:
            return False
        if (key, depth) not in self._apart:
            self._apart[key, depth] = all(self._is_empty_case(case, depth) for case in self.cases(key))
        return self._apart[key, depth]

    def _is_empty_case(self, case: Case, depth: int) -> bool:
        if case.values is not None:
            try:
                return not any(admits(case, value, self.admits) for value in case.values)
            except RequestError:
                return False
        return all(self._is_empty_type(case, each, depth) for each in case.types)

    def _is_empty_type(self, case: Case, kind: str, depth: int) -> bool:
        if kind in NUMBERS:
            return bool(case.range_fault())
        if kind == "string":
            (least, most), terms = case.lengths, [term for term, _ in case.terms]
            return (most is not None and least > most) or (len(terms) > 1 and _is_plainly_never(conj(terms)))
        if kind == "array":
            least, most = case.items
            inner = range(min(least, max((len(layer.prefix) for layer in case.layers), default=0) + 1))
            return (most is not None and least > most) or any(
                self.is_plainly_empty(case.of_item(index), depth - 1) for index in inner
            )
        if kind == "object":
            least, most = case.properties
            return (most is not None and max(least, len(case.required)) > most) or any(
                self.is_plainly_empty(case.of_name(name), depth - 1) for name in case.required
            )
        return False


def _is_plainly_never(term: Term) -> bool:
    try:
        return is_never(term)
    except TooLargeError:
        return False


def _settle(case: Case) -> None:
    """Leave out the types that a case has no values of."""
    for name in case.required:
        if name in case.forbidden and "object" in case.types:
            case.only(case.types - {"object"})
            case.reason = case.reason or f"{shown(name)} is required and may not be there"


# --------------------------------------------------------------------------------------------------- keywords


class Keywords:
    """The keywords of one schema, each checked as it is read."""

    def __init__(self, raw: dict[str, Any], place: str) -> None:
        self.raw, self.place = raw, place

    def fault(self, name: str, expected: str) -> None:
        refuse(step(self.place, name), f"expected {expected}, found {shown(self.raw[name])}")

    def types(self) -> tuple[str, ...]:
        given = self.raw["type"] if isinstance(self.raw["type"], list) else [self.raw["type"]]
        found: list[str] = []
        for each in given:
            if not isinstance(each, str) or each not in OF_KEYWORD:
                refuse(step(self.place, "type"), f"expected {', '.join(sorted(OF_KEYWORD))}, found {shown(each)}")
            found += OF_KEYWORD[each]
        return tuple(found)

    def values(self) -> list[list[Any]]:
        """Return the lists of values that enum and const give."""
        found = []
        if "enum" in self.raw:
            if not isinstance(self.raw["enum"], list):
                self.fault("enum", "a list of values")
            found.append(distinct(self.raw["enum"]))
        return [*found, [self.raw["const"]]] if "const" in self.raw else found

    def number(self, name: str) -> float:
        if isinstance(self.raw[name], bool) or not isinstance(self.raw[name], int | float):
            self.fault(name, "a number")
        return self.raw[name]  # type: ignore[no-any-return]

    def unit(self) -> float:
        if (unit := self.number("multipleOf")) <= 0:
            self.fault("multipleOf", "a number above 0")
        return unit

    def count(self, name: str) -> int:
        found = self.number(name)
        if found < 0 or found != int(found):
            self.fault(name, "a count")
        if found > MOST_COUNT:
            refuse(
                step(self.place, name),
                f"found {shown(found)}, expected at most {MOST_COUNT}; leave it out, or lower it",
            )
        return int(found)

    def text(self, name: str) -> str:
        if not isinstance(self.raw[name], str):
            self.fault(name, "a text")
        return str(self.raw[name])

    def names(self, name: str, held: Any = None) -> list[str]:
        found = self.raw[name] if held is None else held
        if not isinstance(found, list) or not all(isinstance(each, str) for each in found):
            self.fault(name, "a list of names")
        return [str(each) for each in found]

    def pattern(self, is_widest: bool = False) -> Term:
        try:
            return pattern_term(self.text("pattern"), is_widest)
        except PatternError as error:
            refuse(step(self.place, "pattern"), str(error))

    def name_pattern(self, pattern: str) -> Term:
        try:
            return pattern_term(pattern)
        except PatternError as error:
            refuse(step(self.place, "patternProperties", pattern), str(error))

    def format(self) -> Term | None:
        name = self.text("format")
        return format_term(name) if name in FORMATS else None


def layer_of(words: Keywords, document: Document, chain: Chain) -> Layer | None:
    """Return the layer that a schema's own keywords make, or None."""
    raw, place = words.raw, words.place

    def atom(*names: str | int) -> Atom:
        return Atom(document.number(step(place, *names)))

    layer = Layer(chain)
    for name in raw.get("properties", ()):
        layer.names[name] = [atom("properties", name)]
    for pattern in raw.get("patternProperties", ()):
        layer.patterns.append((words.name_pattern(pattern), atom("patternProperties", pattern)))
    layer.is_naming = bool(layer.names or layer.patterns)
    if "additionalProperties" in raw:
        layer.extra, layer.says_extra = atom("additionalProperties"), True
    listed = "items" if isinstance(raw.get("items"), list) else "prefixItems"
    layer.prefix = [atom(listed, index) for index in range(len(raw.get(listed, ())))]
    rest = "additionalItems" if listed == "items" else "items"
    if rest in raw:
        layer.rest = atom(rest)
    is_said = layer.is_naming or layer.says_extra or layer.prefix or layer.rest
    return layer if is_said else None


def types_but(types: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(each for each in TYPES if each not in types)
