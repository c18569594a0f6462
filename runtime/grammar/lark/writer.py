"""A Lark grammar of llguidance as it is written: named rules and terminals, each once."""

from __future__ import annotations

from inferc.runtime.grammar.lark.terms import not_empty, terminal
from inferc.runtime.grammar.schema.regex import EMPTY, Term

# Otherwise a text that must come may only be written with the tokens that the tokenizer makes of it.
ALL_TOKENS = '%llguidance {"no_forcing": true}\n'


class Writer:
    """The lines of a grammar. Rules have names in small letters, terminals in capitals."""

    def __init__(self) -> None:
        self._lines: list[str] = []
        self._rules: dict[str, str] = {}  # by what they are
        self._terminals: dict[Term, str] = {}
        self._count = 0

    def lexeme(self, term: Term) -> str:
        """Return what stands in a rule for a term. Raises TooLargeError."""
        if term not in self._terminals:
            if term == EMPTY:
                return ""
            some, is_optional = not_empty(term)
            name = self.terminal(terminal(some))
            self._terminals[term] = f"{name}?" if is_optional else name
        return self._terminals[term]

    def terminal(self, text: str) -> str:
        """Return the name of a terminal that is this."""
        return self._named("T", text)

    def rule(self, text: str) -> str:
        """Return the name of a rule that is this."""
        return self._named("r", text)

    def reserve(self) -> str:
        """Return the name of a rule that `define` defines later."""
        self._count += 1
        return f"r{self._count}"

    def define(self, name: str, text: str) -> None:
        self._lines.append(f"{name}: {text}")

    def line(self, text: str) -> None:
        self._lines.append(text)

    def _named(self, prefix: str, text: str) -> str:
        if text not in self._rules:
            self._count += 1
            self._rules[text] = f"{prefix}{self._count}"
            self.define(self._rules[text], text)
        return self._rules[text]

    def grammar(self, start: str) -> str:
        """Return the grammar that begins with this rule's text."""
        return "\n".join((f"start: {start or _NOTHING}", *self._lines, ALL_TOKENS))


_NOTHING = '""'
