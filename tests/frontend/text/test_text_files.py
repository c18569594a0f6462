"""The tokenizer folder: what the `tokenizers` library alone makes of it equals transformers' tokenizer."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from random_models import make_random_model
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing

from inferc.errors import ConfigError, UnsupportedError
from inferc.frontend.checkpoint.load import load, load_module
from inferc.frontend.text.golden_texts import GOLDEN_TEXTS
from inferc.frontend.text.text_files import tokenizer_files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return make_random_model("llama", tmp_path / "m", num_hidden_layers=1)


def read(files: dict[str, bytes], name: str) -> Any:
    return json.loads(files[name])


def edit(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps({**(json.loads(path.read_text()) if path.exists() else {}), **changes}))


def test_files(folder: Path) -> None:
    files = tokenizer_files(load(folder))
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    golden = read(files, "golden.json")
    assert [row["text"] for row in golden] == list(GOLDEN_TEXTS)
    for row in golden:
        assert tokenizer.encode(row["text"]).ids == row["token_ids"] == reference(row["text"])["input_ids"]
    facts = read(files, "tokenizer_config.json")
    assert (facts["bos_token"], facts["eos_token"], facts["add_bos_token"]) == ("<s>", "</s>", False)
    assert files["chat_template.jinja"].decode() == reference.chat_template
    assert read(files, "generation_config.json")["eos_token_id"] == 1


def test_equal_input_gives_equal_bytes(folder: Path) -> None:
    assert tokenizer_files(load(folder)) == tokenizer_files(load(folder))


def test_leftover_truncation_and_padding_are_dropped(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_truncation(4)
    tokenizer.enable_padding(length=8)
    tokenizer.save(str(folder / "tokenizer.json"))
    twin = Tokenizer.from_str(tokenizer_files(load(folder))["tokenizer.json"].decode())
    assert len(twin.encode("one two three four five six").ids) > 8


def test_a_tokenizer_object(folder: Path) -> None:
    module = load_module(transformers.AutoModelForCausalLM.from_pretrained(folder))
    assert tokenizer_files(module) == {}
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    assert tokenizer_files(module, tokenizer).keys() == tokenizer_files(load(folder)).keys()
    with pytest.raises(UnsupportedError, match="object has no tokenizer.json form"):
        tokenizer_files(module, object())


def test_bos_is_added_where_the_model_wants_it(folder: Path) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.save(str(folder / "tokenizer.json"))
    files = tokenizer_files(load(folder))
    twin = Tokenizer.from_str(files["tokenizer.json"].decode())
    assert twin.encode("hello").ids[0] == 0
    assert twin.encode("hello", add_special_tokens=False).ids[0] != 0
    assert read(files, "tokenizer_config.json")["add_bos_token"]


def test_sentencepiece_is_converted(folder: Path) -> None:
    import sentencepiece

    trained = io.BytesIO()
    text = ["The quick brown fox jumps over the lazy dog", "hello world", "Café naïve", "a b c d e f g"] * 9
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(text), model_writer=trained, vocab_size=320, model_type="bpe", byte_fallback=True,
        minloglevel=9,
    )  # fmt: skip
    (folder / "tokenizer.json").unlink()
    (folder / "tokenizer.model").write_bytes(trained.getvalue())
    edit(folder / "tokenizer_config.json", tokenizer_class="LlamaTokenizer", add_bos_token=True)
    files = tokenizer_files(load(folder))
    tokenizer = Tokenizer.from_str(files["tokenizer.json"].decode())
    processor = sentencepiece.SentencePieceProcessor(model_proto=trained.getvalue())
    for line in ("hello world", "the fox 東京"):
        assert tokenizer.encode(line).ids == [processor.bos_id(), *processor.encode(line)]
        assert tokenizer.decode(tokenizer.encode(line).ids) == line


def test_damaged_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match="its tokenizer cannot be read") as caught:
        tokenizer_files(load(folder))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (None, "it has no tokenizer: the artifact takes prompts of token ids alone, and gives no text"),
        ("tekken.json", "its tokenizer is tekken.json, which is not read; expected tokenizer.json: the artifact takes"),
        ("qwen.tiktoken", "its tokenizer is qwen.tiktoken, which is not read"),
    ],
)
def test_no_tokenizer(folder: Path, other: str | None, message: str, caplog: pytest.LogCaptureFixture) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    if other is not None:
        (folder / other).write_text("{}")
    assert tokenizer_files(load(folder)) == {}
    assert f"{folder}: {message}" in caplog.text


def test_a_tokenizer_that_git_has_not_fetched(folder: Path) -> None:
    (folder / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 134\n")
    with pytest.raises(ConfigError, match=r"tokenizer\.json is a Git LFS pointer and not the file itself"):
        tokenizer_files(load(folder))


def test_a_vocabulary_of_one_token_a_line_is_read(folder: Path) -> None:
    """A vocabulary like BERT's is read with no other file beside it."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    edit(folder / "config.json", model_type="bert", is_decoder=True)
    (folder / "vocab.txt").write_text("[PAD]\n[UNK]\n[CLS]\n[SEP]\n[MASK]\nhello\nworld")
    tokenizer = Tokenizer.from_str(tokenizer_files(load(folder))["tokenizer.json"].decode())
    assert tokenizer.encode("hello world").tokens == ["[CLS]", "hello", "world", "[SEP]"]


def test_a_vocabulary_larger_than_the_models(folder: Path) -> None:
    edit(folder / "config.json", vocab_size=300)
    with pytest.raises(ConfigError, match=r"its tokenizer has token id 300 \(.*\), and the model has 300 ids"):
        tokenizer_files(load(folder))


def test_added_tokens_beyond_the_models(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<pad>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    assert tokenizer_files(load(folder))
    assert "no ids for 1 added tokens (<pad>)" in caplog.text
    tokenizer.post_processor = TemplateProcessing(single="<pad> $A", special_tokens=[("<pad>", 320)])
    tokenizer.save(str(folder / "tokenizer.json"))
    with pytest.raises(ConfigError, match="token id 320 \\('<pad>'\\), and the model has 320 ids"):
        tokenizer_files(load(folder))


def test_a_tokenizer_without_a_vocabulary(folder: Path) -> None:
    Tokenizer(models.BPE()).save(str(folder / "tokenizer.json"))
    with pytest.raises(ConfigError, match="gives no token ids for any text"):
        tokenizer_files(load(folder))
