"""The tags in which a chat template writes each argument of a call, found by rendering calls with none, one and two.

Some models write arguments not as one JSON object, but one by one, each with its name:
`<parameter=city>Rome</parameter>`. Texts then stand as they are, and other values as JSON. What stands around names and
values is found as that around calls is (inferc.chat.calls).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from os.path import commonprefix
from typing import Any, TypeAlias

# Renders a call with these arguments, without what stands around any answer; None if that cannot be told.
RenderCall: TypeAlias = Callable[[Mapping[str, Any]], str | None]

NAMES = ("zqkeyone", "zqkeytwo")
NUMBERS = (41779, 58833)
REST = re.compile(r"[^\s<\[{(]*")  # of the tag before, at the begin of what two texts end with
TEXT = 'Zqsaid "this" <b>,\n{so}'


@dataclass(frozen=True)
class ArgumentTags:
    """The tags of an argument: `begin`, its name, `middle`, its value, `end`.

    is_json: texts are JSON, too, instead of standing as they are.
    """

    begin: str
    middle: str
    end: str
    is_json: bool = False

    def __str__(self) -> str:
        return f"{self.begin}KEY{self.middle}{'JSON' if self.is_json else 'VALUE'}{self.end}…"


@dataclass(frozen=True)
class TaggedCall:
    """The parts of a call that has tags: what stands before its name, before its arguments, and after them."""

    before: str
    between: str
    after: str
    tags: ArgumentTags


def argument_tags_of(value: Any) -> ArgumentTags:
    """Return the tags that an artifact, or a structural tag, holds; raise ValueError for what are none."""
    if isinstance(value, ArgumentTags):
        return value
    names = [each.name for each in fields(ArgumentTags)]
    if not isinstance(value, Mapping) or value.keys() != set(names):
        raise ValueError(f"arguments: expected an object with {', '.join(names)}, found {value!r:.100}")
    for name in names:
        if type(value[name]) is not (bool if name == "is_json" else str) or value[name] == "":
            expected = "true or false" if name == "is_json" else "a text that is not empty"
            raise ValueError(f"arguments.{name} is {value[name]!r:.40}, expected {expected}")
    if _overlaps(value["end"]):
        raise ValueError(f"arguments.end is {value['end']!r:.40}, expected a text that does not end as it begins")
    return ArgumentTags(**value)


def find_argument_tags(render: RenderCall, name: str) -> TaggedCall | None:
    """Return the parts of the calls of the tool `name`; None if its arguments are not each in tags of their own."""
    first, second = NAMES
    bare = render({})
    one = _cut(render({first: NUMBERS[0]}), name, first, str(NUMBERS[0]))
    two = _cut(render({first: NUMBERS[0], second: NUMBERS[1]}), name, first, str(NUMBERS[0]), second, str(NUMBERS[1]))
    if bare is None or one is None or two is None:
        return None
    before, opened, middle, closed = one
    again = two[3]
    if two != (before, opened, middle, again, middle, closed):
        return None
    shared = commonprefix([opened[::-1], again[::-1]])[::-1]
    begin = shared[len(REST.match(shared).group()) :]  # type: ignore[union-attr]
    between, end = opened[: len(opened) - len(begin)], again[: len(again) - len(begin)]
    after = closed.removeprefix(end)
    if not begin.strip() or not middle or not end.strip() or _overlaps(end) or not after:
        return None
    if not closed.startswith(end) or bare != before + name + between + after:
        return None
    quoted, plain = f'{middle}"{NAMES[1]}"{end}', f"{middle}{TEXT}{end}"
    as_json, as_text = render({first: NAMES[1]}), render({first: TEXT})
    is_json = as_json is not None and quoted in as_json
    if not is_json and (as_text is None or plain not in as_text):
        return None
    return TaggedCall(before, between, after, ArgumentTags(begin, middle, end, is_json))


def _cut(text: str | None, *words: str) -> tuple[str, ...] | None:
    """Return what stands before, between and after words that a text has once each, in this order."""
    found: list[str] = []
    for word in words:
        if text is None or text.count(word) != 1:
            return None
        before, _, text = text.partition(word)
        found.append(before)
    return (*found, text or "")


def _overlaps(text: str) -> bool:
    """Return whether a text ends as it begins, so that one that follows another could begin within it."""
    return any(text.endswith(text[:count]) for count in range(1, len(text)))
