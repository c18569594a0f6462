"""Bad words become tokens as texts spell them: at their start, behind a space, and within a word."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from inferc.errors import RequestError
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.text.spelled import spelled
from inferc.runtime.text.tokenizer import Text


def text_of(folder: Path, pieces: list[str], prefix_space: str | None) -> Text:
    """Make a tokenizer of these pieces, the longest first; prefix_space: as in Metaspace, None for one by bytes."""
    vocab = {piece: index for index, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="?"))
    if prefix_space is None:
        tokenizer = Tokenizer(models.BPE(vocab, [("a", "b"), ("Ġ", "ab")]))
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    else:
        tokenizer = Tokenizer(models.BPE(vocab, [("a", "b"), ("▁", "ab")], byte_fallback=True))
        tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prefix_space, split=False)
        tokenizer.decoder = decoders.Metaspace(prepend_scheme=prefix_space)
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    return Text(folder)


def words_of(text: Text, *words: str) -> set[str]:
    """Return the spellings of words, each as its pieces with a bar between."""
    params = spelled(text, SamplingParams(bad_words=words))
    assert params.bad_words == ()
    name = text.tokenizer.id_to_token
    return {"|".join(name(token) or "" for token in ids) for ids in params.bad_words_ids}


def test_of_a_tokenizer_by_bytes(tmp_path: Path) -> None:
    text = text_of(tmp_path, ["a", "b", "c", "ab", "Ġ", "Ġab", "Ċ"], None)
    assert words_of(text, "ab") == {"ab", "Ġab"} == words_of(text, "  ab")
    assert words_of(text, "abc", "c") == {"ab|c", "Ġab|c", "c", "Ġ|c"}
    assert words_of(text, "ab c") == {"ab|Ġ|c", "Ġab|Ġ|c"}
    assert words_of(text, "\n") == {"Ċ", "Ġ|Ċ"}


def test_of_a_tokenizer_that_puts_a_space_before_a_text(tmp_path: Path) -> None:
    text = text_of(tmp_path, ["a", "b", "c", "ab", "▁", "▁ab", "<0x0A>"], "first")
    assert text.ids_of("ab") == text.ids_of(" ab")
    assert words_of(text, "ab") == {"▁ab", "ab"}
    assert words_of(text, "cab") == {"▁|c|ab", "c|ab"}


def test_words_given_as_ids_stay_and_a_word_without_tokens_is_refused(tmp_path: Path) -> None:
    text = text_of(tmp_path, ["a", "b", "c", "ab", "Ġ", "Ġab", "Ċ"], None)
    params = SamplingParams(bad_words=("ab",), bad_words_ids=((3,), (1, 2)))
    assert spelled(text, params).bad_words_ids == ((3,), (1, 2), (5,))
    assert spelled(text, plain := SamplingParams()) is plain
    with pytest.raises(RequestError, match='bad_words: the model\'s tokenizer has no tokens for "x"; leave it out'):
        spelled(text, SamplingParams(bad_words=("x",)))


def test_breakers_are_the_tokens_with_which_they_end(tmp_path: Path) -> None:
    text = text_of(tmp_path, ["a", "b", "c", "ab", "Ġ", "Ġab", "Ċ"], None)
    params = SamplingParams(dry_multiplier=0.8, dry_sequence_breakers=("b", "c\n", "\n"), dry_breaker_ids=(9, 6))
    found = spelled(text, params)
    assert (found.dry_sequence_breakers, found.dry_breaker_ids) == ((), (9, 6, 3))
    off = SamplingParams(dry_sequence_breakers=("b",))
    assert spelled(text, off) is off, "without a multiplier nobody asks"
