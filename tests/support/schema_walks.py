"""Documents under a schema, chosen at random by what a library admits, and texts that it is asked about.

Every byte is a token of its own here, so what is admitted depends on no vocabulary.
"""

from __future__ import annotations

import random
from functools import cache
from typing import Any

import numpy as np
import pytest

from inferc import StructuredOutputs
from inferc.config import GrammarBackend
from inferc.errors import UnsupportedError
from inferc.runtime.grammar.backend import Backend, open_backend
from inferc.runtime.grammar.vocabulary import Vocabulary

LONGEST = 500
END = 256


@cache
def backend(library: GrammarBackend = "xgrammar") -> Backend:
    """Return the backend of a library; a test that needs one that is not installed is skipped."""
    try:
        return open_backend(Vocabulary((*(bytes([byte]) for byte in range(END)), b""), (END,)), library)
    except UnsupportedError:
        pytest.skip(f"{library} is not installed")


class Walker:
    """The grammar of one schema, or of another form. Raises RequestError for a form that is refused."""

    def __init__(self, schema: Any, library: GrammarBackend = "xgrammar") -> None:
        form = schema if isinstance(schema, StructuredOutputs) else StructuredOutputs(json=schema)
        self.grammar = backend(library).load(backend(library).compile(form))
        self.bits = np.zeros((1, -(-(END + 1) // 32)), np.uint32)

    def admits(self, text: str) -> bool:
        """Return whether the text is a whole document."""
        matcher = self.grammar.matcher()
        return all(matcher.accept(byte) for byte in text.encode()) and matcher.accept(END)

    def document(self, seed: int) -> str | None:
        """Return a document, or None for one that grows too long; asserts that there always is a next character."""
        chosen, matcher, found = random.Random(seed), self.grammar.matcher(), bytearray()
        while len(found) < LONGEST:
            matcher.fill(self.bits, 0)
            allowed = np.flatnonzero(np.unpackbits(self.bits.view(np.uint8), bitorder="little")[: END + 1]).tolist()
            assert allowed, f"nothing may follow {bytes(found)!r}"
            if END in allowed and (len(allowed) == 1 or chosen.random() < 0.5):
                return found.decode(errors="replace")
            if END in allowed:
                allowed.remove(END)
            closing = [byte for byte in allowed if byte in b'"}],:']
            printed = [byte for byte in allowed if 33 <= byte < 127]
            share = chosen.random()
            byte = chosen.choice((share < 0.35 and closing) or (share < 0.93 and printed) or allowed)
            assert matcher.accept(byte)
            found.append(byte)
        return None
