"""JSON Schemas that were rewritten exactly, as rules of a Lark grammar for llguidance."""

from __future__ import annotations

import json
from collections.abc import Mapping
from decimal import Decimal
from typing import Any

from inferc.runtime.grammar.lark.numbers import INTEGER, NUMBER, Bound, between
from inferc.runtime.grammar.lark.numbers import PLACES as DECIMALS
from inferc.runtime.grammar.lark.terms import ANY_STRING, json_string, quoted, times
from inferc.runtime.grammar.lark.writer import Writer
from inferc.runtime.grammar.schema.exact import exact_schema
from inferc.runtime.grammar.schema.regex import Term, chars, repeat

SPACE = chars([(9, 10), (13, 13), (32, 32)])
ANY_OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": {}}


class JsonRules:
    """The rules of JSON under schemas, in a grammar that is being written.

    max_whitespace: the most spaces and line breaks in a row; 0 for `{"a": 1, "b": 2}`.
    """

    def __init__(self, writer: Writer, max_whitespace: int) -> None:
        self._writer = writer
        space = f" {writer.lexeme(repeat(SPACE, 1, max_whitespace))}?" if max_whitespace else ""
        self._open, self._close = space, space
        self._comma = f'{space} ","{space}' if max_whitespace else '", "'
        self._colon = f'{space} ":"{space}' if max_whitespace else '": "'
        self._any: str = ""
        self._definitions: dict[str, str] = {}
        self._forms: Mapping[str, Any] = {}
        self._patterns: list[Term] = []  # of strings, by the number that stands in the form for each

    def rule(self, schema: Any) -> str:
        """Return the rule of a schema as a client sent it. Raises RequestError as `exact_schema` does."""
        numbers: dict[Term, str] = {}
        form = exact_schema(schema, lambda term: numbers.setdefault(term, str(len(numbers))))
        self._patterns, self._forms, self._definitions = list(numbers), form.get("$defs", {}), {}
        return self._rule({name: held for name, held in form.items() if name != "$defs"})

    def any_object(self) -> str:
        """Return the rule of any object."""
        return self._rule(ANY_OBJECT)

    def _rule(self, form: Mapping[str, Any]) -> str:
        if "$ref" in form:
            return self._reference(form["$ref"].removeprefix("#/$defs/"))
        if "anyOf" in form:
            return self._writer.rule(" | ".join(map(self._rule, form["anyOf"])))
        if "enum" in form:
            values = dict.fromkeys(json.dumps(each, ensure_ascii=False) for each in form["enum"])
            return self._writer.terminal(" | ".join(map(quoted, values)))
        kind = form.get("type")
        if kind in ("integer", "number"):
            return self._number(form)
        if kind == "string":
            return self._string(form["pattern"]) if "pattern" in form else self._writer.lexeme(ANY_STRING)
        if kind == "array":
            return self._list(form)
        if kind == "object":
            return self._object(form)
        assert not form, "exact_schema makes no other"
        return self._anything()

    def _reference(self, name: str) -> str:
        if name not in self._definitions:
            self._definitions[name] = rule = self._writer.reserve()
            self._writer.define(rule, self._rule(self._forms[name]))
        return self._definitions[name]

    def _string(self, pattern: str) -> str:
        return self._writer.lexeme(json_string(self._patterns[int(pattern)]))

    def _number(self, form: Mapping[str, Any]) -> str:
        is_integer = form["type"] == "integer"
        if "multipleOf" in form:
            whole = {"type": "integer", "multipleOf": form["multipleOf"], "x-guidance": {"whitespace_flexible": False}}
            return self._writer.rule(f"%json {json.dumps(whole)}")
        low, high = (_bound(form, name) for name in ("inimum", "aximum"))
        if low is None and high is None:
            return self._writer.lexeme(INTEGER if is_integer else NUMBER)
        return self._writer.lexeme(between(low, high, 0 if is_integer else DECIMALS))

    def _anything(self) -> str:
        if not self._any:
            self._any = self._writer.reserve()
            scalar = self._writer.terminal('"null" | "true" | "false"')
            others = [self._writer.lexeme(each) for each in (ANY_STRING, NUMBER)]
            nested = [self._rule({"type": "array", "items": {}}), self._rule(ANY_OBJECT)]
            self._writer.define(self._any, " | ".join((scalar, *others, *nested)))
        return self._any

    # ------------------------------------------------------------------------------------------------- parts

    def _list(self, form: Mapping[str, Any]) -> str:
        prefix = list(map(self._rule, form.get("prefixItems", ())))
        least, most = form.get("minItems", 0), form.get("maxItems")
        if form.get("items", {}) is False:
            tail = ""
        else:
            spare = None if most is None else most - len(prefix)
            tail = self._repeated(self._rule(form.get("items", {})), max(0, least - len(prefix)), spare, bool(prefix))
        for index in reversed(range(len(prefix))):
            body = f"{self._comma if index else ''} {prefix[index]} {tail}"
            tail = self._writer.rule(body) + ("?" if index >= least else "")
        return self._writer.rule(f'"[" {self._open} {tail} {self._close} "]"')

    def _repeated(self, item: str, least: int, most: int | None, is_behind: bool) -> str:
        """Return items with commas between them. is_behind: others come before, so there is one at the begin too."""
        if most is not None and most <= 0:
            return ""
        if is_behind:
            return f"({self._comma} {item}){times(least, most)}"
        more = "" if most == 1 else self._repeated(item, max(0, least - 1), None if most is None else most - 1, True)
        return f"({item} {more}){'' if least else '?'}"

    def _object(self, form: Mapping[str, Any]) -> str:
        needed = set(form.get("required", ()))
        named = []
        for name, held in form.get("properties", {}).items():
            key = self._writer.terminal(quoted(json.dumps(name, ensure_ascii=False)))
            named.append((f"{key}{self._colon} {self._rule(held)}", name in needed))
        others = [
            f"{self._string(pattern)}{self._colon} {self._rule(held)}"
            for pattern, held in form.get("patternProperties", {}).items()
        ]
        if isinstance(held := form.get("additionalProperties"), Mapping):
            others.append(f"{self._writer.lexeme(ANY_STRING)}{self._colon} {self._rule(held)}")
        other = self._writer.rule(" | ".join(others)) if others else ""
        members = _Members(self._writer, self._comma, named, form.get("minProperties", 0), form.get("maxProperties"))
        body = members.rule(lambda *count: self._repeated(other, *count) if other else "")
        return self._writer.rule(f'"{{" {self._open} {body} {self._close} "}}"')


class _Members:
    """The members of an object in order, counted as far as their number matters.

    named: each property's text, and whether it is required.
    """

    def __init__(self, writer: Writer, comma: str, named: list[tuple[str, bool]], least: int, most: int | None) -> None:
        self._writer, self._comma, self._named, self._least, self._most = writer, comma, named, least, most
        self._cap = max(1, least) if most is None else most + 1

    def rule(self, others: Any) -> str:
        """Return what stands for the members; others: makes that of the unnamed ones, `_repeated` of a number."""
        after: dict[int, str | None] = {}
        for count in range(self._cap + 1):
            spare = None if self._most is None else self._most - count
            least = max(0, self._least - count)
            if spare is not None and spare < 0:
                after[count] = None
                continue
            text = others(least, spare, count > 0)
            after[count] = None if least and not text else text
        for text, is_needed in reversed(self._named):
            here: dict[int, str | None] = {}
            for count in range(self._cap + 1):
                ways = []
                then = after[min(count + 1, self._cap)]
                if then is not None:
                    ways.append(f"{self._comma if count else ''} {text} {then}".strip())
                if not is_needed and (skipped := after[count]) is not None:
                    ways.append(skipped or '""')
                here[count] = self._writer.rule(" | ".join(ways)) if ways else None
            after = here
        found = after[0]
        assert found is not None, "exact_schema leaves out what admits nothing"
        return found


def _bound(form: Mapping[str, Any], name: str) -> Bound:
    """Return the bound that ends with a name, as a minimum or maximum, exclusive or not."""
    side = "m" + name
    if side in form:
        return Decimal(str(form[side])), False
    side = "exclusiveM" + name
    return (Decimal(str(form[side])), True) if side in form else None
