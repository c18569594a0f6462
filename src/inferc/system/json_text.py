"""JSON texts from outside, of which nothing is known before they are parsed."""

from __future__ import annotations

import json
from typing import Any


def parse_json(text: str | bytes) -> Any:
    """The value of a JSON text; bytes are UTF-8. Raises ValueError, saying why, for whatever is not one.

    The standard parser calls itself for every bracket, so that 100,000 of them are a RecursionError, which nobody expects of
    a file.
    """
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("its brackets are nested too deeply") from None
