"""Forms whose forced texts are short: of others a library could write one without end, or for hours.

A text is forced where a form leaves no choice. `root ::= "a" root` leaves none for ever, and rules that name the next
one twice make it double with each. Whether a form can is told before, from the least length of each of its parts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from inferc.chat.argument_tags import argument_tags_of
from inferc.errors import RequestError
from inferc.runtime.grammar.lark.gbnf import least_of_rules
from inferc.runtime.grammar.lark.terms import greatest_part
from inferc.runtime.grammar.schema.automata import TooLargeError, lengths
from inferc.runtime.grammar.schema.ecma import PatternError, pattern_term
from inferc.runtime.grammar.schema.exact import exact_schema
from inferc.runtime.grammar.schema.regex import Term
from inferc.runtime.grammar.schema.tagged import tagged_arguments
from inferc.runtime.grammar.tags import ARGUMENTS
from inferc.runtime.step.structured_outputs import StructuredOutputs

MOST = 16_384  # characters
LONG = MOST + 1  # stands for any greater length


def is_forced_text_short(wanted: StructuredOutputs) -> bool:
    """Return whether no part of a form must be longer than `MOST`; False if that is not plain."""
    kind, source = wanted.kind, wanted.source
    try:
        if kind == "json":
            return _of_schema(json.loads(source)) <= MOST
        if kind == "structural_tag":
            return _of_format(json.loads(source)) <= MOST
        if kind == "regex":
            return greatest_part(pattern_term(f"^({source})$")) <= MOST
        if kind == "ebnf":
            return least_of_rules(source, LONG) <= MOST
    except (RequestError, PatternError, TooLargeError, RecursionError, TypeError, ValueError):
        return False
    return kind in ("choice", "json_object")


def _of_schema(schema: Any) -> int:
    """Return the greatest of the least lengths of all parts of a schema."""
    terms = _Terms()
    return terms.greatest(exact_schema(schema, terms.spell))


class _Terms:
    """The patterns of rewritten schemas, each written as its number."""

    def __init__(self) -> None:
        self._numbers: dict[Term, str] = {}

    def spell(self, term: Term) -> str:
        return self._numbers.setdefault(term, str(len(self._numbers)))

    def greatest(self, form: Mapping[str, Any]) -> int:
        """Return the greatest of the least lengths of all parts of a rewritten schema."""
        return _Schema(list(self._numbers), form.get("$defs", {})).greatest(form)


class _Schema:
    def __init__(self, terms: list[Term], forms: Mapping[str, Any]) -> None:
        self._terms, self._forms = terms, forms
        self._known: dict[str, int] = {}
        self._greatest = 0

    def greatest(self, form: Mapping[str, Any]) -> int:
        for name in self._forms:
            self._least({"$ref": f"#/$defs/{name}"})
        self._least(form)
        return self._greatest

    def _least(self, form: Mapping[str, Any]) -> int:
        found = min(LONG, self._of(form))
        if found < LONG or "$ref" not in form:  # a reference to what is being looked at is no way that ends
            self._greatest = max(self._greatest, found)
        return found

    def _of(self, form: Mapping[str, Any]) -> int:
        if "$ref" in form:
            name = form["$ref"].removeprefix("#/$defs/")
            if name not in self._known:
                self._known[name] = LONG
                self._known[name] = self._least(self._forms[name])
            return self._known[name]
        if "anyOf" in form:
            return min(map(self._least, form["anyOf"]))
        if "enum" in form:
            return min(len(json.dumps(each)) for each in form["enum"])
        if "pattern" in form:
            term = self._terms[int(form["pattern"])]
            self._greatest = max(self._greatest, min(LONG, greatest_part(term)))
            return 2 + lengths(term)[0]
        if form.get("type") == "array":
            items = [self._least(each) for each in form.get("prefixItems", ())]
            least = int(form.get("minItems", 0))
            rest = form.get("items", {})
            other = self._least(rest) if isinstance(rest, Mapping) else 0
            return 2 + sum(items[:least]) + max(0, least - len(items)) * (2 + other)
        if form.get("type") == "object":
            needed = set(form.get("required", ()))
            found = {name: len(name) + 4 + self._least(held) for name, held in form.get("properties", {}).items()}
            for held in (form.get("additionalProperties"), *form.get("patternProperties", {}).values()):
                if isinstance(held, Mapping):
                    self._least(held)
            return 2 + sum(length for name, length in found.items() if name in needed)
        return 1


def _of_arguments(node: Mapping[str, Any]) -> int:
    terms = _Terms()
    tags = argument_tags_of(node.get("tags"))
    return _of_format(tagged_arguments(node.get("json_schema"), tags, 0, terms.spell), terms.greatest)


def _of_format(node: Any, of_schema: Callable[[Any], int] = _of_schema) -> int:
    """Return at least the greatest length of what a structural tag must have."""
    if isinstance(node, list):
        return min(LONG, sum(_of_format(each, of_schema) for each in node))
    if isinstance(node, str):
        return len(node)
    if not isinstance(node, Mapping):
        return 0
    kind = node.get("type")
    if kind == "json_schema":
        return of_schema(node.get("json_schema"))
    if kind == ARGUMENTS:
        return _of_arguments(node)
    if kind == "regex":
        return greatest_part(pattern_term(f"^({node['pattern']})$"))
    if kind == "grammar":
        return least_of_rules(node["grammar"], LONG)
    inner = sum(of_schema(held) if name == "schema" else _of_format(held, of_schema) for name, held in node.items())
    return min(LONG, inner * max(1, node["min"]) if kind == "repeat" else inner)
