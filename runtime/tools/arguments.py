"""The arguments of a call, read as their text comes and handed on as JSON: as they are, or out of tags of their own."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Protocol

from inferc.chat.argument_tags import ArgumentTags
from inferc.runtime.grammar.schema.kinds import OPENING, TEXT, Kinds, looks_like, may_look_like

MAX_NAME = 256  # characters within which a call's name ends
MAX_VALUE = 8192  # characters of a name, or of a number, that are awaited as a whole
NUMBER = re.compile(r"-?(0|[1-9][0-9]*)(\.[0-9]+)?([eE][+-]?[0-9]+)?")
PYTHON = {"True": "true", "False": "false", "None": "null"}


class Arguments(Protocol):
    """The arguments of one call."""

    def read(self, text: str) -> tuple[str, str, bool]:
        """Return JSON that became certain, what is left of the text, and whether the arguments ended before that."""


class JsonArguments:
    """Arguments that are written as JSON."""

    def __init__(self) -> None:
        self._json = _Json()

    def read(self, text: str) -> tuple[str, str, bool]:
        end = self._json.end_in(text)
        return (text, "", False) if end is None else (text[:end], text[end:], True)


class TaggedArguments:
    """Arguments that have tags of their own; kinds: the kinds that the argument of a name may have."""

    def __init__(self, tags: ArgumentTags, kinds: Callable[[str], Kinds]) -> None:
        self._tags, self._kinds_of = tags, kinds
        self._step: Callable[[], bool] = self._begin
        self._left, self._found, self._is_ended = "", list[str](), False
        self._kinds: Kinds = frozenset()
        self._count = 0
        self._json = _Json()

    def read(self, text: str) -> tuple[str, str, bool]:
        self._left = text
        while not self._is_ended and self._step():
            pass
        found, self._found = "".join(self._found), []
        left, self._left = self._left, ""
        return found, left, self._is_ended

    # Each step returns whether another one can follow, or more text is needed.

    def _begin(self) -> bool:
        self._found.append("{")
        self._step = self._tag
        return True

    def _tag(self) -> bool:
        begin = self._tags.begin
        if self._left.startswith(begin):
            self._left, self._step = self._left[len(begin) :], self._name
            return True
        return False if begin.startswith(self._left) else self._end()

    def _end(self) -> bool:
        self._found.append("}")
        self._is_ended = True
        return False

    def _name(self) -> bool:
        name, is_there, rest = self._left.partition(self._tags.middle)
        if not is_there:
            return self._end() if len(self._left) > MAX_VALUE else False
        self._found.append(f"{', ' if self._count else ''}{json.dumps(name, ensure_ascii=False)}: ")
        self._left, self._count, self._kinds = rest, self._count + 1, self._kinds_of(name)
        self._step = self._value
        return True

    def _value(self) -> bool:
        """Tell whether the value is a text or JSON."""
        kinds, left, is_whole = self._kinds, self._left, self._tags.end in self._left
        if not left:
            return False
        if self._tags.is_json or TEXT not in kinds:
            is_open = left[0] in OPENING or left[0] == '"'
            self._json, self._step = _Json(), self._compound if is_open else self._scalar
        elif OPENING.get(left[0]) in kinds:
            self._json, self._step = _Json(), self._compound
        elif is_whole:
            is_text = not looks_like(left.partition(self._tags.end)[0], kinds)
            self._step = self._begin_text if is_text else self._scalar
        elif kinds - {TEXT} and len(left) < MAX_VALUE and may_look_like(self._sure, kinds):
            return False
        else:
            self._step = self._begin_text
        return True

    @property
    def _sure(self) -> str:
        """The text that is left, without what may begin the tag behind a value."""
        return self._left[: len(self._left) - common(self._left, self._tags.end)]

    def _begin_text(self) -> bool:
        self._found.append('"')
        self._step = self._text
        return True

    def _text(self) -> bool:
        text, is_there, rest = self._left.partition(self._tags.end)
        text = text if is_there else self._sure
        self._found.append(json.dumps(text, ensure_ascii=False)[1:-1])
        self._left = rest if is_there else self._left[len(text) :]
        if is_there:
            self._found.append('"')
            self._step = self._tag
        return bool(is_there)

    def _compound(self) -> bool:
        end = self._json.end_in(self._left)
        self._found.append(self._left[:end])
        self._left = "" if end is None else self._left[end:]
        if end is not None:
            self._step = self._behind
        return end is not None

    def _behind(self) -> bool:
        """Read the tag behind a whole value; what stands before it is left out."""
        _, is_there, rest = self._left.partition(self._tags.end)
        kept = common(self._left, self._tags.end)
        self._left = rest if is_there else self._left[len(self._left) - kept :]
        self._step = self._tag if is_there else self._behind
        return bool(is_there)

    def _scalar(self) -> bool:
        value, is_there, _ = self._left.partition(self._tags.end)
        if not is_there:
            if len(self._left) > MAX_VALUE:  # no value is as long
                self._step = self._begin_text
                return True
            return False
        self._found.append(spelled(value.strip()))
        self._left, self._step = self._left[len(value) :], self._behind
        return True


def spelled(value: str) -> str:
    """Return JSON for a value as a model wrote it: itself, what Python writes, or a text of anything else."""
    if NUMBER.fullmatch(value):  # of any length, while Python reads so many digits alone
        return value
    try:
        json.loads(value, parse_constant=_no_constant)
    except (ValueError, RecursionError):
        return PYTHON.get(value, json.dumps(value, ensure_ascii=False))
    return value


def _no_constant(name: str) -> None:
    raise ValueError(f"{name} is none of JSON's")


class _Json:
    """The end of a JSON object, list or text that comes in pieces."""

    def __init__(self) -> None:
        self._depth, self._is_text, self._is_escaped = 0, False, False

    def end_in(self, text: str) -> int | None:
        """Return where the value ends in its next piece; None if it goes on."""
        for index, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_text:
                self._is_escaped, self._is_text = char == "\\", char != '"'
                if char == '"' and not self._depth:
                    return index + 1
            elif char == '"':
                self._is_text = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return None


def common(text: str, beginning: str) -> int:
    """Return how many characters at the end of a text may begin `beginning`."""
    for count in range(min(len(text), len(beginning) - 1), 0, -1):
        if text.endswith(beginning[:count]):
            return count
    return 0
