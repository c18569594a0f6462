"""The parser of JSON of many megabytes, which works in pieces so that no call holds the GIL for long.

`json.loads` blocks all other threads until it is done: a second for a few million numbers. Here, long strings and long
lists of numbers are cut out and parsed piece by piece, and only the small rest is parsed at once. The amount of each is
counted, and bounded, before any object is created: a megabyte of `[],[],…` would become a hundred megabytes of lists.
"""

from __future__ import annotations

import json
import re
import secrets
from typing import Any, NoReturn

from inferc.errors import RequestError

LONG_TEXT = 256  # bytes; a longer string is cut out
LONG_LIST = 1 << 10  # bytes; a longer list of numbers is cut out
PIECE = 256 << 10  # bytes of a long string or list that are parsed in one call, in some milliseconds
MASKED_AT_ONCE = 1 << 20  # bytes that are masked in one call
MAX_PARTS = 1 << 17  # strings, objects and lists of a body
MAX_NUMBERS = 1 << 21  # numbers of a body
MAX_REST = 4 << 20  # bytes of the rest, without what is cut out
LONGEST_NUMBER = 256 << 10  # bytes of a number, with the white space around it
MAX_DIGITS = 40  # an integer with more digits is only approximated: no field needs more
BYTES_OF_NUMBER = 64  # if the numbers of a piece are longer on average, some may have thousands of digits

ESCAPED_BACKSLASH, ESCAPED_QUOTE = b"\x01\x02", b"\x01\x03"  # bytes that no string in JSON may have
SECOND_BYTES = (0x02, 0x03)
FIRST_HALF = re.compile(rb"\\u[dD][89abAB][0-9a-fA-F]{2}")  # of a surrogate pair
LONGEST_ESCAPE = 6


def loads(data: bytes) -> Any:
    """Parse UTF-8 bytes as `json.loads` does; an integer of more than MAX_DIGITS digits is only about as large.

    Raises ValueError as `json.loads` does, RecursionError for values that are nested too deeply, and RequestError
    beyond the bounds above.
    """
    reader = _Reader(data)
    reader.split()
    value = json.loads(b"".join(reader.rest), parse_int=_integer, parse_float=_float)
    return reader.restored(value)


def _integer(digits: str) -> int:
    """Convert digits to an integer, approximately for many digits: Python takes milliseconds for thousands of them."""
    if len(digits) <= MAX_DIGITS:
        return int(digits)
    beyond: int = 10 ** min(len(digits) - MAX_DIGITS, 400)
    return int(digits[:MAX_DIGITS]) * beyond


def _float(digits: str) -> float:
    """Convert digits to a float in Python code, so that other threads get a turn between one number and the next.

    The builtin `float` would be called by json without such a turn.
    """
    return float(digits)


class _Reader:
    """A body that is being parsed: long parts are cut out, and put back into the parsed rest."""

    def __init__(self, data: bytes) -> None:
        self._data, self._masked = data, _masked(data)
        self.rest: list[bytes] = []
        self._mark = secrets.token_hex(
            8
        )  # random start of the placeholders for what is cut out, which no client can guess
        self._apart: list[tuple[int, int]] = []  # [start, end) in the data of each part that was cut out
        self._num_parts = self._num_closed = self._num_numbers = self._num_rest = 0

    def split(self) -> None:
        """Fill `rest` with the body without its long parts; raise RequestError beyond the bounds."""
        masked, at = self._masked, 0
        while (opening := masked.find(b'"', at)) >= 0:
            self._between(at, opening)
            closing = masked.find(b'"', opening + 1)
            if closing < 0:
                raise ValueError("a text has no end")
            if closing - opening > LONG_TEXT:
                self._take_out(opening, closing + 1)
            else:
                self._keep(self._data[opening : closing + 1])
            self._count(1)
            at = closing + 1
        self._between(at, len(masked))

    def _between(self, start: int, end: int) -> None:
        """Split the bytes between two strings: numbers, literals and structure."""
        data, at = self._data, start
        while end - at > LONG_LIST and (closing := data.find(b"]", at, end)) >= 0:
            self._num_closed += 1
            if self._num_closed > MAX_PARTS:
                _refuse("brackets", f"{MAX_PARTS}")
            opening = max(data.rfind(b"[", at, closing), data.rfind(b"{", at, closing))
            if closing - opening > LONG_LIST and opening >= at and data[opening] == ord("["):
                self._keep_between(at, opening)
                self._count_numbers(opening, closing)
                self._count(1)
                self._take_out(opening, closing + 1)
            else:
                self._keep_between(at, closing + 1)
            at = closing + 1
        self._keep_between(at, end)

    def _keep_between(self, start: int, end: int) -> None:
        self._keep(self._data[start : min(end, start + MAX_REST + 1)])
        self._count_numbers(start, end)
        self._count(self._data.count(b"[", start, end) + self._data.count(b"{", start, end))

    def _count(self, num_parts: int) -> None:
        self._num_parts += num_parts
        if self._num_parts > MAX_PARTS:
            _refuse("parts", f"{MAX_PARTS} texts, lists and objects")

    def _count_numbers(self, start: int, end: int) -> None:
        for at in range(start, end, MASKED_AT_ONCE):
            self._num_numbers += self._data.count(b",", at, min(at + MASKED_AT_ONCE, end))
            if self._num_numbers > MAX_NUMBERS:
                _refuse("numbers", f"{MAX_NUMBERS}")

    def _keep(self, data: bytes) -> None:
        self._num_rest += len(data)
        if self._num_rest > MAX_REST:
            _refuse("bytes", f"{MAX_REST} beside long texts and lists of numbers")
        self.rest.append(data)

    def _take_out(self, start: int, end: int) -> None:
        self._keep(f'"{self._mark}:{len(self._apart)}"'.encode())
        self._apart.append((start, end))

    # --------------------------------------------------------------------------------------------- put back

    def restored(self, value: Any) -> Any:
        """Return the value with all placeholders replaced by the parts that were cut out."""
        outer = [value]
        waiting: list[list[Any] | dict[str, Any]] = [outer]
        while waiting:
            container = waiting.pop()
            if isinstance(container, dict):
                self._restore_keys(container)
            for key, each in container.items() if isinstance(container, dict) else enumerate(container):
                if isinstance(each, str):
                    if each.startswith(self._mark):
                        container[key] = self._read(each)  # type: ignore[index]  # an index of a list, a key of a dict
                elif isinstance(each, list | dict):
                    waiting.append(each)
        return outer[0]

    def _restore_keys(self, container: dict[str, Any]) -> None:
        if any(key.startswith(self._mark) for key in container):
            items = list(container.items())
            container.clear()
            container.update((self._key(key) if key.startswith(self._mark) else key, each) for key, each in items)

    def _key(self, mark: str) -> str:
        start, end = self._apart[int(mark.partition(":")[2])]
        if self._data[start] != ord('"'):
            raise ValueError("the name of an object's field is a list")
        return self._text(start + 1, end - 1)

    def _read(self, mark: str) -> Any:
        start, end = self._apart[int(mark.partition(":")[2])]
        read = self._text if self._data[start] == ord('"') else self._numbers
        return read(start + 1, end - 1)

    def _text(self, start: int, end: int) -> str:
        pieces = []
        while start < end:
            stop = self._cut(start, end)
            pieces.append(json.loads(b'"%b"' % self._data[start:stop]))
            start = stop
        return "".join(pieces)

    def _cut(self, start: int, end: int) -> int:
        """Return where a string can be cut without splitting a character, an escape, or a pair of surrogate escapes."""
        stop = start + PIECE
        if stop >= end:
            return end
        while self._masked[stop] in SECOND_BYTES or self._masked[stop] & 0xC0 == 0x80:
            stop -= 1
        if (escape := self._masked.rfind(b"\\", stop - LONGEST_ESCAPE + 1, stop)) >= 0:
            stop = escape
        if FIRST_HALF.fullmatch(self._masked, stop - LONGEST_ESCAPE, stop):
            stop -= LONGEST_ESCAPE
        return max(stop, start + 1)

    def _numbers(self, start: int, end: int) -> list[Any]:
        """Parse the numbers of a long list; [start, end) excludes its brackets."""
        found: list[Any] = []
        while start <= end:
            comma = self._data.find(b",", start + PIECE, end)
            stop = end if comma < 0 else comma
            if stop - start > PIECE + LONGEST_NUMBER:
                raise ValueError(f"a number has {stop - start} bytes")
            piece = self._data[start:stop]
            has_long = len(piece) > BYTES_OF_NUMBER * (1 + piece.count(b","))
            values = json.loads(b"[%b]" % piece, parse_int=_integer if has_long else None)
            if not values:
                raise ValueError("a list has a comma with no value behind it")
            found += values
            start = stop + 1
        return found


def _masked(data: bytes) -> bytes:
    """Return the data with escaped quotation marks and backslashes replaced by as many control characters.

    The quotation marks that are left are those around strings.
    """
    if b"\\" not in data:
        return data
    pieces, at = [], 0
    while at < len(data):
        piece = data[at : at + MASKED_AT_ONCE]
        if (len(piece) - len(piece.rstrip(b"\\"))) % 2:  # the escaped character comes next
            piece = data[at : at + len(piece) + 1]
        pieces.append(piece.replace(b"\\\\", ESCAPED_BACKSLASH).replace(b'\\"', ESCAPED_QUOTE))
        at += len(piece)
    return b"".join(pieces)


def _refuse(what: str, most: str) -> NoReturn:
    raise RequestError(f"the body has more {what} than are read at once, at most {most}; send less in one request")
