"""Structural tags: texts of which parts follow forms, as xgrammar defines them, with exact JSON Schemas in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeAlias

from inferc.chat.argument_tags import ArgumentTags, argument_tags_of
from inferc.errors import RequestError, nearest, shown

Node: TypeAlias = Mapping[str, Any]

# The kinds of formats, and the field in which each has another one, or a list of others; None: none of either.
OF_TEXTS = ("const_string", "json_schema", "any_text", "grammar", "regex")
LEAVES = (*OF_TEXTS, "token", "exclude_token", "any_tokens", "arguments")
TAG_LISTS = ("triggered_tags", "token_triggered_tags", "tags_with_separator")
HELD: dict[str, str | None] = {
    **dict.fromkeys(LEAVES, None),
    **dict.fromkeys(("tag", "optional", "plus", "star", "repeat"), "content"),
    **dict.fromkeys(("sequence", "or"), "elements"),
    **dict.fromkeys(TAG_LISTS, "tags"),
}
MAX_DEPTH = 32
MAX_LABEL = 100  # characters of a client's name in messages: those of a tool's name fit
ARGUMENTS = "arguments"  # of a call, each in tags of its own: a format of ours
LABEL = "label"  # of a json_schema: its name in messages, in place of where it is


@dataclass(frozen=True)
class Rewriting:
    """The functions that return what stands for schemas in a library's structural tag; both raise RequestError.

    schema: gets a JSON Schema, and the most spaces and line breaks in a row. arguments: gets that of an object whose
    properties stand in tags of their own, these tags, and the same number, and returns a format.
    """

    schema: Callable[[Any, Any], Any]
    arguments: Callable[[Any, ArgumentTags, int], dict[str, Any]]


def checked_tag(value: Any, max_whitespace: int, rewriting: Rewriting) -> dict[str, Any]:
    """Return a structural tag in xgrammar's notation, with each schema rewritten so that it admits what it should.

    value: xgrammar's form, an object with `format`, or OpenAI's first one with `structures` and `triggers`.
    max_whitespace: the most spaces and line breaks in a row in JSON. Raises RequestError for what cannot be held to.
    """
    if not isinstance(value, Mapping):
        raise RequestError(f"expected an object with a format, found {shown(value)}")
    if "structures" in value:
        return {"type": "structural_tag", "format": _format(_of_structures(value), "#", max_whitespace, rewriting, 0)}
    if "format" not in value:
        found = ", ".join(map(_named, islice(value, 5))) or "nothing"
        raise RequestError(f"expected an object with a format, found one with {found}")
    return {"type": "structural_tag", "format": _format(value["format"], "#/format", max_whitespace, rewriting, 0)}


def _of_structures(value: Node) -> dict[str, Any]:
    """Convert OpenAI's first form: tags with schemas, each after one of the triggers."""
    structures, triggers = value["structures"], value.get("triggers")
    if not isinstance(structures, list) or not all(isinstance(each, Mapping) for each in structures):
        raise RequestError(f"#/structures: expected a list of objects, found {shown(structures)}")
    tags = []
    for index, each in enumerate(structures):
        if missing := [name for name in ("begin", "schema", "end") if name not in each]:
            raise RequestError(f"#/structures/{index}: {missing[0]} is missing")
        content = {"type": "json_schema", "json_schema": each["schema"]}
        tags.append({"type": "tag", "begin": each["begin"], "content": content, "end": each["end"]})
    return {"type": "triggered_tags", "triggers": triggers, "tags": tags}


def _format(node: Any, place: str, max_whitespace: int, rewriting: Rewriting, depth: int) -> dict[str, Any]:
    if not isinstance(node, Mapping):
        raise RequestError(f"{place}: expected an object with a type, found {shown(node)}")
    kind = node.get("type")
    if not isinstance(kind, str) or kind not in HELD:
        hint = nearest(kind, HELD) if isinstance(kind, str) else f"expected one of {', '.join(HELD)}"
        raise RequestError(f"{place}/type: {shown(kind)} is no format that is held to; {hint}")
    if depth == MAX_DEPTH:
        raise RequestError(f"{place}: formats are within one another more than {MAX_DEPTH} times")
    if kind in ("json_schema", ARGUMENTS):
        return (_schema if kind == "json_schema" else _arguments)(node, place, max_whitespace, rewriting)
    name = HELD[kind]
    if name is None:
        return dict(node)
    held, at = node.get(name), f"{place}/{name}"
    if name == "content":
        return {**node, name: _format(held, at, max_whitespace, rewriting, depth + 1)}
    if not isinstance(held, list) or not held:
        raise RequestError(f"{at}: expected a list of at least one format, found {shown(held)}")
    formats = [_format(each, f"{at}/{index}", max_whitespace, rewriting, depth + 1) for index, each in enumerate(held)]
    return {**node, name: formats}


def _schema(node: Node, place: str, max_whitespace: int, rewriting: Rewriting) -> dict[str, Any]:
    known = ("type", "json_schema", "style", "max_whitespace_cnt", LABEL)
    if unknown := [name for name in node if name not in known]:
        raise RequestError(f"{place}/{_named(unknown[0])}: it is not built; leave it out")
    if node.get("style", "json") != "json":
        raise RequestError(f"{place}/style: {shown(node['style'])} is not built; leave it out, for JSON")
    most = node.get("max_whitespace_cnt", max_whitespace)
    with _faults_at(node, place):
        schema = rewriting.schema(node.get("json_schema"), most)
    return {"type": "json_schema", "json_schema": schema, "max_whitespace_cnt": most}


def _arguments(node: Node, place: str, max_whitespace: int, rewriting: Rewriting) -> dict[str, Any]:
    try:
        tags = argument_tags_of(node.get("tags"))
    except ValueError as error:
        raise RequestError(f"{place}/tags: {error}") from None
    with _faults_at(node, place):
        return rewriting.arguments(node.get("json_schema"), tags, max_whitespace)


@contextmanager
def _faults_at(node: Node, place: str) -> Iterator[None]:
    """Give what is wrong in a node's schema the node's name, or its place."""
    try:
        yield
    except RequestError as error:
        label = node.get(LABEL)
        where = _named(label) if isinstance(label, str) and label else f"{place}/json_schema"
        raise RequestError(f"{where}: {error}") from None


def _named(name: Any) -> str:
    """Return a client's name for a message, in one line and not for long."""
    return " ".join(str(name)[:MAX_LABEL].split())
