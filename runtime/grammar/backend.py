"""The contract of a library that holds answers to grammars, and the choice of one."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal, Protocol, TypeAlias

from inferc.errors import UnsupportedError
from inferc.runtime.grammar.vocabulary import Vocabulary
from inferc.runtime.step.plan import U32
from inferc.runtime.step.structured_outputs import StructuredOutputs

BackendName: TypeAlias = Literal["xgrammar"]


class Matcher(Protocol):
    """The place of one answer in its grammar."""

    def accept(self, token_id: int) -> bool:
        """Go on by a token, and return whether the grammar has it here; nothing changes if not."""

    def fill(self, bits: U32, row: int) -> None:
        """Write which tokens may come next into a row of masks [rows, words], as StepMasks has them."""

    def rollback(self, count: int) -> None:
        """Go back by `count` tokens that were accepted."""

    def forced_text(self) -> str:
        """Return the text that must come next, whatever is chosen: the beginning of all that can follow."""

    @property
    def is_ended(self) -> bool:
        """True once an end token was accepted: nothing can come any more."""


class CompiledGrammar(Protocol):
    """A grammar that was compiled for a vocabulary; many answers share one."""

    @property
    def num_bytes(self) -> int:
        """The memory that it takes."""

    def matcher(self) -> Matcher:
        """Return a new place at the grammar's beginning."""


class Backend(Protocol):
    """A library that compiles grammars for one vocabulary."""

    def compile(self, wanted: StructuredOutputs) -> bytes:
        """Compile a grammar, and return what `load` makes it of, in this process or in another.

        Raises RequestError for a form that cannot be held to.
        """

    def load(self, data: bytes) -> CompiledGrammar:
        """Return the grammar that `compile` returned."""


def open_backend(vocabulary: Vocabulary) -> Backend:
    """Return the backend for a vocabulary. Raises UnsupportedError if no library is installed."""
    if find_spec("xgrammar") is None or find_spec("tvm_ffi") is None:
        raise UnsupportedError(
            "answers are held to a form by xgrammar, which is not installed here; pip install xgrammar"
            " (without torch: pip install --no-deps xgrammar apache-tvm-ffi)"
        )
    from inferc.runtime.grammar.xgrammar import XGrammar

    return XGrammar(vocabulary)
