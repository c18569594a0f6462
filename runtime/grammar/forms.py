"""Parts of forms that all libraries of grammars read in the same way."""

from __future__ import annotations

import json
from typing import Any

from inferc.errors import RequestError

# The most spaces and line breaks in a row in JSON: a model may indent it, and does not go on with spaces for ever.
MAX_WHITESPACE = 20
# The first byte of a compiled grammar: whether texts that it leaves no choice about are looked for.
FORCES, FREE = b"f", b"-"
NO_ANSWER = "it admits no answer, not even an empty one; see how it begins"


def parsed(source: str) -> Any:
    """Return what a JSON text says. Raises RequestError if it is none."""
    try:
        return json.loads(source)
    except (ValueError, RecursionError) as error:
        raise RequestError(f"it is no JSON: {str(error)[:200]}") from None
