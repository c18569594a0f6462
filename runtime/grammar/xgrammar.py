"""Grammars by xgrammar, through its compiled library: its Python package would import torch and transformers.

Source of the method: Dong et al. 2024, XGrammar: Flexible and Efficient Structured Generation Engine for Large Language
Models (arXiv:2411.15100).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from inferc.arena import mask_words
from inferc.errors import RequestError, UnsupportedError
from inferc.runtime.grammar.forced import is_forced_text_short
from inferc.runtime.grammar.forms import FORCES, FREE, MAX_WHITESPACE, NO_ANSWER, parsed
from inferc.runtime.grammar.schema.exact import exact_schema
from inferc.runtime.grammar.schema.tagged import tagged_arguments
from inferc.runtime.grammar.tags import Rewriting, checked_tag
from inferc.runtime.grammar.vocabulary import Vocabulary
from inferc.runtime.step.plan import U32
from inferc.runtime.step.structured_outputs import StructuredOutputs

PREFIX = "xgrammar.tvm_ffi_binding."
RAW = 0  # tokens are given as the bytes that they stand for
ANY_OBJECT = '{"type": "object", "additionalProperties": true}'
NO_THREADS, NO_LIMIT = 1, -1
PARTS_BYTES = 128 << 20  # of the parts of grammars that xgrammar keeps, since others may have them too
TOKEN = "token"  # in the text of a structural tag that may name tokens
# The second byte of what `compile` returns, which says of what the grammar is compiled.
GRAMMAR, GRAMMAR_OF_TOKENS, TAG = b"g", b"t", b"s"
MAX_PLACE = 300  # characters of the library's message
LARK = "Lark error at "
REWRITING = Rewriting(lambda schema, _: exact_schema(schema), tagged_arguments)


class Library:
    """The classes of xgrammar's compiled library, by their names in it. Raises UnsupportedError if they changed."""

    def __init__(self) -> None:
        with _without_torch():
            from tvm_ffi import Object, register_object
            from tvm_ffi.libinfo import load_lib_module
        spec = find_spec("xgrammar")
        assert spec is not None and spec.submodule_search_locations, "open_backend has looked for it"
        folder = Path(next(iter(spec.submodule_search_locations)))
        self._keep = load_lib_module("xgrammar", "xgrammar_bindings", extra_lib_paths=[folder])
        known = sys.modules.get("xgrammar.tvm_ffi_binding._ffi_api")  # its package registered them in this process

        def named(name: str, *needed: str) -> Any:
            made = getattr(known, name, None) or register_object(PREFIX + name)(type(name, (Object,), {}))
            if missing := [each for each in needed if not hasattr(made, each)]:
                raise UnsupportedError(
                    f"this xgrammar has no {name}.{missing[0]}; install xgrammar 0.2.8, which inferc was tested with"
                )
            return made

        self.tokenizer_info = named("TokenizerInfo")
        self.compiler = named(
            "GrammarCompiler",
            "compile_grammar_ebnf",
            "compile_structural_tag",
        )
        self.grammar = named(
            "Grammar",
            "from_json_schema",
            "from_regex",
            "from_lark",
            "from_ebnf",
            "from_structural_tag",
            "concat",
            "serialize_json",
            "deserialize_json",
        )
        self.compiled = named("CompiledGrammar", "memory_size_bytes")
        self.matcher = named(
            "GrammarMatcher",
            "accept_token",
            "fill_next_token_bitmask",
            "find_jump_forward_string",
            "rollback",
            "is_terminated",
        )
        self.batch = named("BatchGrammarMatcher", "batch_fill_next_token_bitmask")(NO_THREADS)


@cache
def library() -> Library:
    """Return xgrammar's library, loaded once in a process."""
    return Library()


class _without_torch:
    """A context in which `import torch` fails unless it was imported before.

    The package that xgrammar's library is called through imports torch wherever it is installed, to exchange tensors
    with it; none are exchanged here, and an engine starts two seconds sooner and in 200 MB less without.
    """

    def __enter__(self) -> None:
        self._hides = "torch" not in sys.modules
        if self._hides:
            sys.modules["torch"] = None  # type: ignore[assignment]

    def __exit__(self, *error: object) -> None:
        if self._hides:
            del sys.modules["torch"]


class XGrammar:
    """A compiler of grammars for one vocabulary, with xgrammar."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary, self._library = vocabulary, library()
        size, ends = len(vocabulary.tokens), list(vocabulary.end_ids)
        self._info = self._library.tokenizer_info(list(vocabulary.tokens), RAW, size, ends, False)
        self._compiler = self._library.compiler(self._info, NO_THREADS, True, PARTS_BYTES)
        # It keeps no parts: xgrammar takes parts for equal that differ in the ids of tokens alone.
        self._of_tokens = self._library.compiler(self._info, NO_THREADS, False, NO_LIMIT)

    def compile(self, wanted: StructuredOutputs) -> bytes:
        """Compile a grammar, and return of what `load` compiles it again.

        A compiled one could be written and read, but each of its rules would bring a copy of all automata: 100 MB for a
        schema of 10 KB, which takes longer than to compile it, by far. Raises RequestError for a form that cannot be
        held to.
        """
        try:
            way, source = self._source(wanted)
            made = self._made(way, source)
        except RuntimeError as error:
            raise RequestError(_reason(str(error))) from None
        except UnicodeDecodeError as error:  # what it says quotes a grammar byte by byte, and so half of a character
            raise RequestError(_reason(error.object.decode(errors="replace"))) from None
        except UnicodeEncodeError:  # JSON names halves of characters with escapes
            raise RequestError("it is not text: it has half of a surrogate pair") from None
        self._check_admits(made)
        return (FORCES if is_forced_text_short(wanted) else FREE) + way + source.encode()

    def _source(self, wanted: StructuredOutputs) -> tuple[bytes, str]:
        """Return of what the library compiles a form, and in which way."""
        if wanted.before is not None:
            before = self._library.grammar.from_structural_tag(
                f'{{"type": "structural_tag", "format": {wanted.before}}}'
            )
            whole = self._library.grammar.concat([before, self._grammar(wanted)])
            return GRAMMAR_OF_TOKENS, str(whole.serialize_json())
        if wanted.kind == "structural_tag":
            return TAG, self._tag(wanted)
        return GRAMMAR, str(self._grammar(wanted).serialize_json())

    def _made(self, way: bytes, source: str) -> Any:
        """Return the compiled grammar of what `_source` returned."""
        if way == TAG:
            return (self._of_tokens if TOKEN in source else self._compiler).compile_structural_tag(source)
        compiler = self._of_tokens if way == GRAMMAR_OF_TOKENS else self._compiler
        return compiler.compile_grammar_ebnf(self._library.grammar.deserialize_json(source))

    def _grammar(self, wanted: StructuredOutputs) -> Any:
        source, grammar = wanted.source, self._library.grammar
        if wanted.kind == "json":
            return self._json(json.dumps(exact_schema(parsed(source)), ensure_ascii=False), wanted)
        if wanted.kind == "json_object":
            return self._json(ANY_OBJECT, wanted)
        if wanted.kind == "structural_tag":
            return grammar.from_structural_tag(self._tag(wanted))
        if wanted.kind == "regex":
            return grammar.from_regex(source, False)
        if wanted.kind == "lark":
            return grammar.from_lark(source, self._info, [], [])
        if wanted.kind == "choice":
            source = "root ::= " + " | ".join(map(_quoted, json.loads(source)))
        return grammar.from_ebnf(source, "root")

    def _json(self, schema: str, wanted: StructuredOutputs) -> Any:
        free = not wanted.disable_any_whitespace
        most = MAX_WHITESPACE if free else None
        # Without an indent and separators of its own; names that a schema does not mention are not written; in order.
        return self._library.grammar.from_json_schema(schema, free, None, None, True, most, False, False)

    def _tag(self, wanted: StructuredOutputs) -> str:
        most = 0 if wanted.disable_any_whitespace else MAX_WHITESPACE
        tag = checked_tag(parsed(wanted.source), most, REWRITING)
        return json.dumps(tag, ensure_ascii=False)

    def _check_admits(self, made: Any) -> None:
        """Raise RequestError for a grammar with which no first token could be chosen."""
        bits = np.zeros((1, mask_words(len(self._vocabulary.tokens))), np.uint32)
        Grammar(self._library, made).matcher().fill(bits, 0)
        if not bits.any():
            raise RequestError(NO_ANSWER)

    def load(self, data: bytes) -> Grammar:
        """Return the grammar that `compile` compiled."""
        return Grammar(self._library, self._made(data[1:2], data[2:].decode()), data[:1] == FORCES)


class Grammar:
    """A grammar compiled by xgrammar."""

    def __init__(self, library: Library, compiled: Any, forces: bool = False) -> None:
        self._library, self._compiled, self._forces = library, compiled, forces

    @property
    def num_bytes(self) -> int:
        return int(self._compiled.memory_size_bytes())

    def matcher(self) -> GrammarMatcher:
        """Return a new place at the grammar's beginning."""
        return GrammarMatcher(self._library.matcher(self._compiled, None, False, NO_LIMIT, None), self._forces)


class GrammarMatcher:
    """The place of one answer in a grammar, as xgrammar keeps it."""

    def __init__(self, matcher: Any, forces: bool) -> None:
        self._matcher, self._forces = matcher, forces

    def accept(self, token_id: int) -> bool:
        """Go on by a token, and return whether the grammar has it here."""
        return not self._matcher.is_terminated() and bool(self._matcher.accept_token(token_id, False))

    def fill(self, bits: U32, row: int) -> None:
        """Write which tokens may come next into a row of masks [rows, words]."""
        self._matcher.fill_next_token_bitmask(bits.view(np.int32), row, False)

    @staticmethod
    def fill_rows(matchers: Sequence[GrammarMatcher], bits: U32, rows: Sequence[int]) -> None:
        """Fill a row for each of some matchers, on this thread, which gives up the interpreter once for all."""
        several = [each._matcher for each in matchers]
        library().batch.batch_fill_next_token_bitmask(several, bits.view(np.int32), list(rows), False)

    def rollback(self, count: int) -> None:
        """Go back by `count` tokens that were accepted."""
        self._matcher.rollback(count)

    def forced_text(self) -> str:
        """Return the text that must come next, whatever is chosen."""
        if not self._forces or self.is_ended:
            return ""
        try:
            return str(self._matcher.find_jump_forward_string())
        except UnicodeDecodeError:  # it begins or ends within a character
            return ""

    @property
    def is_ended(self) -> bool:
        return bool(self._matcher.is_terminated())


def _quoted(text: str) -> str:
    """Return a text as a literal of a grammar."""
    return '"' + "".join(_escaped(char) for char in text) + '"'


def _escaped(char: str) -> str:
    if char in '"\\':
        return "\\" + char
    return char if char.isprintable() else f"\\u{ord(char):04x}" if ord(char) < 0x10000 else f"\\U{ord(char):08x}"


def _reason(message: str) -> str:
    """Return the library's message without the place in its own source."""
    lines: Sequence[str] = [line for line in message.strip().splitlines() if line] or ["it cannot be read"]
    if lines[0].startswith(LARK):  # the lines after it show the place, which the first one says
        return lines[0].removeprefix(LARK)[:MAX_PLACE]
    said = lines[-1]
    if ".cc:" in said:
        said = said.partition(".cc:")[2].partition(": ")[2]
    if said.startswith("Check failed: (") and (reason := said.partition(") is false: ")[2]):
        said = reason  # without the condition in the library's source
    return said[:MAX_PLACE]
