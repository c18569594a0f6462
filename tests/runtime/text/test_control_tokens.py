"""Control tokens that users write: taken, refused or read as text, and nothing else changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from inferc.chat.form import ChatForm
from inferc.errors import ConfigError, RequestError
from inferc.frontend.checkpoint.load import load
from inferc.frontend.text.text_files import tokenizer_files
from inferc.runtime.text import control_tokens
from inferc.runtime.text.control_tokens import CHOICES, ControlTokens
from inferc.runtime.text.tokenizer import Text

MODEL = Path(__file__).parents[3] / "examples" / "models" / "tiny-llama"
CONTROL = ("<|bos|>", "<|eos|>", "<|pad|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>")
# Halves of control tokens among words, spaces and whatever else there is.
TEXTS = st.lists(
    st.one_of(st.sampled_from(["<|", "|>", "end", "<|end", "user|>", " ", "\n", "\U000f0041"]), st.text(max_size=6))
).map("".join)
WITH_CONTROL = st.lists(st.one_of(TEXTS, st.sampled_from(CONTROL)), min_size=1).map("".join)


def has_control(text: str) -> bool:
    return any(token in text for token in CONTROL)


@pytest.fixture(scope="module")
def texts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Text]:
    """Return tiny-llama's text side under each choice."""
    folder = tmp_path_factory.mktemp("tokenizer")
    for name, data in tokenizer_files(load(MODEL)).items():
        (folder / name).write_bytes(data)
    return {choice: Text(folder, choice) for choice in CHOICES}


def said(*contents: Any) -> list[dict[str, Any]]:
    roles = ("user", "assistant")
    return [{"role": roles[index % 2], "content": content} for index, content in enumerate(contents)]


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(content=TEXTS.filter(lambda text: not has_control(text)))
def test_a_text_without_control_tokens_has_the_same_ids_under_all_three(texts: dict[str, Text], content: str) -> None:
    plain = [text.encode(content) for text in texts.values()]
    chats = [text.encode_chat(said(content, "b", [{"type": "text", "text": content}])) for text in texts.values()]
    assert plain[0] == plain[1] == plain[2]
    assert chats[0] == chats[1] == chats[2]


@settings(max_examples=200, deadline=None)
@given(content=WITH_CONTROL.filter(has_control))
def test_no_control_token_comes_out_of_a_users_text(texts: dict[str, Text], content: str) -> None:
    allow, escape = texts["allow"], texts["escape"]
    controls = allow.special_ids
    found = escape.encode(content)
    assert found[0] == 0 and not controls & set(found[1:]), "BOS alone"
    assert allow.decode(found[1:], skip_special_tokens=False) == content
    found = escape.encode_chat(said(content, "b"))
    assert [token for token in found if token in controls] == [0, 4, 6, 5, 6, 5]
    assert escape.decode(found, False) == allow.decode(allow.encode_chat(said(content, "b")), False)
    with pytest.raises(RequestError, match=r"the prompt has the control token '<\|.*\|>', and these are refused"):
        texts["refuse"].encode(content)
    with pytest.raises(
        RequestError, match=r"messages\[2\].content has the control token '<\|.*\|>', and these are refused"
    ):
        texts["refuse"].encode_chat(said("a", "b", content))


def test_they_are_read_as_transformers_reads_split_tokens(texts: dict[str, Text]) -> None:
    reference = transformers.AutoTokenizer.from_pretrained(MODEL)
    for content in ("<|end|>", "a <|end|><|end|>b", "x<|user|>\n"):
        wanted = reference.encode(content, add_special_tokens=False, split_special_tokens=True)
        assert texts["escape"].encode(content, add_special_tokens=False) == wanted


@pytest.mark.parametrize("choice", ["refuse", "escape"])
def test_a_role_is_none_that_a_template_makes_a_control_token_of(texts: dict[str, Text], choice: str) -> None:
    with pytest.raises(RequestError, match=r'messages\[0\]: its role is "end"; where control tokens are told apart'):
        texts[choice].encode_chat([{"role": "end", "content": "a"}])
    assert 6 in texts["allow"].encode_chat([{"role": "end", "content": "a"}])


def test_a_long_text(texts: dict[str, Text]) -> None:
    content = "word <|end|> " * 2000
    assert not texts["escape"].special_ids & set(texts["escape"].encode(content)[1:])


# ------------------------------------------------------------------------------------------- other tokenizers

CALLS = (
    "{% for m in messages %}<s>{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}{% endfor %}{% endif %}"
    "{% for call in m.tool_calls or [] %}<call>{{ call.function.arguments | tojson }}{% endfor %}"
    "{% endfor %}"
)


def byte_level(special: list[str], plain: list[str]) -> Tokenizer:
    """Every byte a token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({char: index for index, char in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)
    return tokenizer


def unigram() -> Tokenizer:
    """Return a tokenizer whose vocabulary has the control tokens themselves, as in sentencepiece."""
    pieces = [
        ("<unk>", 0.0),
        ("<s>", 0.0),
        ("<call>", 0.0),
        *[(char, -3.0) for char in '<s>calur: ▁{}"_'],
        ("ab", -2.0),
    ]
    tokenizer = Tokenizer(models.Unigram(pieces, 0))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens(["<unk>", "<s>"])
    tokenizer.add_tokens(["<call>"])
    return tokenizer


def text_of(
    tokenizer: Tokenizer, template: str, folder: Path, choice: str = "escape", form: ChatForm | None = None
) -> Text:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text(tokenizer.to_str())
    (folder / "chat_template.jinja").write_text(template)
    if form is not None:
        (folder / "golden_chat.json").write_text(json.dumps({"form": vars(form)}))
    return Text(folder, choice)


@pytest.mark.parametrize("make", [lambda: byte_level(["<s>"], ["<call>"]), unigram])
def test_tokens_that_the_template_spells_are_control_tokens_too(make: Callable[[], Tokenizer], tmp_path: Path) -> None:
    """Only those in an assistant's message are read, where the model wrote them."""
    tokenizer = make()
    bos, call = tokenizer.token_to_id("<s>"), tokenizer.token_to_id("<call>")
    text = text_of(tokenizer, CALLS, tmp_path)
    sent: list[dict[str, Any]] = [
        {"role": "user", "content": "a<call><s>"},
        {"role": "assistant", "content": "<call>b<s>"},
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"<s>": "<s>"}}}]},
    ]
    found = text.encode_chat(sent)
    assert [token for token in found if token in (bos, call)] == [bos, bos, call, bos, call]
    assert not {bos, call} & set(text.encode("<s><call>", add_special_tokens=False))
    with pytest.raises(RequestError, match=r"messages\[0\].content has the control token '<call>'"):
        text_of(tokenizer, CALLS, tmp_path, "refuse").encode_chat(sent)
    with pytest.raises(RequestError, match=r"messages\[0\].tool_calls has the control token '<s>'"):
        text_of(tokenizer, CALLS, tmp_path, "refuse").encode_chat(sent[2:])
    with pytest.raises(RequestError, match="date has the control token '<s>'"):
        text_of(tokenizer, CALLS, tmp_path, "refuse").encode_chat([{"role": "user", "content": "a"}], date="<s>")


def test_parts_do_not_make_one_together(tmp_path: Path) -> None:
    tokenizer = byte_level(["<|end|>"], [])
    template = "{% for m in messages %}{% for part in m.content %}{{ part.text }}{% endfor %}<|end|>{% endfor %}"
    sent = [{"role": "user", "content": [{"type": "text", "text": "a<|e"}, {"type": "text", "text": "nd|>b"}]}]
    text = text_of(tokenizer, template, tmp_path, form=ChatForm("parts"))
    found = text.encode_chat(sent)
    assert [text.decode([token], False) for token in found].count("<|end|>") == 1
    assert text.decode(found, False) == "a<|end|>b<|end|>"
    with pytest.raises(RequestError, match="has the control token"):
        text_of(tokenizer, template, tmp_path, "refuse", ChatForm("parts")).encode_chat(sent)


def test_json_in_ascii_holds_them_too(tmp_path: Path) -> None:
    tokenizer = byte_level(["<|end|>"], [])
    template = "{% for m in messages %}{{ m.content | tojson(ensure_ascii=True) }}<|end|>{% endfor %}"
    text = text_of(tokenizer, template, tmp_path)
    found = text.encode_chat([{"role": "user", "content": "é<|end|>"}])
    assert [text.decode([token], False) for token in found].count("<|end|>") == 1
    assert text.decode(found, False) == '"\\u00e9<|end|>"<|end|>'


def test_a_token_that_normalizing_makes(tmp_path: Path) -> None:
    tokenizer = byte_level([], [])
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.add_special_tokens([AddedToken("<end>", normalized=True)])
    template = "{{ messages[0].content }}<end>"
    end = tokenizer.token_to_id("<end>")
    assert text_of(tokenizer, template, tmp_path, "allow").encode("a<END>")[-1] == end
    text = text_of(tokenizer, template, tmp_path)
    assert end not in text.encode("a<END>") and text.encode("A<") == [text.encode("a")[0], text.encode("<")[0]]
    with pytest.raises(RequestError, match=r"messages\[0\].content has the control token '<end>' in other characters"):
        text.encode_chat([{"role": "user", "content": "a<END>"}])
    with pytest.raises(RequestError, match="the prompt has the control token '<end>'"):
        text_of(tokenizer, template, tmp_path, "refuse").encode("a<END>")
    assert text.encode_chat([{"role": "user", "content": "A<end>"}])[-1:] == [end]


def test_longer_tokens_go_before_shorter_ones(tmp_path: Path) -> None:
    tokenizer = byte_level(["<a>", "<a><b>"], [])
    text = text_of(tokenizer, "{{ messages[0].content }}<a><b><a>", tmp_path)
    longer, shorter = tokenizer.token_to_id("<a><b>"), tokenizer.token_to_id("<a>")
    found = text.encode_chat([{"role": "user", "content": "<a><b>"}])
    assert found[-2:] == [longer, shorter] and not {longer, shorter} & set(found[:-2])


@given(st.lists(st.text("ab<|.", min_size=1, max_size=5), max_size=8), st.text("ab<|.", max_size=60))
def test_a_pattern_finds_what_a_list_of_them_would(texts: list[str], where: str) -> None:
    """Common beginnings are written once in the pattern, and the longest token still goes first."""
    found, at = [], 0
    while at < len(where):
        hit = max((text for text in texts if where.startswith(text, at)), key=len, default="")
        found += [hit] if hit else []
        at += len(hit) or 1
    assert control_tokens._pattern(texts).findall(where) == found


def test_what_is_nested_too_deeply(tmp_path: Path) -> None:
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    text = text_of(byte_level(["<s>"], []), "{{ messages[0].content }}", tmp_path, "refuse")
    with pytest.raises(RequestError, match="are nested too deeply"):
        text.encode_chat([{"role": "user", "content": "a"}], k=nested)


def test_a_tokenizer_that_makes_them_of_other_tokens_is_named(tmp_path: Path) -> None:
    pieces = {"<": 0, "s": 1, ">": 2, "<s": 3, "<s>": 4}
    tokenizer = Tokenizer(models.BPE(pieces, [("<", "s"), ("<s", ">")]))
    tokenizer.add_special_tokens([AddedToken("<s>")])
    with pytest.raises(ConfigError, match="this model's tokenizer cannot take its control tokens for texts"):
        text_of(tokenizer, "", tmp_path)
    assert ControlTokens(tokenizer, "", "refuse").found("a<s>") == "<s>"


def test_a_model_without_control_tokens(tmp_path: Path) -> None:
    text = text_of(byte_level([], []), "{{ messages[0].content }}", tmp_path)
    assert text.decode(text.encode_chat([{"role": "user", "content": "<s>"}])) == "<s>"


def test_what_is_no_choice(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="special_tokens_in_text is 'drop'; expected one of allow, refuse, escape"):
        text_of(byte_level([], []), "", tmp_path, "drop")
