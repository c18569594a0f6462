"""Grammars by xgrammar: masks over a small vocabulary, refusals, and that no torch comes with it."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from inferc import RequestError, StructuredOutputs
from inferc.arena import mask_words
from inferc.runtime.grammar.backend import Backend, Matcher, open_backend
from inferc.runtime.grammar.vocabulary import Vocabulary

# Every byte, some longer tokens, a control token, an id that the tokenizer does not have, and the end.
TOKENS = (*(bytes([byte]) for byte in range(256)), b'{"a"', b"true", b"ab", "é".encode(), b"", b"", b"")
CONTROL, ABSENT, END = 260, 261, 262


@pytest.fixture(scope="module")
def backend() -> Backend:
    return open_backend(Vocabulary(TOKENS, (END,)))


def start(backend: Backend, **fields: Any) -> Matcher:
    return backend.load(backend.compile(StructuredOutputs(**fields))).matcher()


def allowed(matcher: Matcher) -> set[int]:
    bits = np.zeros((3, mask_words(len(TOKENS))), np.uint32)
    matcher.fill(bits, 1)
    assert not bits[[0, 2]].any()
    return set(np.flatnonzero(np.unpackbits(bits[1].view(np.uint8), bitorder="little")[: len(TOKENS)]).tolist())


def write(matcher: Matcher, text: bytes) -> bool:
    return all(matcher.accept(byte) for byte in text)


def admits(matcher: Matcher, text: str) -> bool:
    return write(matcher, text.encode()) and END in allowed(matcher)


def test_a_mask_has_the_tokens_that_go_on(backend: Backend) -> None:
    matcher = start(backend, regex="ab?c")
    assert allowed(matcher) == {ord("a"), TOKENS.index(b"ab")}
    assert matcher.accept(TOKENS.index(b"ab")) and allowed(matcher) == {ord("c")}
    assert not matcher.accept(ord("x")) and allowed(matcher) == {ord("c")}
    assert matcher.accept(ord("c")) and allowed(matcher) == {END} and not matcher.is_ended
    assert matcher.accept(END) and matcher.is_ended and not matcher.accept(ord("c"))
    matcher.rollback(2)
    assert not matcher.is_ended and allowed(matcher) == {ord("c")}


def test_control_tokens_and_absent_ids_are_never_chosen(backend: Backend) -> None:
    found = allowed(start(backend, regex="(.|\n)*"))
    assert not found & {CONTROL, ABSENT} and END in found and ord("x") in found


@pytest.mark.parametrize(
    ("fields", "good", "bad"),
    [
        (
            {"json": '{"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}'},
            '{"a":true}',
            "{}",
        ),
        ({"json_object": True}, '{"x": [1, null]}', "[1]"),
        ({"regex": r"\d{3}-[a-z]+"}, "123-ab", "12-ab"),
        ({"choice": ["yes", 'a"b\\c\n', "é\u2028😀"]}, 'a"b\\c\n', "no"),
        ({"choice": ["yes", "é\u2028😀"]}, "é\u2028😀", "é"),
        ({"grammar": 'root ::= "a" root | "b"'}, "aab", "aa"),
        ({"grammar": 'start: "a" start | "b"'}, "aab", "aa"),
    ],
)
def test_forms(backend: Backend, fields: dict[str, Any], good: str, bad: str) -> None:
    assert admits(start(backend, **fields), good)
    assert not admits(start(backend, **fields), bad)


def test_whitespace_is_free_and_bounded_or_fixed(backend: Backend) -> None:
    schema = '{"type": "array", "items": {"type": "integer"}, "minItems": 2}'
    assert admits(start(backend, json=schema), "[\n  1,\n  2\n]")
    assert not admits(start(backend, json=schema), "[" + " " * 21 + "1,2]")
    assert admits(start(backend, json=schema, disable_any_whitespace=True), "[1, 2]")
    assert not admits(start(backend, json=schema, disable_any_whitespace=True), "[ 1,2]")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"json": '{"a":'}, "it is no JSON: Expecting value"),
        ({"json": "[" * 20_000}, "it is no JSON: maximum recursion depth"),
        ({"json": '{"enum": []}'}, "enum"),
        ({"regex": "(?=a)b"}, "position 3: Lookahead is not supported yet"),
        ({"regex": "(a"}, "The parenthesis is not closed"),
        ({"regex": r"(a)\1"}, "Backreference is not supported yet"),
        ({"grammar": "root ::= x"}, 'Rule "x" is not defined'),
        ({"grammar": 'a ::= "x"'}, 'The root rule with name "root" is not found'),
        ({"grammar": 'root ::= root "a"'}, "it admits no answer, not even an empty one"),
        ({"grammar": "root ::= " + "(" * 20_000}, "Nest layer exceeded the maximum limit"),
        ({"grammar": "start: ("}, r"line 1, column 9: expected '\)' after group$"),
        ({"grammar": 'x: 🎉\nstart: "a"'}, "line 1, column 4: unexpected character '\ufffd'$"),
    ],
)
def test_refusals_say_where(backend: Backend, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message) as caught:
        backend.compile(StructuredOutputs(**fields))
    assert ".cc" not in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


ALONE = """
import sys
from inferc.runtime.grammar.backend import open_backend
from inferc.runtime.grammar.vocabulary import Vocabulary
from inferc.runtime.step.structured_outputs import StructuredOutputs
backend = open_backend(Vocabulary((b"a", b"b", b""), (2,)))
assert backend.load(backend.compile(StructuredOutputs(regex="ab"))).matcher().accept(0)
assert not {"torch", "transformers", "xgrammar", "pydantic"} & set(sys.modules), "an engine would import all of it"
import tvm_ffi, torch
"""


def test_neither_torch_nor_transformers_is_imported() -> None:
    subprocess.run([sys.executable, "-c", ALONE], check=True)


def test_the_library_of_its_own_package_serves_too() -> None:
    both = ALONE.replace("import sys", "import sys, xgrammar", 1).replace("assert not {", "assert {")
    subprocess.run([sys.executable, "-c", both], check=True)
