"""A parser for JSON texts from outside, which may hold anything."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """Parse a JSON text (bytes are UTF-8); raise ValueError, saying why, for anything else.

    The standard parser recurses for every bracket, so 100,000 of them raise RecursionError, which no caller expects
    when it reads a file.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
