"""The process that compiles grammars, and that may be killed at any time: it answers with a grammar or a fault."""

from __future__ import annotations

import os
import sys

import msgspec

from inferc.config import GrammarBackend
from inferc.errors import InfercError, RequestError
from inferc.runtime.grammar.backend import open_backend
from inferc.runtime.grammar.vocabulary import Vocabulary
from inferc.runtime.step.structured_outputs import StructuredOutputs
from inferc.system.stack import on_stack
from inferc.system.worker import Answer, run_worker

COMPILED, REFUSED, UNSUPPORTED = b"c", b"r", b"u"  # the first byte of an answer
NICENESS = 5  # steps of other requests go first
# A form that needs more stack ends this process, and is refused. The engine reads what is compiled on a larger one.
STACK_BYTES = 16 << 20


def begin(first: bytes) -> Answer:
    """Take the backend's name and the vocabulary, and return what compiles grammars for it."""
    os.nice(NICENESS)
    name, vocabulary = msgspec.msgpack.decode(first, type=tuple[GrammarBackend, Vocabulary])

    def answer(question: bytes) -> bytes:
        try:
            wanted = msgspec.msgpack.decode(question, type=StructuredOutputs)
            return COMPILED + on_stack(STACK_BYTES, lambda: open_backend(vocabulary, name).compile(wanted))
        except RequestError as error:
            return REFUSED + str(error).encode(errors="backslashreplace")
        except InfercError as error:
            return UNSUPPORTED + str(error).encode(errors="backslashreplace")

    return answer


if __name__ == "__main__":
    sys.exit(run_worker(begin))
