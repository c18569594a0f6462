"""The artifact's tokenizer is the checkpoint's own file, read by the library that defines its format; what transformers
makes of the folder is compared with it, and told where it differs."""

import io
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import sentencepiece
import transformers
from random_models import TEXT
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers
from tokenizers.processors import TemplateProcessing

from inferc.errors import ConfigError, UnsupportedError
from inferc.frontend.text.golden_texts import GOLDEN_TEXTS
from inferc.frontend.text.text_files import tokenizer_files
from inferc.runtime.text.detokenizer import Detokenizer
from inferc.runtime.text.tokenizer import Text


def like_llama() -> Tokenizer:
    """Return a tokenizer like that of Llama 2 and Mistral 7B: no pre-tokenizer, bytes by fallback."""
    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, **{f"<0x{byte:02X}>": 3 + byte for byte in range(256)}}
    merges = [("▁", "▁"), ("▁▁", "▁"), ("▁▁", "▁▁"), ("▁", "r"), ("e", "t"), ("▁r", "et")]
    for part in ["▁", *"abcdefghijklmnopqrstuvwxyz", *(first + second for first, second in merges)]:
        vocab.setdefault(part, len(vocab))
    found = Tokenizer(models.BPE(vocab, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    found.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    found.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return found


def like_deepseek() -> Tokenizer:
    """Bytes, under the name of Llama's class."""
    found = Tokenizer(models.BPE())
    found.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    found.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=340, initial_alphabet=alphabet, special_tokens=special, show_progress=False
    )
    found.train_from_iterator(TEXT, trainer)
    return found


def write(folder: Path, tokenizer: Tokenizer | None, **config: Any) -> Any:
    """A folder as far as its text side goes, and the checkpoint of it."""
    folder.mkdir(exist_ok=True)
    if tokenizer is not None:
        tokenizer.save(str(folder / "tokenizer.json"))
    special = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **special, **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "bos_token_id": 1, "eos_token_id": 2}))
    ids = SimpleNamespace(vocab_size=4096, bos_token_id=1, eos_token_id=2, pad_token_id=None)
    return SimpleNamespace(folder=folder, name=str(folder), config=ids, module=None)


def made(checkpoint: Any, tokenizer: Any = None) -> Tokenizer:
    return Tokenizer.from_str(tokenizer_files(checkpoint, tokenizer)["tokenizer.json"].decode())


def golden(checkpoint: Any) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(tokenizer_files(checkpoint)["golden.json"])
    return rows


# ------------------------------------------------------------------------------------------------- tokenizer.json


@pytest.mark.parametrize(
    ("name", "tokenizer", "loses"),
    [
        ("LlamaTokenizer", like_llama(), True),
        ("LlamaTokenizerFast", like_llama(), True),
        ("GemmaTokenizer", like_llama(), True),
        # of bytes; transformers 5.17 makes a sentencepiece tokenizer of it
        ("LlamaTokenizerFast", like_deepseek(), transformers.__version__ < "5.18"),
        ("Qwen2Tokenizer", like_llama(), True),
        ("PreTrainedTokenizerFast", like_llama(), False),
    ],
)
def test_tokens_are_those_of_the_file(
    name: str, tokenizer: Tokenizer, loses: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = write(tmp_path, tokenizer, tokenizer_class=name, legacy=True)
    ours = made(checkpoint)
    for row, text in zip(golden(checkpoint), GOLDEN_TEXTS, strict=True):
        wanted = tokenizer.encode(text)
        assert (row["text"], row["token_ids"]) == (text, wanted.ids)
        assert ours.encode(text).tokens == wanted.tokens
        assert ours.decode(wanted.ids) == tokenizer.decode(wanted.ids) == row["decoded"]
    messages = [record.getMessage() for record in caplog.records]
    told = [message for message in messages if "gives other tokens than tokenizer.json" in message]
    assert bool(told) == loses
    if name == "LlamaTokenizer":
        assert (
            f"{tmp_path}: transformers' LlamaTokenizer gives other tokens than tokenizer.json, which the artifact"
            " follows: ' ' is ['▁'] by transformers and ['▁▁'] here (" in told[0]
        )


def test_a_class_of_the_checkpoints_own_code_is_not_asked(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    auto_map = {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}
    checkpoint = write(tmp_path, like_deepseek(), tokenizer_class="OwnTokenizer", auto_map=auto_map)
    assert made(checkpoint).encode("Hello").ids == like_deepseek().encode("Hello").ids
    assert "names the class tokenization_own.OwnTokenizer of the checkpoint's own code, which is not run" in caplog.text


def test_an_added_token_that_takes_spaces_by_the_config_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Every turn of a conversation has one, and no golden text."""
    tokenizer = like_deepseek()
    tokenizer.add_special_tokens([AddedToken("<|user|>", special=True, normalized=False)])
    entry = {
        "content": "<|user|>",
        "special": True,
        "rstrip": True,
        "lstrip": False,
        "normalized": False,
        "single_word": False,
    }
    token_id = tokenizer.token_to_id("<|user|>")
    checkpoint = write(
        tmp_path, tokenizer, tokenizer_class="PreTrainedTokenizerFast", added_tokens_decoder={str(token_id): entry}
    )
    made(checkpoint)
    assert "gives other tokens than tokenizer.json, which the artifact follows: 'a <|user|> \\n b' is" in caplog.text


def test_a_class_that_has_no_fast_form(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """transformers reads other files for it; the artifact has tokenizer.json, where there is one."""
    checkpoint = write(tmp_path, like_deepseek(), tokenizer_class="CTRLTokenizer")
    (tmp_path / "vocab.json").write_text(json.dumps({"<unk>": 0, "He": 1, "llo": 2}))
    (tmp_path / "merges.txt").write_text("#version\nH e\n")
    assert made(checkpoint).encode("Hello").ids == like_deepseek().encode("Hello").ids
    assert "transformers' CTRLTokenizer gives other tokens than tokenizer.json" in caplog.text
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(UnsupportedError, match="tokenizer CTRLTokenizer has no tokenizer.json form"):
        tokenizer_files(checkpoint)


def test_spaces_that_transformers_cleans_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    words = Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2, "Yes": 3, ".": 4, "It": 5}, unk_token="<unk>"))
    words.add_special_tokens(["<unk>"])
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    checkpoint = write(tmp_path, words, clean_up_tokenization_spaces=True)
    row = next(row for row in golden(checkpoint) if "Yes" in row["text"])
    assert row["decoded"] == words.decode(row["token_ids"]) and " ." in row["decoded"]
    assert (
        "as 'It Yes.', and the decoder of tokenizer.json, which the artifact follows, as 'It Yes .' (1 of"
        in caplog.text
    )


# ---------------------------------------------------------------------------------------------------- BOS and EOS


def with_begin(*names: str) -> Tokenizer:
    found = like_llama()
    special = [(name, found.token_to_id(name)) for name in names]
    found.post_processor = TemplateProcessing(single=" ".join((*names, "$A")), special_tokens=special)
    return found


@pytest.mark.parametrize(
    ("tokenizer", "config", "message"),
    [
        (like_llama(), {}, ""),
        (like_llama(), {"add_bos_token": False, "add_eos_token": False}, ""),
        (with_begin("<s>"), {}, ""),
        (with_begin("<s>"), {"add_bos_token": True}, ""),
        (with_begin("r", "<s>"), {"add_bos_token": True}, ""),
        (
            with_begin("<s>"),
            {"add_bos_token": False},
            "says add_bos_token false, and tokenizer.json adds '<s>', which is",
        ),
        (like_llama(), {"add_bos_token": True}, "says add_bos_token true, and tokenizer.json adds no '<s>', which is"),
        (like_deepseek(), {"add_eos_token": True}, "says add_eos_token true, and tokenizer.json adds no '</s>', which"),
        (like_llama(), {"add_bos_token": True, "bos_token": "<none>"}, "adds no '<none>', which is followed"),
        (like_llama(), {"add_bos_token": True, "bos_token": None}, "adds no bos_token, which is followed"),
    ],
)
def test_bos_and_eos_are_the_files(
    tokenizer: Tokenizer, config: dict[str, Any], message: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoint = write(tmp_path, tokenizer, **config)
    ours, reference = made(checkpoint), transformers.AutoTokenizer.from_pretrained(tmp_path)
    for row in golden(checkpoint):
        assert ours.encode(row["text"]).ids == row["token_ids"] == tokenizer.encode(row["text"]).ids
        assert row["token_ids"] == reference(row["text"])["input_ids"]
    assert message in caplog.text and ("tokenizer_config.json says" in caplog.text) == bool(message)
    facts = json.loads(tokenizer_files(checkpoint)["tokenizer_config.json"])
    assert facts["add_bos_token"] == (tokenizer.encode("a").ids[0] == 1) and not facts["add_eos_token"]


# ------------------------------------------------------------------------------------------------------ added tokens


def entry(content: str, **flags: bool) -> dict[str, Any]:
    plain = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized", "special"), False)
    return {"content": content, **plain, **flags}


def test_added_tokens_that_the_config_has_alone(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    size = like_deepseek().get_vocab_size()
    added = {size: entry("<|im_start|>", special=True), size + 1: entry("<think>"), size + 9: entry("<far>")}
    added |= {1: entry("<other>")}
    checkpoint = write(tmp_path, like_deepseek(), added_tokens_decoder=added)
    ours = made(checkpoint)
    assert ours.encode("a<|im_start|><think>b").tokens == ["a", "<|im_start|>", "<think>", "b"]
    assert (ours.token_to_id("<|im_start|>"), ours.token_to_id("<think>")) == (size, size + 1)
    assert ours.decode([size, size + 1]) == "<think>"
    assert ours.token_to_id("<far>") is None and ours.token_to_id("<other>") is None
    assert (
        f"files beside tokenizer.json have 2 added tokens that it has not, or under other ids ('<other>' (1), '<far>'"
        f" ({size + 9})" in caplog.text
    )


@pytest.mark.parametrize(
    "files",
    [
        {"added_tokens.json": {"<|im_start|>": 340}},
        {
            "added_tokens.json": {"<|im_start|>": 340},
            "special_tokens_map.json": {"pad_token": {"content": "<|im_start|>"}},
        },
        {"tokenizer_config.json": {"additional_special_tokens": ["<|im_start|>"]}},
        {"tokenizer_config.json": {"extra_special_tokens": {"image_token": "<|im_start|>"}}},
        {"tokenizer_config.json": {"pad_token": "<|im_start|>"}},
    ],
    ids=["added", "both", "additional", "extra", "pad"],
)
def test_tokens_that_other_files_only_name(
    files: dict[str, dict[str, Any]], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Under the id that transformers gives them; what only its class has by default stays text."""
    tokenizer = like_deepseek()
    assert tokenizer.get_vocab_size() == 340
    checkpoint = write(tmp_path, tokenizer, **files.get("tokenizer_config.json", {}))
    for name in files.keys() - {"tokenizer_config.json"}:
        (tmp_path / name).write_text(json.dumps(files[name]))
    ours, theirs = made(checkpoint), transformers.AutoTokenizer.from_pretrained(tmp_path)
    wanted = theirs("a<|im_start|>b", add_special_tokens=False)["input_ids"]
    assert wanted[1] == 340 and ours.encode("a<|im_start|>b", add_special_tokens=False).ids == wanted
    assert "added tokens" not in caplog.text and "other tokens" not in caplog.text


def test_a_token_that_cannot_have_the_id_it_has_elsewhere(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = write(tmp_path, like_deepseek())
    (tmp_path / "added_tokens.json").write_text('{"<far>": 349}')
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    theirs_id = theirs.convert_tokens_to_ids("<far>")
    ours_id = made(checkpoint).token_to_id("<far>")
    assert ours_id == 340 == theirs_id or (ours_id is None and "added tokens that it has not" in caplog.text)


@pytest.mark.parametrize(("in_file", "in_config"), [(True, False), (False, True), (False, False)])
def test_flags_of_added_tokens_are_the_files_but_what_is_special(
    in_file: bool, in_config: bool, tmp_path: Path
) -> None:
    tokenizer = like_deepseek()
    tokenizer.add_tokens([AddedToken("<think>", special=in_file, normalized=False, lstrip=True)])
    token_id = tokenizer.get_vocab_size() - 1
    ours = made(write(tmp_path, tokenizer, added_tokens_decoder={token_id: entry("<think>", special=in_config)}))
    reference = transformers.AutoTokenizer.from_pretrained(tmp_path)
    wanted = "" if in_file or in_config else "<think>"
    assert ours.decode([token_id]) == reference.decode([token_id], skip_special_tokens=True) == wanted
    assert len(ours.encode("a  <think>").ids) == 2  # it takes the spaces before it


def test_named_tokens_of_the_vocabulary_are_special(tmp_path: Path) -> None:
    """Named tokens end a text or stand at its start; a file may have them as ordinary pieces."""
    assert not like_llama().get_added_tokens_decoder()
    ours = made(write(tmp_path, like_llama()))
    assert ours.decode([1, *like_llama().encode("return x").ids, 2]) == "return x"
    assert ours.encode("x</s>", add_special_tokens=False).ids[-1] == 2


@pytest.mark.parametrize(
    ("name", "content", "why"),
    [
        ("tokenizer_config.json", b'{"bos_token": "<s>"', "Expecting ',' delimiter"),
        ("tokenizer_config.json", b"[]", "a list where an object is expected"),
        ("tokenizer_config.json", b'{"a": "\xff"}', "can't decode byte 0xff"),
    ],
)
def test_a_file_beside_it_that_is_damaged(name: str, content: bytes, why: str, tmp_path: Path) -> None:
    checkpoint = write(tmp_path, like_deepseek())
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError) as caught:
        tokenizer_files(checkpoint)
    assert str(tmp_path) in str(caught.value) and why in str(caught.value)


def test_a_file_that_is_no_tokenizer(tmp_path: Path) -> None:
    checkpoint = write(tmp_path, like_llama())
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"}')
    with pytest.raises(ConfigError, match="its tokenizer cannot be read"):
        tokenizer_files(checkpoint)


# --------------------------------------------------------------------------------------------------------- in memory


def test_a_tokenizer_in_memory_is_what_it_is(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoint = write(tmp_path / "m", like_llama(), tokenizer_class="LlamaTokenizer", legacy=True)
    given = transformers.AutoTokenizer.from_pretrained(tmp_path / "m")
    checkpoint.folder = None
    ours = made(checkpoint, given)
    assert ours.encode("    return x").ids == given("    return x")["input_ids"]
    assert "the tokenizer in memory (LlamaTokenizer) is not what its tokenizer.json is" in caplog.text
    assert "' ' is ['▁▁'] by the file and ['▁'] here" in caplog.text
    caplog.clear()
    given = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "m" / "tokenizer.json"))
    assert made(checkpoint, given).encode("    return x").tokens == like_llama().encode("    return x").tokens
    assert not caplog.records


# ----------------------------------------------------------------------------------------------------- sentencepiece


def train(folder: Path, **options: Any) -> sentencepiece.SentencePieceProcessor:
    trained = io.BytesIO()
    lines = [
        "The quick brown fox jumps",
        "hello world",
        "Café naïve",
        "a b c d e f g",
        "  def f(x):",
        "東京 привет",
    ] * 9
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(lines), model_writer=trained, vocab_size=340, byte_fallback=True, minloglevel=9,
        hard_vocab_limit=False, **options,
    )  # fmt: skip
    (folder / "tokenizer.model").write_bytes(trained.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())


PLAIN = {"normalization_rule_name": "identity", "remove_extra_whitespaces": False}
# By a table, as real models of XGLM are, whose class cannot do without one.
NORMALIZED = {"normalization_rule_name": "nmt_nfkc"}


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("LlamaTokenizer", {"model_type": "bpe", **PLAIN}),
        ("LlamaTokenizer", {"model_type": "bpe", **PLAIN, "add_dummy_prefix": False}),
        ("LlamaTokenizer", {"model_type": "bpe"}),
        ("LlamaTokenizer", {"model_type": "unigram"}),
        ("GemmaTokenizer", {"model_type": "bpe", **PLAIN}),
        ("PreTrainedTokenizerFast", {"model_type": "unigram", **PLAIN}),
    ],
)
def test_a_sentencepiece_model_gives_what_its_library_does(name: str, options: dict[str, Any], tmp_path: Path) -> None:
    checkpoint = write(tmp_path, None, tokenizer_class=name, add_bos_token=True)
    processor = train(tmp_path, **options)
    rows, ours = golden(checkpoint), made(checkpoint)
    assert [row["text"] for row in rows] == list(GOLDEN_TEXTS)
    for row in rows:
        ids = processor.encode(row["text"])
        assert ours.encode(row["text"]).ids == row["token_ids"] == [processor.bos_id(), *ids]
        assert ours.decode(row["token_ids"]) == row["decoded"] == processor.decode(ids)


@pytest.mark.parametrize(
    ("options", "config", "is_told"),
    [
        ({}, {}, True),
        ({}, {"add_bos_token": False}, False),
        ({}, {"add_bos_token": True}, False),
        ({"bos_id": -1}, {"bos_token": None}, False),
        ({}, {"tokenizer_class": "GemmaTokenizer"}, True),
        (NORMALIZED, {"tokenizer_class": "XGLMTokenizer"}, False),  # which begins a text with EOS
    ],
)
def test_a_sentencepiece_model_whose_bos_nobody_asks_for(
    options: dict[str, Any], config: dict[str, Any], is_told: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """transformers 4 wrote it by Llama's classes, and 5 does not."""
    checkpoint = write(tmp_path, None, **{"tokenizer_class": "LlamaTokenizer", **config})
    train(tmp_path, model_type="bpe", **{**PLAIN, **options})
    ids = made(checkpoint).encode("hello").ids
    told = [record.getMessage() for record in caplog.records if "add_bos_token" in record.getMessage()]
    assert bool(told) == is_told
    if is_told:
        (message,) = told
        assert 1 not in ids and 1 not in transformers.AutoTokenizer.from_pretrained(tmp_path)("hello")["input_ids"]
        assert message == (
            f"{tmp_path}: tokenizer.model has the BOS token '<s>', tokenizer_config.json no add_bos_token, and no BOS"
            " is written, as"
            " by transformers 5; 4 wrote it with Llama's and Gemma's classes: if the model was trained with it, set"
            " add_bos_token to true in tokenizer_config.json"
        )


def test_a_sentencepiece_model_that_cannot_be_said_whole(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """With `legacy: false` no space follows a special token, and then leading spaces cannot all be kept."""
    checkpoint = write(tmp_path, None, tokenizer_class="LlamaTokenizer", legacy=False)
    processor = train(tmp_path, model_type="bpe", **PLAIN)
    rows, ours = golden(checkpoint), made(checkpoint)
    assert all(row["token_ids"] == processor.encode(row["text"]) for row in rows)
    assert " " not in [row["text"] for row in rows] and "Hello, world!" in [row["text"] for row in rows]
    assert ours.encode("</s>c d").tokens == ["</s>", "c", "▁d"]
    assert (
        "tokenizer.json cannot express all that tokenizer.model does: ' ' is ['▁', '▁'] by it and ['▁'] here"
        in caplog.text
    )


# ------------------------------------------------------------------------------------------------- the runtime's side


def test_the_runtime_decodes_as_the_file(tmp_path: Path) -> None:
    """Byte tokens under a decoder that knows no bytes are spelled out: what the file says, whatever they look like."""
    tokenizer = like_llama()
    tokenizer.decoder = decoders.Metaspace()
    out = tmp_path / "out"
    out.mkdir()
    for name, data in tokenizer_files(write(tmp_path / "m", tokenizer)).items():
        (out / name).write_bytes(data)
    text = Text(out)
    ids = text.encode("return é")
    pieces = Detokenizer(text)
    assert (
        "".join(pieces.push([token]) for token in ids) + pieces.finish()
        == tokenizer.decode(ids)
        == "return <0xC3><0xA9>"
    )
