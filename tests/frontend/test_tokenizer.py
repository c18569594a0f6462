"""The tokenizer folder: what the `tokenizers` library alone makes of it equals transformers' tokenizer."""

import io
import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers
from random_models import make_random_model
from tokenizers import Tokenizer, models
from tokenizers.processors import TemplateProcessing

from inferc.errors import ArtifactError, ConfigError, RequestError, UnsupportedError
from inferc.frontend.load import Checkpoint, load, load_module
from inferc.frontend.tokenizer import GOLDEN_CHATS, GOLDEN_TEXTS, eos_token_ids, generation_defaults, tokenizer_files
from inferc.runtime.text import Text


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


def test_no_tokenizer(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    assert tokenizer_files(load(folder)) == {}


@pytest.mark.parametrize(
    ("generation", "expected"),
    [
        ({"eos_token_id": [3, 4], "temperature": 0.6, "top_p": 0.9, "do_sample": True}, [3, 4]),
        ({"eos_token_id": 5}, [5]),
        ({"temperature": 0.6}, [1]),  # from config.json
        (None, [1]),
    ],
)
def test_eos_ids(generation: dict[str, Any] | None, expected: list[int], folder: Path) -> None:
    file = folder / "generation_config.json"
    file.unlink()
    if generation is not None:
        file.write_text(json.dumps({**generation, "transformers_version": "9"}))
    defaults = generation_defaults(load(folder))
    assert eos_token_ids(defaults) == expected
    assert defaults["bos_token_id"] == 0
    assert "transformers_version" not in defaults
    assert defaults.get("temperature") == (generation or {}).get("temperature")


def test_no_eos(folder: Path) -> None:
    (folder / "generation_config.json").unlink()
    edit(folder / "config.json", eos_token_id=None)
    assert eos_token_ids(generation_defaults(load(folder))) == []


def test_generation_defaults_of_a_module(folder: Path) -> None:
    module: Checkpoint = load_module(transformers.AutoModelForCausalLM.from_pretrained(folder))
    assert generation_defaults(module)["eos_token_id"] == 1
    (folder / "generation_config.json").write_text("nonsense")
    with pytest.raises(ConfigError, match="not a JSON object"):
        generation_defaults(load(folder))


@pytest.mark.parametrize(
    ("field", "value", "expected"),
    [
        ("eos_token_id", "</s>", '"</s>", expected a token id or a list of them'),
        ("eos_token_id", [1, "</s>"], "expected a token id or a list of them"),
        ("temperature", "hot", '"hot", expected a number'),
        ("top_k", 1.5, "1.5, expected a whole number"),
        ("top_p", [0.9], "expected a number"),
        ("do_sample", "yes", "expected true or false"),
        ("stop_strings", [3], "expected a string or a list of them"),
        ("bos_token_id", True, "expected a token id"),
    ],
)
def test_a_generation_field_of_another_kind(field: str, value: Any, expected: str, folder: Path) -> None:
    edit(folder / "generation_config.json", **{field: value})
    with pytest.raises(ConfigError, match=f"generation_config.json: {field} is .*{expected}") as caught:
        generation_defaults(load(folder))
    assert "\n" not in str(caught.value)


def test_whole_numbers_may_be_written_as_floats(folder: Path) -> None:
    edit(folder / "generation_config.json", top_k=50.0, temperature=1, eos_token_id=[1.0])
    defaults = generation_defaults(load(folder))
    assert (repr(defaults["top_k"]), defaults["temperature"], repr(defaults["eos_token_id"])) == ("50", 1, "[1]")


def test_eos_ids_that_the_model_does_not_have(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    edit(folder / "generation_config.json", eos_token_id=[1, 4000, -1])
    assert eos_token_ids(generation_defaults(load(folder))) == [1]
    assert "eos_token_id 4000, -1 left out" in caplog.text
    edit(folder / "generation_config.json", eos_token_id=4000)
    with pytest.raises(ConfigError, match="eos_token_id is 4000, and the model has the ids 0 to 319"):
        generation_defaults(load(folder))


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


# ------------------------------------------------------------------------------------------------------- chats

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}<|{{ message.role }}|>{{ message.content | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def use_template(folder: Path, template: str) -> None:
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    edit(folder / "tokenizer_config.json", chat_template=template)


def written(folder: Path, out: Path) -> Text:
    """The runtime's text side of what the frontend wrote."""
    out.mkdir(exist_ok=True)
    for name, data in tokenizer_files(load(folder)).items():
        (out / name).write_bytes(data)
    return Text(out)


def test_the_runtime_makes_of_chats_what_transformers_does(folder: Path, tmp_path: Path) -> None:
    use_template(folder, TEMPLATE)
    text = written(folder, tmp_path / "t")
    golden = json.loads((tmp_path / "t" / "golden_chat.json").read_text())
    assert len(golden["vectors"]) == len(GOLDEN_CHATS) and not golden["depends_on_time"]
    assert golden["begins_with_bos"] == {"text": False, "chat": True}
    assert (golden["stop_token_ids"], golden["turn_end"]) == ([1], 1)
    reference = transformers.AutoTokenizer.from_pretrained(folder)
    for row in golden["vectors"]:
        ids = reference.apply_chat_template(
            row["messages"], add_generation_prompt=row["add_generation_prompt"], return_dict=False
        )
        assert row["token_ids"] == ids
        assert text.encode_chat(row["messages"], add_generation_prompt=row["add_generation_prompt"]) == ids


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("text", "other", "the model's chat template writes '<s><|user|>Hello, wo' where it wrote 'other'"),
        ("token_ids", [1, 2], "are not those of when the model was compiled"),
    ],
)
def test_chats_that_changed_are_refused(folder: Path, tmp_path: Path, name: str, change: Any, message: str) -> None:
    use_template(folder, TEMPLATE)
    written(folder, tmp_path / "t")
    path = tmp_path / "t" / "golden_chat.json"
    golden = json.loads(path.read_text())
    golden["vectors"][0][name] = change
    path.write_text(json.dumps(golden))
    with pytest.raises(RequestError, match=re.escape(message)):
        Text(tmp_path / "t").encode_chat([{"role": "user", "content": "hi"}])


def test_stop_ids_that_changed_are_refused(folder: Path, tmp_path: Path) -> None:
    text = written(folder, tmp_path / "t")
    text.check_stop_ids([1])
    with pytest.raises(ArtifactError, match=r"texts end at the token ids \[1, 2\], and ended at \[1\] when"):
        text.check_stop_ids([2, 1])


def test_a_template_may_refuse_conversations_and_hold_the_day(folder: Path, tmp_path: Path) -> None:
    refuses = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    use_template(folder, refuses + "{{ strftime_now('%d %m %Y') }}" + TEMPLATE)
    written(folder, tmp_path / "t").encode_chat([{"role": "user", "content": "hi"}])
    golden = json.loads((tmp_path / "t" / "golden_chat.json").read_text())
    assert len(golden["vectors"]) == len(GOLDEN_CHATS) - 1 and golden["depends_on_time"]


def test_a_turn_that_ends_no_text_is_warned_of(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    use_template(folder, TEMPLATE.replace("</s>", "<s>"))
    tokenizer_files(load(folder))
    assert "ends an answer with '<s>' (id 0), which ends no text by the model's generation config" in caplog.text
