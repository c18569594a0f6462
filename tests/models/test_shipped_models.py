"""The models in examples/models are what their cards say."""

import hashlib
import json
import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

MODELS = Path(__file__).resolve().parents[2] / "examples" / "models"
NAMES = ("tiny-llama", "tiny-draft", "tiny-moe")
MAX_FOLDER_BYTES = 16_000_000


@cache
def card(name: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads((MODELS / name / "card.json").read_text(encoding="utf-8"))
    return values


@cache
def load(name: str) -> tuple[Any, Any]:
    model: Any = AutoModelForCausalLM.from_pretrained(MODELS / name, dtype=torch.float32)
    return model.eval(), AutoTokenizer.from_pretrained(MODELS / name)


@cache
def eval_text() -> str:
    return (MODELS / "eval.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize("name", NAMES)
def test_the_folder_is_small_and_complete(name: str) -> None:
    files = {path.name: path.stat().st_size for path in (MODELS / name).iterdir()}
    assert set(files) == {
        "README.md", "card.json", "chat_template.jinja", "config.json", "generation_config.json", "loss.png",
        "model.safetensors", "tokenizer.json", "tokenizer_config.json",
    }  # fmt: skip
    assert sum(files.values()) < MAX_FOLDER_BYTES
    assert files["loss.png"] < 60_000
    config = json.loads((MODELS / name / "config.json").read_text(encoding="utf-8"))
    assert config["dtype"] == "bfloat16" and config["max_position_embeddings"] == 4096


@pytest.mark.parametrize("name", NAMES)
def test_the_model_loads_and_shares_the_tokenizer(name: str) -> None:
    model, tokenizer = load(name)
    assert model.config.vocab_size == len(tokenizer) == 4096
    assert sum(p.numel() for p in model.parameters()) == card(name)["parameters"]
    shared = (MODELS / "tiny-llama" / "tokenizer.json").read_bytes()
    assert (MODELS / name / "tokenizer.json").read_bytes() == shared


def test_the_shapes_are_those_the_examples_rely_on() -> None:
    llama, draft, moe = (load(name)[0].config for name in NAMES)
    assert (llama.model_type, llama.num_hidden_layers, llama.hidden_size) == ("llama", 6, 256)
    assert (llama.num_attention_heads, llama.num_key_value_heads, llama.head_dim) == (4, 2, 64)
    assert draft.model_type == "llama" and card("tiny-draft")["parameters"] < 800_000
    assert (moe.model_type, moe.num_experts, moe.num_experts_per_tok) == ("qwen3_moe", 8, 2)


def test_the_tokenizer_round_trips_any_text() -> None:
    _, tokenizer = load("tiny-llama")
    for text in (eval_text()[:2000], "\tif x:\r\n        naïve = '日本' + \"🎉\"\n\n\n", "  a  1234567 "):
        ids = tokenizer(text).input_ids
        assert ids[0] == tokenizer.bos_token_id
        assert tokenizer.decode(ids[1:]) == text


def test_the_chat_template_renders() -> None:
    model, tokenizer = load("tiny-llama")
    messages = [{"role": "user", "content": " What does `heapq.merge` do? "}]
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|bos|><|user|>\nWhat does `heapq.merge` do?<|end|>\n<|assistant|>\n"
    ids = tokenizer(text, add_special_tokens=False).input_ids
    special = tokenizer.convert_tokens_to_ids(["<|bos|>", "<|user|>", "<|end|>", "<|assistant|>"])
    assert [i for i in ids if i in tokenizer.all_special_ids] == special
    assert model.generation_config.eos_token_id == tokenizer.convert_tokens_to_ids(["<|eos|>", "<|end|>"])


@pytest.mark.parametrize("name", NAMES)
def test_the_held_out_text_is_the_one_that_was_measured(name: str) -> None:
    data = (MODELS / "eval.txt").read_bytes()
    assert 60_000 <= len(data) <= 150_000
    assert hashlib.sha256(data).hexdigest() == card(name)["eval_sha256"]


@pytest.mark.parametrize("name", NAMES)
def test_perplexity_is_the_recorded_one(name: str) -> None:
    model, tokenizer = load(name)
    ids = tokenizer(eval_text()[: card(name)["prefix_chars"]], add_special_tokens=False).input_ids
    total = 0.0
    with torch.no_grad():
        for start in range(0, len(ids), 1024):
            window = ids[start : start + 1024]
            logits = model(torch.tensor([[tokenizer.bos_token_id, *window[:-1]]])).logits[0]
            total += F.cross_entropy(logits, torch.tensor(window), reduction="sum").item()
    assert math.exp(total / len(ids)) == pytest.approx(card(name)["prefix_perplexity_float32"], rel=0.01)


@pytest.mark.parametrize("name", NAMES)
def test_it_has_learned_something(name: str) -> None:
    measured = card(name)
    assert measured["perplexity_float32"] < 200
    assert measured["perplexity_bfloat16"] == pytest.approx(measured["perplexity_float32"], rel=0.02)
