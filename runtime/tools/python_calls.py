"""Arguments of calls that are written as Python's: what they may be under a schema, and JSON of what was written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from inferc.errors import RequestError, shown
from inferc.runtime.grammar.tags import LABEL
from inferc.runtime.tools.arguments import PYTHON, spelled

Format = dict[str, Any]

IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
WORDS: dict[Any, str] = {True: "True", False: "False", None: "None"}
# What a schema of arguments may say beside its properties: nothing that this form could not hold.
OF_WORDS = ("title", "description", "$schema", "$id", "$comment", "default", "examples", "strict")
SAYS_NOTHING = (*OF_WORDS, "type", "additionalProperties", "$defs", "definitions")
DEFINITIONS = ("$defs", "definitions")
MOST_OPTIONAL = 24  # properties of which none must be there: each may be the first


def python_arguments(label: str, schema: Mapping[str, Any]) -> Format:
    """Return the format of keyword arguments under a schema: those that must be there first, then the others.

    A value is JSON, with Python's words for true, false and null where a schema names them; within lists and objects
    they are JSON's. Raises RequestError, which begins with the label, for a schema that cannot be held to.
    """
    properties, required = schema.get("properties") or {}, schema.get("required") or []
    for name in schema:
        if name not in (*SAYS_NOTHING, "properties", "required") and schema[name] not in (None, [], {}):
            _refuse(label, f"#/{name} is not built in calls that are written as Python; name properties alone")
    if not isinstance(properties, Mapping) or not isinstance(required, list):
        _refuse(label, "#: expected properties as an object, and required as a list")
    if missing := [name for name in required if name not in properties]:
        _refuse(label, f"#/required has {shown(missing[0])}, which is no property; name it among them")
    for name in properties:
        if not IDENTIFIER.fullmatch(name):
            _refuse(label, f"the name {shown(name)} cannot be written in calls as Python's; use letters, digits and _")
    definitions = {name: schema[name] for name in DEFINITIONS if name in schema}
    made = {
        name: sequence(text(f"{name}="), _value(f"{label}: {name}", each, definitions))
        for name, each in properties.items()
        if each is not False or name in required
    }
    needed = [made[name] for name in dict.fromkeys(required)]
    others = [each for name, each in made.items() if name not in required]
    if needed:
        first, *rest = needed
        return sequence(first, *(sequence(text(", "), each) for each in rest), *map(_further, others))
    if len(others) > MOST_OPTIONAL:
        _refuse(label, f"{len(others)} properties of which none is required, at most {MOST_OPTIONAL}; require one")
    ways = [sequence(each, *map(_further, others[index + 1 :])) for index, each in enumerate(others)]
    return {"type": "optional", "content": any_of(ways)} if ways else text("")


def _further(argument: Format) -> Format:
    return {"type": "optional", "content": sequence(text(", "), argument)}


def _value(label: str, schema: Any, definitions: Mapping[str, Any]) -> Format:
    """Return the format of a value: words of Python, and the rest as JSON."""
    words, rest = _parted(schema)
    ways: list[Format] = [text(word) for word in dict.fromkeys(words)]
    if rest is not None:
        whole = {**definitions, **rest} if isinstance(rest, Mapping) else rest
        ways.append({"type": "json_schema", "json_schema": whole, LABEL: label})
    return any_of(ways)


def _parted(schema: Any) -> tuple[list[str], Any]:
    """Return Python's words among the values of a schema, and the schema of the others, None if there are none."""
    if not isinstance(schema, Mapping):
        return [], schema
    if "const" in schema or "enum" in schema:
        values = [schema["const"]] if "const" in schema else schema["enum"]
        alone = schema.keys() <= {"const", "enum", "type", "title", "description", "default"}
        if not alone or not isinstance(values, list) or ("const" in schema and "enum" in schema) or "type" in schema:
            return [], schema
        rest = [each for each in values if not isinstance(each, bool | None)]
        return [WORDS[each] for each in values if isinstance(each, bool | None)], {"enum": rest} if rest else None
    kinds = schema.get("type")
    if kinds is None and schema.keys() <= {"anyOf", "title", "description", "default"} and schema.get("anyOf"):
        parts = [_parted(each) for each in schema["anyOf"]] if isinstance(schema["anyOf"], list) else []
        rests = [rest for _, rest in parts if rest is not None]
        if not parts:
            return [], schema
        return [word for words, _ in parts for word in words], {**schema, "anyOf": rests} if rests else None
    listed = [kinds] if isinstance(kinds, str) else kinds if isinstance(kinds, list) else []
    words = [*(["True", "False"] if "boolean" in listed else []), *(["None"] if "null" in listed else [])]
    others = [each for each in listed if each not in ("boolean", "null")]
    if not words:
        return [], schema
    return words, {**schema, "type": others} if others else None


def any_of(ways: list[Format]) -> Format:
    """Return the format of one of several."""
    return ways[0] if len(ways) == 1 else {"type": "or", "elements": ways}


def sequence(*formats: Format) -> Format:
    """Return the format of formats that follow one another."""
    return {"type": "sequence", "elements": list(formats)}


def text(value: str) -> Format:
    """Return the format of a text."""
    return {"type": "const_string", "value": value}


def _refuse(label: str, words: str) -> NoReturn:
    raise RequestError(f"{label}: {words}")


class PythonArguments:
    """Arguments that are written as Python's keyword arguments, up to the bracket that closes them."""

    def __init__(self) -> None:
        self._found: list[str] = ["{"]
        self._step: Callable[[str], bool] = self._name
        self._written = ""  # of a name, a word or an escape
        self._depth, self._quote, self._count = 0, "", 0
        self._is_ended = False

    def read(self, text: str) -> tuple[str, str, bool]:
        at = 0
        while at < len(text) and not self._is_ended:
            at += self._step(text[at])
        found, self._found = "".join(self._found), []
        return found, text[at:], self._is_ended

    # Each step takes a character, and returns whether it was read.

    def _name(self, char: str) -> bool:
        if char == "=":
            name = json.dumps(self._written.strip(" ,\n\t"), ensure_ascii=False)
            self._found.append(f"{', ' if self._count else ''}{name}: ")
            self._count += 1
            self._written, self._step = "", self._value
            return True
        if char == ")":
            self._found.append("}")
            self._is_ended = True
            return False
        self._written += char
        return True

    def _value(self, char: str) -> bool:
        if char in "\"'":
            self._quote, self._step = char, self._text
            self._found.append('"')
        elif char in "[{(":
            self._depth += 1
            self._found.append("{" if char == "{" else "[")
        elif self._depth and char in "]})":
            self._depth -= 1
            self._found.append("}" if char == "}" else "]")
        elif not self._depth and char in ",)":
            self._written, self._step = "", self._name
            return char == ","
        elif char in ",: \n\t":
            self._found.append(char if self._depth else "")
        else:
            self._written, self._step = "", self._word
            return False
        return True

    def _word(self, char: str) -> bool:
        if char in ",:)]} \n\t":
            self._found.append(PYTHON.get(self._written) or spelled(self._written))
            self._step = self._value
            return False
        self._written += char
        return True

    def _text(self, char: str) -> bool:
        if char == "\\":
            self._written, self._step = "", self._escape
        elif char == self._quote:
            self._found.append('"')
            self._step = self._value
        else:
            self._found.append(json.dumps(char, ensure_ascii=False)[1:-1])
        return True

    def _escape(self, char: str) -> bool:
        """Read what stands behind a backslash: as JSON has it, or as Python alone has it."""
        if self._written:  # of a character by its eight digits
            self._written += char
            if len(self._written) < 9:
                return True
            code = int(self._written[1:], 16) if re.fullmatch("U00[0-9a-fA-F]{6}", self._written) else 0xFFFD
            self._found.append(json.dumps(chr(code) if code < 0x110000 else "\ufffd")[1:-1])
        elif char == "U":
            self._written = char
            return True
        else:
            self._found.append(ESCAPES.get(char) or (f"\\{char}" if char in '"\\/bfnrtu' else "\\\\" + char))
        self._written, self._step = "", self._text
        return True


# The escapes of Python that JSON lacks; the digits behind \x follow as they do in JSON.
ESCAPES = {"'": "'", "x": "\\u00", "a": "\\u0007", "v": "\\u000b", "0": "\\u0000"}
