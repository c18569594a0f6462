"""Documents under a schema, chosen at random by what a library admits, and texts that it is asked about.

Every byte is a token of its own here, so what is admitted depends on no vocabulary.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cache
from typing import Any

import numpy as np
import pytest

from inferc import StructuredOutputs
from inferc.config import GrammarBackend
from inferc.errors import UnsupportedError
from inferc.runtime.grammar.backend import Backend, open_backend
from inferc.runtime.grammar.vocabulary import NO_TEXT, Vocabulary

LONGEST = 500
CLOSING = frozenset(b'"}],:')
END = 256
MARKS = {END + 1 + index: chr(0xDC10 + index) for index in range(12)}  # of the control tokens


@cache
def backend(library: GrammarBackend = "xgrammar") -> Backend:
    """Return the backend of a library; a test that needs one that is not installed is skipped."""
    return _opened(library, ())


@cache
def marked_backend(library: GrammarBackend = "xgrammar") -> Backend:
    """Return the backend of a vocabulary that has control tokens, too."""
    return _opened(library, [NO_TEXT + bytes([index]) for index in range(len(MARKS))])


def _opened(library: GrammarBackend, controls: Sequence[bytes]) -> Backend:
    try:
        return open_backend(Vocabulary((*(bytes([byte]) for byte in range(END)), b"", *controls), (END,)), library)
    except UnsupportedError:
        pytest.skip(f"{library} is not installed")


class Walker:
    """The grammar of one schema, or of another form. Raises RequestError for a form that is refused.

    has_controls: there are control tokens, which texts have as MARKS. tries: texts that are often tried in documents.
    """

    def __init__(
        self,
        schema: Any,
        library: GrammarBackend = "xgrammar",
        has_controls: bool = False,
        tries: Sequence[str] = (),
    ) -> None:
        form = schema if isinstance(schema, StructuredOutputs) else StructuredOutputs(json=schema)
        opened = (marked_backend if has_controls else backend)(library)
        self.grammar, self.tries = opened.load(opened.compile(form)), tries
        self.size = END + 1 + (len(MARKS) if has_controls else 0)
        self.bits = np.zeros((1, -(-self.size // 32)), np.uint32)

    def admits(self, text: str) -> bool:
        """Return whether the text is a whole document."""
        matcher = self.grammar.matcher()
        return all(matcher.accept(token) for token in tokens_of(text)) and matcher.accept(END)

    def document(self, seed: int, fullness: int = 0) -> str | None:
        """Return a document, or None for one that grows too long; asserts that there always is a next character.

        fullness: up to so many bytes no list and no object is closed while it may go on, and later all are.
        """
        chosen, matcher, found = random.Random(seed), self.grammar.matcher(), list[int]()
        while len(found) < LONGEST + fullness:
            if self.tries and chosen.random() < 0.15:
                for token in tokens_of(chosen.choice(self.tries)):
                    if not matcher.accept(token):
                        break
                    found.append(token)
            matcher.fill(self.bits, 0)
            bits = np.unpackbits(self.bits.view(np.uint8), bitorder="little")
            allowed = np.flatnonzero(bits[: self.size]).tolist()
            assert allowed, f"nothing may follow {text_of(found)!r}"
            if END in allowed and (len(allowed) == 1 or chosen.random() < 0.5):
                return text_of(found)
            if END in allowed:
                allowed.remove(END)
            if fullness:
                written = text_of(found)
                in_text = written.replace("\\\\", "").replace('\\"', "").count('"') % 2
                ends = [byte for byte in allowed if byte < 256 and byte in (b'"' if in_text else b"}]")]
                others = allowed if in_text else [byte for byte in allowed if byte not in ends]
                allowed = (others if len(found) < fullness else ends) or allowed
            closing = [byte for byte in allowed if byte in CLOSING]
            printed = [byte for byte in allowed if 33 <= byte < 127]
            share = chosen.random()
            byte = chosen.choice((share < 0.35 and closing) or (share < 0.93 and printed) or allowed)
            assert matcher.accept(byte)
            found.append(byte)
        return None


def tokens_of(text: str) -> list[int]:
    """Return the tokens of a text: its bytes, and the control tokens whose marks it has."""
    ids = {mark: token for token, mark in MARKS.items()}
    return [token for char in text for token in ([ids[char]] if char in ids else char.encode())]


def text_of(tokens: Sequence[int]) -> str:
    """Return the text of tokens, with the marks of control tokens."""
    found, data = "", bytearray()
    for token in (*tokens, None):
        if token is not None and token < END:
            data.append(token)
            continue
        found += data.decode(errors="replace") + ("" if token is None else MARKS[token])
        data.clear()
    return found
