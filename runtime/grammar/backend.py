"""The contract of a library that holds answers to grammars, and the choice of one."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any, Protocol

from inferc.config import Auto, GrammarBackend
from inferc.errors import UnsupportedError
from inferc.runtime.grammar.vocabulary import Vocabulary
from inferc.runtime.step.plan import U32
from inferc.runtime.step.structured_outputs import StructuredOutputs

MODULES: dict[GrammarBackend, tuple[str, ...]] = {"xgrammar": ("xgrammar", "tvm_ffi"), "llguidance": ("llguidance",)}
INSTALL: dict[GrammarBackend, str] = {
    "xgrammar": "pip install xgrammar (without torch: pip install --no-deps xgrammar apache-tvm-ffi)",
    "llguidance": "pip install llguidance",
}


class Matcher(Protocol):
    """The place of one answer in its grammar."""

    def accept(self, token_id: int) -> bool:
        """Go on by a token, and return whether the grammar has it here; nothing changes if not."""

    def fill(self, bits: U32, row: int) -> None:
        """Write which tokens may come next into a row of masks [rows, words], as StepMasks has them."""

    @staticmethod
    def fill_rows(matchers: Sequence[Any], bits: U32, rows: Sequence[int]) -> None:
        """Do for each of some matchers, all of this class, and its row what `fill` does, in one call of the library.

        Where it raises, any of the rows may not be written.
        """

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


def choose_backend(choice: GrammarBackend | Auto) -> GrammarBackend:
    """Return the backend that is asked for, or for "auto" the first that is installed.

    Raises UnsupportedError if it is not installed.
    """
    names: tuple[GrammarBackend, ...] = ("xgrammar", "llguidance") if choice == "auto" else (choice,)
    for name in names:
        if all(find_spec(module) is not None for module in MODULES[name]):
            return name
    raise UnsupportedError(
        f"answers are held to a form by {names[0]}, which is not installed here; {INSTALL[names[0]]}"
        + (f", or {INSTALL[names[1]]}" if len(names) > 1 else "")
    )


def open_backend(vocabulary: Vocabulary, choice: GrammarBackend | Auto = "auto") -> Backend:
    """Return the backend for a vocabulary. Raises UnsupportedError if no library is installed."""
    if choose_backend(choice) == "llguidance":
        from inferc.runtime.grammar.llguidance import Llguidance

        return Llguidance(vocabulary)
    from inferc.runtime.grammar.xgrammar import XGrammar

    return XGrammar(vocabulary)
