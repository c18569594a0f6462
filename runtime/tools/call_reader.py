"""The calls of tools in an answer, read as its text comes."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import groupby
from os.path import commonprefix

from inferc.chat.calls import CallForm

MAX_NAME = 256  # characters within which a call's name ends
MAX_SPACES = 256  # at the end of a text that are held back, since a call may follow
PIECE = 4096  # characters that are read at once: each step copies what is left of them


@dataclass(frozen=True)
class CallPart:
    """A part of a call: the first one names it, those after it go on with its arguments, which are JSON."""

    index: int
    arguments: str = ""
    name: str | None = None
    id: str | None = None


@dataclass
class Call:
    """A whole call of an answer."""

    id: str
    name: str
    arguments: str = ""


def new_id(prefix: str = "call_") -> str:
    """Return a call's id, as clients of OpenAI's expect it, or with another prefix."""
    return prefix + secrets.token_hex(12)


@dataclass
class Said:
    """An answer as far as it was read: its text without calls, its calls, and whether the last one was cut."""

    text: str = ""
    calls: list[Call] = field(default_factory=list)
    is_cut: bool = False

    def add(self, part: str | CallPart) -> None:
        if isinstance(part, str):
            self.text += part
        elif part.name is not None:
            self.calls.append(Call(part.id or "", part.name, part.arguments))
        else:
            self.calls[part.index].arguments += part.arguments


class CallReader:
    """The reader of one answer, whose calls are in the form of its model.

    Text is handed on as soon as it cannot begin a call any more. Spaces and line breaks beside a call are left out.
    Text that only begins like a call stays text. make_id: makes the ids of calls.
    """

    def __init__(self, form: CallForm, make_id: Callable[[], str] = new_id) -> None:
        self._form, self._make_id = form, make_id
        self._left = ""  # what may belong to what comes next
        self._spaces = ""  # at the end of the text so far
        self._is_behind_call = False  # nothing but spaces came since
        self._opening = form.before  # what began the call whose name is read
        self._read: Callable[[list[str | CallPart]], bool] = self._read_text
        self._json = _Json()
        self.num_calls = 0

    def push(self, text: str) -> list[str | CallPart]:
        """Return what became certain with the next text: parts of the answer's text, and of its calls."""
        found: list[str | CallPart] = []
        for start in range(0, len(text), PIECE):
            self._left += text[start : start + PIECE]
            while self._read(found):
                pass
        return _merged(found)

    @property
    def is_cut(self) -> bool:
        """True while the last call's arguments have not ended."""
        return self._read == self._read_arguments

    def finish(self) -> list[str | CallPart]:
        """Return what was held back when the answer ended; of a call that was cut before its arguments, the text."""
        found: list[str | CallPart] = []
        if self._read == self._read_end:  # what follows was awaited to tell the end of calls from another one
            self._left, self._read = self._behind_end(), self._read_text
        if self._read == self._read_name:
            self._say(self._opening, found)
        if self._read in (self._read_text, self._read_name):
            self._say(self._left, found)
        if self._spaces:
            found.append(self._spaces)
        self._left = self._spaces = ""
        return _merged(found)

    def _say(self, text: str, found: list[str | CallPart]) -> None:
        """Hand a text on, without the spaces at its end, which a call may follow."""
        if self._is_behind_call:
            text = text.lstrip()
        if kept := text.rstrip():
            found.append(self._spaces + kept)
            self._spaces, self._is_behind_call = text[len(kept) :], False
        else:
            self._spaces += text
        if len(self._spaces) > MAX_SPACES:
            found.append(self._spaces[:-MAX_SPACES])
            self._spaces = self._spaces[-MAX_SPACES:]

    def _read_text(self, found: list[str | CallPart]) -> bool:
        text, _, rest = self._left.partition(self._form.before)
        if len(text) < len(self._left):
            self._say(text, found)
            self._left, self._read, self._opening = rest, self._read_name, self._form.before
            return True
        held = _common(self._left, self._form.before)
        self._say(self._left[: len(self._left) - held], found)
        self._left = self._left[len(self._left) - held :]
        return False

    def _read_name(self, found: list[str | CallPart]) -> bool:
        name, is_there, rest = self._left.partition(self._form.between)
        if not is_there and len(self._left) < MAX_NAME + len(self._form.between):
            return False
        if not is_there or len(name) > MAX_NAME or not name:
            self._say(self._opening + self._left[:1], found)  # only its beginning was a call's
            self._left = self._left[1:]
            self._read = self._read_text
            return True
        found.append(CallPart(self.num_calls, "", name, self._make_id()))
        self.num_calls += 1
        self._spaces, self._is_behind_call = "", True
        self._left, self._json, self._read = rest, _Json(), self._read_arguments
        return True

    def _read_arguments(self, found: list[str | CallPart]) -> bool:
        end = self._json.end_in(self._left)
        part = self._left if end is None else self._left[:end]
        if part:
            found.append(CallPart(self.num_calls - 1, part))
        self._left = self._left[len(part) :]
        if end is None:
            return False
        self._read = self._read_end
        return True

    def _read_end(self, found: list[str | CallPart]) -> bool:
        """Read what stands behind arguments: the beginning of another call's name, or the end of all calls.

        One may begin with the other, so what came is told apart once it is as long as the longer one, or differs.
        """
        left, joint, after = self._left, self._form.joint, self._form.after
        if not left or any(end != left and end.startswith(left) for end in (joint or "", after)):
            return False
        is_after_longer = joint is not None and len(after) > len(joint) and left.startswith(after)
        if joint is not None and left.startswith(joint) and not is_after_longer:
            shared = len(commonprefix([joint, after]))  # it ends the call before
            self._left, self._read, self._opening = left[len(joint) :], self._read_name, joint[shared:]
        else:
            self._left, self._read = self._behind_end(), self._read_text
        return True

    def _behind_end(self) -> str:
        """Return what came behind the end of calls, of which the answer may have a part alone."""
        after = self._form.after
        return "" if after.startswith(self._left) else self._left.removeprefix(after)


class _Json:
    """The end of a JSON object that comes in pieces."""

    def __init__(self) -> None:
        self._depth, self._is_text, self._is_escaped = 0, False, False

    def end_in(self, text: str) -> int | None:
        """Return where the object ends in its next piece; None if it goes on."""
        for index, char in enumerate(text):
            if self._is_escaped:
                self._is_escaped = False
            elif self._is_text:
                self._is_escaped, self._is_text = char == "\\", char != '"'
            elif char == '"':
                self._is_text = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return index + 1
        return None


def _common(text: str, beginning: str) -> int:
    """Return how many characters at the end of a text may begin `beginning`."""
    for count in range(min(len(text), len(beginning) - 1), 0, -1):
        if text.endswith(beginning[:count]):
            return count
    return 0


def _merged(parts: list[str | CallPart]) -> list[str | CallPart]:
    """Return the parts with texts that follow one another joined, and arguments with those before them."""
    found: list[str | CallPart] = []
    for _, group in groupby(parts, lambda part: None if isinstance(part, str) else part.index):
        first, *rest = group
        if isinstance(first, str):
            found.append("".join((first, *map(str, rest))))
        else:
            arguments = [each.arguments for each in (first, *rest) if isinstance(each, CallPart)]
            found.append(replace(first, arguments="".join(arguments)))
    return found


def read_calls(form: CallForm, text: str) -> Said:
    """Return the text and the calls of a whole answer."""
    reader, said = CallReader(form), Said()
    for part in (*reader.push(text), *reader.finish()):
        said.add(part)
    said.is_cut = reader.is_cut
    return said
