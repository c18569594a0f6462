"""The form of an answer as bodies ask for it: OpenAI's `response_format`, and fields of vLLM, SGLang and llama.cpp."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from inferc.errors import RequestError, nearest, shown
from inferc.runtime.openai.fields import NOTHING
from inferc.runtime.step.structured_outputs import StructuredOutputs

# Fields that give a form themselves, and the field of StructuredOutputs that each is. `json_schema`, `grammar` are
# llama.cpp's, `regex`, `ebnf` and `json_schema` are SGLang's, the others vLLM's.
DIRECT = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "structural_tag": "structural_tag",
    "json_schema": "json",
    "grammar": "grammar",
    "regex": "regex",
    "ebnf": "grammar",
}
TYPES = ("text", "json_object", "json_schema", "structural_tag")
FIELDS = ("response_format", "structured_outputs", *DIRECT)


def form_of(body: Mapping[str, Any]) -> StructuredOutputs | None:
    """Return the form that a body asks for, or None. Raises RequestError for a wrong one, and for more than one."""
    found = {}
    for name in FIELDS:
        value = body.get(name)
        # An empty text or list asks for nothing; `guided_json: {}` is a schema, which admits anything.
        if value is None or (value in NOTHING and value != {}):
            continue
        if name == "response_format":
            form = of_format(value, name)
        elif name == "structured_outputs":
            form = StructuredOutputs.of(value) if value else None
        else:
            form = StructuredOutputs(**{DIRECT[name]: value}, label=name)
        if form is not None:
            found[name] = form
    if len(found) > 1:
        first, *others = found
        raise RequestError(f"{first}: {' and '.join(others)} gives the answer a form, too; send one of them")
    return next(iter(found.values()), None)


def of_format(value: Any, where: str) -> StructuredOutputs | None:
    """Return the form that an OpenAI format asks for; None for plain text.

    where: the format's place in the body. A Responses body has `name` and `schema` beside the type, a chat's has them
    in `json_schema`.
    """
    if not isinstance(value, Mapping):
        raise RequestError(f"{where}: expected an object with a type, found {shown(value)}")
    if not value:
        return None
    kind = value.get("type")
    if kind == "text":
        return None
    if kind == "json_object" and value.get("schema") is None:
        return StructuredOutputs(json_object=True, label=where)
    if kind == "json_object":  # as llama.cpp has it
        return StructuredOutputs(json=value["schema"], label=f"{where}.schema")
    if kind == "structural_tag":
        given: dict[str, Any] = {"structural_tag": value}
        return StructuredOutputs(**given, label=where)
    if kind != "json_schema":
        hint = nearest(kind, TYPES) if isinstance(kind, str) else f"expected one of {', '.join(TYPES)}"
        raise RequestError(f"{where}.type is {shown(kind)}; {hint}")
    is_nested = "json_schema" in value
    inner: Any = value["json_schema"] if is_nested else value
    place = f"{where}.json_schema" if is_nested else where
    if not isinstance(inner, Mapping) or inner.get("schema") is None:
        raise RequestError(f"{place}.schema is missing; give the JSON Schema that the answer follows")
    return StructuredOutputs(json=inner["schema"], label=f"{place}.schema")
