"""Grammars by each library: masks over a small vocabulary, places in them, refusals, and what comes with it."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from typing import Any

import numpy as np
import pytest

from inferc import RequestError, StructuredOutputs
from inferc.arena import mask_words
from inferc.config import GrammarBackend
from inferc.errors import UnsupportedError
from inferc.runtime.grammar.backend import Backend, Matcher, choose_backend, open_backend
from inferc.runtime.grammar.vocabulary import Vocabulary

# Every byte, some longer tokens, a control token, an id that the tokenizer does not have, and the end.
TOKENS = (*(bytes([byte]) for byte in range(256)), b'{"a"', b"true", b"ab", "é".encode(), b"", b"", b"", b"", b"ab")
CONTROL, ABSENT, END, OTHER_END, TWIN = range(260, 265)
ENDS = {END, OTHER_END}


@pytest.fixture(scope="module")
def backend(library: GrammarBackend) -> Backend:
    return open_backend(Vocabulary(TOKENS, (END, OTHER_END)), library)


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
    assert allowed(matcher) == {ord("a"), TOKENS.index(b"ab"), TWIN}
    assert matcher.accept(TOKENS.index(b"ab")) and allowed(matcher) == {ord("c")}
    assert not matcher.accept(ord("x")) and allowed(matcher) == {ord("c")}
    assert matcher.accept(ord("c")) and allowed(matcher) == ENDS and not matcher.is_ended
    assert matcher.accept(END) and matcher.is_ended and not matcher.accept(ord("c"))
    matcher.rollback(2)
    assert not matcher.is_ended and allowed(matcher) == {ord("c")}
    assert not matcher.accept(END) and not matcher.is_ended, "it cannot end here"
    matcher.rollback(1)
    assert matcher.accept(TWIN) and matcher.accept(ord("c")) and matcher.accept(OTHER_END) and matcher.is_ended
    matcher.rollback(1)
    assert not matcher.is_ended and allowed(matcher) == ENDS
    matcher.rollback(2)
    assert allowed(matcher) == {ord("a"), TOKENS.index(b"ab"), TWIN}


def test_an_answer_that_may_go_on_may_end_and_be_taken_back(backend: Backend) -> None:
    matcher = start(backend, regex="a+")
    assert write(matcher, b"aa") and allowed(matcher) == {ord("a"), *ENDS}
    assert matcher.accept(END) and matcher.is_ended and not matcher.accept(ord("a")) and not matcher.accept(END)
    matcher.rollback(1)
    assert matcher.accept(ord("a")) and allowed(matcher) == {ord("a"), *ENDS}


def test_places_in_one_grammar_are_independent(backend: Backend) -> None:
    grammar = backend.load(backend.compile(StructuredOutputs(regex="ab|ac")))
    one, other = grammar.matcher(), grammar.matcher()
    assert one.accept(ord("a")) and allowed(one) == {ord("b"), ord("c")}
    assert allowed(other) == {ord("a"), TOKENS.index(b"ab"), TWIN}
    assert other.accept(TWIN) and allowed(other) == ENDS and allowed(one) == {ord("b"), ord("c")}
    assert grammar.num_bytes > 0


def test_several_places_are_filled_in_one_call(backend: Backend) -> None:
    places = [start(backend, regex=each) for each in ("ab", "c?d", "[x-z]", "e")]
    assert places[3].accept(ord("e"))
    bits = np.zeros((6, mask_words(len(TOKENS))), np.uint32)
    bits[2] = bits[5] = 7
    places[0].fill_rows(places, bits, [4, 1, 0, 3])
    alone = [allowed(place) for place in places]
    found = [set(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little")).tolist()) for row in bits]
    assert [found[row] for row in (4, 1, 0, 3)] == alone and alone[3] == ENDS
    assert (bits[[2, 5]] == 7).all(), "other rows are left as they are"


def test_all_tokens_of_a_text_that_must_come_may_write_it(backend: Backend) -> None:
    matcher = start(backend, regex="abé!")
    assert matcher.forced_text() == "abé!" and allowed(matcher) == {ord("a"), TOKENS.index(b"ab"), TWIN}
    assert write(matcher, b"ab") and allowed(matcher) == {"é".encode()[0], TOKENS.index("é".encode())}
    assert matcher.accept("é".encode()[0]) and matcher.forced_text() == "", "no text begins within a character"


@pytest.mark.parametrize(
    ("fields", "written", "forced"),
    [
        ({"regex": "abc|abd"}, b"", "ab"),
        ({"regex": "abc|abd"}, b"ab", ""),
        ({"regex": "[ab]c"}, b"", ""),
        ({"regex": "ab?"}, b"a", ""),
        ({"choice": ["yes", "yen"]}, b"", "ye"),
        ({"json": '{"const": {"name": 1}}', "disable_any_whitespace": True}, b"", '{"name": 1}'),
    ],
)
def test_text_that_must_come_is_forced(backend: Backend, fields: dict[str, Any], written: bytes, forced: str) -> None:
    matcher = start(backend, **fields)
    assert write(matcher, written) and matcher.forced_text() == forced
    assert write(matcher, forced.encode()), "it is what the grammar has"
    if END in allowed(matcher):
        assert matcher.accept(END) and matcher.forced_text() == ""


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
        ({"grammar": 'start: A+ "x" /[0-9]/?\nA: /[b-c]/ | "a"'}, "abx7", "x"),
        (
            {"grammar": 'root ::= pair ("," pair)* # some\npair ::= [a-z]{1,3} "\\x3d" ("0" | [1-9] [0-9]*)'},
            "ab=7,c=10",
            "a=07",
        ),
        ({"grammar": 'root ::= "(" root? ")" | [^()\\n]+'}, "((é))", "((é)"),
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
    ("fields", "message", "of_llguidance"),  # a message that is not given is the other's, or any
    [
        ({"json": '{"a":'}, "it is no JSON: Expecting value", ""),
        ({"json": "[" * 20_000}, "it is no JSON: maximum recursion depth", ""),
        ({"json": '{"enum": []}'}, "enum", ""),
        (
            {"regex": "(?=a)b"},
            "position 3: Lookahead is not supported yet",
            "look-around, including look-ahead and look-behind, is not supported",
        ),
        ({"regex": "(a"}, "The parenthesis is not closed", "unclosed group"),
        ({"regex": r"(a)\1"}, "Backreference is not supported yet", "backreferences are not supported"),
        ({"grammar": "root ::= x"}, 'Rule "x" is not defined', 'line 1, column 10: there is no rule "x"; define it'),
        ({"grammar": 'a ::= "x"'}, 'The root rule with name "root" is not found', 'it has no rule "root"'),
        ({"grammar": 'root ::= root "a"'}, "it admits no answer, not even an empty one", ""),
        ({"grammar": "root ::= " + "(" * 20_000}, "Nest layer exceeded the maximum limit", "more than 100 times"),
        ({"grammar": 'root ::= "a" |\n  [z-a]'}, ".", "line 2, column 3: a range of characters ends before it begins"),
        (
            {"grammar": 'root ::= (= "a") "a"'},
            "Expect element, but got",
            r"line 1, column 10: a look ahead \(= …\) is not built; leave it out",
        ),
        ({"grammar": 'root ::= "a'}, ".", "line 1, column 12: expected the end of what was opened, found the end"),
        ({"grammar": 'root ::= "a"{3,2}'}, ".", r"line 1, column 13: found \{3,2\}, of which the second count is less"),
        ({"grammar": "start: ("}, r"line 1, column 9: expected '\)' after group$", r"1\(9\): Expected token '\)'"),
        ({"grammar": 'x: 🎉\nstart: "a"'}, "line 1, column 4: unexpected character '\ufffd'$", r"1\(4\): lexer error"),
        ({"grammar": "start: <|im_end|>"}, ".", 'unknown special token: "<.im_end.>"'),
    ],
)
def test_refusals_say_where(
    backend: Backend, library: GrammarBackend, fields: dict[str, Any], message: str, of_llguidance: str
) -> None:
    expected = of_llguidance or message if library == "llguidance" else message
    with pytest.raises(RequestError, match=expected) as caught:
        backend.compile(StructuredOutputs(**fields))
    assert ".cc" not in str(caught.value) and "\n" not in str(caught.value) and len(str(caught.value)) < 400


ALONE = """
import sys
from inferc.runtime.grammar.backend import open_backend
from inferc.runtime.grammar.vocabulary import Vocabulary
from inferc.runtime.step.structured_outputs import StructuredOutputs
backend = open_backend(Vocabulary((b"a", b"b", b""), (2,)), sys.argv[1])
assert backend.load(backend.compile(StructuredOutputs(regex="ab"))).matcher().accept(0)
import_all = {"torch", "transformers", "xgrammar", "pydantic", "tokenizers", "jinja2"}
assert not import_all & set(sys.modules), "an engine would import all of it"
"""


def run_alone(source: str, library: str) -> None:
    subprocess.run([sys.executable, "-c", source, library], check=True)


def test_neither_torch_nor_transformers_is_imported(library: GrammarBackend) -> None:
    run_alone(ALONE, library)


def test_torch_is_imported_after_xgrammar() -> None:
    run_alone(ALONE + "import tvm_ffi, torch\n", "xgrammar")


def test_the_library_of_its_own_package_serves_too() -> None:
    both = ALONE.replace("import sys", "import sys, xgrammar", 1).replace("assert not import", "assert import")
    run_alone(both, "xgrammar")


def test_what_is_not_installed_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = {"xgrammar"}
    monkeypatch.setattr(
        "inferc.runtime.grammar.backend.find_spec", lambda name: None if name in missing else find_spec(name)
    )
    assert choose_backend("auto") == "llguidance"
    with pytest.raises(UnsupportedError, match="by xgrammar, which is not installed here; pip install xgrammar"):
        choose_backend("xgrammar")
    missing.add("llguidance")
    with pytest.raises(UnsupportedError, match=r"pip install xgrammar \(.*\), or pip install llguidance$"):
        choose_backend("auto")
    with pytest.raises(UnsupportedError, match="by llguidance, which is not installed here; pip install llguidance$"):
        open_backend(Vocabulary(TOKENS, (END,)), "llguidance")


def test_auto_is_xgrammar_where_both_are_installed(library: GrammarBackend) -> None:
    assert choose_backend("auto") == "xgrammar" and choose_backend(library) == library
