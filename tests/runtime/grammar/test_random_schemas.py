"""Random schemas: each is refused by place, or every document that its rewriting admits is valid."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from random_schemas import ROOT
from schema_walks import Walker

from inferc.config import GrammarBackend
from inferc.errors import RequestError


def check(schema: dict[str, Any], count: int, library: GrammarBackend) -> bool:
    """Assert that a schema is refused in one line, or that so many random documents under it are valid."""
    try:
        walker = Walker(schema, library)
    except RequestError as error:
        assert str(error).startswith("#") and "\n" not in str(error)
        return False
    kind = jsonschema.Draft202012Validator
    validator = kind(schema, format_checker=kind.FORMAT_CHECKER)
    for seed in range(count):
        if (text := walker.document(seed)) is not None:
            assert validator.is_valid(json.loads(text)), text
    return True


@pytest.mark.slow
@settings(max_examples=1500, deadline=None, derandomize=True)
@given(schema=ROOT)
def test_many_random_schemas(library: GrammarBackend, schema: dict[str, Any]) -> None:
    check(schema, 20, library)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(schema=ROOT)
def test_random_schemas(library: GrammarBackend, schema: dict[str, Any]) -> None:
    check(schema, 20, library)
