"""The calls of tools in an answer, read as its text comes."""

from __future__ import annotations

import re
import secrets
import string
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import groupby
from os.path import commonprefix

from inferc.chat.calls import ID, NUMBER, OF_NAME, SLOTS
from inferc.runtime.tools.answer_calls import AnswerCalls
from inferc.runtime.tools.arguments import MAX_NAME, Arguments, JsonArguments, common

MAX_SPACES = 256  # at the end of a text that are held back, since a call may follow
PIECE = 4096  # characters that are read at once: each step copies what is left of them
SLOT = re.compile(f"([{ID}{NUMBER}])")
IN_NAME = string.ascii_letters + string.digits + "_.-"
IN_SLOT = re.compile(r"[A-Za-z0-9_-]{0,64}")  # what may stand for an id or a number


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


def short_id() -> str:
    """Return a call's id of nine letters and digits, as some chat templates require."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


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
    Text that only begins like a call stays text. make_id: makes the ids of calls, unless the model's form has others.
    """

    def __init__(self, calls: AnswerCalls, make_id: Callable[[], str] = new_id) -> None:
        self._calls, self._form = calls, calls.form
        self._make_id = make_id if self._form.ids == "ours" else short_id
        self._left = ""  # what may belong to what comes next
        self._spaces = ""  # at the end of the text so far
        self._is_plain = False  # no call comes any more
        self._is_behind_call = False  # nothing but spaces came since
        self._opening = self._form.before  # what began the call whose name is read
        self._read: Callable[[list[str | CallPart]], bool] = self._read_text
        self._arguments: Arguments = JsonArguments()
        self.num_calls = 0

    def push(self, text: str) -> list[str | CallPart]:
        """Return what became certain with the next text: parts of the answer's text, and of its calls."""
        found: list[str | CallPart] = []
        for start in range(0, len(text), PIECE):
            self._left += text[start : start + PIECE]
            while self._read(found):
                pass
        return self._merged(found)

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
        return self._merged(found)

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
        if self._is_plain:
            self._say(self._left, found)
            self._left = ""
            return False
        before = self._form.before
        if self._is_first and not before.startswith(self._left[: len(before)]):
            self._is_plain = True
            return True
        text, _, rest = self._left.partition(self._form.before)
        if len(text) < len(self._left):
            self._say(text, found)
            self._left, self._read, self._opening = rest, self._read_name, self._form.before
            return True
        held = common(self._left, self._form.before)
        self._say(self._left[: len(self._left) - held], found)
        self._left = self._left[len(self._left) - held :]
        return False

    def _read_name(self, found: list[str | CallPart]) -> bool:
        behind = self._left.lstrip(IN_NAME) if self._form.is_python else ""
        if behind and not behind.startswith(self._form.between):  # a list, or a link of Markdown's
            return self._read_no_name(found)
        name = self._name_in(self._left)
        end = _matched(self._form.between, self._left[len(name) :]) if name else None
        longest = MAX_NAME + max(map(len, self._calls.behind_name))
        if (name is None or end == MORE) and len(self._left) < longest:
            return False
        if not name or len(name) > MAX_NAME or end is None or end == MORE:
            return self._read_no_name(found)
        written = self._left[len(name) : len(name) + end]
        found.append(CallPart(self.num_calls, "", name, self._id(name, written)))
        self.num_calls += 1
        self._spaces, self._is_behind_call = "", True
        self._left, self._read = self._left[len(name) + end :], self._read_arguments
        self._arguments = self._calls.arguments(name)
        return True

    def _read_no_name(self, found: list[str | CallPart]) -> bool:
        """Hand on what began like a call as text."""
        self._say(self._opening + self._left[:1], found)
        self._left = self._left[1:]
        self._read, self._is_plain = self._read_text, self._is_first
        return True

    @property
    def _is_first(self) -> bool:
        """True if calls begin the answer, or there are none."""
        return self._calls.is_first or self._form.is_first

    def _name_in(self, text: str) -> str | None:
        """Return the name at the begin of a text, None if its end did not come."""
        places = [at for each in self._calls.behind_name if (at := text.find(each)) >= 0]
        return text[: min(places)] if places else None

    def _id(self, name: str, written: str) -> str:
        """Return the id of a call; written: what stood behind its name."""
        pieces = SLOT.split(self._form.between)
        if self._form.ids in ("ours", "short") or len(pieces) < 3:
            return self._make_id()
        slot = written[len(pieces[0]) : len(written) - len(pieces[2])]
        return slot if self._form.ids == "written" else f"{OF_NAME}{name}:{slot}"

    def _read_arguments(self, found: list[str | CallPart]) -> bool:
        part, self._left, is_ended = self._arguments.read(self._left)
        if part := self._calls.shown(part):
            found.append(CallPart(self.num_calls - 1, part))
        if is_ended:
            self._read = self._read_end
        return is_ended

    def _read_end(self, found: list[str | CallPart]) -> bool:
        """Read what stands behind arguments: the beginning of another call's name, or the end of all calls.

        One may begin with the other, so what came is told apart once it is as long as the longer one, or differs.
        """
        left, joint, after = self._left, self._form.joint, self._form.after
        is_joint = None if joint is None else _matched(joint, left)
        is_after = _matched(after, left)
        if not left or MORE in (is_joint, is_after):
            return False
        if joint is not None and is_joint is not None and is_joint >= (is_after or 0):
            shared = _matched(commonprefix([joint, after]), left) or 0  # it ends the call before
            self._left, self._read, self._opening = left[is_joint:], self._read_name, left[shared:is_joint]
        else:
            self._left, self._read = self._behind_end(), self._read_text
        return True

    def _behind_end(self) -> str:
        """Return what came behind the end of calls, of which the answer may have a part alone."""
        end = _matched(self._form.after, self._left)
        return "" if end == MORE else self._left[end or 0 :]

    def _merged(self, parts: list[str | CallPart]) -> list[str | CallPart]:
        """Return the parts joined, without the marks of control tokens that are no part of a call."""
        return _merged([self._calls.shown(part) if isinstance(part, str) else part for part in parts])


MORE = -1


def _matched(form: str, text: str) -> int | None:
    """Return how many characters at the begin of a text are in a form, which may have slots; MORE if it is cut."""
    at = 0
    for piece in SLOT.split(form):
        if piece in SLOTS:
            found = IN_SLOT.match(text, at)
            assert found is not None, "it may be empty"
            at = found.end()
            if at == len(text):
                return MORE
        elif text.startswith(piece, at):
            at += len(piece)
        else:
            return MORE if piece.startswith(text[at:]) else None
    return at


def _merged(parts: list[str | CallPart]) -> list[str | CallPart]:
    """Return the parts with texts that follow one another joined, and arguments with those before them."""
    found: list[str | CallPart] = []
    for _, group in groupby(parts, lambda part: None if isinstance(part, str) else part.index):
        first, *rest = group
        if isinstance(first, str):
            if text := "".join((first, *map(str, rest))):
                found.append(text)
        else:
            arguments = [each.arguments for each in (first, *rest) if isinstance(each, CallPart)]
            found.append(replace(first, arguments="".join(arguments)))
    return found


def read_calls(calls: AnswerCalls, text: str) -> Said:
    """Return the text and the calls of a whole answer."""
    reader, said = CallReader(calls), Said()
    for part in (*reader.push(text), *reader.finish()):
        said.add(part)
    said.is_cut = reader.is_cut
    return said
