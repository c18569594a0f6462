"""Arguments of calls that are written as Python's: what they may be under a schema, and JSON of what was written."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from inferc.errors import RequestError, shown
from inferc.runtime.grammar.tags import LABEL
from inferc.runtime.step.structured_outputs import MAX_BYTES
from inferc.runtime.tools.arguments import PYTHON, spelled

Format = dict[str, Any]

IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
WORDS: dict[Any, str] = {True: "True", False: "False", None: "None"}
# What a schema of arguments may say beside its properties: nothing that this form could not hold.
OF_WORDS = ("title", "description", "$schema", "$id", "$comment", "default", "examples", "strict")
SAYS_NOTHING = (*OF_WORDS, "type", "additionalProperties", "$defs", "definitions")
DEFINITIONS = ("$defs", "definitions")
REFERENCES = ("$ref", "$dynamicRef")
MOST_DEPTH = 16  # of alternatives within others that are looked into for Python's words
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
    if missing := [name for name in required if not isinstance(name, str) or name not in properties]:
        _refuse(label, f"#/required has {shown(missing[0])}, which is no property; name it among them")
    for name in properties:
        if not IDENTIFIER.fullmatch(name):
            _refuse(label, f"the name {shown(name)} cannot be written in calls as Python's; use letters, digits and _")
    definitions = {name: schema[name] for name in DEFINITIONS if name in schema}
    named = {name: each for name, each in properties.items() if each is not False or name in required}
    refers = _check_size(label, named, definitions, required)
    made = {
        name: sequence(text(f"{name}="), _value(f"{label}: {name}", each, definitions if name in refers else {}))
        for name, each in named.items()
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


def _check_size(
    label: str, properties: Mapping[str, Any], definitions: Mapping[str, Any], required: list[str]
) -> set[str]:
    """Return the properties that refer to definitions, of which the form then has a copy for each.

    Where none is required, each may be the first, and those behind it come again. Raises RequestError for a form that
    would be too large.
    """
    try:
        shared = len(json.dumps(definitions))
        written = {name: json.dumps(each) for name, each in properties.items()}
    except (TypeError, ValueError, RecursionError) as error:
        _refuse(label, f"it is no JSON: {str(error)[:200]}")
    refers = {name for name, each in written.items() if any(word in each for word in REFERENCES)}
    sizes = [len(each) + (shared if name in refers else 0) for name, each in written.items()]
    total = sum(sizes) if required else sum(size * count for count, size in enumerate(sizes, 1))
    if total > MAX_BYTES:
        _refuse(
            label,
            f"properties and what they refer to take {total} bytes in calls that are written as Python, at most"
            f" {MAX_BYTES} are allowed; make them smaller, or require one",
        )
    return refers


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


def _parted(schema: Any, depth: int = 0) -> tuple[list[str], Any]:
    """Return Python's words among the values of a schema, and the schema of the others, None if there are none."""
    if not isinstance(schema, Mapping) or depth == MOST_DEPTH:
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
        parts = [_parted(each, depth + 1) for each in schema["anyOf"]] if isinstance(schema["anyOf"], list) else []
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
    """Arguments that are written as Python's keyword arguments, up to the bracket that closes them.

    What JSON lacks, as an expression, becomes a text of it; texts side by side are one.
    """

    def __init__(self) -> None:
        self._found: list[str] = ["{"]
        self._step: Callable[[str], bool] = self._name
        self._written: list[str] = []  # of a name, a word or an escape
        self._open: list[str] = []  # what closes the lists and objects around what is read
        self._quote, self._nested, self._count = "", 0, 0
        self._spaces = ""  # what stands before the next value: a comma before a bracket is none of JSON's
        self._is_awaited = False  # the value of a name
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
            name = json.dumps("".join(self._written).strip("," + SPACES), ensure_ascii=False)
            self._found.append(f"{', ' if self._count else ''}{name}: ")
            self._count += 1
            self._written, self._is_awaited, self._step = [], True, self._value
            return True
        if char == ")":
            self._found.append("}")
            self._is_ended = True
            return False
        self._written.append(char)
        return True

    def _value(self, char: str) -> bool:
        if self._open and char in "]})":
            self._found.append(self._open.pop())
            self._spaces = ""
        elif not self._open and char in ",)":
            if self._is_awaited:
                self._found.append("null")
            self._written, self._step = [], self._name
            return char == ","
        elif char in SEPARATORS:
            self._spaces += char if self._open and len(self._spaces) < MOST_SPACES else ""
        else:
            self._found.append(self._spaces)
            self._spaces, self._is_awaited = "", False
            if char in "\"'":
                self._quote, self._step = char, self._text
                self._found.append('"')
            elif char in "[{(":
                self._open.append("}" if char == "{" else "]")
                self._found.append("{" if char == "{" else "[")
            else:
                self._written, self._step = [], self._word
                return False
        return True

    def _word(self, char: str) -> bool:
        """Read a number, a name, or an expression, within whose brackets and quotes it goes on."""
        if self._quote:
            self._quote = "" if char == self._quote else self._quote
        elif char in "\"'":
            self._quote = char
        elif self._nested or char in "([{":
            self._nested += (char in "([{") - (char in ")]}")
        elif char in ",:)]}":
            word = "".join(self._written).rstrip(SPACES)
            value = PYTHON.get(word) or spelled(word)
            is_name = char == ":" and self._open[-1:] == ["}"] and not value.startswith('"')
            self._found.append(f'"{value}"' if is_name else value)
            self._step = self._value
            return False
        self._written.append(char)
        return True

    def _text(self, char: str) -> bool:
        if char == "\\":
            self._written, self._step = [], self._escape
        elif char == self._quote:
            self._quote, self._step = "", self._behind_text
        else:
            self._found.append(json.dumps(char, ensure_ascii=False)[1:-1])
        return True

    def _behind_text(self, char: str) -> bool:
        if char in "\"'":
            self._quote, self._step = char, self._text
        elif char not in SPACES:
            self._found.append('"')
            self._step = self._value
            return False
        return True

    def _escape(self, char: str) -> bool:
        """Read what stands behind a backslash: as JSON has it, or as Python alone has it."""
        if not self._written:
            if char in DIGITS:
                self._written.append(char)
                return True
            plain = f"\\{char}" if char in '"\\/bfnrt' else json.dumps(f"\\{char}", ensure_ascii=False)[1:-1]
            self._found.append(ESCAPES.get(char, plain))
            self._step = self._text
            return True
        kind, *digits = self._written
        if char not in HEX:  # none of Python's, who writes it as it stands
            self._found.append("\\\\" + "".join(self._written))
            self._written, self._step = [], self._text
            return False
        self._written.append(char)
        if len(digits) + 1 == DIGITS[kind]:
            code = int("".join((*digits, char)), 16)
            wide = json.dumps(chr(code) if code < 0x110000 else "\ufffd")[1:-1]
            self._found.append(f"\\u{code:04x}" if code < 0x10000 else wide)
            self._written, self._step = [], self._text
        return True


SPACES = " \n\t\r"
SEPARATORS = ",:" + SPACES
HEX = "0123456789abcdefABCDEF"
DIGITS = {"x": 2, "u": 4, "U": 8}  # behind these escapes
# The escapes of Python that JSON lacks; behind a line's end the text goes on.
ESCAPES = {"'": "'", "a": "\\u0007", "v": "\\u000b", "0": "\\u0000", "\n": ""}
MOST_SPACES = 256  # between two values
