"""The spelling of forced texts: tokens as long as they can be, that add up to the text."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from inferc.runtime.artifact.load import load_artifact
from inferc.runtime.grammar.spelling import Spelling
from inferc.runtime.grammar.vocabulary import Vocabulary
from inferc.runtime.text.tokenizer import Text

TOKENS = (b"", b"a", b"b", b"ab", b"abc", b"bc", b"a", b"\xc3", b"\xa9", b"x" * 100)


def test_each_token_is_the_longest_and_the_first_of_equals() -> None:
    spelling = Spelling(TOKENS)
    assert spelling.spell("abcab", 9) == [4, 3] and spelling.spell("aab", 9) == [1, 3]
    assert spelling.spell("é", 9) == [7, 8] and spelling.spell("", 9) == []


def test_what_no_token_spells_ends_the_draft() -> None:
    assert Spelling(TOKENS).spell("ab?c", 9) == [3] and Spelling(()).spell("a", 9) == []


def test_no_more_is_spelled_than_is_asked_for() -> None:
    """An answer of one long constant would otherwise cost time in proportion to its square."""
    assert Spelling((b"a", b"aaa")).spell("a" * 60_000, 5) == [1] * 5


def test_control_tokens_have_no_text() -> None:
    spelling = Spelling(TOKENS)
    assert spelling.count_with_text([1, 2, 0, 3]) == 2 and spelling.count_with_text([1, 7]) == 2


@given(st.text(alphabet="abc", max_size=30))
def test_tokens_add_up_to_the_text(text: str) -> None:
    spelling = Spelling((b"c", *TOKENS))
    assert b"".join(((b"c", *TOKENS))[token] for token in spelling.spell(text, 99)) == text.encode()


def test_a_tokenizer_mostly_spells_alike(tiny_artifact: Path) -> None:
    artifact = load_artifact(tiny_artifact)
    text = Text(artifact.tokenizer)
    spelling = Spelling(Vocabulary.of(text, artifact.vocab_size, ()).tokens)
    for frame in ('{"name": "', '", "arguments": {"city": "', "def add(first"):
        ids = spelling.spell(frame, 99)
        assert text.decode(ids) == frame and len(ids) <= len(text.encode(frame, add_special_tokens=False))
