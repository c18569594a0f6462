"""The libraries that hold answers to forms, each of which a test that asks for `library` is run with."""

from __future__ import annotations

from typing import cast, get_args

import pytest
from schema_walks import backend

from inferc.config import GrammarBackend


@pytest.fixture(params=get_args(GrammarBackend), scope="module")
def library(request: pytest.FixtureRequest) -> GrammarBackend:
    backend(request.param)
    return cast(GrammarBackend, request.param)
