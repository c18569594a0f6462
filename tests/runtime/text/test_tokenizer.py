"""Detokenising piece by piece equals decoding the whole, and stop strings do not depend on where pieces are cut."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

from inferc.errors import ArtifactError, RequestError
from inferc.runtime.step.sampling_params import SamplingParams
from inferc.runtime.text.detokenizer import Detokenizer
from inferc.runtime.text.stop_strings import StopStrings
from inferc.runtime.text.text_stream import Delta, TextStream
from inferc.runtime.text.tokenizer import BYTE_OF_CHAR, Text

EOS = 256


def byte_level() -> Tokenizer:
    """Ids 0..255 are the bytes in order of value; some merges; an end token.

    An added one with a character of no byte.
    """
    char_of_byte = {byte: char for char, byte in BYTE_OF_CHAR.items()}
    vocab = {char_of_byte[byte]: byte for byte in range(256)}
    merges = [("h", "e"), ("l", "l"), (char_of_byte[0xF0], char_of_byte[0x9F])]
    tokenizer = Tokenizer(models.BPE({**vocab, "</s>": EOS, "he": 257, "ll": 258, "".join(merges[2]): 259}, merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    tokenizer.add_tokens([AddedToken("<tool 東京>", normalized=False)])
    tokenizer.post_processor = processors.TemplateProcessing(single="</s> $A", special_tokens=[("</s>", EOS)])
    return tokenizer


def sentencepiece(strip: bool) -> Tokenizer:
    """Llama 2's kind: ▁ for a space, bytes for characters it lacks."""
    pieces = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "a", "b", "▁▁", "é", "東"]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], byte_fallback=True))
    parts: list[decoders.Decoder] = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*parts, decoders.Strip(" ", 1, 0)] if strip else parts)
    tokenizer.add_special_tokens([AddedToken("</s>", special=True)])
    return tokenizer


def word_piece() -> Tokenizer:
    tokenizer = Tokenizer(models.WordPiece({"[UNK]": 0, "play": 1, "##ing": 2, "the": 3, ".": 4}, unk_token="[UNK]"))
    tokenizer.decoder = decoders.WordPiece()
    return tokenizer


def make_text(folder: Path, tokenizer: Tokenizer, **files: object) -> Text:
    (folder / "tokenizer.json").write_text(tokenizer.to_str(), encoding="utf-8")
    for name, content in files.items():
        (folder / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")
    return Text(folder)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Text]:
    tokenizers = {
        "byte_level": byte_level(),
        "sentencepiece": sentencepiece(strip=True),
        "gemma": sentencepiece(strip=False),
        "word_piece": word_piece(),
    }
    return {name: make_text(tmp_path_factory.mktemp(name), tokenizer) for name, tokenizer in tokenizers.items()}


def cut(items: list[int], cuts: list[int]) -> list[list[int]]:
    edges = sorted({0, len(items), *(at % (len(items) + 1) for at in cuts)})
    return [items[a:b] for a, b in pairwise(edges)]


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 260), max_size=40), cuts=st.lists(st.integers(0, 40)), skip=st.booleans())
def test_byte_level_pieces_join_to_the_whole(
    texts: dict[str, Text], ids: list[int], cuts: list[int], skip: bool
) -> None:
    text = texts["byte_level"]
    detokenizer = Detokenizer(text, skip)
    pieces = [detokenizer.push(part) for part in cut(ids, cuts)]
    assert "".join(pieces) + detokenizer.finish() == text.decode(ids, skip)


@settings(deadline=None)
@given(string=st.text(max_size=20), cuts=st.lists(st.integers(0, 80)))
def test_no_piece_has_half_a_character(texts: dict[str, Text], string: str, cuts: list[int]) -> None:
    text = texts["byte_level"]
    detokenizer = Detokenizer(text)
    ids = text.encode(string)
    assert ids[0] == EOS, "what comes before a text is written by the tokenizer"
    pieces = [detokenizer.push(part) for part in cut(ids, cuts)]
    assert all("\ufffd" not in piece or "\ufffd" in string for piece in pieces)
    assert "".join(pieces) == string
    assert detokenizer.finish() == ""


@pytest.mark.parametrize("name", ["sentencepiece", "gemma"])
@settings(deadline=None)
@given(
    parts=st.lists(
        st.one_of(st.sampled_from(["▁", "▁the", "a", "b", "▁▁", "é", "東", "</s>"]), st.characters(codec="utf-8"))
    ),
    cuts=st.lists(st.integers(0, 60)),
)
def test_sentencepiece_pieces_join_to_the_whole(
    texts: dict[str, Text], name: str, parts: list[str], cuts: list[int]
) -> None:
    text = texts[name]
    ids = []
    for part in parts:
        token = text.tokenizer.token_to_id(part)
        ids += [token] if token is not None else [2 + byte for byte in part.encode()]
    detokenizer = Detokenizer(text, at_start=True)
    pieces = [detokenizer.push(piece) for piece in cut(ids, cuts)]
    assert "".join(pieces) + detokenizer.finish() == text.decode(ids)


def test_after_a_prompt_the_first_space_is_kept(texts: dict[str, Text]) -> None:
    text = texts["sentencepiece"]
    the = text.tokenizer.token_to_id("▁the") or 0
    assert text.decode([the]) == "the"
    assert Detokenizer(text).push([the]) == " the"


def test_emoji_in_byte_tokens_comes_out_whole(texts: dict[str, Text]) -> None:
    detokenizer = Detokenizer(texts["gemma"])
    ids = [2 + byte for byte in "🙂é".encode()]
    assert [detokenizer.push([token]) for token in ids] == ["", "", "", "🙂", "", "é"]


@settings(deadline=None)
@given(ids=st.lists(st.integers(0, 4), max_size=30), cuts=st.lists(st.integers(0, 30)))
def test_a_decoder_that_is_not_by_bytes(texts: dict[str, Text], ids: list[int], cuts: list[int]) -> None:
    detokenizer = Detokenizer(texts["word_piece"])
    pieces = [detokenizer.push(part) for part in cut(ids, cuts)]
    assert "".join(pieces) + detokenizer.finish() == texts["word_piece"].decode(ids)


def test_an_id_beyond_the_vocabulary_is_nothing(texts: dict[str, Text]) -> None:
    assert texts["byte_level"].token_bytes(9999) == b""
    assert texts["byte_level"].token_bytes(260) == "<tool 東京>".encode()


# -------------------------------------------------------------------------------------------- stop strings


def stream(stops: list[str], pieces: list[str], include: bool = False) -> tuple[str, str | None]:
    finder, shown = StopStrings(stops, include), ""
    for piece in pieces:
        part, stop = finder.push(piece)
        shown += part
        if stop is not None:
            return shown, stop
    return shown + finder.finish(), None


@given(
    string=st.text("abc", max_size=30),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), min_size=1, max_size=3),
    cuts=st.lists(st.integers(0, 30)),
    include=st.booleans(),
)
def test_stop_strings_do_not_depend_on_the_cuts(string: str, stops: list[str], cuts: list[int], include: bool) -> None:
    edges = sorted({0, len(string), *(at % (len(string) + 1) for at in cuts)})
    pieces = [string[a:b] for a, b in pairwise(edges)]
    assert stream(stops, pieces, include) == stream(stops, list(string), include)
    ends = [string.find(stop) + len(stop) for stop in stops if stop in string]
    shown, stop = stream(stops, pieces, include=True)
    assert shown == (string[: min(ends)] if ends else string)
    assert (stop is not None) == bool(ends)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    finder = StopStrings(["\n\nUser:"])
    assert finder.push("Hello\n") == ("Hello", None)
    assert finder.push("\nUs") == ("", None)
    assert finder.push("e it") == ("\n\nUse it", None)
    assert finder.push("\n\nUser: x") == ("", "\n\nUser:")


def test_a_stream_ends_by_stop_string_token_or_length(texts: dict[str, Text]) -> None:
    text = texts["byte_level"]

    def ids(string: str) -> list[int]:
        return text.encode(string, add_special_tokens=False)

    stopping = TextStream(text, SamplingParams(stop=("lo w",)))
    assert stopping.push(ids("hel")) == Delta("he", num_tokens=len(ids("hel")))
    ended = stopping.push(ids("lo wor"))
    assert ended[:3] == ("l", "stop", "lo w")
    # What came with the end and lies behind it is no part of the text.
    assert text.decode(ids("lo wor")[: ended.num_tokens]).startswith("lo w")
    assert "lo w" not in text.decode(ids("lo wor")[: ended.num_tokens - 1])
    kept = TextStream(text, SamplingParams(stop=("lo",), include_stop_str_in_output=True))
    assert kept.push(ids("hello!"))[:3] == ("hello", "stop", "lo")
    by_token = TextStream(text, SamplingParams(skip_special_tokens=False))
    assert by_token.push([*ids("hi"), EOS], "stop")[:3] == ("hi", "stop", EOS)
    at_length = TextStream(text, SamplingParams(stop=("hix",)))
    assert at_length.push([*ids("hi"), 0xC3], "length")[:2] == ("hi\ufffd", "length")
    early = TextStream(text, SamplingParams(stop=("a",), min_tokens=3, max_tokens=9))
    assert early.push(ids("a"))[:1] == ("a",)
    assert early.push(ids("bca"))[:3] == ("bc", "stop", "a")


# --------------------------------------------------------------------------------------------------- files


def test_the_tokenizer_must_give_what_it_gave_at_compile(tmp_path: Path) -> None:
    golden = [{"text": "hello", "token_ids": [EOS, 257, 258, 111]}]
    make_text(tmp_path, byte_level(), golden=golden)
    with pytest.raises(ArtifactError, match="when the model was compiled"):
        make_text(tmp_path, byte_level(), golden=[{"text": "hello", "token_ids": [1]}])
    make_text(tmp_path, byte_level(), golden=[{**golden[0], "decoded": "hello"}])
    with pytest.raises(ArtifactError, match="decodes .* as 'hello', and did as ' hello' when the model was compiled"):
        make_text(tmp_path, byte_level(), golden=[{**golden[0], "decoded": " hello"}])


def test_a_decoder_that_bytes_do_not_explain_is_asked_itself(tmp_path: Path) -> None:
    """Without ByteFallback a byte's token is spelled out; golden texts show that it is."""
    tokenizer = sentencepiece(strip=False)
    tokenizer.decoder = decoders.Metaspace()
    assert make_text(tmp_path, tokenizer).is_by_bytes
    tokenizer.post_processor = processors.TemplateProcessing(single="<0xC3> $A", special_tokens=[("<0xC3>", 2 + 0xC3)])
    text = make_text(tmp_path, tokenizer, golden=[{"text": "", "token_ids": [2 + 0xC3], "decoded": "<0xC3>"}])
    assert not text.is_by_bytes and Detokenizer(text).push([2 + 0xC3]) == "<0xC3>"


def test_a_missing_or_broken_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="no tokenizer"):
        Text(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ArtifactError, match="is not a tokenizer"):
        Text(tmp_path)


def test_text_that_cannot_be_encoded_is_the_requests_fault(texts: dict[str, Text]) -> None:
    with pytest.raises(RequestError, match="half of a surrogate pair"):
        texts["byte_level"].encode("\ud800")
    with pytest.raises(RequestError, match="no chat template"):
        texts["byte_level"].encode_chat([{"role": "user", "content": "hi"}])
