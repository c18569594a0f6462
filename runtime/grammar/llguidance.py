"""Grammars by llguidance: parsed as an answer is written, with nothing compiled ahead but its first lexer.

Its grammars are in Lark's form. A JSON Schema, a structural tag and a grammar in GBNF are written in it here, the
schema as it was rewritten for xgrammar too, so that both hold to the same.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import llguidance
import numpy as np

from inferc.arena import mask_words
from inferc.errors import RequestError
from inferc.runtime.grammar.forced import is_forced_text_short
from inferc.runtime.grammar.forms import FORCES, FREE, MAX_WHITESPACE, NO_ANSWER, parsed
from inferc.runtime.grammar.lark.gbnf import gbnf_rule
from inferc.runtime.grammar.lark.tags import Part, TagRules
from inferc.runtime.grammar.lark.writer import ALL_TOKENS, Writer
from inferc.runtime.grammar.schema.automata import TooLargeError
from inferc.runtime.grammar.schema.regex import alt, literal
from inferc.runtime.grammar.vocabulary import Vocabulary
from inferc.runtime.step.plan import U32
from inferc.runtime.step.structured_outputs import StructuredOutputs

_WITHIN = frozenset(bytes([byte]) for byte in range(0x80, 0xC0))  # bytes of characters behind the first
PANIC = "panic:"
TOKENS = "<["  # in a grammar that names tokens; within a name of JSON it costs drafts, and no more
MAX_PLACE = 300  # characters of the library's message
MOST_STATES = 50_000  # of the lexer of one answer, of 1 to 2 KB each
MOST_ITEMS = 20_000  # of the parser at one place: two for each property that may come next
BYTES_OF_A_BYTE = 64  # of memory, for each of a grammar's text: as measured, rounded up
END_TOKEN = b"\xff[end]"  # by its first byte no text; llguidance lists such tokens in messages, and fails if none is
ASCII_CLASSES = "dw"  # \d and \w are of ASCII alone, as in xgrammar and in JSON Schema


class Llguidance:
    """A compiler of grammars for one vocabulary, with llguidance."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._hidden = [token for token, data in enumerate(vocabulary.tokens) if not data]
        self._tokenizer = llguidance.LLTokenizer(
            llguidance.TokenizerWrapper(_Tokens(vocabulary)),
            n_vocab=len(vocabulary.tokens),
            eos_token=list(vocabulary.end_ids),
        )
        self._limits = llguidance.LLParserLimits(
            max_lexer_states=MOST_STATES, max_items_in_row=MOST_ITEMS, verbose_errors=False
        )

    def compile(self, wanted: StructuredOutputs) -> bytes:
        """Write a form as a grammar of llguidance, and check it.

        Raises RequestError for a form that cannot be held to.
        """
        try:
            source = self._grammar(wanted)
        except UnicodeEncodeError:  # JSON names halves of characters with escapes
            raise RequestError("it is not text: it has half of a surrogate pair") from None
        except TooLargeError:
            raise RequestError("it is too long written out; make it smaller") from None
        except RecursionError:
            raise RequestError("its parts are within one another too often; nest fewer") from None
        matcher = self._matcher(source)
        bits = np.zeros((1, mask_words(len(self._vocabulary.tokens))), np.uint32)
        try:
            LlguidanceMatcher(matcher, self._vocabulary.end_ids, False).fill(bits, 0)
        except RuntimeError as error:
            raise RequestError(str(error)) from None
        if not bits.any():
            raise RequestError(NO_ANSWER)
        # Asked for the text that must come where a token must, llguidance fails for good.
        forces = TOKENS not in source and is_forced_text_short(wanted)
        return (FORCES if forces else FREE) + source.encode()

    def load(self, data: bytes) -> LlguidanceGrammar:
        """Return the grammar that `compile` returned."""
        made, ends = self._matcher(data[1:].decode()), self._vocabulary.end_ids
        return LlguidanceGrammar(made, ends, data[:1] == FORCES, BYTES_OF_A_BYTE * len(data))

    def _matcher(self, source: str) -> Any:
        made = llguidance.LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        if made.is_error():
            raise RequestError(_reason(made.get_error()))
        return made

    def _grammar(self, wanted: StructuredOutputs) -> str:
        writer = Writer()
        tags = TagRules(writer, self._hidden, self._ids.get)
        parts: list[tuple[Part, str]] = []
        if wanted.before is not None:
            parts.append((tags.part(json.loads(wanted.before), "#"), "#"))
        elif wanted.kind == "lark":
            return f"{wanted.source}\n{ALL_TOKENS}"
        parts.append((self._part(wanted, writer, tags), "#"))
        source = writer.grammar(tags.text(tags.joined(parts)))
        if wanted.kind != "lark":
            return source
        both = [{"name": "answer", "lark_grammar": source}, {"name": "form", "lark_grammar": wanted.source}]
        return json.dumps({"grammars": both}, ensure_ascii=False)

    def _part(self, wanted: StructuredOutputs, writer: Writer, tags: TagRules) -> Part:
        kind, source = wanted.kind, wanted.source
        most = 0 if wanted.disable_any_whitespace else MAX_WHITESPACE
        if kind == "json":
            return tags.json(most).rule(parsed(source))
        if kind == "json_object":
            return tags.json(most).any_object()
        if kind == "structural_tag":
            value = parsed(source)
            json.dumps(value, ensure_ascii=False).encode()  # raises for half of a character
            return tags.tag(value, most)
        if kind == "choice":
            return alt(map(literal, json.loads(source)))
        if kind == "ebnf":
            return gbnf_rule(source, writer)
        if kind == "regex":
            return self._regex(source, writer)
        return "@form"

    def _regex(self, source: str, writer: Writer) -> Part:
        pattern = f"/{llguidance.regex_to_lark(source, use_ascii=ASCII_CLASSES)}/"
        check = self._matcher(f"start: {pattern}\n{ALL_TOKENS}")
        name = writer.terminal(f"{pattern} & /(.|\\n)+/")
        if check.is_accepting():
            return f"{name}?"
        return name

    @cached_property
    def _ids(self) -> dict[str, int]:
        """The ids of tokens by their texts."""
        found: dict[str, int] = {}
        for token, data in enumerate(self._vocabulary.tokens):
            found.setdefault(data.lstrip(b"\xff").decode(errors="replace"), token)
        return found


class _Tokens:
    """A tokenizer as llguidance takes one: only the bytes of tokens are asked for, and no text is tokenized."""

    bos_token_id = None

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.tokens = list(vocabulary.tokens)
        self.eos_token_id = vocabulary.end_ids[0]
        self.tokens[self.eos_token_id] = END_TOKEN

    def __call__(self, text: bytes) -> list[int]:
        return []


class LlguidanceGrammar:
    """A grammar that llguidance has read; each answer has a parser of its own."""

    def __init__(self, matcher: Any, end_ids: tuple[int, ...], forces: bool, num_bytes: int) -> None:
        self._matcher, self._end_ids, self._forces, self.num_bytes = matcher, end_ids, forces, num_bytes

    def matcher(self) -> LlguidanceMatcher:
        """Return a new place at the grammar's beginning."""
        return LlguidanceMatcher(self._matcher.deep_copy(), self._end_ids, self._forces)


class LlguidanceMatcher:
    """The place of one answer in a grammar, as llguidance keeps it; the end token is kept here."""

    def __init__(self, matcher: Any, end_ids: tuple[int, ...], forces: bool) -> None:
        self._matcher, self._end_ids, self._forces = matcher, end_ids, forces
        self.is_ended = False

    def accept(self, token_id: int) -> bool:
        """Go on by a token, and return whether the grammar has it here."""
        if self.is_ended:
            return False
        if token_id in self._end_ids:
            self.is_ended = bool(self._matcher.is_accepting())
            return self.is_ended
        return bool(self._matcher.try_consume_tokens([token_id]))

    def fill(self, bits: U32, row: int) -> None:
        """Write which tokens may come next into a row of masks [rows, words]."""
        self.fill_rows([self], bits, [row])

    @staticmethod
    def fill_rows(matchers: Sequence[LlguidanceMatcher], bits: U32, rows: Sequence[int]) -> None:
        """Fill a row for each of some matchers.

        llguidance's own call for several has other threads do it, which costs more than it saves beside a step.
        """
        begin, width = bits.ctypes.data, bits.strides[0]
        for matcher, row in zip(matchers, rows, strict=True):
            matcher._matcher.unsafe_compute_mask_ptr(begin + row * width, width)
            if matcher._matcher.is_error():
                raise RuntimeError(_reason(matcher._matcher.get_error()))

    def rollback(self, count: int) -> None:
        """Go back by `count` tokens that were accepted."""
        count -= self.is_ended
        self.is_ended = False
        if count and not self._matcher.rollback(count):
            raise RuntimeError(_reason(self._matcher.get_error()))

    def forced_text(self) -> str:
        """Return the text that must come next, whatever is chosen."""
        if not self._forces or self.is_ended:
            return ""
        data: bytes = self._matcher.compute_ff_bytes()
        text = data.partition(b"\xff")[0]
        return "" if text[:1] in _WITHIN else text.decode(errors="ignore")


def _reason(message: str) -> str:
    """Return the library's message in one line, without the lines of the grammar that it shows."""
    if message.startswith("NoExtension"):
        return NO_ANSWER
    if message.startswith(PANIC):  # a limit of its own, of which it says the place in its source
        return "it is too large for llguidance; make it smaller"
    lines = [line.strip() for line in message.strip().splitlines() if line.strip()] or ["it cannot be read"]
    place, quotes, said = lines[0].partition(": invalid regex ")
    if quotes:  # the expression itself, which is quoted, may be long
        said = said.rpartition(" (in regex): ")[2]
        return f"{place}: {' '.join([said, *(line for line in lines if line.startswith('error: '))])}"[:MAX_PLACE]
    return lines[0][:MAX_PLACE]
