"""The form that a request asks of its answer: a JSON Schema, a regular expression, a choice, a grammar, a tag."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, Literal, TypeAlias

from inferc.errors import RequestError, is_among, nearest, shown

MAX_BYTES = 1 << 18  # of a schema, an expression, a grammar, or all choices together
MAX_CHOICES = 2048

Kind: TypeAlias = Literal["json", "json_object", "regex", "choice", "ebnf", "lark", "structural_tag"]
Form: TypeAlias = Literal["json", "json_object", "regex", "choice", "grammar", "structural_tag"]
FORMS: tuple[Form, ...] = ("json", "json_object", "regex", "choice", "grammar", "structural_tag")
OURS = ("label", "before", "has_headers")  # the fields that no client gives
# The parameters of vLLM's StructuredOutputsParams that are not built, with the values that ask for nothing.
NOT_BUILT: dict[str, tuple[Any, ...]] = {
    "whitespace_pattern": (None,),
    "disable_fallback": (None, False, True),  # there is nothing to fall back to
    "disable_additional_properties": (None, False, True),  # a schema that names properties admits only these
}


@dataclass(frozen=True)
class StructuredOutputs:
    r"""The form that an answer is held to: exactly one of the first six, named as vLLM's StructuredOutputsParams.

    - json: a JSON Schema (draft 2020-12), as its text or as what `json.loads` makes of it, or a pydantic model.
    - json_object: any JSON object.
    - regex: a regular expression that the whole answer matches.
    - choice: texts, of which the answer is one.
    - grammar: in GBNF (llama.cpp's: `root ::= "a" | "b"`) or in Lark's form (`start: "a" | "b"`).
    - structural_tag: text of which parts follow forms, in xgrammar's notation, as text or as an object.
    - disable_any_whitespace: JSON is written on one line, `{"a": 1, "b": 2}`; otherwise the model may indent it.

    label: the name of the field that gave the form, for messages. before: a format of a structural tag, as JSON, which
    the answer has before the form: that of reasoning, which no client gives. has_headers: the form has the headers of
    the messages of an answer in channels, which reasoning then does not end with.

    The answer then ends where the form ends. Raises RequestError if not exactly one is given, and for wrong types.
    """

    json: str | None = None
    json_object: bool | None = None
    regex: str | None = None
    choice: tuple[str, ...] | None = None
    grammar: str | None = None
    structural_tag: str | None = None
    disable_any_whitespace: bool = False
    label: str = field(default="", compare=False, repr=False)
    before: str | None = field(default=None, repr=False)
    has_headers: bool = field(default=False, repr=False)

    def __post_init__(self) -> None:
        given = [name for name in FORMS if self._gives(name)]
        if len(given) != 1:
            found = f"found {' and '.join(given)}" if given else "found none"
            raise RequestError(f"structured_outputs: expected one of {', '.join(FORMS)}, {found}")
        label = self.label or f"structured_outputs.{given[0]}"
        object.__setattr__(self, "label", label)
        object.__setattr__(self, "json", _schema_text(label, self.json))
        object.__setattr__(self, "structural_tag", _json_text(label, self.structural_tag, "a structural tag"))
        if self.choice is not None:
            object.__setattr__(self, "choice", _choices(label, self.choice))
        for name in ("regex", "grammar"):
            if (value := getattr(self, name)) is not None:
                _check_text(label, value)
        for name in ("json_object", "disable_any_whitespace"):
            if type(value := getattr(self, name)) not in (bool, type(None)):
                raise RequestError(f"structured_outputs.{name}: expected true or false, found {shown(value)}")

    @staticmethod
    def of(value: Any) -> StructuredOutputs | None:
        """Return the form that a parameter's value names: one of these, or a map of their fields.

        Raises RequestError for a field that does not exist or is not built.
        """
        if value is None or isinstance(value, StructuredOutputs):
            return value
        if not isinstance(value, Mapping):
            raise RequestError(f"structured_outputs: expected an object with one of {', '.join(FORMS)}")
        known = [each.name for each in fields(StructuredOutputs) if each.name not in OURS]
        found: dict[str, Any] = {}
        for name, each in value.items():
            if name in known:
                found[name] = each
            elif name not in NOT_BUILT:
                raise RequestError(f"structured_outputs: it has no field {shown(name)}; {nearest(str(name), known)}")
            elif not is_among(each, NOT_BUILT[name]):
                raise RequestError(f"structured_outputs.{name} is not built yet; leave it out")
        if found.get("disable_any_whitespace") is None:
            found.pop("disable_any_whitespace", None)
        return StructuredOutputs(**found)

    def _gives(self, name: Form) -> bool:
        value = getattr(self, name)
        return value is not None and not (name == "json_object" and value is False)

    @property
    def kind(self) -> Kind:
        """The kind of the form; a grammar's is told from how it writes its rules."""
        form = self.form
        if form == "grammar":
            return "ebnf" if "::=" in self.source else "lark"
        return form

    @property
    def form(self) -> Form:
        """The name of the field that gives the form."""
        return next(name for name in FORMS if self._gives(name))

    @property
    def source(self) -> str:
        """The text that defines the form; that of a choice is a JSON list, that of any JSON object is empty."""
        if self.choice is not None:
            return json.dumps(self.choice)
        return self.json or self.regex or self.grammar or self.structural_tag or ""


def _schema_text(label: str, schema: Any) -> str | None:
    """Return a schema as JSON text, in which the order of properties is kept: it is the order of the answer."""
    if schema is None:
        return None
    if isinstance(schema, type) and hasattr(schema, "model_json_schema"):
        schema = schema.model_json_schema()
    return _json_text(label, schema, "a JSON Schema", Mapping | bool)


def _json_text(label: str, value: Any, what: str, kinds: Any = Mapping) -> str | None:
    """Return a value as JSON text, unless it is text already."""
    if value is None:
        return None
    if not isinstance(value, str):
        if not isinstance(value, kinds):
            raise RequestError(f"{label}: expected {what}, found {shown(value)}")
        try:
            value = json.dumps(value, ensure_ascii=False)
        except (TypeError, ValueError, RecursionError) as error:
            raise RequestError(f"{label}: it is no JSON: {str(error)[:200]}") from None
    _check_text(label, value)
    return str(value)


def _choices(label: str, value: Any) -> tuple[str, ...]:
    if not isinstance(value, Sequence) or isinstance(value, str) or not value:
        raise RequestError(f"{label}: expected a list of texts, found {shown(value)}")
    if len(value) > MAX_CHOICES:
        raise RequestError(f"{label}: found {len(value)} texts, at most {MAX_CHOICES} are allowed; give fewer")
    for each in value:
        if not isinstance(each, str) or not each:
            raise RequestError(f"{label}: expected texts that are not empty, found {shown(each)} among them")
    _check_text(label, "".join(value))
    return tuple(value)


def _check_text(label: str, value: Any) -> None:
    if not isinstance(value, str) or not value:
        raise RequestError(f"{label}: expected a text that is not empty, found {shown(value)}")
    try:
        size = len(value.encode())
    except UnicodeEncodeError:
        raise RequestError(f"{label}: it is not text: it has half of a surrogate pair") from None
    if size > MAX_BYTES:
        raise RequestError(f"{label}: it has {size} bytes, at most {MAX_BYTES} are allowed; make it smaller")
